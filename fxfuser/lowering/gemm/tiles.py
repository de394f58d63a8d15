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
    """The default tile, then the candidates."""
    ranked = sorted((s for s in _SHAPES if _fits(s, product)), key=lambda s: _time(s, product))
    found = [_tile(s, product) for s in ranked[:MOST]]
    return tuple(dict.fromkeys(found))


def _fits(shape: tuple[int, int, int, float], product: Product) -> bool:
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


def _time(shape: tuple[int, int, int, float], product: Product) -> float:
    rows, columns, _, efficiency = shape
    tiles = product.batch * -(-product.rows // rows) * -(-product.columns // columns)
    return -(-tiles // MULTIPROCESSORS) * rows * columns / efficiency


def _tile(shape: tuple[int, int, int, float], product: Product) -> Tile:
    rows, columns, warps, _ = shape
    stages = min(3, _stages(rows, columns, product)) if rows * columns == 128 * 256 else _stages(rows, columns, product)
    return Tile((("MBLOCK", rows), ("NBLOCK", columns), ("KBLOCK", _depth(product)), ("GROUP", GROUP)), warps, stages)
