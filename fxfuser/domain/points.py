"""What a domain is: the points of a group of nodes, a DAG in which no view is left.

A `Point` is one node evaluated at one index.  Views, broadcasts, slices, pads and concatenations are gone:
they have become the indices of the points they connect.  Lowering emits each point once and needs to know
neither FX nor views.  Equal points are one object (the resolver interns them), so identity is equality.

    y = (x.t() + b).sum(0), x: [6, 4]          ->  store y[n] <- reduce sum over m of add(x[n, m], b[n])

Kinds of point:
    load     reads tensor `node` (materialised outside the group) at `index`
    op       a pointwise row of the op table; `args`/`kwargs` mirror the node's, with points for nodes.  Of a
             fractional arange: the index, the start and the step
    reduce   a reduction row; `operands` holds one point per region (their states are combined),
             `axes` the reduced axes of each
    scan     a scan row, at the index of its only operand: folds that up to the point's place along the axis that
             `axes` holds, or from there on where `value` is true; no axis where there is but one element
    select   `operands[i]` where `conditions[i]` holds, the first that does; the last has no condition, so there
             is one condition fewer than operands.  Operands may be of other dtypes than the point.
             Operand i is only read where its condition holds, so its loads carry that condition as a mask
    dot      element `index` of a matrix product: `operands` are the left factor at (.., m, k), the right one at
             (.., k, n) and, where the node adds one, that tensor at (.., m, n); `axes` holds the axes of k
    partial  the states of a reduction over part of what it reduces, which an earlier kernel left at element `index[0]`
             of the tensors that `value` names, one per state; `args` holds how many elements all states are of
    parts    the sum of element `index[0]` of all parts that an earlier kernel left of product `node`, one after the
             other; `args` holds how many elements a part has and how many parts there are
    times    the product of two operands, in fp32
    scaled   the product `node` at `index` of which `operands[0]` is the sum: scaled, and with what the node adds,
             `operands[1]` where it adds something
    scattered  `operands[0]`, the value of a store at `index` of the tensor into which `node` scatters it
    iota     the value of `index[0]` itself, an integer (aten.arange, size arguments)
    constant `value`, a Python number

Where a load's or an iota's index, or a select's conditions, name lookups, `lookups` pairs each with the point that
has its value: y = table[ids] is a load of table at [ids[i], d], whose only lookup is the load of ids at [i].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, Iterable, Iterator, Mapping

import torch
from torch import fx

from fxfuser.domain.index import Axis, Form, Index, Lookup, axes_of, linear
from fxfuser.domain.size import Size
from fxfuser.domain.tensors import strides_of
from fxfuser.ops import memory_of


class PointKind(Enum):
    LOAD = "load"
    OP = "op"
    REDUCE = "reduce"
    SCAN = "scan"
    DOT = "dot"
    PARTIAL = "partial"
    PARTS = "parts"
    TIMES = "times"
    SCALED = "scaled"
    SELECT = "select"
    IOTA = "iota"
    CONSTANT = "constant"
    SCATTERED = "scattered"


@dataclass(frozen=True)
class Bound:
    """The condition `lower <= form < upper`; a side that is None does not bound."""

    form: Form
    lower: Size | None
    upper: Size | None

    def __repr__(self) -> str:
        low = "" if self.lower is None else f"{self.lower} <= "
        high = "" if self.upper is None else f" < {self.upper}"
        return f"{low}{self.form}{high}"


FOLDS = (PointKind.REDUCE, PointKind.SCAN)
Condition = tuple[Bound, ...]  # all must hold


@dataclass(frozen=True, eq=False)
class Point:
    """One node at one index; see the module's text.  `dtype` is the ATen dtype of the value."""

    kind: PointKind
    dtype: torch.dtype
    node: fx.Node | None = None
    index: Index = ()
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    operands: tuple[Point, ...] = ()
    axes: tuple[tuple[Axis, ...], ...] = ()
    conditions: tuple[Condition, ...] = ()
    value: Any = None
    output: int = 0  # which result of a node with several
    lookups: tuple[tuple[Lookup, Point], ...] = ()
    deps: frozenset[Axis] = field(default=frozenset())  # axes on which the value depends

    @property
    def inputs(self) -> tuple[Point, ...]:
        """Every point that must be known before this one."""
        return (*self.operands, *(value for _, value in self.lookups))

    def __repr__(self) -> str:
        name = self.node.name if self.node is not None else repr(self.value)
        where = "" if not self.index else "[" + ", ".join(map(repr, self.index)) + "]"
        return f"{self.kind.value} {name}{where}"


