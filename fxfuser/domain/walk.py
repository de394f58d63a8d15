"""One walk over a group, from its outputs to what it reads: which element of each node is needed.

Enters: a `Pattern`, the group's nodes and its outputs, and a `Space`.  Leaves: per node its demands, keyed by index and
result number, each with what it needs of other nodes.  Nodes are visited in reverse order, so that all demands on a
node are known when it is reached: nothing is visited twice and nothing recurses.  Indices may hold pieces.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Iterable, Iterator, Mapping, Sequence, Union

import torch
from torch import fx

from fxfuser.domain.borders import decided, simplified
from fxfuser.domain.factory import Ramp, factory_value
from fxfuser.domain.index import Axis, Form, Index, Lookup, Piece, Splits, bounds, lookups_of, within
from fxfuser.domain.layout import Region, layout_regions
from fxfuser.domain.lookup import gather_index, scatter_index
from fxfuser.domain.pattern import Pattern
from fxfuser.domain.points import Bound, Condition, PointKind, Reject
from fxfuser.domain.products import matrix_product
from fxfuser.domain.size import Size
from fxfuser.domain.space import Inliner, Space
from fxfuser.domain.sums import place_in
from fxfuser.domain.tensors import dtype_of, is_tensor, shape_of, size_argument
from fxfuser.domain.views import base_of, broadcast, map_view
from fxfuser.ops import Kind, argument, kind_of, reduction_dims

SHORT = 8  # reductions up to this length unroll
WINDOW = 32  # the same of windows, whose elements are parts of their neighbours too
READS = 64  # of one operand by all unrolled steps: a window over a window has too many
DEEPEST = 6  # the text of an index doubles with each view that does not factor


class Rejected(Exception):
    """Carries a `Reject` out of a walk."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(str(reject))
        self.reject = reject


@dataclass(eq=False, slots=True)  # not frozen, which would take twice the time: a walk makes one for each operand
class Ref:
    """Result `output` of `node` at `index`."""

    node: fx.Node
    index: Index
    output: int = 0


@dataclass(frozen=True, eq=False)
class Value:
    """A number, or an integer form, of this dtype."""

    dtype: torch.dtype
    value: bool | int | float | Form


Operand = Union[Ref, Value]


@dataclass(eq=False, slots=True)
class Demand:
    """What one node at one index needs.  `kind` None: the value is its only operand's."""

    kind: PointKind | None
    operands: tuple[Operand, ...]
    conditions: tuple[Condition, ...] = ()
    axes: tuple[tuple[Axis, ...], ...] = ()
    reverse: bool = False  # of a scan: it begins at the end of the axis
    place: Index = ()  # of what is scattered: where in its base
    numbers: tuple[bool | int | float, ...] = ()  # what follows the operands among the arguments, if not the node's own


Key = tuple[Index, int]


