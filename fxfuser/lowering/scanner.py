"""Scans inside a kernel: a running fold along one axis, by the same monoids as reductions.

An axis that is held as a whole is scanned where it stands.  Along a loop each chunk is scanned by itself and combined
with what the chunks before it came to, which the loop carries: a value of its own per loop that reads the scan.
"""

from __future__ import annotations

from typing import Iterable

from fxfuser.domain.index import Axis
from fxfuser.domain.points import Point
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.expressions import full
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.reducer import Reducer, Unit, accumulation_dtype, monoid_of
from fxfuser.lowering.schedule import Dim
from fxfuser.lowering.scope import Scope, Value


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
        operand = _together(v.name for v in states)
        scanned = self._within(unit, dim, states, axes, scope)
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

    def _within(self, unit: Unit, dim: Dim, states: list[Value], axes: frozenset[Axis], scope: Scope) -> list[Value]:
        """The tile scanned along a dim, without the dims along which it has one element: of what was reduced, threads
        may still hold several along those, of which Triton 3.6 cannot make a scan (AddPartialReduceOneWarp asserts)."""
        emitter, monoid = self.emitter, monoid_of(unit.point)
        dims = sorted((d for d in emitter.schedule.dims_of(axes) if d.block != "1"), key=lambda d: d.slot)
        dense, tile = f"[{', '.join(d.block for d in dims)}]", emitter.tile(axes)
        flat = len(dims) < emitter.schedule.rank
        operand = _together(f"tl.reshape({v.name}, {dense})" if flat else v.name for v in states)
        order = ", reverse=True" if unit.point.value else ""
        names = emitter.fresh("scan", len(states))
        scope.lines.append(
            f"{', '.join(names)} = tl.associative_scan({operand}, {dims.index(dim)}, {monoid.combine}{order})")
        if flat:
            scope.lines += [f"{name} = tl.reshape({name}, {tile})" for name in names]
        return [Value(n, v.dtype, axes) for n, v in zip(names, states)]


def _together(names: Iterable[str]) -> str:
    """One operand, or a tuple of several."""
    listed = list(names)
    return listed[0] if len(listed) == 1 else f"({', '.join(listed)})"
