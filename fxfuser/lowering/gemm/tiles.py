"""Which tiles a matrix product gets: a pure function of its sizes and of what stands around it.

The first tile is the default; those that follow are worth measuring, the most promising first.  Times are estimates:
rounds of tiles on the multiprocessors, times what one tile takes, its main loop by the tensor cores and its epilogue by
everything else.  Where two programs share a multiprocessor, one's epilogue runs beside the other's main loop.  Tiles of
few rows wait for memory instead: see `reading`.  The efficiencies are those of bf16 on an H200, measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Iterable, Iterator

from fxfuser.domain.roles import next_power_of_2
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.products import WAITING, WARP
from fxfuser.lowering.tiles import MULTIPROCESSORS

SHARED = 227 * 1024  # bytes of shared memory that the programs of a Hopper multiprocessor can have
RESERVED = 1536  # of these, per program: the system takes 1024, barriers and reductions of rows some more
MOST = 10  # tiles, the default included
LEAST = 16  # rows or columns of a dot
LEAST_STRIP = 32  # columns that an epilogue takes at a time: 64 bytes of a row, half of what a copy moves at best
WARP_ROWS = 16  # of a warp in one instruction of the tensor cores
HOPPER_ROWS = 64  # that one instruction of Hopper's tensor cores takes; fewer are worth padding
DEEPEST = 5  # stages of the main loop's pipeline
DEEPEST_NARROW = 8  # the same of tiles that are narrow in one dimension, whose steps hold few bytes
MOST_UNDER_WAY = 192 * 1024  # bytes of the stages of a part that has a multiprocessor for itself, if it is no larger
NARROW = 32
FEW = 64  # rows or columns of a product up to which its tiles may wait for memory
GROUP = 8  # rows of tiles that are walked together, so that they share columns in L2
ACCUMULATORS = 128  # fp32 per thread; more would spill
HELD = 32768  # and of all threads of a multiprocessor: half of its registers
NEAR = 1.15  # times the best estimate: as far as it has been wrong about tiles that leave nothing but states
LEAST_STEPS = 4  # of the main loop, for a part of k to be worth a program
JOINED = 8  # parts that one program adds up; beyond, bundles of them are added up first
# What one element costs in multiplications by a step of k, of which a multiprocessor makes about 1700 a clock:
EPILOGUE_COST = 1700 / 128  # an instruction of the epilogue
PART_COST = 1700 * 4 / 32  # an element of a part, to L2 or back
START = 1700 * 1500  # the latency of a tile's first loads
PIPELINE = {1: 0.5, 2: 0.72}  # the share of full speed that a main loop with so few stages has
ALONE = 0.75  # and that a program has that would share its multiprocessor, but does not
UNIT = 1700 * 1755.0  # of these in a microsecond
# Bytes per microsecond: of the device's memory, of its L2, what one multiprocessor can draw, and the bytes that it must
# have under way for that (Little's law, at about a microsecond)
MEMORY, L2, DRAW, UNDER_WAY = 4.3e6, 1.1e7, 90e3, 64 * 1024
QUEUED = 8 * 1024  # bytes under way on each multiprocessor with which half of the device's bandwidth is drawn
HOP = 0.7 * UNIT  # the latency of reading what another program has just written
ARRIVE = 1.0 * UNIT  # publishing a part and finding out who else has
FOLLOW = 2.0 * UNIT  # a second kernel
ADDING = 6e6  # bytes per microsecond of parts that all programs add up
READER = 40e3  # and that one of a second kernel does
EACH = 16  # elements that a thread adds up, at most, where there are enough programs for all
READER_WARPS = 8  # which it has for this, about, where programs of one grid have those of the tile


@dataclass(frozen=True)
class Shape:
    """A tile's rows and columns; programs of a multiprocessor; and how busy the main loop keeps the tensor cores."""

    rows: int
    columns: int
    warps: int
    efficiency: float
    resident: int = 1
    wide: bool = False  # twice the usual step of k, for tiles so small that a step has little to do
    deep: bool = False  # as many stages as there is room for


