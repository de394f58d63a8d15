"""From a set of nodes to their domain.

Enters: the compute nodes of a group and its outputs.  Leaves: a `Domain`, or a `Reject` with the reason why
the nodes have no common one.  A walk from the outputs finds every index that is needed; what it learns about
axes (splits, axes that meet, short reductions) changes the space, and walks repeat until nothing changes.
Then points are built, axes get their roles, and contiguous axes merge.
"""

from __future__ import annotations

from typing import Collection, Sequence

from torch import fx

from fxfuser.domain.build import Builder
from fxfuser.domain.coalesce import Group, coalesce
from fxfuser.domain.index import Axis, linear
from fxfuser.domain.points import Domain, Point, PointKind, Reject, Store, points_of
from fxfuser.domain.size import hint
from fxfuser.domain.space import Space
from fxfuser.domain.tensors import strides_of
from fxfuser.domain.unite import align, meet
from fxfuser.domain.walk import Rejected, Walk, ordered

_ROUNDS = 64  # a walk that still learns something after so many has met a fault of ours


def resolve(nodes: Collection[fx.Node], outputs: Sequence[fx.Node]) -> Domain | Reject:
    """The iteration space of `nodes`, whose results `outputs` are stored; see the module's text.

    Nodes outside the group are looked through where they are views, else read.
    """
    try:
        walk = _settled_walk(ordered(nodes), outputs)
        stores = Builder(walk).stores(tuple(outputs))
    except Rejected as rejected:
        return rejected.reject
    reductions = [p for p in points_of(stores) if p.kind is PointKind.REDUCE and any(p.axes)]
    program = _program(stores, reductions)
    if isinstance(program, Reject):
        return program
    group = coalesce(Group(stores, program))
    return Domain(group.stores, group.program, _axes(group))


def _settled_walk(nodes: list[fx.Node], outputs: Sequence[fx.Node]) -> Walk:
    space = Space()
    for _ in range(_ROUNDS):
        walk = Walk(nodes, outputs, space)
        if walk.splits:
            space.split(walk.splits)
        elif not (meet(walk, space) or _unroll(walk, space) or align(walk, space)):
            return walk
    raise AssertionError(f"axes do not settle: {outputs}")


def _unroll(walk: Walk, space: Space) -> bool:
    """Unrolls short reductions, except along the contiguous dimension of a tensor that they read."""
    if not walk.short:
        return False
    stored = frozenset().union(*(f.axes for index in walk.root_indices for f in index))
    kept: set[fx.Node] = set()
    for name, node in walk.short.items():
        axes = space.form(name, 0).axes
        if axes & stored or any(_contiguous(walk, axis) for axis in axes):
            kept.add(node)
    names = [name for name, node in walk.short.items() if node not in kept]
    space.unrolled.update(names)
    return bool(names)


def _contiguous(walk: Walk, axis: Axis) -> bool:
    for node, indices in walk.loads.items():
        for index in indices:
            inlined = walk.inliner.index(index)
            if any(axis in f.axes for f in inlined) and linear(inlined, strides_of(node)).coefficient(axis) in (1, -1):
                return True
    return False


def _program(stores: Sequence[Store], reductions: Sequence[Point]) -> tuple[Axis, ...] | Reject:
    reduced = {a for p in reductions for axes in p.axes for a in axes}
    common = [s.axes for s in stores] + [p.deps for p in reductions]
    shared = frozenset.intersection(*common) - reduced if common else frozenset()
    for point in reductions:
        for axis in sorted(point.deps - shared, key=lambda a: a.name):
            return _kept_inside(point, axis, reductions)
    return _by_stride(stores, shared)


def _kept_inside(point: Point, axis: Axis, reductions: Sequence[Point]) -> Reject:
    name = point.node.name if point.node is not None else "a reduction"
    over = next((p for p in reductions if any(axis in axes for axes in p.axes)), None)
    if over is not None and over.node is not None:
        reason = f"{name} keeps an axis of size {axis.size} over which {over.node.name} reduces"
    else:
        reason = f"{name} has a value for each step along an axis of size {axis.size} that not all results share"
    return Reject(reason, f"materialise {name}", point.node)


def _by_stride(stores: Sequence[Store], axes: frozenset[Axis]) -> tuple[Axis, ...]:
    """The axes as the largest store lays them out, the outermost first."""
    if not axes:
        return ()
    largest = max(stores, key=lambda s: _volume(s.axes))
    offset = linear(largest.index, strides_of(largest.node))
    return tuple(sorted(axes, key=lambda a: (-abs(hint(offset.coefficient(a), {})), a.name)))


def _volume(axes: frozenset[Axis]) -> int:
    total = 1
    for axis in axes:
        total *= hint(axis.size, {})
    return total


def _axes(group: Group) -> tuple[Axis, ...]:
    """Program axes, then the others as they first occur."""
    found: dict[Axis, None] = dict.fromkeys(group.program)
    for store in group.stores:
        found.update(dict.fromkeys(sorted(store.axes, key=lambda a: a.name)))
    for point in points_of(group.stores):
        for axes in point.axes:
            found.update(dict.fromkeys(axes))
    return tuple(found)
