"""Other tiles worth measuring: those near the default, in rows per program, elements per iteration and warps.

Enters: the default tile and tiles that the choice of it knows to be good elsewhere.  Leaves: all that are worth a
build, the default first.  Invariants: every block is a power of two; no candidate brings a mask into the text that the
default does without, since all share one text.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import log2
from typing import Iterator, Mapping, Sequence

from fxfuser.domain.roles import next_power_of_2
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.schedule import Dim, Schedule

MOST = 16  # tiles of one kernel, each a build of a second or two
MOST_WARPS = 16
MOST_PER_THREAD = 128  # elements of a tile; its values would not fit the registers
WARP = 32
REACH = 2  # doublings and halvings, see `_distance`


def candidates(known: Sequence[Tile], schedule: Schedule, nests: Sequence[frozenset[Dim]], extents: Mapping[str, int],
               least: int = 1) -> tuple[Tile, ...]:
    """`known`, its first the default, and the tiles near that; `extents` are sizes by block name, symbolic ones' hints.

    `nests` are the inner dims that are walked together, `least` the elements that a thread has to have of some nest.
    """
    near = [t for t in _near(known[0], schedule, extents) if _fits(t, schedule, nests, least)]
    plain = [t for t in dict.fromkeys((*known, *near)) if not _brings_masks(t, known[0], schedule)]
    return tuple(plain[:MOST])


def _near(default: Tile, schedule: Schedule, extents: Mapping[str, int]) -> Iterator[Tile]:
    """By distance.  Held dims stay whole, loops change together."""
    blocks = dict(default.blocks)
    loops = [d.block for d in schedule.inner if d.looped]
    free = [*([d.block] for d in schedule.program if d.axes), *([loops] if loops else [])]
    moves = [m for m in product(range(-REACH, REACH + 1), repeat=len(free) + 1) if _distance(m) <= REACH]
    for *steps, warps in sorted(moves, key=_distance):
        scaled = {b: blocks[b] * 2.0**s for group, s in zip(free, steps) for b in group}
        count = default.num_warps * 2.0**warps
        if 1 <= count <= MOST_WARPS and all(1 <= v <= next_power_of_2(extents[b]) for b, v in scaled.items()):
            changed = {**blocks, **{b: int(v) for b, v in scaled.items()}}
            yield replace(default, blocks=tuple(changed.items()), num_warps=int(count))


def _distance(move: tuple[int, ...]) -> int:
    """Steps of the blocks, and those by which warps do not follow them: threads with more or fewer elements."""
    *blocks, warps = move
    return sum(map(abs, blocks)) + abs(warps - sum(blocks))


def _fits(tile: Tile, schedule: Schedule, nests: Sequence[frozenset[Dim]], least: int) -> bool:
    """Whether each thread has its elements, and not too many."""
    blocks = dict(tile.blocks)
    own = [d.block for d in schedule.program]
    counts = [_volume([blocks[b] for b in (*own, *(d.block for d in nest))]) for nest in nests or (frozenset(),)]
    threads = tile.num_warps * WARP
    return threads * least <= max(counts) <= threads * MOST_PER_THREAD


def _volume(sizes: Sequence[int]) -> int:
    return 1 << sum(int(log2(s)) for s in sizes)


def _brings_masks(tile: Tile, default: Tile, schedule: Schedule) -> bool:
    """Whether lanes lie past the end of a dim where the default has none."""
    blocks, before = dict(tile.blocks), dict(default.blocks)
    sizes = {d.block: d.size for d in schedule.dims}
    return any(isinstance(size, int) and size % before[b] == 0 and size % blocks[b] for b, size in sizes.items())