_SHAPES = (
    Shape(128, 256, 8, 1.0), Shape(128, 128, 8, 0.97), Shape(128, 128, 4, 0.97, 2), Shape(128, 128, 8, 0.97, 2),
    Shape(256, 128, 8, 0.93),
    Shape(128, 64, 4, 0.75, 2), Shape(64, 128, 4, 0.75, 2), Shape(64, 256, 4, 0.7, 2), Shape(256, 64, 8, 0.75),
    Shape(64, 128, 4, 0.75, 2, True), Shape(64, 64, 4, 0.55, 3), Shape(64, 64, 4, 0.6, 2, True),
    Shape(64, 32, 4, 0.35, 4), Shape(32, 64, 4, 0.3, 4), Shape(16, 128, 4, 0.25, 2), Shape(16, 64, 4, 0.2, 4),
    Shape(16, 256, 4, 0.22, 2), Shape(16, 64, 4, 0.22, 2, True), Shape(16, 32, 4, 0.15, 4, True),
    Shape(32, 64, 4, 0.35, 2, True), Shape(32, 128, 4, 0.4, 2), Shape(64, 32, 4, 0.4, 2, True),
    Shape(64, 16, 4, 0.15, 4), Shape(32, 32, 4, 0.15, 4), Shape(16, 32, 2, 0.1, 4), Shape(32, 16, 2, 0.1, 4),
    Shape(16, 16, 1, 0.05, 4))


@dataclass(frozen=True)
class Product:
    """Sizes of a product, by hints where they are dynamic; `dots` accumulators of each tile, `staged` bytes per element
    of a tile that pass through shared memory beside the factors, `passed` bytes of a column that each warp passes to
    others, `work` instructions per element of the epilogue, `shared` memory of a multiprocessor for one program;
    `readers` programs of the kernel that adds up parts, where another does; `scratch` bytes of each row that
    pass through shared memory beside the rest; `states` bytes of each row that a fold of the tile's columns leaves;
    `outnumbered`: rows by threads, as Triton lets a number of a row follow its reader's layout only then."""

    batch: int
    rows: int
    columns: int
    depth: int
    itemsize: int
    dots: int = 1
    staged: int = 2
    work: int = 4
    passed: int = 0
    shared: int = SHARED
    readers: int = 0
    scratch: int = 0
    states: int = 0
    outnumbered: bool = False


