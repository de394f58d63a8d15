"""Tiles of products of few rows or columns whose warps each take a slice of every step of k.

    columns   8: 128 programs of 1024 columns, each with all of k; a step of 512 of k is 4 slices of 128

With tiles as small as one warp's, a product of few rows has enough programs without a part of k for each: nothing has
to be left in memory, counted and added up.  The warps of a program have nothing to share but k (CUTLASS: sliced-K).
Each has a sum of its own, and the sums meet once, in shared memory, behind the loop.  Written by hand, on an H200, in
us, in a row of such products with weights of their own, beside cuBLAS and this package without slices: 8 x 1024 x 1024
2.7, 4.2 and 3.3; 8 x 256 x 1024 2.6, 4.2, 4.4; 4 x 4096 x 4096 11.0, 12.9, 12.8; 16 x 4096 x 4096 11.7, 12.9, 12.9.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Iterator

from fxfuser.domain.roles import next_power_of_2
from fxfuser.lowering.gemm.tiles import (
    EPILOGUE_COST,
    LEAST,
    MOST,
    RESERVED,
    START,
    UNIT,
    Choice,
    Product,
    Shape,
    few,
    reading,
    tile_count,
)
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.products import WARP
from fxfuser.lowering.schedule import SLICES
from fxfuser.lowering.tiles import MULTIPROCESSORS

WARPS = 4  # and slices: eight were slower at every size
NARROW = (8, 16, 32, 64)  # of a tile, in the dimension that is not few; fewer are those of no instruction
SLICE = (64, 128, 256)  # of k, in bytes of which lines of memory are a part
MOST_SUMS = 64  # fp32 per thread
DEEPEST = 6  # stages
RESIDENT = 4  # programs of a multiprocessor, at most
MEET = 0.3 * UNIT  # the slices' sums
LATER = 0.2  # of its start that a program takes where others have begun before
EFFICIENCY = 0.3  # of the tensor cores, by the instructions that one warp has for itself


def sliced_tiles(product: Product) -> tuple[Tile, ...]:
    """The default tile, then the candidates, of a kernel whose steps of k are sliced; none where memory is not what the
    product waits for."""
    found = sorted(_choices(product), key=lambda c: _time(c, product))
    return tuple(dict.fromkeys(map(_tile, found[:MOST])))


def sliced_estimate(product: Product) -> float:
    """The time of the best of them, comparable with `estimate`."""
    return min((_time(c, product) for c in _choices(product)), default=math.inf)


def _choices(product: Product) -> Iterator[Choice]:
    if not few(product) or product.itemsize != 2:  # fp32 products have no warp's tile on tensor cores
        return
    steps = [WARPS * n for n in SLICE if 2 * WARPS * n <= product.depth]
    # with masks, or from rows that are not aligned, a load of many elements takes too many registers
    steps = [n for n in steps if product.depth % n == 0] or steps[:1]
    for rows, columns in _tiles(product):
        if rows * columns * product.dots > MOST_SUMS * WARP:  # each warp has a sum of the whole tile
            continue
        programs = -(-tile_count(Shape(rows, columns, WARPS, EFFICIENCY), product) // MULTIPROCESSORS)
        for resident in {1, min(RESIDENT, max(2, programs))}:
            for step in steps:
                found = _deepest(Shape(rows, columns, WARPS, EFFICIENCY, resident), step, product)
                yield from [] if found is None else [found]


def _tiles(product: Product) -> Iterator[tuple[int, int]]:
    """Rows and columns: all of the few, and some of the others."""
    rows, columns = (next_power_of_2(n) for n in (product.rows, product.columns))
    if rows <= columns:
        yield from ((max(rows, LEAST), n) for n in NARROW if n <= columns)
    else:
        yield from ((n, max(columns, NARROW[0])) for n in NARROW if LEAST <= n <= rows)


def _deepest(shape: Shape, step: int, product: Product) -> Choice | None:
    """The deepest pipeline that leaves room for so many programs of a multiprocessor."""
    each = (shape.rows + shape.columns * product.dots) * step * product.itemsize
    room = product.shared // shape.resident - RESERVED - shape.rows * shape.columns * product.staged
    stages = min(DEEPEST, room // each, -(-product.depth // step) + 1)
    return Choice(shape, step, stages, shape.columns) if stages >= 2 else None


def _time(choice: Choice, product: Product) -> float:
    shape, programs = choice.shape, tile_count(choice.shape, product)
    area = shape.rows * shape.columns * product.dots
    later = -(-programs // (MULTIPROCESSORS * shape.resident)) - 1  # rounds, whose start is beside another's end
    loop = -(-programs // MULTIPROCESSORS) * area * product.depth / shape.efficiency
    begin = (1 + LATER * later) * START
    return max(loop, reading(choice, product, programs)) + begin + MEET + area * product.work * EPILOGUE_COST


def _tile(choice: Choice) -> Tile:
    tile = choice.tile(False)
    blocks = tuple(b for b in tile.blocks if b[0] != "RESIDENT")
    return replace(tile, blocks=(*blocks, (SLICES, WARPS)))
