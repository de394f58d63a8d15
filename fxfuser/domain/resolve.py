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
from fxfuser.domain.cut import cuts, may_pay, pays
from fxfuser.domain.index import Axis, linear
from fxfuser.domain.pattern import Pattern
from fxfuser.domain.points import Domain, Reject, points_of
from fxfuser.domain.roles import roles
from fxfuser.domain.space import Space
from fxfuser.domain.sums import Sums, summed
from fxfuser.domain.tensors import strides_of
from fxfuser.domain.unite import align, meet
from fxfuser.domain.walk import SHORT, Rejected, Walk
from fxfuser.ops import Kind, kind_of

_CUTS = 3  # rounds of cutting: borders inside pieces show only then
_ROUNDS = 64  # a walk that still learns something after so many has met a fault of ours


def resolve(nodes: Collection[fx.Node], outputs: Sequence[fx.Node], sums: Sums | None = None) -> Domain | Reject:
    """The iteration space of `nodes`, whose results `outputs` are stored; see the module's text.

    Nodes outside the group are looked through where they are views, else read.  Matrix products have domains of their
    own kind; `sums` says how a kernel without tiles comes by theirs.
    """
    products = [n for n in nodes if kind_of(n) is Kind.GEMM]
    if products and sums is None:
        return Reject(f"{products[0].target} does not lower to loops", "", products[0])
    left = frozenset(() if sums is Sums.LOOPED else products)
    try:
        return _resolve(Pattern(nodes, outputs, left), sums)
    except Rejected as rejected:
        return rejected.reject


def _resolve(pattern: Pattern, sums: Sums | None) -> Domain | Reject:
    space = Space()
    walk = settled_walk(pattern, space)
    domain = _domain(walk, sums)
    for _ in range(_CUTS):
        wanted = cuts(walk)
        if not wanted or isinstance(domain, Reject) or not may_pay(domain):
            return domain
        space = space.copy()
        for axis, places in wanted.items():
            space.cut(axis, places)
        walk = settled_walk(pattern, space)
        pieces = _domain(walk, sums)
        if isinstance(pieces, Reject) or not pays(domain, pieces):
            return domain
        domain = pieces
    return domain


def _domain(walk: Walk, sums: Sums | None) -> Domain | Reject:
    stores = Builder(walk).stores()
    if sums is not None:
        stores = summed(stores, sums)
    found = roles(stores)
    if isinstance(found, Reject):
        return found
    group = coalesce(Group(stores, found.program, found.looped))
    return Domain(group.stores, group.program, axes_in(group), group.looped)


def settled_walk(pattern: Pattern, space: Space) -> Walk:
    """A walk after which the space need not change."""
    for _ in range(_ROUNDS):
        walk = Walk(pattern, space)
        if walk.splits:
            space.split(walk.splits)
        elif not (meet(walk, space) or _unroll(walk, space) or align(walk, space)):
            return walk
    raise AssertionError(f"axes do not settle: {pattern.outputs}")


def _unroll(walk: Walk, space: Space) -> bool:
    """Unrolls short reductions, except along the contiguous dimension of a tensor that they read.

    The windows of neighbours overlap there: each step of one then reads neighbouring elements itself.
    """
    stored = frozenset().union(*(f.axes for index in walk.root_indices for f in index))
    found: list[str] = []
    for length, names in walk.short.values():
        axes = frozenset().union(*(space.form(name, 0).axes for name in names))
        rest = [axis for axis in axes if not _overlaps(walk, axis)]
        if axes & stored or any(_contiguous(walk, axis) for axis in rest):
            continue
        if length <= SHORT or len(rest) < len(axes):
            found += names
    space.unrolled.update(found)
    return bool(found)


def _overlaps(walk: Walk, axis: Axis) -> bool:
    """Whether some element is read at several steps of this axis, at different places of the other axes."""
    for indices in walk.loads.values():
        for form in (f for index in indices for f in walk.inliner.index(index) if axis in f.axes):
            reach = form.coefficient(axis) * axis.size
            if any(atom != axis and not (isinstance(atom, Axis) and atom.reduced)
                   and isinstance(step, int) and isinstance(reach, int) and abs(step) < abs(reach)
                   for atom, step in form.terms):
                return True
    return False


def _contiguous(walk: Walk, axis: Axis) -> bool:
    for node, indices in walk.loads.items():
        for index in indices:
            inlined = walk.inliner.index(index)
            if any(axis in f.axes for f in inlined) and linear(inlined, strides_of(node)).coefficient(axis) in (1, -1):
                return True
    return False


def axes_in(group: Group) -> tuple[Axis, ...]:
    """Program axes, then the others as they first occur."""
    found: dict[Axis, None] = dict.fromkeys(group.program)
    for store in group.stores:
        found.update(dict.fromkeys(sorted(store.axes, key=lambda a: a.name)))
    for point in points_of(group.stores):
        for axes in point.axes:
            found.update(dict.fromkeys(axes))
    return tuple(found)
