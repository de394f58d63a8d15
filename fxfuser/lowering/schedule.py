"""How a domain's axes become a kernel's dimensions: programs, tiles and loops.

Enters: a `Domain`.  Leaves: a `Schedule`, an ordered list of `Dim`s.  A dim is one vector of indices and
covers one or more axes, flattened; its coordinates are decoded from that vector by div and mod.  Every value
in the kernel is a tile with one position (`slot`) per dim, of size 1 where it does not depend on that dim, so
broadcasting is Triton's and nobody writes it.

Invariant: two dims share a slot only if no store and no reduction walks both.

    pointwise                 x over all axes
    pointwise, transposed     y over the axes that loads are contiguous in, x over the stores' contiguous axis
    reductions                x over the program axes, then one dim per class of inner axes that always occur together,
                              a serial loop over chunks where the domain says so
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator, Sequence

from torch import fx

from fxfuser.domain.index import Axis, Form, linear
from fxfuser.domain.points import Domain, PointKind
from fxfuser.domain.roles import classes, nests
from fxfuser.domain.size import Size, from_torch, hint

SLICES = "SLICES"  # the block of pieces into which a step of a dim is cut


@dataclass(frozen=True)
class Dim:
    """One index vector: `axes` flattened, outermost first; `block` names its constexpr block size.

    `named` is what names the block where it is not the dim itself; "" and a size of `1` for a dim of which each program
    takes one step at a time.  A block of several `places` is a block of the other axes at each step of the first.
    A block that is cut has its pieces, of which there are SLICES, in the slot `slices`.
    """

    name: str
    axes: tuple[Axis, ...]
    slot: int
    program: bool
    looped: bool = False
    descending: bool = False  # of a loop: from the end, as a scan in it goes
    named: str | None = None
    places: int = 1
    slices: int | None = None

    @property
    def size(self) -> Size:
        return product(a.size for a in self.axes)

    @property
    def block(self) -> str:
        if self.named == "":
            return "1"
        return f"{(self.named or self.name).upper()}BLOCK"


@dataclass(frozen=True)
class Schedule:
    """The dims of a kernel: program dims first, then inner ones."""

    dims: tuple[Dim, ...]

    @property
    def rank(self) -> int:
        return 1 + max(d.slot for d in self.dims)

    @property
    def program(self) -> tuple[Dim, ...]:
        return tuple(d for d in self.dims if d.program)

    @property
    def inner(self) -> tuple[Dim, ...]:
        return tuple(d for d in self.dims if not d.program)

    def dims_of(self, axes: Iterable[Axis]) -> frozenset[Dim]:
        """The dims that carry these axes."""
        wanted = set(axes)
        return frozenset(d for d in self.dims if wanted & set(d.axes))


@dataclass(frozen=True)
class Access:
    """One load or store: the element offset as a form, and how many bytes an element has."""

    offset: Form
    bytes: int
    store: bool


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total


def strides_of(node: fx.Node) -> tuple[Size, ...]:
    """The strides of a materialised tensor, in elements."""
    return tuple(from_torch(s) for s in node.meta["val"].stride())


def accesses(domain: Domain) -> Iterator[Access]:
    """Every load and store of the domain."""
    for store in domain.stores:
        yield Access(store.layout, store.node.meta["val"].dtype.itemsize, True)
    for point in domain.points():
        if point.kind is PointKind.LOAD and point.node is not None:
            yield Access(linear(point.index, strides_of(point.node)), point.dtype.itemsize, False)
        elif point.kind in (PointKind.PARTIAL, PointKind.PARTS):
            yield Access(point.index[0], 4, False)


def schedule(domain: Domain) -> Schedule:
    """The dims of a kernel that computes `domain`."""
    found = tuple(accesses(domain))
    if len(domain.axes) == len(domain.program):
        return Schedule(_pointwise(domain, found))
    rows = Dim("x", _ordered(domain.program, found), 0, True)
    return Schedule((rows, *_inner(domain, found)))


def static(size: Size) -> int | None:
    return size if isinstance(size, int) else None


def stride_along(access: Access, axis: Axis) -> int:
    """|stride| of an access along an axis; large where it is symbolic, 0 where the access does not move."""
    coefficient = access.offset.coefficient(axis)
    if coefficient == 0:
        return 0
    return abs(coefficient) if isinstance(coefficient, int) else hint(coefficient, {}, 1 << 20)


def _ordered(axes: Sequence[Axis], found: tuple[Access, ...]) -> tuple[Axis, ...]:
    """Outermost first: by falling stride in the stores, where they do not tell in the loads, else as they came."""
    def key(axis: Axis) -> tuple[int, int]:
        return (max((stride_along(a, axis) for a in found if a.store), default=0),
                max((stride_along(a, axis) for a in found if not a.store), default=0))
    return tuple(sorted(axes, key=key, reverse=True))


def contiguous_axis(access: Access, axes: Iterable[Axis]) -> Axis | None:
    """The axis along which neighbouring elements lie side by side."""
    return next((a for a in axes if access.offset.coefficient(a) in (1, -1) and static(a.size) != 1), None)


def _pointwise(domain: Domain, found: tuple[Access, ...]) -> tuple[Dim, ...]:
    order = _ordered(domain.program, found)
    fast = next((c for a in found if a.store and (c := contiguous_axis(a, order))), None)
    other = _transposed_axis(order, fast, found)
    if fast is None or other is None:
        return (Dim("x", order, 0, True),)
    outer = tuple(a for a in order if a not in (fast, other))
    return (Dim("y", (*outer, other), 0, True), Dim("x", (fast,), 1, True))


def _transposed_axis(order: tuple[Axis, ...], fast: Axis | None, found: tuple[Access, ...]) -> Axis | None:
    """The axis along which some access is contiguous while it jumps along `fast`; the one with most bytes."""
    weight: dict[Axis, int] = {}
    for access in found:
        axis = contiguous_axis(access, order)
        if fast is None or axis is None or axis == fast or stride_along(access, fast) <= 1:
            continue
        weight[axis] = weight.get(axis, 0) + access.bytes
    return max(weight, key=lambda a: weight[a]) if weight else None


def _inner(domain: Domain, found: tuple[Access, ...]) -> tuple[Dim, ...]:
    walked = nests(domain.stores, domain.folds(), frozenset(domain.program))
    # what strides leave open, names decide: sets have another order in each process
    groups = [_ordered(sorted(c, key=lambda a: a.name), found) for c in classes(walked)]
    groups.sort(key=lambda axes: min((stride_along(a, axes[-1]) or 1 << 30 for a in found), default=0), reverse=True)
    slots = _colour(groups, walked)
    backwards = {a for p in domain.folds() if p.kind is PointKind.SCAN and p.value for a in p.axes[0]}
    return tuple(Dim(f"r{i}", axes, slots[i], False, axes[0] in domain.looped,
                     axes[0] in domain.looped and axes[0] in backwards) for i, axes in enumerate(groups))


def _colour(groups: list[tuple[Axis, ...]], walked: tuple[frozenset[Axis], ...]) -> list[int]:
    """Slots by interference, given out from the contiguous end so that shared fast axes keep the last slot."""
    clash = [[any(set(a) & n and set(b) & n for n in walked) for b in groups] for a in groups]
    colours: list[int] = [0] * len(groups)
    for i in reversed(range(len(groups))):
        taken = {colours[j] for j in range(i + 1, len(groups)) if clash[i][j]}
        colours[i] = next(c for c in range(1, len(groups) + 1) if c not in taken)
    last = max(colours)
    return [last + 1 - c for c in colours]
