"""Cutting: regions as pieces with axes of their own instead of selects.

A select evaluates every operand on every lane.  Where a border lies on one axis, that axis is replaced by
pieces, each with its own store; the borders are then decided, and pieces of equal length meet at what they
share: two halves of a head that change places are one axis, two stores and no select.  It pays where it saves work
and leaves enough rows to lay programs along; short or lonely borders (a pad by one) stay selects.
"""

from __future__ import annotations

from torch import fx

from fxfuser.domain.borders import borders
from fxfuser.domain.index import Axis, Form, axes_of, linear
from fxfuser.domain.points import Domain, PointKind
from fxfuser.domain.size import Size, hint
from fxfuser.domain.tensors import strides_of
from fxfuser.domain.walk import Walk
from fxfuser.ops import row

PIECES = 16  # of all outputs together
ROWS = 1024  # programs that must be left; a symbolic size counts as that many
SAVED = 0.8  # of the work that selects do, at most this may be left
LARGE = 8  # tensors with fewer than one in so many of the largest one's elements do not matter
SHORTEST = 32  # contiguous elements of a piece that is walked inside a program


def cuts(walk: Walk) -> dict[Axis, list[Size]]:
    """The axes that alone decide a select's bounds, and where; empty where too many pieces would come of it."""
    found: dict[Axis, list[Size]] = {}
    for demands in walk.demands.values():
        for demand in demands.values():
            if demand is None or demand.kind is not PointKind.SELECT:
                continue
            for bound in (b for condition in demand.conditions for b in condition):
                axis, places = borders(bound) or (None, [])
                if axis is not None:
                    known = found.setdefault(axis, [])
                    known.extend(p for p in places if p not in known)
    pinned = _pinned(walk)
    ordered = {axis: _rising(places) for axis, places in found.items() if places and axis not in pinned}
    if any(places is None for places in ordered.values()):
        return {}
    kept = {axis: places for axis, places in ordered.items() if places}
    return kept if _count(walk, kept) <= PIECES else {}


def _pinned(walk: Walk) -> frozenset[Axis]:
    """Inner digits of positions that an arg-reduction counts: its regions must follow one another."""
    counted = [d for node, demands in walk.demands.items() for d in demands.values()
               if d is not None and d.kind is PointKind.REDUCE and _counts(node)]
    return frozenset(a for demand in counted for axes in demand.axes for a in axes[1:])


def _counts(node: fx.Node) -> bool:
    found = row(node.target)
    return found is not None and found.monoid is not None and found.monoid.indexed


def _rising(places: list[Size]) -> list[Size] | None:
    """The places in order; None where symbols leave it open."""
    if len(places) == 1:
        return places
    numbers = [p for p in places if isinstance(p, int)]
    return [*sorted(numbers)] if len(numbers) == len(places) else None


def _count(walk: Walk, wanted: dict[Axis, list[Size]]) -> int:
    total = 0
    for index in walk.root_indices:
        pieces = 1
        for axis in frozenset().union(*(f.axes for f in index)):
            pieces *= 1 + len(wanted.get(axis, ()))
        total += pieces if pieces > 1 else 0
    return total


def may_pay(whole: Domain) -> bool:
    """Whether there are rows enough for pieces to be worth a try."""
    return _rows(whole) >= ROWS


def pays(whole: Domain, pieces: Domain) -> bool:
    """Whether the domain whose axes are cut is the better one."""
    if _rows(pieces) < ROWS or _strided(pieces) > _strided(whole) or _ragged(pieces):
        return False
    return _work(pieces) <= SAVED * _work(whole)


def _volume(axes: frozenset[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= hint(axis.size, {}, ROWS)
    return total


def _work(domain: Domain) -> float:
    total = 0.0
    for point in domain.points():
        if point.node is None:
            continue
        found = row(point.node.target) if point.kind is PointKind.OP else None
        total += (found.cost if found else 1) * _volume(point.deps.union(*point.axes))
    return total


def _neighbours(offset: Form) -> frozenset[Axis]:
    """The axis along which neighbours are read or written, in a set."""
    return frozenset(a for a, k in offset.terms if k in (1, -1) and isinstance(a, Axis))


def _strided(domain: Domain) -> bool:
    """Whether a store leaves gaps, as one piece of an interleaved dimension does."""
    return any(store.axes and not _neighbours(store.layout) for store in domain.stores)


def _fast(domain: Domain) -> frozenset[Axis]:
    """The axes along which the large tensors are contiguous."""
    accesses = [(s.layout, s.axes) for s in domain.stores]
    accesses += [(linear(p.index, strides_of(p.node)), axes_of(p.index)) for p in domain.points()
                 if p.kind is PointKind.LOAD and p.node is not None]
    volumes = [_volume(axes) for _, axes in accesses]
    least = max(volumes, default=1) // LARGE
    return frozenset().union(*(_neighbours(offset) for (offset, _), v in zip(accesses, volumes) if v >= least))


def _rows(domain: Domain) -> int:
    return _volume(frozenset(domain.program) - _fast(domain))


def _ragged(domain: Domain) -> bool:
    """Whether programs walk contiguous pieces that are too short to be read at full width."""
    return any(hint(a.size, {}, ROWS) < SHORTEST for a in _fast(domain) - frozenset(domain.program))