@dataclass(frozen=True)
class Choice:
    """A shape with its steps of k, its stages, columns of its epilogue's strips, and in how many parts it takes k."""

    shape: Shape
    step: int
    stages: int
    strip: int
    splits: int = 1

    @property
    def together(self) -> int:
        """Parts that fit the registers at once beside their sum."""
        return max(1, min(4, ACCUMULATORS * self.shape.warps * WARP // (self.shape.rows * self.shape.columns)))

    def tile(self, split: bool) -> Tile:
        shape = self.shape
        last = (("SPLITS", self.splits), ("JOIN", joined(self.splits)), ("TOGETHER", self.together)) if split else \
            (("RESIDENT", shape.resident),)
        blocks = (("MBLOCK", shape.rows), ("NBLOCK", shape.columns), ("STRIPBLOCK", self.strip),
                  ("KBLOCK", self.step), ("GROUP", GROUP), *last)
        return Tile(blocks, shape.warps, self.stages)


def joined(splits: int) -> int:
    """How many parts a program adds up at once: all, or so many that two rounds read fewest."""
    return splits if splits <= JOINED else math.isqrt(splits - 1) + 1


def gemm_tiles(product: Product) -> tuple[Tile, ...]:
    """The default tile of a persistent kernel, then the candidates."""
    found = [c for shape in _fitting(product) for c in _choices(shape, product, product.staged)]
    found.sort(key=lambda c: _time(c, product))
    if product.states and not product.staged:
        found = _fewest_states_first(found, product)
    return tuple(dict.fromkeys(c.tile(False) for c in found[:MOST]))


def _fewest_states_first(found: list[Choice], product: Product) -> list[Choice]:
    """Of the choices with the least times, those first that leave fewest states: these are all that the kernel writes
    and all that it needs of memory, and the next kernel reads them."""
    most = NEAR * _time(found[0], product) if found else 0.0
    return sorted(found, key=lambda c: -c.shape.columns if _time(c, product) <= most else 0)


def split_tiles(product: Product) -> tuple[Tile, ...]:
    """The same of a kernel that splits k; none where whole tiles fill the device or k is too short to split."""
    found = sorted(_split_choices(product), key=lambda c: _split_time(c, product))
    return tuple(dict.fromkeys(c.tile(True) for c in found[:MOST]))


def part_tiles(product: Product) -> tuple[Tile, ...]:
    """The same of a kernel that leaves its parts, one or several, to another."""
    found = sorted(_split_choices(product, 1), key=lambda c: _part_time(c, product))
    return tuple(dict.fromkeys(c.tile(True) for c in found[:MOST]))


def joined_tiles(product: Product, tiles: Iterable[Tile]) -> tuple[Tile, ...]:
    """Tiles of `part_tiles` in the order of a kernel whose programs leave and add up parts in one grid."""
    times: dict[Tile, float] = {}
    for choice in _split_choices(product, 1):
        times.setdefault(choice.tile(True), _joined_time(choice, product))
    return tuple(sorted(tiles, key=lambda tile: times.get(tile, math.inf)))


def joined_estimate(product: Product) -> float:
    """The time of the best of them, comparable with `estimate`."""
    return min((_joined_time(c, product) for c in _split_choices(product, 1)), default=math.inf)


def _split_choices(product: Product, least: int = 2) -> Iterator[Choice]:
    """Each shape, and where others share its multiprocessor, it alone: that makes fewer parts, and a part has no
    epilogue beside which another's main loop could run.  Few rows leave no shape so large that this was tried."""
    shapes = list(_fitting(product))
    if not few(product):
        known = {(s.rows, s.columns, s.warps) for s in shapes if s.resident == 1}
        shapes += [replace(s, resident=1, efficiency=ALONE * s.efficiency, deep=True) for s in shapes
                   if s.resident > 1 and (s.rows, s.columns, s.warps) not in known]
    for shape in shapes:
        for choice in _choices(shape, product, 0):  # the main loop's buffers are free when the epilogue begins
            for splits in _splits(choice, product, least):
                yield Choice(shape, choice.step, choice.stages, choice.strip, splits)


def estimate(product: Product, split: bool, left: bool = False) -> float:
    """The time of the best tile, comparable with that of the other kinds; infinite where there is none."""
    if left:
        times = [_part_time(c, product) for c in _split_choices(product, 1)]
    elif split:
        times = [_split_time(c, product) for c in _split_choices(product)]
    else:
        times = [_time(c, product) for shape in _fitting(product) for c in _choices(shape, product, product.staged)]
    return min(times, default=float("inf"))


def _fitting(product: Product) -> Iterator[Shape]:
    rows, columns = (max(LEAST, next_power_of_2(n)) for n in (product.rows, product.columns))
    for shape in _SHAPES:
        most_rows = max(rows, HOPPER_ROWS) if shape.columns >= HOPPER_ROWS else rows
        if shape.rows > most_rows or shape.columns > columns:
            continue
        threads = shape.warps * WARP
        if product.outnumbered and shape.rows >= threads:
            continue
        if shape.rows * shape.columns * product.dots <= threads * min(ACCUMULATORS, HELD // (shape.resident * threads)):
            yield shape


def _choices(shape: Shape, product: Product, staged: int) -> Iterator[Choice]:
    """The shape with a step of k, if that leaves room for a pipeline: with strips of its columns that make it deepest,
    then with wider ones."""
    usual = max(LEAST, min(128 // product.itemsize, next_power_of_2(product.depth)))
    step = 2 * usual if shape.wide else usual
    each = (shape.rows + shape.columns * product.dots) * step * product.itemsize  # of a stage
    deepest = DEEPEST_NARROW if min(shape.rows, shape.columns) <= NARROW else DEEPEST
    if shape.deep:
        deepest = max(deepest, min(DEEPEST_NARROW, MOST_UNDER_WAY // each))
    found: list[Choice] = []
    for strip in _strips(shape, product):
        beside = strip * (shape.rows * staged + shape.warps * product.passed) + shape.rows * product.scratch
        if strip < shape.columns and shape.rows > WARP_ROWS * shape.warps:  # folds change their layout on the way
            beside += shape.rows * product.states
        left = product.shared // shape.resident - RESERVED - beside
        stages = min(deepest, left // each)
        enough = stages >= 2 or (stages == 1 and product.depth <= step)
        if enough and (not found or stages > found[-1].stages):
            found.append(Choice(shape, step, stages, strip))
    yield from reversed(found)


def _strips(shape: Shape, product: Product) -> tuple[int, ...]:
    """How many columns the epilogue may take at a time, most first; all where it stores nothing of each element.

    What is stored takes registers beside the accumulators: a tile whose accumulators take half of all has strips.
    Threads outnumber the columns of a strip, as Triton lets a number of a column follow its reader's layout only then.
    """
    if product.staged == 0:
        return (shape.columns,)
    threads = shape.warps * WARP
    full = shape.rows * shape.columns * product.dots >= ACCUMULATORS * threads
    found = [shape.columns // n for n in ((2, 4) if full else (1, 2, 4))
             if shape.columns // n >= LEAST_STRIP and (n == 1 or shape.columns // n < threads)]
    return tuple(found) or (shape.columns,)


def tile_count(shape: Shape, product: Product) -> int:
    return product.batch * -(-product.rows // shape.rows) * -(-product.columns // shape.columns)


def _loop(choice: Choice, product: Product) -> float:
    """The main loop of a tile over all of k, at full speed."""
    shape = choice.shape
    deep = PIPELINE.get(choice.stages, 1.0)
    return shape.rows * shape.columns * product.dots * product.depth / shape.efficiency / deep


def _together(shape: Shape, programs: int, each: float) -> float:
    """The time of so many programs on all multiprocessors, of which `each` would take so long at full speed."""
    most = -(-programs // MULTIPROCESSORS)  # on one multiprocessor
    full, rest = divmod(most, shape.resident)
    alone = ALONE if shape.resident > 1 and rest == 1 else 1.0
    return full * shape.resident * each + rest * each / alone + START * -(-most // shape.resident)


def reading(choice: Choice, product: Product, programs: int) -> float:
    """The time in which so many programs can have read their factors.

    A multiprocessor draws no more than its programs have under way in the pipelines of their main loops, and the one
    with most programs is the last.
    """
    shape, size = choice.shape, product.itemsize
    most = -(-programs // MULTIPROCESSORS)
    rows, columns = min(shape.rows, product.rows), min(shape.columns, product.columns) * product.dots
    each = (rows + columns) * product.depth * size / choice.splits
    one = max(1, choice.stages - 1) * (rows + columns) * choice.step * size
    draw = DRAW * min(1.0, min(most, shape.resident) * one / UNDER_WAY)
    spread = min(programs, shape.resident * MULTIPROCESSORS) * one / MULTIPROCESSORS
    memory = MEMORY * spread / (spread + QUEUED)
    whole = product.batch * (product.rows + product.columns * product.dots) * product.depth * size
    return UNIT * max(most * each / draw, whole / memory, programs * each / L2)


def _time(choice: Choice, product: Product) -> float:
    shape = choice.shape
    loop = _loop(choice, product)
    epilogue = shape.rows * shape.columns * product.dots * product.work * EPILOGUE_COST
    each = max(loop, epilogue) + 0.25 * min(loop, epilogue) if shape.resident > 1 else loop + epilogue
    tiles = tile_count(shape, product)
    if not few(product):
        return _together(shape, tiles, each)
    return max(_together(shape, tiles, each), reading(choice, product, tiles) + START)


def few(product: Product) -> bool:
    """Whether memory, not the tensor cores, may be what a product waits for."""
    return min(product.rows, product.columns) <= FEW


def _splits(choice: Choice, product: Product, least: int) -> list[int]:
    """Numbers of parts that fill whole rounds of the multiprocessors, or nearly; or few, where there are many tiles."""
    tiles = tile_count(choice.shape, product)
    longest = product.depth // (choice.step * LEAST_STEPS)
    rounds = range(1, 2 * choice.shape.resident + 1)
    if tiles > MULTIPROCESSORS and not (few(product) and tiles <= MULTIPROCESSORS * choice.shape.resident):
        return [1] if least == 1 and few(product) else []
    found = {min(r * MULTIPROCESSORS // tiles, longest) for r in rounds} | ({1} if least == 1 else set())
    return sorted(s for s in found if s >= least)


def _parts(choice: Choice, product: Product) -> float:
    """The parts of k and their way to L2."""
    shape, splits = choice.shape, choice.splits
    area = min(shape.rows, product.rows) * shape.columns * product.dots
    each = _loop(choice, product) / splits + area * PART_COST
    programs = tile_count(shape, product) * splits
    return max(_together(shape, programs, each), reading(choice, product, programs) + START)


def _split_time(choice: Choice, product: Product) -> float:
    """The parts, and the last arrivers, who read the parts of a bundle and then the bundles, one after the other."""
    shape, splits = choice.shape, choice.splits
    area = shape.rows * shape.columns * product.dots
    together = joined(splits)
    read, rounds = (splits, 1) if together == splits else (together + 1 - (-splits // together), 2)
    read_all = read * area * PART_COST + -(-read // choice.together) * HOP
    return _parts(choice, product) + read_all + area * product.work * EPILOGUE_COST + rounds * ARRIVE


def _part_time(choice: Choice, product: Product) -> float:
    """The parts, and the kernel that reads all of them, which has few programs where it must have whole rows."""
    return _parts(choice, product) + FOLLOW + _adding(choice, product, READER_WARPS)


def _joined_time(choice: Choice, product: Product) -> float:
    """The parts, and programs behind them in one grid, as many as find room at once or, each with all that registers
    hold, more: those then wait for one another, as each has the memory of the first.  Few programs, each with a row to
    itself, began no sooner than a second kernel's on an H200."""
    threads = WARP * choice.shape.warps
    programs = min(product.readers, _elements(product) // (EACH * threads))
    waves = max(1, -(-programs // MULTIPROCESSORS))
    begin = FOLLOW if product.readers < MULTIPROCESSORS else ARRIVE + (waves - 1) * HOP
    return _parts(choice, product) + begin + _adding(choice, product, choice.shape.warps)


def _adding(choice: Choice, product: Product, warps: int) -> float:
    """The time in which programs of so many warps add up all parts."""
    readers = max(1, min(product.readers, MULTIPROCESSORS))
    each = min(EACH, max(1, _elements(product) // (readers * warps * WARP)))
    draw = min(ADDING, READER * readers * warps / READER_WARPS)
    return HOP * -(-choice.splits // (WAITING // each)) + UNIT * 4.0 * choice.splits * _elements(product) / draw


def _elements(product: Product) -> int:
    return product.batch * product.rows * product.columns * product.dots
