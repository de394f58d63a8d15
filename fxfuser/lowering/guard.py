"""Guards: the condition under which a select reads one of its operands, and with it the mask of the loads below."""

from __future__ import annotations

from typing import Iterator

from fxfuser.domain.index import Axis, axes_of
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
