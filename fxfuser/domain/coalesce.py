"""Fewer axes: two that every index uses as one counter become one.

Enters: the stores of a resolved group and its program axes.  Leaves: the same with adjacent axes merged, an
outer and an inner one being the quotient and the remainder of the new axis.  Legal where every offset and
every condition names them only as outer * size(inner) + inner, so that the digits fold away again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Iterator, Mapping, Sequence

from fxfuser.domain.index import Atom, Axis, Form, Index, Lookup, Quotient, Remainder, divide, fold, linear
from fxfuser.domain.points import FOLDS, Bound, Point, PointKind, Store, mirrored, points_of
from fxfuser.domain.size import Size
from fxfuser.domain.tensors import strides_of


@dataclass(frozen=True, eq=False)
class Group:
    """Stores of a group, its program axes, and those of its inner axes that are loops."""

    stores: tuple[Store, ...]
    program: tuple[Axis, ...]
    looped: frozenset[Axis]

    def role(self, axis: Axis) -> tuple[bool, bool]:
        """What tells axes apart that may not become one."""
        return axis in self.program, axis in self.looped


def coalesce(group: Group) -> Group:
    """The group with as few axes as its indices allow."""
    points = points_of(group.stores)
    uses = _uses(group.stores, points)
    chains = _chains(group, points, uses)
    if not chains:
        return group
    digits: dict[Axis, Form] = {}
    merged: dict[Axis, Axis] = {}
    for chain in chains:
        whole = _whole(chain)
        rest = Form.axis(whole)
        for axis in reversed(chain[1:]):
            rest, digits[axis] = divide(rest, axis.size)
        digits[chain[0]] = rest
        merged.update(dict.fromkeys(chain, whole))
    return Rewriter(digits, merged).group(group, points)


def _whole(chain: Sequence[Axis]) -> Axis:
    size: Size = 1
    for axis in chain:
        size = size * axis.size
    return Axis("".join(a.name for a in chain), size, chain[0].reduced)


def _uses(stores: Iterable[Store], points: Iterable[Point]) -> dict[Form, None]:
    """Every form whose value matters: offsets, conditions, integers, places of dots, and what quotients divide."""
    found: dict[Form, None] = {}

    def note(form: Form) -> None:
        if form in found:
            return
        found[form] = None
        for atom, _ in form.terms:
            if isinstance(atom, (Quotient, Remainder)):
                note(atom.form)

    for store in stores:
        note(store.offset)
    for point in points:
        if point.kind is PointKind.LOAD and point.node is not None:
            note(linear(point.index, strides_of(point.node)))
        elif point.kind in (PointKind.IOTA, PointKind.PARTS):
            note(point.index[0])
        elif point.kind is PointKind.DOT:  # a batch is no row, though one right factor serves all of it
            for form in point.index:
                note(form)
        for condition in point.conditions:
            for bound in condition:
                note(bound.form)
    return found


def _chains(group: Group, points: Sequence[Point], uses: dict[Form, None]) -> list[list[Axis]]:
    """Maximal runs of axes, outermost first, that are always used as one counter."""
    tables = [dict(form.terms) for form in uses]
    reductions = [axes for p in points if p.kind in (*FOLDS, PointKind.DOT) for axes in p.axes]
    inner_of: dict[Axis, Axis] = {}
    taken: set[Axis] = set()
    for outer, inner in _candidates(group.stores, uses):
        if outer in inner_of or inner in taken or group.role(outer) != group.role(inner):
            continue
        if all(_together(t, outer, inner) for t in tables) and all(_adjacent(r, outer, inner) for r in reductions):
            inner_of[outer] = inner
            taken.add(inner)
    chains = []
    for axis in inner_of:
        if axis not in taken:
            chain = [axis]
            while chain[-1] in inner_of:
                chain.append(inner_of[chain[-1]])
            chains.append(chain)
    return chains


def _candidates(stores: Iterable[Store], uses: Iterable[Form]) -> Iterator[tuple[Axis, Axis]]:
    for form in uses:
        axes = [(a, k) for a, k in form.terms if isinstance(a, Axis)]
        for outer, k in axes:
            for inner, m in axes:
                if outer != inner and k == m * inner.size:
                    yield outer, inner


def _together(terms: dict[Atom, Size], outer: Axis, inner: Axis) -> bool:
    k, m = terms.get(outer), terms.get(inner)
    return k is None and m is None or k is not None and m is not None and k == m * inner.size


def _adjacent(reduced: Sequence[Axis], outer: Axis, inner: Axis) -> bool:
    if outer not in reduced and inner not in reduced:
        return True
    return outer in reduced and inner in reduced and reduced.index(inner) == reduced.index(outer) + 1


class Rewriter:
    """What points and indices become where axes are forms over others: `digits` is the form of each axis, `merged` the
    axis that takes its place; None: none does."""

    def __init__(self, digits: dict[Axis, Form], merged: Mapping[Axis, Axis | None]) -> None:
        self._digits, self._merged = digits, merged
        self._forms: dict[Form, Form] = {}
        self._indices: dict[Index, Index] = {}
        self._moved_deps: dict[frozenset[Axis], frozenset[Axis]] = {}
        self.points: dict[int, Point] = {}  # what each has become, by id

    def group(self, group: Group, points: Iterable[Point]) -> Group:
        for point in points:
            self.points[id(point)] = self.point(point)
        stores = tuple(Store(s.node, self.index(s.index), self.points[id(s.value)]) for s in group.stores)
        return Group(stores, self.axes(group.program), frozenset(self.axes(tuple(group.looped))))

    def axes(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        return tuple(dict.fromkeys(to for a in axes if (to := self._merged.get(a, a)) is not None))

    def _deps(self, deps: frozenset[Axis]) -> frozenset[Axis]:
        known = self._moved_deps.get(deps)
        if known is None:
            known = self._moved_deps[deps] = frozenset(self.axes(tuple(deps)))
        return known

    def index(self, index: Index) -> Index:
        known = self._indices.get(index)
        if known is None:
            known = self._indices[index] = tuple(map(self._form, index))
        return known

    def _form(self, form: Form) -> Form:
        known = self._forms.get(form)
        if known is None:
            known = Form((), form.constant)
            for atom, k in form.terms:
                known = known + self._atom(atom).scale(k)
            known = self._forms[form] = fold(known)
        return known

    def _atom(self, atom: object) -> Form:
        if isinstance(atom, Axis):
            return self._digits.get(atom) or Form(((atom, 1),))
        if isinstance(atom, Quotient):
            return divide(self._form(atom.form), atom.divisor)[0]
        if isinstance(atom, Lookup):
            return Form(((self._lookup(atom), 1),))
        assert isinstance(atom, Remainder)
        return divide(self._form(atom.form), atom.divisor)[1]

    def _lookup(self, lookup: Lookup) -> Lookup:
        return replace(lookup, index=self.index(lookup.index))

    def point(self, point: Point) -> Point:
        moved = self.points
        return Point(
            point.kind, point.dtype, point.node, self.index(point.index),
            args=mirrored(point.args, moved), kwargs=mirrored(point.kwargs, moved),
            operands=tuple([moved[id(p)] for p in point.operands]),
            axes=tuple(map(self.axes, point.axes)),
            conditions=tuple(tuple(Bound(self._form(b.form), b.lower, b.upper) for b in c) for c in point.conditions),
            value=point.value, output=point.output,
            lookups=tuple((self._lookup(name), moved[id(p)]) for name, p in point.lookups),
            deps=self._deps(point.deps))
