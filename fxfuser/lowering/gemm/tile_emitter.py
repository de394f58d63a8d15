"""The emitter of a kernel whose tiles descriptors can move, and which may combine states of an earlier kernel."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Mapping

import torch
from torch import fx

from fxfuser.domain.index import Axis, Form, linear, lookups_of
from fxfuser.domain.points import Point, PointKind, Store
from fxfuser.lowering.emitter import Emitter
from fxfuser.lowering.expressions import HALF, Sizes, full
from fxfuser.lowering.gemm.descriptors import Descriptors
from fxfuser.lowering.gemm.folded import Folded
from fxfuser.lowering.gemm.partials import pointer_name
from fxfuser.lowering.gemm.tiles import LEAST
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.schedule import Dim, Schedule, strides_of
from fxfuser.lowering.scope import Scope, Value
from fxfuser.ops import kernel_dtype, literal

aten = torch.ops.aten

STARTS = ("m", "n", "strip")
CUT_BY = {"STRIPBLOCK": "NBLOCK"}  # a strip may lie past the end as a whole: what cuts a dim is the tile


@dataclass(frozen=True)
class Border:
    """Texts: `divided`, where it is not empty, is whether the tiles divide what they cut, a constexpr; `crossed`
    whether some lane of this tile lies past the end."""

    divided: str
    crossed: str


@dataclass
class TileEmitter(Emitter):
    """Loads and stores of whole tiles go through `descriptors` where DESCRIPTORS is true at the call.

    `dims`: batch, the first and the second dim of the tile.  A `padded` emitter loads zeros past the end, as factors of
    a product must be.  Bools are no elements that a descriptor knows.  What is `folded` is combined where it is read.

    An epilogue has a scope `ahead` of the main loop, where it reads what rows have: that is under way while the loop
    runs.  Triton, too, gives a tile that meets a loaded row the layout of whichever comes first in the text; a row in
    that of the accumulators moves a few numbers between threads, accumulators in that of a row the whole tile.
    """

    dims: tuple[Dim, ...] = ()
    descriptors: Descriptors = field(default_factory=lambda: Descriptors(Sizes()))
    padded: bool = False
    folded: Mapping[fx.Node, Folded] = field(default_factory=dict)
    ahead: Scope | None = None
    combined: dict[tuple[tuple[int, ...], Form], list[Value]] = field(default_factory=dict)

    def existing(self, axes: Iterable[Axis], text: str, absent: str) -> str:
        """Without a mask in those of the tiles that divide what they cut."""
        found, border = super().existing(axes, text, absent), self.border(axes)
        return found if border is None or not border.divided else f"({text} if {border.divided} else {found})"

    def border(self, axes: Iterable[Axis]) -> Border | None:
        """What is known of the lanes past the end of these axes; None where there are none."""
        dims = [d for d in self.ordered(self.schedule.dims_of(axes)) if self.vectors.masked(d) and d.axes]
        if not dims:
            return None
        divided = ""
        if all(isinstance(d.size, int) and d.size % LEAST == 0 for d in dims):
            divided = " and ".join(f"{d.size} % {CUT_BY.get(d.block, d.block)} == 0" for d in dims)
        past = [f"{self.start(d)} + {d.block} > {self.sizes.text(d.size)}" for d in dims]
        return Border(divided, past[0] if len(past) == 1 else " | ".join(f"({text})" for text in past))

    def start(self, dim: Dim) -> str:
        """Persistent kernels walk tiles, whose rows, columns and strips have names of their own for it."""
        return f"{dim.name}_start" if dim.name in STARTS else ""

    def _load(self, point: Point, guard: Guard) -> Value:
        assert point.node is not None
        folded, offset = self.folded.get(point.node), linear(point.index, strides_of(point.node))
        if folded is None:
            if self.ahead is None or guard or lookups_of(point.index) or self._of_columns(offset):
                return super()._load(point, guard)
            with self._moved(self.ahead):
                return super()._load(point, guard)
        key = folded.partial.buffers, offset
        if key not in self.combined:
            self.combined[key] = self._combined(folded, offset)
        return self.reducer.result(folded.reduction, folded.monoid, self.combined[key], folded.output)

    def _op(self, point: Point, guard: Guard) -> Value:
        """A sum with the product of a row's value and a column's in one operation: on their own these would meet in the
        layout in which they are loaded, and the whole tile would pass through shared memory to the accumulators'."""
        terms = None if self.precise else _outer(point, self.schedule)
        if terms is None or point.node is None:
            return super()._op(point, guard)
        value, left, right = (self.emit(p, guard) for p in terms)
        sign = "-" if point.node.target is aten.sub.Tensor else ""
        found = self.bind("fma", f"tl.fma({sign}{left.name}, {right.name}, {value.name})", torch.float32,
                          value.axes | left.axes | right.axes, point.dtype not in HALF)
        if id(point) in self.read and point.node in self.targets:
            found = self.rounded(found, point.dtype)
        self.note(found, point)
        return found

    def _of_columns(self, offset: Form) -> bool:
        return any(d.slot == 1 for d in self.schedule.dims_of(offset.axes))

    @contextmanager
    def _moved(self, scope: Scope) -> Iterator[None]:
        """Inside, lines go to another scope."""
        here, self.scope = self.scope, scope
        yield
        self.scope = here

    def _combined(self, folded: Folded, offset: Form) -> list[Value]:
        """The states of each row, or of each column, together; the identity past the last."""
        if self.ahead is None or self._of_columns(offset):
            return self._one_by_one(folded, offset)
        return self._at_once(folded, offset)

    def _one_by_one(self, folded: Folded, offset: Form) -> list[Value]:
        """Each state is loaded into the layout in which the total is wanted.  A tile of states would have its own, in
        which factors would then be computed: these could not go from registers to the tensor cores."""
        monoid, kinds, axes = folded.monoid, folded.dtypes, offset.axes
        totals, number = self.fresh(monoid.name, monoid.states), self.fresh("state_number", 1)[0]
        identity = monoid.identity(kinds[0])
        self.top.lines += [f"{t} = {full(x, kind, self.tile(axes))}" for t, x, kind in zip(totals, identity, kinds)]
        self.top.lines.append(f"for {number} in tl.static_range(STATES):")
        masks = " & ".join([f"({number} < {self.sizes.text(folded.count)})", *self.mask(axes)])
        place = f"({self.indices.form(offset)}) + {number} * {self.sizes.text(folded.partial.width)}"
        states = [f"tl.load({self.buffers[pointer_name(buffer)]} + {place}, {masks}, {literal(x, kind)})"
                  for buffer, x, kind in zip(folded.partial.buffers, identity, kinds)]
        self.top.lines.append(f"    {', '.join(totals)} = {monoid.combine}({', '.join(totals + states)})")
        return [Value(name, kind, axes) for name, kind in zip(totals, kinds)]

    def _at_once(self, folded: Folded, offset: Form) -> list[Value]:
        """The states lie in the tile's other position."""
        assert self.ahead is not None
        axes, lines = offset.axes, self.ahead.lines
        number = self.fresh("state_number", 1)[0]
        lines.append(f"{number} = tl.arange(0, STATES).to(INDEX)[None, :]")
        masks = [f"({number} < {self.sizes.text(folded.count)})", *self.mask(axes)]
        place = f"({self.indices.form(offset)}) + {number} * {self.sizes.text(folded.partial.width)}"
        monoid, names = folded.monoid, self.fresh("state", folded.monoid.states)
        kinds = folded.dtypes
        for name, buffer, kind, identity in zip(names, folded.partial.buffers, kinds, monoid.identity(kinds[0])):
            pointer = f"{self.buffers[pointer_name(buffer)]} + {place}"
            lines.append(f"{name} = tl.load({pointer}, {' & '.join(masks)}, {literal(identity, kind)})")
        found = self.fresh(monoid.name, monoid.states)
        states = names[0] if len(names) == 1 else f"({', '.join(names)})"
        lines.append(f"{', '.join(found)} = tl.reduce({states}, 1, {monoid.combine}, keep_dims=True)")
        return [Value(name, kind, axes) for name, kind in zip(found, kinds)]

    def fill(self, point: Point, guard: Guard) -> str:
        """Nothing: a factor's tile is 0 past the end, and elsewhere a descriptor may load it."""
        return ""

    def read_text(self, point: Point, pointer: str, masks: list[str], guard: Guard) -> str:
        arguments = [pointer, *([" & ".join(masks)] if masks else []), *(["0"] if masks and self.padded else [])]
        usual = f"tl.load({', '.join(arguments)})"
        assert point.node is not None
        offset = linear(point.index, strides_of(point.node))
        if guard or lookups_of(point.index) or point.dtype is torch.bool:
            return usual
        moved = self.descriptors.load(self.pointers[point.node], offset, self.dims, point.dtype.itemsize)
        return usual if moved is None else f"({moved} if DESCRIPTORS else {usual})"

    def write_lines(self, store: Store, value: str, line: str) -> list[str]:
        dtype: torch.dtype = store.node.meta["val"].dtype
        if dtype is torch.bool or not self.schedule.dims_of(store.value.deps) >= self.schedule.dims_of(store.axes):
            return [line]
        moved = self.descriptors.store(self.targets[store.node], store.offset, self.dims, dtype.itemsize, value)
        return [line] if moved is None else ["if DESCRIPTORS:", f"    {moved}", "else:", f"    {line}"]


def _outer(point: Point, schedule: Schedule) -> tuple[Point, Point, Point] | None:
    """Of value + row * column, or value - row * column, the three, all of which kernels hold as fp32."""
    if point.node is None or point.node.target not in (aten.add.Tensor, aten.sub.Tensor) or point.kwargs:
        return None
    sides = [a for a in point.args if isinstance(a, Point)]
    if len(sides) != 2:
        return None
    for value, product in (sides, sides[::-1]):
        if product is sides[0] and point.node.target is aten.sub.Tensor:
            continue
        factors = [a for a in product.args if isinstance(a, Point)] if _is_product(product) else []
        dims = [schedule.dims_of(f.deps) for f in factors]
        if len(dims) == 2 and dims[0] and dims[1] and not dims[0] & dims[1] and schedule.dims_of(value.deps) >= \
                dims[0] | dims[1] and all(kernel_dtype(p.dtype) is torch.float32 for p in (value, point, *factors)):
            return value, factors[0], factors[1]
    return None


def _is_product(point: Point) -> bool:
    return point.kind is PointKind.OP and point.node is not None and point.node.target is aten.mul.Tensor
