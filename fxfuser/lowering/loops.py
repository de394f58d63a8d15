"""The lines of a whole kernel: what it does before all loops, its loops stage by stage, and what needs none.

Enters: an emitter, which knows the value of each point.  Leaves: its `top` holds the kernel's body.

Loops run in stages.  A reduction over a looped dim is known after the loop in which its operand is known, so
stage(reduction) = stage(operand) + 1; all reductions and stores of one stage over the same dims share a loop.  What is
folded with another reduction is known when that is.
"""

from __future__ import annotations

from typing import Iterator, Mapping

from fxfuser.domain.points import Point, PointKind, Store
from fxfuser.lowering.dependent import reads_parts, wait
from fxfuser.lowering.emitter import Emitter, Key
from fxfuser.lowering.guard import Guard, concerning, guarded, looked_up
from fxfuser.lowering.peeling import parts
from fxfuser.lowering.pipelined import stages
from fxfuser.lowering.reducer import Unit
from fxfuser.lowering.rereads import rereads
from fxfuser.lowering.schedule import Dim
from fxfuser.lowering.scope import Scope


class Loops:
    """The loops of one kernel; `steps` are the default tile's blocks, by which they are cut in two."""

    def __init__(self, emitter: Emitter, steps: Mapping[str, int]) -> None:
        self.emitter, self.steps = emitter, steps
        self.stores = emitter.stores()
        self.stages: dict[int, int] = {}
        # sums that are folded in the loop of the reduction on which they depend
        self.online = {id(pair.second): pair.first for pairs in emitter.reducer.joint.values() for pair in pairs}

    def write(self) -> None:
        """Prologue, then the loops stage by stage, then what needs no loop."""
        emitter, stores = self.emitter, self.stores
        emitter.top.lines += emitter.vectors.programs()
        for dim in emitter.schedule.inner:
            if not dim.looped:
                emitter.top.lines += emitter.vectors.held(dim)
        units = self._units()
        emitter.fills = emitter.reducer.fills(units)
        last = max([self.stage(s.value) for s in stores], default=0)
        emitter.rereads = rereads(emitter, [(u.operand, u.stage) for u in units if u.loops],
                                  [(s, self.stage(s.value)) for s in stores if emitter.loops(s.axes)])
        if reads_parts(emitter.domain):
            wait(emitter, stores)
        for stage in range(last + 1):
            emitter.current = stage
            self._stage(stage, units)
        alone = [s for s in stores if not emitter.loops(s.axes)]
        for store in alone if emitter.neighbours is None else emitter.neighbours.write(alone):
            emitter.store(store)

    def stage(self, point: Point) -> int:
        """How many loops over the data must have ended before this point is known."""
        point = self.online.get(id(point), point)
        if id(point) not in self.stages:
            stage = max((self.stage(p) for p in point.inputs), default=0)
            looped = point.kind is PointKind.REDUCE and any(self.emitter.loops(r) for r in point.axes)
            self.stages[id(point)] = stage + looped
        return self.stages[id(point)]

    def _units(self) -> list[Unit]:
        """Every region of every reduction."""
        emitter = self.emitter
        return [Unit(point, guard, i, emitter.ordered(emitter.loops(axes)), self.stage(point.operands[i]))
                for point, guard in self._reductions() for i, axes in enumerate(point.axes)]

    def _reductions(self) -> Iterator[tuple[Point, Guard]]:
        """Every reduction with each guard under which it is read, operands first."""
        seen: set[Key] = set()

        def visit(point: Point, guard: Guard) -> Iterator[tuple[Point, Guard]]:
            point = self.online.get(id(point), point)
            guard = concerning(guard, point.deps) if point.kind is PointKind.REDUCE else guard
            if (id(point), guard) in seen:
                return
            seen.add((id(point), guard))
            for name, below in looked_up(point, guard):
                yield from visit(self.emitter.positions.points[name], below)
            for operand, below in guarded(point, guard):
                yield from visit(operand, below)
            if point.kind is PointKind.REDUCE:
                yield point, guard

        for store in self.stores:
            yield from visit(store.value, ())

    def _stage(self, stage: int, units: list[Unit]) -> None:
        emitter = self.emitter
        work: dict[tuple[Dim, ...], tuple[list[Unit], list[Store]]] = {}
        for unit in units:
            if unit.stage == stage and unit.loops:
                work.setdefault(unit.loops, ([], []))[0].append(unit)
        for store in self.stores:
            loops = emitter.ordered(emitter.loops(store.axes))
            if loops and self.stage(store.value) == stage:
                work.setdefault(loops, ([], []))[1].append(store)
        for loops, (reduced, stored) in work.items():
            self._loop(loops, reduced, stored)

    def _loop(self, loops: tuple[Dim, ...], reduced: list[Unit], stored: list[Store]) -> None:
        """A nest of loops, in one part or several."""
        emitter, reducer = self.emitter, self.emitter.reducer
        reducer.group(reduced)
        for i, walks in enumerate(parts(emitter, reducer, loops, reduced, self.steps)):
            for unit in reduced if i else ():
                reducer.spread(unit)
            emitter.vectors.walks = walks
            for unit in reduced if not i else ():
                reducer.begin(unit)
            self._open(loops)
            for unit in reduced:
                reducer.accumulate(unit)
            for store in stored:
                emitter.store(store)
            self._close(loops)
        emitter.vectors.walks = {}
        for unit in reduced:
            reducer.end(unit)

    def _open(self, loops: tuple[Dim, ...]) -> None:
        emitter = self.emitter
        for dim in loops:
            emitter.scope = Scope(dim, emitter.scope)
            emitter.scope.lines += emitter.vectors.step(dim)

    def _close(self, loops: tuple[Dim, ...]) -> None:
        emitter = self.emitter
        for dim in reversed(loops):
            body, parent = emitter.scope.lines, emitter.scope.parent
            assert parent is not None
            parent.lines.append(emitter.vectors.loop(dim, stages(dim, emitter.domain, emitter.schedule)))
            parent.lines += [f"    {line}" for line in body]
            emitter.scope = parent
