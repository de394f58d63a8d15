"""Which tiles a matrix product gets: a pure function of its sizes and of what stands around it.

The first tile is the default; those that follow are worth measuring, the most promising first.  Times are wave
arithmetic: how many rounds of tiles the multiprocessors take, times the tile's area over how well it keeps the tensor
cores busy.  The efficiencies are those of bf16 on an H200, by facts that were measured with prototypes: 128 x 256
reaches the library's speed, smaller tiles trail.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.domain.roles import next_power_of_2
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.tiles import MULTIPROCESSORS

SHARED = 227 * 1024  # bytes of shared memory that one program can have on Hopper
SHARED_AMPERE = 163 * 1024
MOST = 8  # tiles, the default included
LEAST = 16  # rows or columns of a dot
DEEPEST = 4  # stages of the main loop's pipeline
GROUP = 8  # rows of tiles that are walked together, so that they share columns in L2

LEAST_STEPS = 4  # of the main loop, for a part to be worth a program
# what it costs to move an element of a part through L2 and back, in multiplications of one element by a step of k: one
# multiprocessor makes 4096 of those a clock and moves 32 bytes
PART_COST = 4096 * 4 / 32

Shape = tuple[int, int, int, float]

# (rows, columns, warps, efficiency)
_SHAPES = ((128, 256, 8, 1.0), (256, 128, 8, 0.95), (128, 128, 8, 0.88), (128, 128, 4, 0.86), (64, 256, 4, 0.82),
           (256, 64, 4, 0.8), (128, 64, 4, 0.75), (64, 128, 4, 0.75), (64, 64, 4, 0.6), (32, 64, 4, 0.3),
           (64, 32, 4, 0.3), (16, 64, 4, 0.15), (16, 128, 4, 0.2), (16, 256, 4, 0.22), (64, 16, 4, 0.15),
           (32, 32, 4, 0.15), (16, 32, 2, 0.1), (32, 16, 2, 0.1), (16, 16, 1, 0.05))


@dataclass(frozen=True)
class Product:
    """Sizes of a product, by hints where they are dynamic; `staged` bytes per element of the tile that pass through
    shared memory beside the factors, `dots` accumulators of each tile."""

    batch: int
    rows: int
    columns: int
    depth: int
    itemsize: int
    dots: int = 1
    staged: int = 2


def gemm_tiles(product: Product) -> tuple[Tile, ...]:
    """The default tile of a persistent kernel, then the candidates."""
    ranked = sorted((s for s in _SHAPES if _fits(s, product)), key=lambda s: _time(s, product))
    return tuple(dict.fromkeys(_tile(s, product) for s in ranked[:MOST]))


def split_tiles(product: Product) -> tuple[Tile, ...]:
    """The same of a kernel that splits k; none where whole tiles fill the device, or k is too short to split."""
    ranked: list[tuple[float, Shape, int]] = []
    for shape in _SHAPES:
        if _fits(shape, product):
            ranked += [(_split_time(shape, splits, product), shape, splits) for splits in _splits(shape, product)]
    ranked.sort(key=lambda r: r[0])
    return tuple(dict.fromkeys(_tile(shape, product, splits) for _, shape, splits in ranked[:MOST]))


def _splits(shape: Shape, product: Product) -> list[int]:
    """Numbers of parts that fill whole rounds of the multiprocessors, or nearly."""
    tiles = _tiles(shape, product)
    if tiles > MULTIPROCESSORS:
        return []
    longest = product.depth // (_depth(product) * LEAST_STEPS)
    return sorted({s for rounds in (1, 2, 3) if 2 <= (s := rounds * MULTIPROCESSORS // tiles) <= longest})


def _split_time(shape: Shape, splits: int, product: Product) -> float:
    """Rounds of shorter tiles, and the parts' way through L2: in units of one step of k over one element."""
    rows, columns, _, efficiency = shape
    rounds = -(-_tiles(shape, product) * splits // MULTIPROCESSORS)
    multiply = rounds * rows * columns * product.depth / splits / efficiency
    moved = 2 * splits * product.batch * product.rows * product.columns * product.dots
    return multiply + moved * PART_COST / MULTIPROCESSORS


def _fits(shape: Shape, product: Product) -> bool:
    rows, columns, warps, _ = shape
    if rows > max(LEAST, next_power_of_2(product.rows)) or columns > max(LEAST, next_power_of_2(product.columns)):
        return False
    if rows * columns * product.dots > 128 * 256:
        return False  # accumulators take half of the registers as it is
    return _stages(rows, columns, product) >= 1


def _depth(product: Product) -> int:
    return max(LEAST, min(128 // product.itemsize, next_power_of_2(product.depth)))


def _stages(rows: int, columns: int, product: Product) -> int:
    left = SHARED - rows * columns * product.staged
    return min(DEEPEST, left // ((rows + columns * product.dots) * _depth(product) * product.itemsize))


def _tiles(shape: Shape, product: Product) -> int:
    rows, columns, _, _ = shape
    return product.batch * -(-product.rows // rows) * -(-product.columns // columns)


def _time(shape: Shape, product: Product) -> float:
    rows, columns, _, efficiency = shape
    return -(-_tiles(shape, product) // MULTIPROCESSORS) * rows * columns / efficiency


def _tile(shape: Shape, product: Product, splits: int = 0) -> Tile:
    rows, columns, warps, _ = shape
    blocks = (("MBLOCK", rows), ("NBLOCK", columns), ("KBLOCK", _depth(product)), ("GROUP", GROUP))
    return Tile((*blocks, ("SPLITS", splits)) if splits else blocks, warps, _stages(rows, columns, product))
