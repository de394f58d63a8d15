"""Which block sizes a kernel gets: a pure function of its schedule and of how it touches memory.

The first tile is the default; the others are worth measuring under max-autotune.  Units: elements per block,
warps per program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

from fxfuser.domain.index import Axis
from fxfuser.domain.joint import Pair, joint_folds
from fxfuser.domain.points import Domain, PointKind
from fxfuser.domain.roles import TRANSCENDENTAL, nests, next_power_of_2
from fxfuser.domain.size import Size, hint
from fxfuser.lowering import coalescing, groups
from fxfuser.lowering.candidates import WARP, candidates
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.reducer import monoid_of
from fxfuser.lowering.schedule import Access, Dim, Schedule, accesses, contiguous_axis, product
from fxfuser.ops import row

MULTIPROCESSORS = 132
ELEMENTS = 1024  # of one pointwise program: 8 a thread with 4 warps, two 16-byte loads of fp32, one of bf16
WARPS = 8  # of one pointwise program, at most
# Bytes that it moves, so that not too few are on a multiprocessor at once (12 accesses of bf16 beside each other, 32768
# positions' embeddings in litgpt's Phi-3.5, on an H200: 202 us with 1024 elements a program, 213 with 2048)
MOVED = 32 << 10
# Bytes that a program moves where all its warps wait for the last (`Row.agrees`): as few as hide that a multiprocessor
# takes 80 ns to begin one, in which memory moves 2.6 KB.  Many small ones do not wait together (sine and cosine of 1 GB
# of bf16 on an H200: 1005 us with 2048 elements and 8 warps a program, 886 with 1024 and 4, 853 with 512 and 2, 1265
# with 256 and 1; sine alone: 557 with 1024 and 2, 612 with 1024 and 4, 644 with 512 and 2)
AGREEING, AGREEING_WARPS = 3 << 10, 2
# Elements of a tile that one iteration of a loop takes: of plain sums (1 GB on an H200: 246 us, 265 with half as many),
# and of folds of several states, which end with a fold of as many lanes
SUM_CHUNK = 4096
LOOP_CHUNK = 2048
GROUPED_THREADS = 256  # that walk a row in groups of lanes
GROUPED_RESIDENT = 4  # programs of so many that a multiprocessor holds
# Bytes of rows under way that the L2 cache still holds when they are read again; above, programs of twice the threads
# are half as many (10673 rows of 50304 bf16 on an H200, softmax in two parts by hand: 688 us with 66 MB, 572 with 27)
CACHED = 40_000_000
LONE_CHUNK = 8192  # the same where a multiprocessor has but one program: more bytes in flight
# Rows that lie side by side in memory: a program takes two cache lines of fp32 of them, and each thread folds much by
# itself (on an H200 a column sum of 64 x 64 tiles takes 21 us with 2 warps and 50 with 8)
STRIDED_ROWS = 64
STRIDED_TILE = 4096
STRIDED_PER_THREAD = 64
# The same where the elements are written too (12288 x 3072 bf16, gelu's backward and its column sums: 67 us with 16
# elements a thread, 56 with 32, 66 with 64; three tensors side by side and their column sums: 48, 33 and 32)
WRITTEN_PER_THREAD = 32
# (rows, warps) of few programs that fold many rows each, as the last step of a split sum does (512 rows of partials:
# 4.9 us with 16 rows and 16 warps, 6.8 with 64 rows)
STRIDED_OTHERS = ((16, 16), (16, 8), (8, 8), (32, 16))
# Rows of states that one program combines (64 bytes of each tile's at least), and elements of its tile; a thread holds
# several states of each
STATE_ROWS, STATE_TILE, STATE_PER_THREAD = 64, 4096, 8
PER_THREAD = 16  # elements of a tile, elsewhere
# The same where few rows have sums that an earlier kernel has left: nobody else is there while they wait (one row of
# 4096 and rms_norm behind a product on an H200: 14.1 us for both, 14.2 with 16)
LEFT_PER_THREAD = 8
# Of loops beside each other, one vector of bf16; and lanes that lie side by side in memory, a cache line of them
# (position embeddings on an H200: among the best of 43 tiles of each)
SIBLING_PER_THREAD, SIDE_BY_SIDE = 8, 32
ROW_TILE = 2048  # elements of one program of a reduction, all its rows together
# (rows, warps) of a matrix that multiplies a vector: the vector is loaded once for all rows, and each thread has many
# loads of the matrix under way
VECTOR_TILES = ((4, 8), (2, 8), (2, 4), (4, 4), (1, 4), (1, 8), (8, 8), (1, 16))
VECTOR_PER_THREAD = (16, 64)  # elements of the matrix, at least and at most


@dataclass(frozen=True)
class Extents:
    """Sizes of a schedule's dims, symbolic ones by their hints."""

    values: Mapping[str, int]

    def of(self, dim: Dim) -> int:
        return max(1, size_hint(dim.size, self.values))


