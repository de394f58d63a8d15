"""Loops in two parts: whole steps, all of whose lanes exist, and behind them a rest.

    R0WHOLE: tl.constexpr = 50304 // R0BLOCK * R0BLOCK
    R0REST: tl.constexpr = R0BLOCK // R0GROUP
    for r0_start in range(0, R0WHOLE, R0BLOCK): ...             no masks
    for r0_start in range(R0WHOLE, 50304, R0REST): ...          masks, and steps of a quarter of the lanes

Without it the last step computes for lanes that do not exist, and all steps ask which do.  (Softmax of 10673 rows of
50304 bf16, 16384 at a time, written by hand, on an H200: 644 us in one part, 572 in two.)

Done where elements cost more than what moves them: where loops fold by groups of lanes, each of which makes an
exponential, and where they count, as a count is one number while all lanes exist (see counts.py).  What accumulates
lane by lane has a rest of a whole step.

Enters: a nest of loops and what it folds.  Leaves: the parts in which it is walked, by dim, one after the other.
"""

from __future__ import annotations

from typing import Mapping, Sequence

from fxfuser.domain.points import PointKind
from fxfuser.lowering import groups
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.pipelined import stages
from fxfuser.lowering.reducer import Reducer, Unit
from fxfuser.lowering.schedule import Dim
from fxfuser.lowering.vectors import Walk

WASTED = 10  # a row is peeled where its last step has that part of its elements in lanes that do not exist

Walks = Mapping[Dim, Walk]
IN_ONE: tuple[Walks, ...] = ({},)


def parts(emitter: Emission, reducer: Reducer, loops: Sequence[Dim], units: Sequence[Unit], steps: Mapping[str, int],
          ) -> tuple[Walks, ...]:
    """How a nest of loops is walked; `steps` are the blocks of the default tile, which say what pays."""
    if len(loops) != 1 or not _allowed(emitter, loops[0], units):
        return IN_ONE
    dim, = loops
    step, size = steps.get(dim.block, 0), dim.size
    if not isinstance(size, int) or not step or size < step or size % step == 0:
        return IN_ONE
    known = (*reducer.accumulators, *units)
    if not any(unit in reducer.grouped or reducer.monoid(unit.point).counts for unit in known):
        return IN_ONE
    if all(unit in reducer.grouped for unit in units):
        if -size % step * WASTED < size:
            return IN_ONE
        rest = groups.rest(emitter, dim)
    elif any(unit not in reducer.grouped and reducer.monoid(unit.point).counts for unit in units):
        rest = dim.block
    else:
        return IN_ONE
    whole = f"{dim.block.removesuffix('BLOCK')}WHOLE"
    emitter.define(f"{whole}: tl.constexpr = {size} // {dim.block} * {dim.block}")
    return {dim: Walk("0", whole, dim.block, False)}, {dim: Walk(whole, str(size), rest, True)}


def _allowed(emitter: Emission, dim: Dim, units: Sequence[Unit]) -> bool:
    """Whether a loop begins at the first element, carries nothing but accumulators, and loads nothing ahead."""
    scanned = {a for p in emitter.domain.folds() if p.kind is PointKind.SCAN for axes in p.axes for a in axes}
    return dim.block != "1" and not dim.descending and not scanned & set(dim.axes) \
        and all(unit.operand.kind is not PointKind.PARTIAL for unit in units) \
        and not stages(dim, emitter.domain, emitter.schedule)
