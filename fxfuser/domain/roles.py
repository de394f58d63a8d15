"""What each axis is in the kernel: laid out over programs, walked by a serial loop, or held as a tile.

Enters: the stores of a resolved group.  Leaves: `Roles`, or a `Reject` where no assignment serves every
reduction.  Program axes are those on which every store and every reduction's result depends and over which
nothing is reduced.  The inner axes fall into classes that are always walked together; a class is looped if its
length is symbolic or if a nest that walks it would not fit the registers.  Invariant: no reduction both loops
over what it reduces and depends on another loop, so each is either accumulated across one loop or done inside
one iteration.  That is how layer norm's backward reads its data once: rows in a loop, a row's sums inside the
iteration, the column sums across iterations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

from fxfuser.domain.index import Axis, axes_of, linear
from fxfuser.domain.points import FOLDS, Point, PointKind, Reject, Store, points_of
from fxfuser.domain.size import Size, hint
from fxfuser.domain.tensors import strides_of
from fxfuser.ops import row

# elements of one program's tile: a row of so many is held in registers as a whole (16 warps x 32 elements a thread)
PERSISTENT_ELEMENTS = 16384
# of a nest of several classes, all held: more would spill beside the values of the other nests
NEST_ELEMENTS = 8192

# rows of a fold whose results lie side by side in memory: more would leave a program too few columns for whole lines
# (a sum of 524288 x 1024 bf16 on an H200: 579 us with 1024 rows held and 8 columns a program, 256 in a loop)
STRIDED_ELEMENTS = 128

TRANSCENDENTAL = 16  # cost of such an op in the op table
FILLED = 32768  # elements with which programs of 128 still occupy 256 multiprocessors
# Bytes that the cache may deliver for each byte of memory before it is what a kernel waits for, and how many programs
# a loop beside them must leave (position embeddings that read tables for each head on an H200: 0.92 of a copy with 1.5
# bytes for each, 0.86 with 1.8, 0.56 where a table of 32768 positions has left the cache before the next head; with a
# loop over heads 0.99, 0.93 and 0.90)
READ_AGAIN = 1.45
READ_FILLED = 4 * FILLED

Nest = frozenset[Axis]


@dataclass(frozen=True)
class Roles:
    """Program axes, outermost first, and the inner axes that are serial loops; all other axes are tiles."""

    program: tuple[Axis, ...]
    looped: frozenset[Axis]


def roles(stores: Sequence[Store]) -> Roles | Reject:
    """The role of every axis of a group, or why its reductions cannot share one kernel."""
    points = points_of(stores)
    reductions = [p for p in points if p.kind in FOLDS and any(p.axes)]
    reduced = {a for p in reductions for axes in p.axes for a in axes}
    common = [s.axes for s in stores] + [p.deps for p in reductions]
    shared = frozenset.intersection(*common) - reduced if common else frozenset()
    if not reductions:
        shared = _without_recomputed(shared, points) or _without_read_again(shared, stores, points) or shared
    found = nests(stores, reductions, shared)
    looped = _looped(found, points, shared)
    for point in reductions:
        over = frozenset(a for axes in point.axes for a in axes) & looped
        kept = (point.deps.difference(shared, *point.axes)) & looped
        if over and kept:
            return _conflict(point, min(kept, key=lambda a: a.name), reductions)
    return _scans_disagree(points, looped) or Roles(_by_stride(stores, shared), looped)


def _without_recomputed(program: Nest, points: Sequence[Point]) -> Nest | None:
    """The program axes without those along which transcendentals would be computed anew.

    cos(position * frequency) is the same for every head: heads become a loop, and it is computed once before it.
    Done only where the axes left fill the device.
    """
    work: dict[Nest, int] = {}
    for point in points:
        found = row(point.node.target) if point.kind is PointKind.OP and point.node is not None else None
        if found is not None and found.cost >= TRANSCENDENTAL and point.deps < program:
            work[point.deps] = work.get(point.deps, 0) + found.cost
    return _heaviest(work, FILLED)


def _without_read_again(program: Nest, stores: Sequence[Store], points: Sequence[Point]) -> Nest | None:
    """The program axes without those along which tensors would be loaded anew, where that is most of what is moved.

    A table of cosines, loaded for every head, comes from the cache, if it still is there; a loop loads it once.
    """
    if len(program) < 2:
        return None
    fast = _by_stride(stores, program)[-1]  # lanes that lie along it share what does not depend on it
    loads = [p for p in points if p.kind is PointKind.LOAD and fast in p.deps and p.deps <= program]
    needed = sum(s.value.dtype.itemsize * _volume(s.axes) for s in stores) + sum(
        p.dtype.itemsize * _volume(p.deps) for p in loads)
    again: dict[Nest, int] = {}
    for load in loads:
        if load.deps < program:
            repeated = load.dtype.itemsize * (_volume(program) - _volume(load.deps))
            again[load.deps] = again.get(load.deps, 0) + repeated
    return _heaviest(again, READ_FILLED) if sum(again.values()) > (READ_AGAIN - 1) * needed else None


def _heaviest(weights: dict[Nest, int], least: int) -> Nest | None:
    """The axes of most weight, if they are large enough to be programs of their own."""
    if not weights:
        return None
    found = max(weights, key=lambda axes: (weights[axes], len(axes), sorted(a.name for a in axes)))
    return found if _volume(found) >= least else None


def nests(stores: Iterable[Store], reductions: Iterable[Point], program: frozenset[Axis]) -> tuple[Nest, ...]:
    """The sets of inner axes that are walked together: by a store, by one region of a reduction.

    What a region reduces is a set of its own, so that an axis it keeps is never flattened with one it folds.
    """
    found: dict[Nest, None] = {}
    for store in stores:
        found.setdefault((store.axes | store.value.deps) - program)
    for point in reductions:
        for region in point.axes:
            found.setdefault((frozenset(region) | point.deps) - program)
            found.setdefault(frozenset(region) - program)
    return tuple(n for n in found if n)


def classes(walked: Sequence[Nest]) -> tuple[frozenset[Axis], ...]:
    """The inner axes in sets that occur in the same nests."""
    together: dict[tuple[bool, ...], set[Axis]] = {}
    for axis in sorted(frozenset().union(*walked), key=lambda a: a.name):
        together.setdefault(tuple(axis in nest for nest in walked), set()).add(axis)
    return tuple(map(frozenset, together.values()))


def extent(axes: Iterable[Axis]) -> int | None:
    """The number of combinations of these axes; None where it is symbolic."""
    total: Size = 1
    for axis in axes:
        total = total * axis.size
    return total if isinstance(total, int) else None


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _looped(walked: Sequence[Nest], points: Sequence[Point], program: Nest) -> frozenset[Axis]:
    found = classes(walked)
    extents = {c: extent(c) for c in found}
    needed = frozenset().union(*(p.deps.union(*p.axes) for p in points if p.kind in FOLDS))
    # what no reduction needs is walked in whatever steps the tile choice likes
    looped = {c for c in found if not c & needed or extents[c] is None or (extents[c] or 0) > PERSISTENT_ELEMENTS}
    if len(walked) == 1 and _volume(program) >= FILLED:
        looped |= {c for c in found if (extents[c] or 0) > STRIDED_ELEMENTS
                   and _strided(c, points, program) and not _revisited(c, points)}
    for nest in walked:
        members = [c for c in found if c & nest]
        limit = PERSISTENT_ELEMENTS if len(members) == 1 else NEST_ELEMENTS
        while _tile(members, looped, extents) > limit:
            held = [c for c in members if c not in looped]
            looped.add(min(held, key=lambda c: (_revisited(c, points), -(extents[c] or 0))))
    return frozenset().union(*looped)


def _strided(axes: Nest, points: Sequence[Point], program: Nest) -> bool:
    """Whether more is loaded that lies side by side along the programs than along these axes."""
    balance = 0
    for point in points:
        if point.kind is PointKind.LOAD and point.node is not None:
            offset = linear(point.index, strides_of(point.node))
            side_by_side = {a for a in offset.axes if offset.coefficient(a) in (1, -1)}
            balance += point.dtype.itemsize * (bool(side_by_side & program) - bool(side_by_side & axes))
    return balance > 0


def _tile(members: Sequence[Nest], looped: set[Nest], extents: dict[Nest, int | None]) -> int:
    total = 1
    for c in members:
        total *= 1 if c in looped else next_power_of_2(extents[c] or 1)
    return total


def _revisited(axes: Nest, points: Sequence[Point]) -> bool:
    """Whether something walks these axes again after a reduction over them: a loop would read its data twice."""
    after: dict[int, bool] = {}
    for point in points:
        over = point.kind is PointKind.REDUCE and any(axes & frozenset(r) for r in point.axes)
        after[id(point)] = over or any(after[id(p)] for p in point.inputs)
        if after[id(point)] and point.deps & axes:
            return True
    return False


def _scans_disagree(points: Sequence[Point], looped: Nest) -> Reject | None:
    """One loop has one direction, and what a select reads on some lanes only cannot be folded along them."""
    if all(point.kind is not PointKind.SCAN for point in points):
        return None
    directions: dict[Axis, bool] = {}
    scanned: dict[int, Nest] = {}  # the axes of the scans on which a point depends
    for point in points:
        below = frozenset().union(*(scanned[id(p)] for p in point.inputs))
        if below & axes_of(b.form for condition in point.conditions for b in condition):
            return Reject("it selects within a running value", "select before the scan", point.node)
        own = frozenset().union(*point.axes) if point.kind is PointKind.SCAN else frozenset()
        scanned[id(point)] = below | own
        for axis in own & looped:
            if directions.setdefault(axis, point.value) is not point.value:
                return Reject("scans run along one axis in both directions", "scan in one direction", point.node)
    return None


def _conflict(point: Point, axis: Axis, reductions: Sequence[Point]) -> Reject:
    name = point.node.name if point.node is not None else "a reduction"
    over = next((p for p in reductions if any(axis in axes for axes in p.axes)), None)
    if over is not None and over.node is not None:
        reason = f"{name} keeps an axis of size {axis.size} over which {over.node.name} reduces"
        remedy = f"have {over.node.name} reduce over dimensions that {name} does not keep"
    else:
        reason = f"{name} has a value for each step along an axis of size {axis.size} that not all results share"
        remedy = f"give all results the dimension of size {axis.size}, or none"
    return Reject(reason, remedy, point.node)


def _by_stride(stores: Sequence[Store], axes: frozenset[Axis]) -> tuple[Axis, ...]:
    """The axes as the largest store lays them out, the outermost first."""
    if not axes:
        return ()
    largest = max(stores, key=lambda s: _volume(s.axes))
    offset = largest.layout
    return tuple(sorted(axes, key=lambda a: (-abs(hint(offset.coefficient(a), {})), a.name)))


def _volume(axes: frozenset[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= hint(axis.size, {})
    return total