@dataclass(frozen=True, eq=False)
class Store:
    """Tensor `node`, which other segments or the graph's output read, is `value` at `index`."""

    node: fx.Node
    index: Index
    value: Point

    @property
    def axes(self) -> frozenset[Axis]:
        return axes_of(self.index)

    @property
    def place(self) -> Index:
        """Where the value lies in the memory that holds it."""
        return self.value.index if self.value.kind is PointKind.SCATTERED else self.index

    @cached_property
    def offset(self) -> Form:
        """The element of that memory, counted from its first."""
        return linear(self.place, strides_of(memory_of(self.node)))

    @cached_property
    def layout(self) -> Form:
        """How elements lie to each other as a rule: the offset, if tensors of positions just counted.

        For estimates: whatever positions are, a kernel may hold them in any order.
        """
        return linear(tuple(map(_counted, self.place)), strides_of(memory_of(self.node))) if self.value.lookups \
            else self.offset

    def __repr__(self) -> str:
        return f"store {self.node.name}[{', '.join(map(repr, self.index))}] <- {self.value!r}"


def _counted(form: Form) -> Form:
    found = Form((), form.constant)
    for atom, k in form.terms:
        inner = next((f for f in reversed(atom.index) if f.terms), Form()) if isinstance(atom, Lookup) \
            else Form(((atom, 1),))
        found = found + inner.scale(k)
    return found


def over(point: Point, moved: Mapping[int, Point]) -> Point:
    """The point over what its operands, by id, have become; itself where none has changed."""
    if all(moved[id(p)] is p for p in point.inputs):
        return point
    return replace(
        point, operands=tuple(moved[id(p)] for p in point.operands), args=mirrored(point.args, moved),
        kwargs=mirrored(point.kwargs, moved), lookups=tuple((name, moved[id(p)]) for name, p in point.lookups))


def mirrored(argument: Any, moved: Mapping[int, Point]) -> Any:
    """An argument with each point in it, at whatever depth, replaced by what it has become."""
    if isinstance(argument, Point):
        return moved[id(argument)]
    return tuple(mirrored(a, moved) for a in argument) if isinstance(argument, tuple) else argument


def needed_by(value: Point) -> tuple[Point, ...]:
    """A point and every point that it needs, operands before users."""
    return _in_order([value])


def points_of(stores: Iterable[Store]) -> tuple[Point, ...]:
    """Every point that these stores need, operands before users, in a deterministic order."""
    return _in_order([store.value for store in stores])


def _in_order(values: Iterable[Point]) -> tuple[Point, ...]:
    order: dict[int, Point] = {}
    for value in values:
        stack: list[tuple[Point, bool]] = [(value, False)]
        while stack:
            point, done = stack.pop()
            if id(point) in order:
                continue
            if done:
                order[id(point)] = point
                continue
            stack.append((point, True))
            stack.extend((p, False) for p in reversed(point.inputs) if id(p) not in order)
    return tuple(order.values())


@dataclass(frozen=True, eq=False)
class Domain:
    """The iteration space of a group and every point in it.

    `program` lists the axes along which programs are laid out, outermost first: every store and every
    reduction's result depends on all of them (or is repeated along them), and none is reduced.  All other
    axes are walked inside one program: those in `looped` chunk by chunk, the others held as a whole.
    """

    stores: tuple[Store, ...]
    program: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    looped: frozenset[Axis] = frozenset()

    def points(self) -> tuple[Point, ...]:
        """Every point, operands before users, in a deterministic order."""
        return points_of(self.stores)

    def reductions(self) -> Iterator[Point]:
        return (p for p in self.points() if p.kind is PointKind.REDUCE)

    def folds(self) -> Iterator[Point]:
        """What combines the elements along axes: reductions and scans."""
        return (p for p in self.points() if p.kind in FOLDS)

    def __str__(self) -> str:
        head = "program " + (" x ".join(f"{a.name}[{a.size}]" for a in self.program) or "1")
        inner = [a for a in self.axes if a not in self.program]
        if inner:
            head += "; inner " + ", ".join(f"{a.name}[{a.size}]" + ("*" if a.reduced else "") for a in inner)
        return "\n".join([head, *map(repr, self.stores)])


@dataclass(frozen=True)
class Reject:
    """Why a set of nodes has no common domain, and what would give it one."""

    reason: str
    remedy: str = ""
    node: fx.Node | None = None

    def __str__(self) -> str:
        return self.reason + (f"; {self.remedy}" if self.remedy else "")
