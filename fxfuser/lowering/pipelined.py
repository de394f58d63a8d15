"""Loops that load ahead: several iterations are under way at once.

    for r0_start in tl.range(0, 32, R0BLOCK, num_stages=3 if XBLOCK * R0BLOCK * R1BLOCK <= 2048 else 1):

An iteration that folds what it holds, as each row of layer norm's backward is summed before its gradient is known,
waits for its loads and then for the fold's barrier, so that memory idles meanwhile.  What the next iterations read
then is on its way through shared memory.  (12288 rows of 768 with residual and sums over rows, 171 MB, on an H200:
46 us with three stages, 55 with one; a copy of the same bytes takes 43.)

So does a loop that folds nothing but stores what it makes of its loads, such as position embeddings head by head: what
it stores waits for what it loads, and the next iteration's loads behind both.  (Mistral's, 4096 positions: 41.5 us and
42.8.)

Left alone: loops that only accumulate, whose loads nothing waits for, and tiles whose stages would take so much shared
memory that fewer programs fit a multiprocessor.
"""

from __future__ import annotations

from fxfuser.domain.points import Domain, PointKind
from fxfuser.lowering.schedule import Dim, Schedule

STAGES = 3
BYTES = 24 << 10  # that one iteration of a program loads


def stages(dim: Dim, domain: Domain, schedule: Schedule) -> str:
    """How many iterations of the loop over a dim are under way, as source over the kernel's blocks; nothing for one."""
    if dim.descending:
        return ""
    if any(p.axes for p in domain.folds()):
        beside = frozenset(d for d in schedule.inner if not d.looped)
        waits = _folds_what_it_holds(dim, domain, schedule, beside) and sum(d.looped for d in schedule.inner) == 1
    else:
        beside = frozenset(schedule.program)
        # one loop, not one within another
        waits = all(len(schedule.dims_of(s.axes) - beside) == 1 for s in domain.stores if s.axes & {*dim.axes})
    loads = [p for p in domain.points() if p.kind is PointKind.LOAD and p.deps & frozenset(dim.axes)]
    tiles = [p for p in loads if schedule.dims_of(p.deps) >= beside]
    if not waits or not tiles or any(p.lookups for p in loads):  # a place that is itself loaded is not known ahead
        return ""
    most = BYTES // sum(p.dtype.itemsize for p in tiles)
    walked = schedule.dims_of(a for p in tiles for a in p.deps)
    blocks = " * ".join(d.block for d in schedule.dims if d in walked)
    return f"{STAGES} if {blocks} <= {1 << max(most, 1).bit_length() - 1} else 1"


def _folds_what_it_holds(dim: Dim, domain: Domain, schedule: Schedule, held: frozenset[Dim]) -> bool:
    """Whether an iteration of the loop over a dim reduces over the dims beside it."""
    along = frozenset(dim.axes)
    folded = {d for p in domain.reductions() if p.deps & along for axes in p.axes for d in schedule.dims_of(axes)}
    return bool(folded & held)