def size_hint(size: Size, values: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else hint(size, values)


def tiles(domain: Domain, schedule: Schedule, hints: Mapping[str, int], unrolled: bool = False) -> tuple[Tile, ...]:
    """The default tile, then the candidates; `unrolled`: each thread has several stores beside each other."""
    extents = Extents(hints)
    walked = [schedule.dims_of(n) for n in nests(domain.stores, domain.folds(), frozenset(domain.program))]
    if not schedule.inner:
        known = _pointwise(domain, schedule, extents, unrolled)
    elif not any(p.axes for p in domain.folds() if any(p.axes)):
        known = _siblings(domain, schedule, walked, extents)
    elif any(p.kind is PointKind.TIMES for p in domain.points()) and not any(d.looped for d in schedule.inner):
        known = _vector_rows(schedule, extents) or _rows(domain, schedule, walked, extents)
    else:
        known = _rows(domain, schedule, walked, extents)
    # a group whose lanes are in several warps is folded through shared memory, in each step
    least = _grouped(domain, schedule) if schedule.inner and not _strided(domain, schedule, extents) else 0
    return candidates(known, schedule, walked, {d.block: extents.of(d) for d in schedule.dims}, max(1, least))


def _pointwise(domain: Domain, schedule: Schedule, extents: Extents, unrolled: bool) -> tuple[Tile, ...]:
    dims = schedule.program
    if len(dims) == 2:
        y, x = dims
        blocks = [(64, 64), (32, 32), (128, 64), (64, 128), (32, 64)]
        if extents.of(y) * extents.of(x) < 64 * 64 * 2 * MULTIPROCESSORS:
            blocks.insert(0, (32, 32))
        sized = [(min(b, next_power_of_2(extents.of(y))), min(c, next_power_of_2(extents.of(x)))) for b, c in blocks]
        return tuple(Tile(((y.block, b), (x.block, c)), 4 if b * c <= 2048 else 8) for b, c in dict.fromkeys(sized))
    if not dims[0].axes:
        return (Tile(((dims[0].block, 1),), 1),)
    found = tuple(accesses(domain))
    narrow = min((a.bytes for a in found), default=4)
    moved = sum(a.bytes for a in found if contiguous_axis(a, dims[0].axes[-1:]) is not None)
    # 16-byte accesses of the narrowest tensor, while a small tensor still spreads over all multiprocessors
    spread = max(128, next_power_of_2(extents.of(dims[0]) // (2 * MULTIPROCESSORS)))
    wanted = min(ELEMENTS * max(1, 4 // narrow), max(ELEMENTS, 1 << (MOVED // max(1, moved)).bit_length() - 1), spread)
    # parts of vectors are where neighbours are in one thread anyway; Triton would bring them to others for wider stores
    each = 1 if unrolled else coalescing.elements(domain, dims[0], extents.values)
    if each < coalescing.MOST:
        wanted = min(wanted, WARPS * WARP * each)
    most = WARPS
    if _agrees(domain):
        most = AGREEING_WARPS
        wanted = min(wanted, max(most * WARP * each, next_power_of_2(-(-AGREEING // max(1, moved)))))
    options = [wanted, wanted * 2, max(128, wanted // 2)]
    return tuple(Tile(((dims[0].block, b),), max(1, min(most, b // (each * WARP)))) for b in dict.fromkeys(options))


def _agrees(domain: Domain) -> bool:
    """Whether the warps of a program wait for each other in the text of some op."""
    found = [row(p.node.target) for p in domain.points() if p.kind is PointKind.OP and p.node is not None]
    return any(r is not None and r.agrees for r in found)


def _siblings(domain: Domain, schedule: Schedule, walked: list[frozenset[Dim]], extents: Extents) -> tuple[Tile, ...]:
    """Stores that walk axes of their own beside the common ones, each in a loop: elements, and how many along it."""
    x = schedule.program[0]
    programs = extents.of(x) if x.axes else 1
    strided = _strided(domain, schedule, extents)
    if not strided:
        shapes = [(2048, 2048), (1024, 1024), (1024, 512), (2048, 256)]
    elif not _computes(domain, schedule):
        half = next_power_of_2(max(map(extents.of, schedule.inner))) // 2  # one iteration loads, another stores
        shapes = [(1024, max(1, min(16, half))), (1024, 16), (1024, 8), (2048, 32), (2048, 16), (1024, 4), (4096, 32)]
    elif len(schedule.inner) == 1:  # little is computed anew where few iterations are left
        shapes = [(4096, 32), (2048, 32), (1024, 16), (1024, 8), (1024, 4), (512, 2)]
    else:
        shapes = [(1024, 4), (1024, 8), (4096, 32), (1024, 16), (2048, 4), (512, 2)]
    found = []
    for elements, across in shapes:
        steps = _steps(schedule, walked, extents, across)
        longest = max(_product(steps, dims) for dims in walked)
        width = min(max(1, elements // longest), next_power_of_2(programs)) if x.axes else 1
        while width > (SIDE_BY_SIDE if strided else 1) and programs < width * 2 * MULTIPROCESSORS:
            width //= 2
        warps = max(1, min(8, width * longest // (SIBLING_PER_THREAD * WARP)))
        found.append(Tile(((x.block, width), *steps.items()), warps))
    return tuple(dict.fromkeys(found))


def _steps(schedule: Schedule, walked: list[frozenset[Dim]], extents: Extents, across: int) -> dict[str, int]:
    """Elements per block of each inner dim: all of a held one; of loops together `across` in the fullest nest, the
    innermost first."""
    steps = {d.block: next_power_of_2(extents.of(d)) for d in schedule.inner if not d.looped}
    for dim in (d for d in reversed(schedule.inner) if d.looped):
        beside = max(_product(steps, dims - {dim}) for dims in walked if dim in dims)
        most = min(max(1, across // beside), next_power_of_2(extents.of(dim)))
        dividing = math.gcd(dim.size, most) if isinstance(dim.size, int) else 1
        steps[dim.block] = dividing if dividing * 4 >= most else most  # masked lanes cost less than shorter steps
    return {d.block: steps[d.block] for d in schedule.inner}


def _computes(domain: Domain, schedule: Schedule) -> bool:
    """Whether transcendentals are computed before the loops: few threads should compute the same."""
    outside = frozenset(a for d in schedule.program for a in d.axes)
    found = [row(p.node.target) for p in domain.points()
             if p.kind is PointKind.OP and p.node is not None and p.deps <= outside]
    return any(r is not None and r.cost >= TRANSCENDENTAL for r in found)


def _vector_rows(schedule: Schedule, extents: Extents) -> tuple[Tile, ...]:
    """A matrix that multiplies a vector, whole rows of it in each program."""
    x = schedule.program[0]
    held = {d.block: next_power_of_2(extents.of(d)) for d in schedule.inner}
    row = max(held.values())
    least, most = VECTOR_PER_THREAD
    return tuple(Tile(((x.block, n), *held.items()), w) for n, w in VECTOR_TILES
                 if least <= n * row // (w * WARP) <= most and extents.of(x) >= n * 2 * MULTIPROCESSORS)


def _rows(domain: Domain, schedule: Schedule, walked: list[frozenset[Dim]], extents: Extents) -> tuple[Tile, ...]:
    x = schedule.program[0]
    strided = _strided(domain, schedule, extents)
    programs = extents.of(x) if x.axes else 1
    lone = not strided and programs < 2 * MULTIPROCESSORS
    per_thread = 0 if strided else _grouped(domain, schedule)
    reread = _row_bytes(domain, schedule, extents) if per_thread and _writes_inner(domain) else 0
    budget = per_thread * _grouped_threads(programs, reread) or _budget(domain, schedule, strided, lone)
    chunks = _chunks(schedule, walked, extents, budget)
    row = max((_product(chunks, dims) for dims in walked), default=1)
    if strided and _combines(domain) and x.axes:
        return _states(x, schedule, programs, extents)
    if strided:
        rows = max(8, min(STRIDED_ROWS, STRIDED_TILE // row))
        few = programs < rows * 2 * MULTIPROCESSORS and not any(d.looped for d in schedule.inner)
        per_thread = PER_THREAD if few else WRITTEN_PER_THREAD if _writes_inner(domain) else STRIDED_PER_THREAD
    else:
        left = lone and any(p.kind is PointKind.PARTS for p in domain.points())
        rows, per_thread = max(1, ROW_TILE // row), per_thread or (LEFT_PER_THREAD if left else PER_THREAD)
    rows = min(rows, next_power_of_2(programs)) if x.axes else 1
    # few rows: rather one row a program than idle multiprocessors
    while rows > 1 and not strided and programs < rows * 2 * MULTIPROCESSORS:
        rows //= 2
    found = []
    for n in dict.fromkeys((rows, rows * 2 if x.axes else rows, max(1, rows // 2))):
        warps = max(1, min(16, next_power_of_2(n * row // (per_thread * WARP))))
        found.append(Tile(((x.block, n), *chunks.items()), warps))
    if strided and x.axes and row > STRIDED_TILE // STRIDED_ROWS:
        found += [Tile(((x.block, min(n, next_power_of_2(programs))), *chunks.items()), w) for n, w in STRIDED_OTHERS]
    return tuple(dict.fromkeys(found))


def _combines(domain: Domain) -> bool:
    """Whether all that is folded are states that the tiles of an earlier kernel have left."""
    return {o.kind for p in domain.folds() for o in p.operands} == {PointKind.PARTIAL}


def _states(x: Dim, schedule: Schedule, programs: int, extents: Extents) -> tuple[Tile, ...]:
    """States lie row by row of each tile.  There are few of them, of which every thread takes a few, all under way."""
    rows = STATE_ROWS
    while rows > STATE_ROWS // 4 and programs < rows * 2 * MULTIPROCESSORS:
        rows //= 2
    rows = min(rows, next_power_of_2(programs))
    found = []
    for n, elements in ((rows, STATE_TILE), (rows, STATE_TILE // 2), (max(1, rows // 2), STATE_TILE // 2)):
        steps = {d.block: min(max(1, elements // n), next_power_of_2(extents.of(d))) for d in schedule.inner}
        tile = n * max(steps.values())
        found.append(Tile(((x.block, n), *steps.items()), max(1, min(16, tile // (STATE_PER_THREAD * WARP)))))
    return tuple(dict.fromkeys(found))


def _writes_inner(domain: Domain) -> bool:
    """Whether what is folded is written as well, element by element: then threads do more than add up."""
    return any(store.axes - frozenset(domain.program) for store in domain.stores)


def _grouped(domain: Domain, schedule: Schedule) -> int:
    """Elements of a thread where loops fold by groups of lanes, a vector each; else 0."""
    if len(schedule.inner) != 1 or not any(pair.monoid.absorbs for pair in _pairs(domain, schedule)):
        return 0
    inner = schedule.inner[0].axes
    widest = max((a.bytes for a in accesses(domain) if not a.store and contiguous_axis(a, inner)), default=4)
    return groups.LANES * max(1, 16 // widest)


def _row_bytes(domain: Domain, schedule: Schedule, extents: Extents) -> int:
    """What a program loads of its rows along the inner dims."""
    inner = {axis for d in schedule.inner for axis in d.axes}
    return sum(a.bytes * size_hint(product(axis.size for axis in a.offset.axes & inner), extents.values)
               for a in accesses(domain) if not a.store and a.offset.axes & inner)


def _grouped_threads(programs: int, reread: int) -> int:
    """Threads of a program that walks a row in groups of lanes; `reread`: bytes of it that it reads twice.

    Where a few programs would begin when all others end, half as many each, so that all are under way at once.  Not
    where they are more than a few: a row that is read again should still lie in the cache.  For which they are twice as
    many each where so many programs follow each other that it does not matter how the last end.
    """
    at_once = GROUPED_RESIDENT * MULTIPROCESSORS
    if programs > at_once * 4 and at_once * reread > CACHED:
        return GROUPED_THREADS * 2
    return GROUPED_THREADS // 2 if at_once < programs <= at_once * 4 // 3 else GROUPED_THREADS


def _pairs(domain: Domain, schedule: Schedule) -> tuple[Pair, ...]:
    """Folds of loops that become one."""
    looped = frozenset(d for d in schedule.inner if d.looped)
    return tuple(joint_folds(domain.points(), lambda axes: schedule.dims_of(axes) & looped))


def _budget(domain: Domain, schedule: Schedule, strided: bool, lone: bool) -> int:
    """Elements of one iteration's tile."""
    if strided:
        return STRIDED_TILE // STRIDED_ROWS
    if any(not d.looped for d in schedule.inner):
        return ROW_TILE  # accumulators of the looped dim stand beside the held one: half the size, twice the programs
    if lone:
        return LONE_CHUNK
    plain = all(monoid_of(p).states == 1 for p in domain.reductions()) and not _pairs(domain, schedule)
    return SUM_CHUNK if plain else LOOP_CHUNK


def _chunks(schedule: Schedule, walked: list[frozenset[Dim]], extents: Extents, budget: int) -> dict[str, int]:
    """Elements per block of each inner dim: all of a held one, of a loop what its fullest nest leaves room for."""
    chunks = {d.block: next_power_of_2(extents.of(d)) for d in schedule.inner if not d.looped}
    for dim in (d for d in schedule.inner if d.looped):
        beside = max(_product(chunks, dims - {dim}) for dims in walked if dim in dims)
        chunks[dim.block] = min(max(1, budget // beside), next_power_of_2(extents.of(dim)))
    return {d.block: chunks[d.block] for d in schedule.inner}


def _product(chunks: Mapping[str, int], dims: frozenset[Dim]) -> int:
    total = 1
    for dim in dims:
        total *= chunks.get(dim.block, 1)
    return total


def _strided(domain: Domain, schedule: Schedule, extents: Extents) -> bool:
    """Whether most of what is loaded is contiguous along the program axes instead of the inner ones."""
    x = schedule.program[0]
    inner = tuple(axis for d in schedule.inner for axis in d.axes)
    loads: list[Access] = [a for a in accesses(domain) if not a.store and a.offset.axes & set(inner)]

    def along(axes: tuple[Axis, ...]) -> int:
        return sum(a.bytes * size_hint(product(axis.size for axis in a.offset.axes), extents.values) for a in loads
                   if contiguous_axis(a, axes) is not None)

    return along(x.axes) > along(inner)
