"""Scans inside a kernel: a running fold along one axis, by the same monoids as reductions.

An axis that is held as a whole is scanned where it stands.  Along a loop each chunk is scanned by itself and combined
with what the chunks before it came to, which the loop carries: a value of its own per loop that reads the scan.
"""

from __future__ import annotations

from fxfuser.domain.points import Point
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.expressions import full
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.reducer import Reducer, Unit, accumulation_dtype, monoid_of
from fxfuser.lowering.schedule import Dim
from fxfuser.lowering.scope import Value


class Scanner:
    """The scans of one kernel."""

    def __init__(self, emitter: Emission, reducer: Reducer) -> None:
        self.emitter = emitter
        self.reducer = reducer

    def emit(self, point: Point, guard: Guard) -> Value:
        """The value of a scan at its index."""
        unit = Unit(point, guard, 0, (), 0)
        states = self.reducer.lifted(unit)
        for dim in self.emitter.schedule.dims_of(unit.axes):  # one, or none where the dimension has one element
            states = self._scanned(unit, dim, states)
        return self.reducer.result(point, monoid_of(point), states, point.output)

    def _scanned(self, unit: Unit, dim: Dim, states: list[Value]) -> list[Value]:
        emitter, monoid = self.emitter, monoid_of(unit.point)
        axes = frozenset().union(*(v.axes for v in states))
        scope = emitter.scope.covering(emitter.loops(axes))
        operand = ", ".join(v.name for v in states)
        operand = operand if len(states) == 1 else f"({operand})"
        order = ", reverse=True" if unit.point.value else ""
        names = emitter.fresh("scan", len(states))
        scope.lines.append(
            f"{', '.join(names)} = tl.associative_scan({operand}, {dim.slot}, {monoid.combine}{order})")
        scanned = [Value(n, v.dtype, axes) for n, v in zip(names, states)]
        if not dim.looped:
            return scanned
        # before the loop, whose lines are still being made, in the scope around it
        assert scope.parent is not None and scope.dim is dim
        carries, kept = emitter.fresh("carry", len(states)), axes - frozenset(dim.axes)
        dtype = accumulation_dtype(unit.point)
        for name, identity, state in zip(carries, monoid.identity(dtype), monoid.dtypes(dtype)):
            scope.parent.lines.append(f"{name} = {full(identity, state, emitter.tile(kept))}")
        before = [f"tl.broadcast_to({c}, {emitter.tile(axes)})" for c in carries]
        names = emitter.fresh("scan", len(states))
        totals = emitter.fresh("total", len(states))
        scope.lines.append(
            f"{', '.join(totals)} = tl.reduce({operand}, {dim.slot}, {monoid.combine}, keep_dims=True)")
        scope.lines.append(f"{', '.join(names)} = {monoid.combine}({', '.join(before + [v.name for v in scanned])})")
        scope.lines.append(f"{', '.join(carries)} = {monoid.combine}({', '.join(carries + totals)})")
        return [Value(n, v.dtype, axes) for n, v in zip(names, states)]
