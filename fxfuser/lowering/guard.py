"""Guards: the condition under which a select reads one of its operands, and with it the mask of the loads below."""

from __future__ import annotations

from typing import Iterator

from fxfuser.domain.index import Axis, Lookup, axes_of, lookups_of
from fxfuser.domain.points import Condition, Point, PointKind

Guard = tuple[tuple[Condition, bool], ...]  # each condition, and whether it must hold or must not


def guard_axes(guard: Guard) -> frozenset[Axis]:
    """The axes that the conditions of a guard name."""
    return axes_of(b.form for condition, _ in guard for b in condition)


def guarded(point: Point, guard: Guard) -> Iterator[tuple[Point, Guard]]:
    """A point's operands, each with the guard under which it is read."""
    if point.kind is not PointKind.SELECT:
        yield from ((p, guard) for p in point.operands)
        return
    before: Guard = ()
    for i, operand in enumerate(point.operands):
        if i < len(point.conditions) and point.conditions[i]:
            yield operand, guard + before + ((point.conditions[i], True),)
            before += ((point.conditions[i], False),)
        else:
            yield operand, guard + before


def looked_up(point: Point, guard: Guard) -> Iterator[tuple[Lookup, Guard]]:
    """Every lookup that the text of a point under its guard names, each with the guard under which it is read."""
    for name, _ in point.lookups:
        yield name, before(guard, name)
    for i, (condition, _) in enumerate(guard):
        for name in lookups_of(b.form for b in condition):
            yield name, before(guard[:i], name)


def before(guard: Guard, name: Lookup) -> Guard:
    """What held when a lookup was first named: the conditions that do not themselves name it."""
    return tuple((c, holds) for c, holds in guard if name not in lookups_of(b.form for b in c))


def concerning(guard: Guard, axes: frozenset[Axis]) -> Guard:
    """The conditions that matter to a reduction whose result depends on `axes`.

    None on other axes does: what it reads is the same, whichever lane of those asks, and some lane does.  No reduction
    is read at a lookup, so no condition on one concerns it either.
    """
    return tuple((c, holds) for c, holds in guard
                 if not lookups_of(b.form for b in c) and not axes.isdisjoint(axes_of(b.form for b in c)))


def crossing(guard: Guard, axes: frozenset[Axis]) -> frozenset[Axis]:
    """The axes that stand in one bound of a guard with some of `axes`."""
    found: frozenset[Axis] = frozenset()
    for condition, _ in guard:
        for bound in condition:
            if not axes.isdisjoint(bound.form.axes):
                found |= bound.form.axes
    return found
