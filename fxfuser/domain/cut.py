"""Cutting: regions as pieces with axes of their own instead of selects.

A select evaluates every operand on every lane.  Where a border lies on one axis, that axis is replaced by
pieces, each with its own store; the borders are then decided, and pieces of equal length meet at what they
share: the two halves of a rotated head are one axis, two stores and no select.  It pays where it saves work
and leaves enough rows to lay programs along; short or lonely borders (a pad by one) stay selects.
"""

from __future__ import annotations

from fxfuser.domain.borders import borders
from fxfuser.domain.index import Axis, linear
from fxfuser.domain.points import Domain, PointKind, Store
from fxfuser.domain.size import Size, hint
from fxfuser.domain.tensors import strides_of
from fxfuser.domain.walk import Walk
from fxfuser.ops import row

PIECES = 16  # of all outputs together
ROWS = 1024  # programs that must be left; a symbolic size counts as that many
SAVED = 0.8  # of the work that selects do, at most this may be left
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
    ordered = {axis: _rising(places) for axis, places in found.items() if places}
    if any(places is None for places in ordered.values()):
        return {}
    kept = {axis: places for axis, places in ordered.items() if places}
    return kept if _count(walk, kept) <= PIECES else {}


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


def pays(whole: Domain, pieces: Domain) -> bool:
    """Whether the domain whose axes are cut is the better one."""
    if _strided(pieces) > _strided(whole) or _ragged(pieces):
        return False
    return _rows(pieces) >= ROWS and _work(pieces) <= SAVED * _work(whole)


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


def _contiguous(store: Store) -> frozenset[Axis]:
    """The axis along which a store writes neighbours, in a set."""
    offset = linear(store.index, strides_of(store.node))
    return frozenset(a for a, k in offset.terms if k in (1, -1) and isinstance(a, Axis))


def _strided(domain: Domain) -> bool:
    """Whether a store leaves gaps, as one piece of an interleaved dimension does."""
    return any(store.axes and not _contiguous(store) for store in domain.stores)


def _rows(domain: Domain) -> int:
    return _volume(frozenset(domain.program).difference(*map(_contiguous, domain.stores)))


def _ragged(domain: Domain) -> bool:
    """Whether programs walk contiguous pieces that are too short to be read at full width."""
    inner = frozenset().union(*map(_contiguous, domain.stores)) - frozenset(domain.program)
    return any(hint(a.size, {}, ROWS) < SHORTEST for a in inner)
