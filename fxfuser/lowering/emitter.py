"""Points to Triton text: the one emitter of every kernel family.

Enters: a `Domain` and its `Schedule`.  Leaves: the values of its points, as lines of one kernel, in the order in which
somebody asks for them: the loops of a kernel (see loops.py), or the writer of a matrix product.  A value is a tile with
one position per schedule slot, of size 1 where it does not depend on that slot's dim.  Each point is emitted once per
guard: the guard is the condition under which a select reads it, and becomes the mask of the loads below.

Numerics (the default): fp16 and bf16 values stay fp32 until they are stored; a cast always rounds; a value
that is stored is read as stored; rows marked `rounded` read operands rounded to their ATen dtype.  What a row
marked `steep` makes of fp16 is an infinity where fp16 has no number as large: loss scaling watches for those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping

import torch
from torch import fx

from fxfuser.domain.index import Axis, axes_of, linear, lookups_of
from fxfuser.domain.joint import Pair, joint_folds
from fxfuser.domain.points import Bound, Condition, Domain, Point, PointKind, Store
from fxfuser.errors import user_location
from fxfuser.lowering.expressions import HALF, Indices, Sizes, full
from fxfuser.lowering.guard import Guard, concerning, crossing, guard_axes
from fxfuser.lowering.kernel import Note
from fxfuser.lowering.narrow import comparison
from fxfuser.lowering.neighbours import Neighbours
from fxfuser.lowering.operands import NodeOperands
from fxfuser.lowering.pointers import pointers_to
from fxfuser.lowering.positions import Positions
from fxfuser.lowering.products import add_parts, scaled, times
from fxfuser.lowering.reducer import Reducer
from fxfuser.lowering.rereads import Rereads
from fxfuser.lowering.scanner import Scanner
from fxfuser.lowering.schedule import Dim, Schedule, strides_of
from fxfuser.lowering.scope import Scope, Value
from fxfuser.lowering.selects import select
from fxfuser.lowering.softmaxes import Softmaxes
from fxfuser.lowering.vectors import Vectors, axis_names
from fxfuser.ops import FLOAT8, TRITON_NAMES, Row, convert, float8_bits, kernel_dtype, ranged, render, rounded, row

Key = tuple[int, Guard]
DEEP = 32  # ops that follow from each other, emitted by recursion


@dataclass
class Emitter:
    """Emission of one kernel, into `top`."""

    domain: Domain
    schedule: Schedule
    pointers: dict[fx.Node, str]  # tensors read, and the parameter that points to each
    targets: dict[fx.Node, str]  # tensors written
    blocks: dict[str, int]  # the largest block of each dim, for masks that no tile needs
    precise: bool = False  # numerics="eager": round after every op, IEEE division and roots
    sizes: Sizes = field(default_factory=Sizes)
    top: Scope = field(default_factory=Scope)
    notes: dict[str, Note] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # of names by stem; emitters of one kernel share them
    joint: tuple[Pair, ...] | None = None  # reductions that are folded together; None: those of one loop
    buffers: Mapping[str, str] = field(default_factory=dict)  # of partial states, and the parameter that points to each
    accumulators: dict[int, Value] = field(default_factory=dict)  # what a main loop has made of each dot, by id
    unrolled: bool = False  # each thread has stores of several neighbours

    def __post_init__(self) -> None:
        self.scope = self.top
        counted = {d.name: d.axes for d in self.schedule.dims if len(d.axes) > 1 and not self.schedule.inner}
        self.indices = Indices(self.sizes, axis_names(self.schedule), counters=counted)
        self.vectors = Vectors(self.schedule, self.indices, self.blocks)
        self.positions = Positions(self)
        self.depth = 0
        self.read = {id(operand) for point in self.domain.points() for operand in point.operands}
        self.looped = frozenset(d for d in self.schedule.inner if d.looped)
        self.results: dict[Key, Value] = {}
        self.wide: dict[tuple[str, torch.dtype], str] = {}  # what rounded values were before
        self.current, self.rereads = 0, Rereads()  # the stage of the loops that are written, and what several read
        self.fills: dict[int, str] = {}  # by load: what folds want in lanes that do not exist
        self.borders: dict[Key, str] = {}  # by load and guard: what a select wants where the guard does not hold
        self.filled: dict[str, tuple[str, frozenset[str]]] = {}  # by value: what lanes hold where which masks fail
        pairs = self.joint
        if pairs is None:
            pairs = () if self.precise else tuple(joint_folds(self.domain.points(), self.loops))
        self.reducer = Reducer(self, pairs)
        self.scanner = Scanner(self, self.reducer)
        self.softmaxes = Softmaxes(self, self.domain.points())
        self.neighbours = Neighbours(self, self.stores()) if self.unrolled else None

    def stores(self) -> list[Store]:
        """The stores that write something: what an empty one would read may lie outside of its tensors."""
        return [s for s in self.domain.stores if all(axis.size != 0 for axis in s.axes)]

    # ---------------------------------------------------------------- dims, loops and masks

    def loops(self, axes: Iterable[Axis]) -> frozenset[Dim]:
        """The serial loops on which these axes depend."""
        return self.schedule.dims_of(axes) & self.looped

    def start(self, dim: Dim) -> str:
        """The name of where a step of a loop begins in a dim; nothing where no loop walks the dim."""
        return f"{dim.name}_start" if dim in self.looped else ""

    def ordered(self, dims: frozenset[Dim]) -> tuple[Dim, ...]:
        return tuple(d for d in self.schedule.dims if d in dims)

    def mask(self, axes: Iterable[Axis], guard: Guard = ()) -> list[str]:
        """The conditions under which lanes over these axes exist and the guard holds."""
        return self.vectors.masks(axes) + [self.condition(c, holds, guard[:i]) for i, (c, holds) in enumerate(guard)]

    def existing(self, axes: Iterable[Axis], text: str, absent: str) -> str:
        """`text` in lanes that exist over these axes, `absent` in others."""
        masks = self.mask(axes)
        return f"tl.where({' & '.join(masks)}, {text}, {absent})" if masks else text

    def condition(self, condition: Condition, holds: bool, guard: Guard = ()) -> str:
        """A named predicate that is evaluated where `guard` holds."""
        axes = axes_of(b.form for b in condition) | self.positions.look_up(lookups_of(b.form for b in condition), guard)
        prefix = "" if axes else f"{self.full(0, torch.int64)} + "
        if not holds and len(condition) == 1 and None in (condition[0].lower, condition[0].upper):
            bound = condition[0]
            text = self.indices.condition((Bound(bound.form, bound.upper, bound.lower),), prefix)
        else:
            text = self.indices.condition(condition, prefix)
            text = text if holds else f"~{text}"
        return self.bind("inside", text, torch.bool, axes).name

    def define(self, line: str) -> None:
        """Writes a line before all loops that are still to come, once."""
        if line not in self.top.lines:
            self.top.lines.append(line)

    def block(self, dim: Dim) -> str:
        """The lanes of a dim where lines are written now, as source."""
        return self.vectors.block(dim)

    def tile(self, axes: Iterable[Axis], blocks: Mapping[Dim, str] | None = None) -> str:
        """The shape of a tile over these axes, as source; `blocks` stand for those of dims."""
        return self.vectors.tile(axes, blocks)

    # ---------------------------------------------------------------- values

    def full(self, value: bool | int | float, dtype: torch.dtype) -> str:
        return full(value, dtype, self.tile(()))

    def fresh(self, stem: str, count: int) -> list[str]:
        """Names that no other value has: stem_0, stem_1, ..."""
        first = self.counts.get(stem, 0)
        self.counts[stem] = first + count
        return [f"{stem}_{first + i}" for i in range(count)]

    def bind(self, stem: str, text: str, dtype: torch.dtype, axes: frozenset[Axis], rounded: bool = True) -> Value:
        """The value of `text`, defined in the outermost scope that has its axes; equal text is one value."""
        scope = self.scope.covering(self.loops(axes))
        for around in scope.chain():
            if (text, dtype) in around.by_text:
                return around.by_text[text, dtype]
        value = Value(self.fresh(stem, 1)[0], dtype, axes, rounded)
        scope.lines.append(f"{value.name} = {text}")
        scope.by_text[text, dtype] = value
        return value

    def emit(self, point: Point, guard: Guard = ()) -> Value:
        """The value of a point, read where `guard` holds."""
        guard = concerning(guard, point.deps) if point.kind is PointKind.REDUCE else guard
        key = (id(point), guard)
        known = self._known(key)
        if known is not None:
            return known
        self.depth += 1
        if self.depth > DEEP and point.kind is PointKind.OP:
            self._emit_below(point, guard)
        value = self._point(point, guard)
        self.depth -= 1
        axes = value.axes | guard_axes(guard)
        self.scope.covering(self.loops(axes)).by_point[key] = value
        return value

    def share(self, point: Point, guard: Guard, others: Iterable[Guard]) -> None:
        """Lets the value that a point has where `guard` holds be its value under stricter guards too."""
        value = self.emit(point, guard)
        known = self.scope.covering(self.loops(value.axes | guard_axes(guard))).by_point
        known.update({(id(point), other): value for other in others})

    def _known(self, key: tuple[int, Guard]) -> Value | None:
        if key in self.results:
            return self.results[key]
        return next((scope.by_point[key] for scope in self.scope.chain() if key in scope.by_point), None)

    def _emit_below(self, point: Point, guard: Guard) -> None:
        """Emits the ops on which a point depends, the lowest first: a long chain must not be a deep recursion."""
        seen: set[int] = {id(point)}
        order, pending = list[Point](), [point]
        while pending:
            inputs = [p for p in pending[-1].inputs if p.kind is PointKind.OP and id(p) not in seen]
            below = next((p for p in inputs if self._known((id(p), guard)) is None), None)
            if below is None:
                order.append(pending.pop())
            else:
                seen.add(id(below))
                pending.append(below)
        for below in order[:-1]:
            self.emit(below, guard)

    def note(self, value: Value, point: Point) -> None:
        """Remembers which node of the model the value is."""
        assert point.node is not None
        self.notes.setdefault(value.name, Note(value.name, point.node.name, str(point.node.target),
                                               user_location(point.node.stack_trace)))

    def _point(self, point: Point, guard: Guard) -> Value:
        match point.kind:
            case PointKind.CONSTANT:
                # a half constant is what its dtype makes of the number, although it is held as fp32
                value = torch.tensor(point.value, dtype=point.dtype).item() if point.dtype in HALF else point.value
                if point.dtype in FLOAT8:
                    value = float8_bits(value, point.dtype)
                return self.bind("constant", self.full(value, kernel_dtype(point.dtype)), kernel_dtype(point.dtype),
                                 frozenset())
            case PointKind.IOTA:
                return self._iota(point, guard)
            case PointKind.LOAD:
                return self._load(point, guard)
            case PointKind.SELECT:
                return select(self, point, guard)
            case PointKind.REDUCE:
                return self.reducer.inline(point, guard)
            case PointKind.SCAN:
                return self.scanner.emit(point, guard)
            case PointKind.DOT:
                return self.accumulators[id(point)]
            case PointKind.PARTIAL:
                raise AssertionError("a reduction loads its states itself")
            case PointKind.SCATTERED:
                return self.emit(point.operands[0], guard)
            case PointKind.PARTS:
                return add_parts(self, point, guard)
            case PointKind.TIMES:
                return times(self, point, guard)
            case PointKind.SCALED:
                added = [self.emit(p, guard) for p in point.operands[1:]]
                return scaled(self, point, self.emit(point.operands[0], guard), added)
            case PointKind.OP:
                return self._op(point, guard)

    def _iota(self, point: Point, guard: Guard) -> Value:
        form, dtype = point.index[0], kernel_dtype(point.dtype)
        axes = form.axes | self.positions.look_up(form.lookups, guard)
        text = f"({self.indices.form(form)}).to({TRITON_NAMES[dtype]})"
        if not form.terms:
            text = f"{self.full(0, dtype)} + {self.indices.form(form)}"
        return self.bind("index", text, dtype, axes)

    def _load(self, point: Point, guard: Guard) -> Value:
        assert point.node is not None
        names = lookups_of(point.index)
        positions = self.positions.look_up(names, guard)
        # no lane is; hoisted out of its loop the load would read a null pointer (not asked of what the run tells)
        if any(type(n) is int and n == 0 for n in point.node.meta["val"].shape):
            dtype = kernel_dtype(point.dtype)
            return self.bind("constant", self.full(0, dtype), dtype, frozenset())
        offset = linear(point.index, strides_of(point.node))
        # lanes past the end of a dim that only the guard names are harmless, as the pointer does not move along it,
        # unless it is a condition on both that keeps the pointer inside, as on a diagonal
        axes = offset.axes | guard_axes(guard) | positions
        masks = self.mask(offset.axes | crossing(guard, offset.axes), guard) + self.positions.in_range(names, guard)
        pointer = pointers_to(self, self.pointers[point.node], offset, axes)
        part = self.neighbours and self.neighbours.part(point, offset, guard, self._filled(point, masks, guard))
        text = part or self.read_text(point, pointer, masks, guard)
        if point.dtype in HALF:
            text += ".to(tl.float32)"
        value = self.bind("load", text, kernel_dtype(point.dtype), axes)
        fill = self.fill(point, guard)
        if fill and masks:
            self.filled[value.name] = fill, frozenset(masks)
        return value

    def read_text(self, point: Point, pointer: str, masks: list[str], guard: Guard) -> str:
        """The expression that loads a tile where `guard` holds; kernels with other ways override it."""
        policy = self.rereads.policy(point, self.current)
        return f"tl.load({', '.join([pointer, *self._filled(point, masks, guard), *([policy] if policy else [])])})"

    def _filled(self, point: Point, masks: list[str], guard: Guard) -> list[str]:
        """The arguments of a load that say where it reads, and what it holds elsewhere."""
        fill = self.fill(point, guard)
        return [" & ".join(masks), *([fill] if fill else [])] if masks else []

    def fill(self, point: Point, guard: Guard) -> str:
        """What a load is to hold in lanes that are masked; nothing where that does not matter."""
        plain = not guard and not lookups_of(point.index)
        return self.borders.get((id(point), guard), self.fills.get(id(point), "") if plain else "")

    def _op(self, point: Point, guard: Guard) -> Value:
        assert point.node is not None
        compared = comparison(self, point, guard)
        if compared is not None:
            text, *sides = compared
            value = self.bind(str(point.node.target).split(".")[1], text, torch.bool, frozenset().union(
                *(side.deps for side in sides)))
            self.note(value, point)
            return value
        found = row(point.node.target)
        assert found is not None, point.node
        operands = NodeOperands(self, point, guard)
        text, own = self.softmaxes.text(point, operands, guard) or render(found, operands), kernel_dtype(point.dtype)
        if own != kernel_dtype(operands.dtype) and point.dtype != torch.bool:
            text = convert(f"({text})", operands.dtype, own)
        stem = str(point.node.target).split(".")[1].strip("_")
        exact = point.dtype not in HALF or (found.rounds and _from_byte(point))
        if text.isidentifier():  # a cast that the kernel need not make
            value = Value(text, own, operands.axes, exact)
        else:
            value = self.bind(stem, text, own, operands.axes, exact)
        if not exact and id(point) in self.read:
            value = self._as_read(value, point, found)
        self.note(value, point)
        return value

    def _as_read(self, value: Value, point: Point, found: Row) -> Value:
        """The half value of an op as other points read it."""
        if self.precise or found.rounds or point.node in self.targets:
            return self.rounded(value, point.dtype)
        text = ranged(value.name, point.dtype) if found.steep else value.name
        return value if text == value.name else self.bind("ranged", text, value.dtype, value.axes, False)

    def converted(self, value: Value, aten: torch.dtype, target: torch.dtype) -> Value:
        """A value of ATen dtype `aten` as one of `target`, both as kernels hold them."""
        if kernel_dtype(target) == value.dtype:
            return value
        text = convert(value.name, aten if kernel_dtype(aten) == value.dtype else value.dtype, target)
        return self.bind("cast", text, kernel_dtype(target), value.axes)

    def rounded(self, value: Value, dtype: torch.dtype) -> Value:
        """The value rounded to a half dtype and held as fp32 again."""
        if value.rounded or dtype not in HALF:
            return value
        found = self.bind("rounded", rounded(value.name, dtype), torch.float32, value.axes)
        self.wide[found.name, dtype] = value.name
        return found

    def half(self, value: Value, dtype: torch.dtype) -> str:
        """The value as a tile of a half dtype; of one that was rounded to it, by that very rounding."""
        return f"{self.wide.get((value.name, dtype), value.name)}.to({TRITON_NAMES[dtype]})"

    def store(self, store: Store) -> None:
        """Writes a value to where it is stored."""
        text, axes = self.stored(store)
        target = self.target(store, axes)
        masks = " & ".join(self.mask(store.axes) + self.positions.in_range(lookups_of(store.place), ()))
        policy = self.rereads.store_policy(store)
        arguments = [target, text, *([masks] if masks else []), *([policy] if policy else [])]
        lines = self.write_lines(store, text, f"tl.store({', '.join(arguments)})")
        self.scope.covering(self.loops(store.axes)).lines += lines

    def target(self, store: Store, axes: frozenset[Axis]) -> str:
        """Where a value over `axes` is stored.

        A store whose strides are 0 along an axis writes one value from several lanes, all equal.
        """
        positions = self.positions.look_up(lookups_of(store.place), ())
        return pointers_to(self, self.targets[store.node], store.offset, store.offset.axes | axes | positions)

    def stored(self, store: Store) -> tuple[str, frozenset[Axis]]:
        """A value as its tensor holds it, and the axes on which it depends."""
        value = self.emit(store.value)
        dtype = store.node.meta["val"].dtype
        value = self.converted(value, store.value.dtype, kernel_dtype(dtype))
        return self.half(value, dtype) if dtype in HALF else value.name, value.axes

    def write_lines(self, store: Store, value: str, line: str) -> list[str]:
        """The lines that store `value`, of which `line` is the usual one; kernels with other ways override it."""
        return [line]


def _from_byte(point: Point) -> bool:
    """Whether an op has one operand, of a byte: fp16 and bf16 have all its numbers."""
    return len(point.operands) == 1 and point.operands[0].dtype.itemsize == 1