class Walk:
    """One walk; what POINTWISE nodes need is not kept, since it follows from where they are needed: see `demand`."""

    def __init__(self, pattern: Pattern, space: Space) -> None:
        self.pattern, self.space = pattern, space
        self.splits: Splits = {}
        self.inliner = Inliner(self.splits)
        self.demands: dict[fx.Node, dict[Key, Demand | None]] = {n: {} for n in pattern.nodes}
        self.loads: dict[fx.Node, dict[Index, None]] = {}
        self.lookups: dict[Lookup, Ref] = {}
        self._tables: dict[tuple[fx.Node, int], str] = {}  # tensors of positions and what lookups call them
        self.short: dict[fx.Node, tuple[int, list[str]]] = {}  # lengths of reductions that may unroll, and their axes
        self._budget = 1024 + 64 * len(pattern.nodes)
        # one root per output, or one per piece of it
        stored = [(node, index) for i, node in enumerate(pattern.outputs) for index in self._root_indices(i, node)]
        self.root_nodes = tuple(node for node, _ in stored)
        self.root_indices = tuple(index for _, index in stored)
        self.roots = tuple(self.need(node, index) for node, index in stored)
        for node in reversed(pattern.nodes):
            self._visit(node)
        self.indices = self._indices()
        if any(self._too_deep(index) for index in self.indices):
            node = next(node for index, node in self.visits() if self._too_deep(index))
            raise Rejected(Reject("its index does not factor", "use views whose sizes divide each other", node))

    def _visit(self, node: fx.Node) -> None:
        """Notes what a node needs, all of whose readers have been visited."""
        reader = self.pattern.reader.get(node)
        if reader is not None:
            self.demands[node] = dict.fromkeys(self.demands[reader])
            self._spend(len(self.demands[node]), node)
        demands, followed = self.demands[node], self.pattern.followed.get(node)
        if followed is None:
            for key in demands:
                demands[key] = self._expand(node, key[0])
        elif followed:
            for index, _ in demands:
                for operand, shape in followed:
                    self.need(operand, index if shape is None else broadcast(index, shape))

    def demand(self, node: fx.Node, key: Key) -> Demand:
        """What a node needs at an index at which it is needed."""
        known, index = self.demands[node][key], key[0]
        if known is not None:
            return known
        return Demand(PointKind.OP, tuple([
            self._place(operand, index if shape is None else broadcast(index, shape))
            for operand, shape in self.pattern.operands[node]]))

    def visits(self) -> Iterator[tuple[Index, fx.Node]]:
        """Every index at which a node is needed."""
        for node, demands in self.demands.items():
            yield from ((index, node) for index, _ in demands)
        for node, indices in self.loads.items():
            yield from ((index, node) for index in indices)

    def _indices(self) -> dict[Index, None]:
        """The indices at which nodes are needed, each once."""
        found: dict[Index, None] = {}
        for node, demands in self.demands.items():
            if node not in self.pattern.reader:
                for index, _ in demands:
                    found[index] = None
        for indices in self.loads.values():
            found.update(indices)
        return found

    def _too_deep(self, index: Index) -> bool:
        return any(form.depth > DEEPEST for form in self.inliner.index(index))

    def _root_indices(self, number: int, node: fx.Node) -> tuple[Index, ...]:
        whole = tuple(self.space.form(f"o{number}d{d}", size) for d, size in enumerate(shape_of(node)))
        return self.space.variants(whole)

    def need(self, node: fx.Node, index: Index) -> Ref:
        """Notes that the element at `index` is needed; returns where it is, behind all views."""
        ref = self._place(node, index)
        known = self.demands.get(ref.node)
        if known is None:
            self.loads.setdefault(ref.node, {})[ref.index] = None
            return ref
        before = len(known)
        known.setdefault((ref.index, ref.output))
        if len(known) > before:
            self._spend(1, ref.node)
        return ref

    def _place(self, node: fx.Node, index: Index) -> Ref:
        path = self.pattern.path(node)
        for view in path.views:
            index = map_view(view, index, self.splits)
        return Ref(path.node, index, path.output)

    def _spend(self, places: int, node: fx.Node) -> None:
        self._budget -= places
        if self._budget < 0:
            raise Rejected(Reject("its elements are needed at too many places",
                                  "shift, pad or join less often in one chain", node))

    def _expand(self, node: fx.Node, index: Index) -> Demand:
        kind = kind_of(node)
        if kind is Kind.LAYOUT:
            regions = layout_regions(node, index, self.splits)
            if not regions:
                raise Rejected(Reject(f"{node.target} has no index map", "", node))
            return self._regions(node, regions)
        if kind is Kind.REDUCTION:
            return self._reduction(node, index)
        if kind is Kind.SCAN:
            return self._scan(node, index)
        if kind is Kind.FACTORY:
            return self._factory(node, index)
        if kind is Kind.GATHER:
            return self._gather(node, index)
        if kind is Kind.SCATTER:
            place, source = scatter_index(node, index, self.look_up), argument(node, 2)
            stored = self.need(source, broadcast(index, shape_of(source)))
            return Demand(PointKind.SCATTERED, (stored,), place=place)
        if kind is Kind.GEMM:
            return self._product(node, index)
        raise Rejected(Reject(f"{node.target} does not lower to loops", "", node))

    def _factory(self, node: fx.Node, index: Index) -> Demand:
        made, dtype = factory_value(node, index), dtype_of(node)
        if made is None:
            raise Rejected(Reject(f"{node.target} with these arguments has no closed form", "", node))
        if isinstance(made, Bound):
            choice = Value(dtype, 1), Value(dtype, 0)
            return self._choose([(choice[0], (made,)), (choice[1], ())])
        if isinstance(made, Ramp):
            return Demand(PointKind.OP, (Value(torch.int64, made.form),), numbers=(made.start, made.step))
        return Demand(None, (Value(dtype, made),))

    def _gather(self, node: fx.Node, index: Index) -> Demand:
        inner = gather_index(node, index, self.look_up, self.splits)
        if inner is None:
            raise Rejected(Reject(f"{node.target} has no index map", "", node))
        return Demand(None, (self.need(base_of(node), inner),))

    def look_up(self, positions: fx.Node, index: Index, size: Size, wraps: bool) -> Form:
        """The position that a tensor holds at `index`; one that counts is the index itself."""
        if kind_of(positions) is Kind.FACTORY and positions in self.demands:
            made = factory_value(positions, index)
            if isinstance(made, Form) and within(made, size):
                return made
        ref = self.need(positions, index)
        name = self._tables.setdefault((ref.node, ref.output), f"t{len(self._tables)}")
        lookup = Lookup(name, ref.index, size, wraps)
        self.lookups[lookup] = ref
        return Form(((lookup, 1),))

    def _regions(self, node: fx.Node, regions: tuple[Region, ...]) -> Demand:
        kept: list[tuple[Region, Condition]] = []
        for region in regions:
            condition, holds = self._simplified(region.condition)
            if not holds:
                continue
            kept.append((region, condition))
            if not condition:
                break
        return self._choose([(self._source(node, r), c) for r, c in kept])

    def _simplified(self, condition: Condition) -> tuple[Condition, bool]:
        """The bounds that are not decided, and False if one never holds."""
        left = []
        for bound in condition:
            answer = decided(bound, bounds(bound.form))
            if answer is False:
                return (), False
            if answer is None:
                left.append(simplified(Bound(self.inliner.form(bound.form), bound.lower, bound.upper)))
        return tuple(left), True

    def _choose(self, choices: list[tuple[Operand, Condition]]) -> Demand:
        operands = tuple(o for o, _ in choices)
        if len(operands) == 1:
            return Demand(None, operands)
        return Demand(PointKind.SELECT, operands, tuple(c for _, c in choices[:-1]))

    def _source(self, node: fx.Node, region: Region) -> Operand:
        source = region.source
        if isinstance(source, (bool, int, float)):
            return Value(dtype_of(node), source)
        if is_tensor(source):
            return self.need(source, region.index)
        if isinstance(source.meta.get("val"), torch.SymInt):
            return Value(dtype_of(node), Form((), size_argument(source)))
        raise Rejected(Reject(f"{node.target} fills with a number that is computed at run time", "", node))

    def _reduction(self, node: fx.Node, index: Index) -> Demand:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        shape = shape_of(operand)
        dims, keep = reduction_dims(node)
        if any(shape[d] == 0 for d in dims):
            return Demand(PointKind.REDUCE, ())
        names = {d: f"r{self.pattern.numbers[node]}d{d}" for d in dims}
        regions: Iterable[Index]
        if self._unrolls(node, [names[d] for d in dims if shape[d] != 1], [shape[d] for d in dims]):
            steps = itertools.product(*(range(size) for d in dims if isinstance(size := shape[d], int)))
            regions = (tuple(Form((), i) for i in step) for step in steps)
        else:
            regions = self.space.variants(tuple(self.space.form(names[d], shape[d], True) for d in dims))
            self._note_short(node, names, shape)
        kept = [f for d, f in enumerate(index) if not (keep and d in names)]
        if lookups_of(kept):
            raise Rejected(Reject("its result is read at positions that a tensor holds",
                                  "gather before the reduction", node))
        needs, axes = [], []
        for region in regions:
            inner, rest = dict(zip(dims, region)), iter(kept)
            needs.append(self.need(operand, tuple(inner[d] if d in inner else next(rest) for d in range(len(shape)))))
            axes.append(_axes_in_order(region))
        return Demand(PointKind.REDUCE, tuple(needs), axes=tuple(axes))

    def _scan(self, node: fx.Node, index: Index) -> Demand:
        """A scan is known where a whole axis runs through its dimension, in either direction."""
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        need = self.need(operand, index)
        dims, _ = reduction_dims(node)
        if not dims or shape_of(node)[dims[0]] == 1:
            return Demand(PointKind.SCAN, (need,), axes=((),))
        size, inlined = shape_of(node)[dims[0]], self.inliner.index(index)
        form = inlined[dims[0]]
        axis, step = form.terms[0] if form.terms else (None, 0)
        whole = isinstance(axis, Axis) and len(form.terms) == 1 and axis.size == size and step in (1, -1) \
            and form.constant == (0 if step == 1 else size - 1)
        alone = all(axis not in f.axes for d, f in enumerate(inlined) if d != dims[0])
        if not whole or not alone or not isinstance(axis, Axis):
            raise Rejected(Reject("its running values are read out of order", "shift or gather before the scan", node))
        return Demand(PointKind.SCAN, (need,), axes=((axis,),), reverse=step == -1)

    def _product(self, node: fx.Node, index: Index) -> Demand:
        """A dot of a row and a column, for each step of a batch."""
        factors = matrix_product(node)
        if factors is None:
            raise Rejected(Reject(f"{node.target} is no product of matrices", "", node))
        added = [] if factors.added is None else [
            self.need(factors.added, broadcast(index, shape_of(factors.added)))]
        if node in self.pattern.left:
            if lookups_of(index):
                raise Rejected(Reject("it reads the product at positions that a tensor holds",
                                      "reduce over a comparison of positions instead of gathering", node))
            return Demand(PointKind.DOT, (Value(torch.int64, place_in(shape_of(node), index)), *added))
        *batch, row, column = index
        inner = self.space.form(f"k{self.pattern.numbers[node]}", shape_of(factors.left)[-1], True)
        needs = [self.need(factors.left, (*batch, row, inner)), self.need(factors.right, (*batch, inner, column))]
        return Demand(PointKind.DOT, (*needs, *added), axes=(_axes_in_order((inner,)),))

    def _unrolls(self, node: fx.Node, names: Sequence[str], sizes: Sequence[Size]) -> bool:
        if not all(name in self.space.unrolled for name in names):
            return False
        return not names or len(self.demands[node]) * math.prod(s for s in sizes if isinstance(s, int)) <= READS

    def _note_short(self, node: fx.Node, names: Mapping[int, str], shape: Sequence[Size]) -> None:
        length: Size = 1
        for d in names:
            length = length * shape[d]
        axes = [names[d] for d in names if shape[d] != 1]
        if isinstance(length, int) and length <= WINDOW and not self.space.unrolled.issuperset(axes):
            self.short[node] = length, axes


def _axes_in_order(forms: Sequence[Form]) -> tuple[Axis, ...]:
    """The axes of reduced dimensions, outermost first: their lexicographic order is the elements' order."""
    found: list[Axis] = []
    for form in forms:
        inside = [(k, a) for a, k in form.terms if isinstance(a, Axis) and not isinstance(a, Piece)]
        found += [a for _, a in sorted(inside, key=lambda t: _magnitude(t[0]), reverse=True)]
    return tuple(found)


def _magnitude(size: Size) -> tuple[int, int]:
    if isinstance(size, int):
        return 0, abs(size)
    return max(len(m) for m, _ in size.terms), max(abs(c) for _, c in size.terms)
