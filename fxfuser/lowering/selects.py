"""Selects: one of several values by conditions on the position, each value read where its condition holds."""

from __future__ import annotations

from fxfuser.domain.index import axes_of
from fxfuser.domain.points import Point, PointKind
from fxfuser.lowering.borders import border
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard, guarded
from fxfuser.lowering.scope import Value
from fxfuser.ops import kernel_dtype


def _shared(point: Point) -> list[Point]:
    """What all operands of a select load from the same places, as both halves of a byte do: wherever the select is read
    one of them reads it, so that one load serves for all."""
    first, *others = (_loads(p) for p in point.operands)
    return [load for key, load in first.items() if all(key in other for other in others)]


def _loads(point: Point) -> dict[int, Point]:
    """The loads below a point, by their ids, that are read under the very guard under which the point is."""
    found, seen, pending = dict[int, Point](), set[int](), [point]
    while pending:
        below = pending.pop()
        if id(below) in seen:
            continue
        seen.add(id(below))
        if below.kind is PointKind.LOAD and not below.lookups:
            found[id(below)] = below
        if below.kind is PointKind.OP:
            pending += below.operands
    return found


def select(emitter: Emission, point: Point, guard: Guard) -> Value:
    """The value of a select; a border of one number is what its load has outside."""
    dtype = kernel_dtype(point.dtype)
    found = border(point)
    if found is not None:
        inside = *guard, (point.conditions[0], True)
        emitter.borders.setdefault((id(found[0]), inside), found[1])
        value = emitter.emit(point.operands[0], inside)
        filled, where = emitter.filled.get(value.name, ("", frozenset()))
        if filled == found[1] and value.dtype == dtype and emitter.condition(*inside[-1], guard) in where:
            return value
    branches = tuple(guarded(point, guard))
    for load in _shared(point):
        emitter.share(load, guard, [g for _, g in branches])
    values = [emitter.converted(emitter.emit(p, g), p.dtype, dtype) for p, g in branches]
    text, axes = values[-1].name, values[-1].axes
    for value, condition in zip(reversed(values[:-1]), reversed(point.conditions)):
        text = f"tl.where({emitter.condition(condition, True, guard)}, {value.name}, {text})"
        axes = axes | value.axes | axes_of(b.form for b in condition)
    return emitter.bind("select", text, dtype, axes, all(v.rounded for v in values))
