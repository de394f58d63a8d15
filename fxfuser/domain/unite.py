"""Axes meet: which axes of a group are one.

Where one node is needed at two indices, terms with equal coefficient and size in one dimension may be one
axis, as virtual registers are coalesced: legal only if no index names both.  So the axis of a softmax's store
meets the axis that its maximum runs over, and x + x.t() keeps two.  Stores that share nothing are then laid
side by side by equal sizes.
"""

from __future__ import annotations

import itertools
from typing import Iterator, Sequence

from fxfuser.domain.index import Axis, Form, Index, Splits
from fxfuser.domain.points import PointKind
from fxfuser.domain.size import exact_div
from fxfuser.domain.space import Space
from fxfuser.domain.walk import Walk

_PAIRS = 8  # of how many indices of one node all pairs are tried


class Interference:
    """Which axes occur together in an index, under the unions made so far."""

    def __init__(self, walk: Walk, space: Space) -> None:
        self._space = space
        self._near: dict[Axis, set[Axis]] = {}
        self._joined: dict[Axis, Axis] = {}
        self.changed = False
        seen = {frozenset().union(*(f.axes for f in index)) for index in walk.root_indices}
        for index in walk.indices:
            seen.add(frozenset().union(*(f.axes for f in walk.inliner.index(index))))
        for group in seen:
            for axis in group:
                self._near.setdefault(axis, set()).update(group)

    def current(self, axis: Axis) -> Axis:
        while axis in self._joined:
            axis = self._joined[axis]
        return axis

    def apart(self, left: Axis, right: Axis) -> bool:
        """Whether no index names both."""
        left, right = self.current(left), self.current(right)
        return left != right and right not in self._near.get(left, ())

    def unite(self, kept: Axis, gone: Axis) -> bool:
        """Makes the two one if that is legal."""
        kept, gone = self.current(kept), self.current(gone)
        if kept == gone or kept.size != gone.size or not self.apart(kept, gone):
            return False
        near = self._near.pop(gone, set())
        for other in near - {gone}:
            self._near[other].discard(gone)
            self._near[other].add(kept)
        self._near.setdefault(kept, {kept}).update(near - {gone})
        self._joined[gone] = kept
        self._space.unite(kept, gone)
        self.changed = True
        return True


def meet(walk: Walk, space: Space) -> bool:
    """Unites axes at nodes needed at several indices, or splits one that would meet then; whether any did."""
    meetings = list(_meetings(walk))
    if not meetings:
        return False
    interference, splits = Interference(walk, space), Splits()
    for left, right in meetings:
        for first, second in zip(left, right):
            _meet_forms(first, second, interference, splits)
    if splits:
        space.split({a: s for a, s in splits.items() if interference.current(a) == a})
    space.settle()
    return interference.changed or bool(splits)


def _meetings(walk: Walk) -> Iterator[tuple[Index, Index]]:
    """The pairs of indices at which some node is needed.

    Each set of indices once, whatever the nodes: a pair that meets again has nothing left to unite or to split.
    """
    several = [[index for index, _ in demands] for demands in walk.demands.values() if len(demands) > 1]
    several += [list(indices) for indices in walk.loads.values() if len(indices) > 1]
    for indices in dict.fromkeys(tuple(dict.fromkeys(map(walk.inliner.index, found))) for found in several):
        if len(indices) <= _PAIRS:
            yield from itertools.combinations(indices, 2)
        else:
            yield from itertools.pairwise(indices)


def _meet_forms(left: Form, right: Form, interference: Interference, splits: Splits) -> None:
    if left is right:
        return
    for a, k in left.terms:
        for b, m in right.terms:
            if k == m and a != b and isinstance(a, Axis) and isinstance(b, Axis):
                if not interference.unite(a, b):
                    _split_to_meet(a, b, right, interference, splits)
                    _split_to_meet(b, a, left, interference, splits)


def _split_to_meet(whole: Axis, digit: Axis, form: Form, interference: Interference, splits: Splits) -> None:
    """Splits `whole` at the size of `digit` if another digit of `form` would meet the outer part."""
    inner = digit.size
    if inner == whole.size or whole in splits or not interference.apart(whole, digit):
        return
    outer = exact_div(whole.size, inner)
    if outer is None or outer == 1 or whole.size == 0:
        return
    step = form.coefficient(digit) * inner
    for atom, k in form.terms:
        if k == step and isinstance(atom, Axis) and exact_div(outer, atom.size) is not None \
                and interference.apart(whole, atom):
            splits[whole] = [inner]
            return


def align(walk: Walk, space: Space) -> bool:
    """Lays stores that share nothing side by side, and reductions that share nothing; whether any axis united."""
    stores, reductions = _store_rows(walk), _reduced_rows(walk)
    if len(stores) < 2 and len(reductions) < 2:
        return False
    interference = Interference(walk, space)
    for rows in (stores, reductions):
        distinct: dict[tuple[Axis, ...], None] = {}  # siblings are mostly alike: few rows need comparing
        for row in rows:
            for earlier in distinct:
                _align_rows(earlier, row, interference)
            distinct.setdefault(tuple(map(interference.current, row)))
    space.settle()
    return interference.changed


def _align_rows(earlier: Sequence[Axis], row: Sequence[Axis], interference: Interference) -> None:
    fixed = [interference.current(a) for a in earlier]
    mine = [interference.current(a) for a in row]
    free = [a for a in mine if a not in fixed]
    for other in fixed if free else ():
        found = next((a for a in free if other not in mine and interference.unite(other, a)), None)
        if found is not None:
            free.remove(found)


def _store_rows(walk: Walk) -> list[list[Axis]]:
    """The axes of each store in dimension order."""
    return [[a for form in index for a, _ in form.terms if isinstance(a, Axis)] for index in walk.root_indices]


def _reduced_rows(walk: Walk) -> list[list[Axis]]:
    """The axes of each reduction, in dimension order."""
    return [list(demand.axes[0]) for demands in walk.demands.values() for demand in demands.values()
            if demand is not None and demand.kind is PointKind.REDUCE and demand.axes and demand.axes[0]]
