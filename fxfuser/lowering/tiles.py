"""Which block sizes a kernel gets: a pure function of its schedule and of how it touches memory.

The first tile is the default; the others are worth measuring under max-autotune.  Units: elements per block,
warps per program.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from fxfuser.domain.points import Domain
from fxfuser.domain.size import Size, hint
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.schedule import Access, Dim, Schedule, accesses, contiguous_axis, next_power_of_2

MULTIPROCESSORS = 132
ELEMENTS = 1024  # of one pointwise program: 8 a thread with 4 warps, two 16-byte loads of fp32, one of bf16
LOOP_CHUNK = 2048  # elements of a row that one iteration of a loop takes
ROW_TILE = 2048  # elements of one program of a reduction, all its rows together
WARP = 32


@dataclass(frozen=True)
class Extents:
    """Sizes of a schedule's dims, symbolic ones by their hints."""

    values: Mapping[str, int]

    def of(self, dim: Dim) -> int:
        return max(1, size_hint(dim.size, self.values))


def size_hint(size: Size, values: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else hint(size, values)


def tiles(domain: Domain, schedule: Schedule, hints: Mapping[str, int]) -> tuple[Tile, ...]:
    """The default tile, then the candidates."""
    extents = Extents(hints)
    if not schedule.inner:
        return _pointwise(domain, schedule, extents)
    return _rows(domain, schedule, extents)


def _pointwise(domain: Domain, schedule: Schedule, extents: Extents) -> tuple[Tile, ...]:
    dims = schedule.program
    if len(dims) == 2:
        y, x = dims
        blocks = [(32, 32), (64, 32), (32, 64), (64, 64), (16, 64)]
        sized = [(min(b, next_power_of_2(extents.of(y))), min(c, next_power_of_2(extents.of(x)))) for b, c in blocks]
        return tuple(Tile(((y.block, b), (x.block, c)), 4 if b * c <= 1024 else 8) for b, c in dict.fromkeys(sized))
    size = extents.of(dims[0])
    if not dims[0].axes:
        return (Tile(((dims[0].block, 1),), 1),)
    narrow = min((a.bytes for a in accesses(domain)), default=4)
    # 16-byte accesses of the narrowest tensor, while a small tensor still spreads over all multiprocessors
    wanted = min(ELEMENTS * max(1, 4 // narrow), max(128, next_power_of_2(size // (2 * MULTIPROCESSORS))))
    options = [wanted, wanted * 2, max(128, wanted // 2)]
    return tuple(Tile(((dims[0].block, b),), max(1, min(8, b // (8 * WARP)))) for b in dict.fromkeys(options))


def _rows(domain: Domain, schedule: Schedule, extents: Extents) -> tuple[Tile, ...]:
    x = schedule.program[0]
    chunks = {d.block: _chunk(d, schedule, extents) for d in schedule.inner}
    row = max((_nest(schedule, dims, chunks) for dims in _walked(schedule, domain)), default=1)
    rows = 1 if not x.axes else min(_rows_per_program(domain, schedule, row), next_power_of_2(extents.of(x)))
    # few rows: rather one row a program than idle multiprocessors
    while rows > 1 and not _strided(domain, schedule) and extents.of(x) < rows * 2 * MULTIPROCESSORS:
        rows //= 2
    found = []
    for n in dict.fromkeys((rows, rows * 2 if x.axes else rows, max(1, rows // 2))):
        elements = n * row
        warps = max(1, min(16, next_power_of_2(elements // (16 * WARP))))
        found.append(Tile(((x.block, n), *chunks.items()), warps))
    return tuple(found)


def _chunk(dim: Dim, schedule: Schedule, extents: Extents) -> int:
    if not dim.looped:
        return next_power_of_2(extents.of(dim))
    return min(LOOP_CHUNK, max(16, next_power_of_2(extents.of(dim))))


def _walked(schedule: Schedule, domain: Domain) -> list[frozenset[Dim]]:
    inner = frozenset(schedule.inner)
    found = [schedule.dims_of(s.axes) & inner for s in domain.stores]
    found += [schedule.dims_of(region) & inner for p in domain.reductions() for region in p.axes]
    return found


def _nest(schedule: Schedule, dims: frozenset[Dim], chunks: Mapping[str, int]) -> int:
    total = 1
    for dim in dims:
        total *= chunks[dim.block]
    return total


def _rows_per_program(domain: Domain, schedule: Schedule, row: int) -> int:
    if not _strided(domain, schedule):
        return max(1, ROW_TILE // max(row, 1))
    # the rows are side by side in memory: a tile as wide as a cache line at least
    return max(32, ROW_TILE // max(row, 1))


def _strided(domain: Domain, schedule: Schedule) -> bool:
    """Whether most loads are contiguous along the program axes instead of the reduced ones."""
    x = schedule.program[0]
    along: list[Access] = [a for a in accesses(domain) if not a.store and contiguous_axis(a, x.axes) is not None]
    inner = tuple(axis for d in schedule.inner for axis in d.axes)
    return sum(a.bytes for a in along if a.offset.axes & set(inner)) > \
        sum(a.bytes for a in accesses(domain) if not a.store and contiguous_axis(a, inner) is not None)
