"""What a kernel takes: launch, bytes over the bandwidth that its programs can draw, arithmetic.

Enters: bytes, independent points and operations of a group.  Leaves: microseconds, for comparing one
grouping with another; absolute values hold for one card only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence


@dataclass(frozen=True)
class DeviceRates:
    """How fast a device is.  The defaults were measured on an H200; the ratios are what matters."""

    bandwidth: float = 4.3e6  # bytes per microsecond, read and written, large copies
    launch: float = 2.0  # microseconds of a kernel that does nothing
    processors: int = 132
    program_bandwidth: float = 32e3  # bytes per microsecond that one program alone can draw
    operations: float = 6e7  # cheap operations (cost 1 in the op table) per microsecond


TILE_BYTES = 4096  # fewer per program than this and the launch of programs dominates
CONTIGUOUS = 32  # neighbouring elements that one program must take along the contiguous axis, or waste its sectors


def parallel_bandwidth(rates: DeviceRates, points: int, moved: int) -> float:
    """The bandwidth that `points` independent pieces of work can draw when they move this many bytes in all."""
    programs = max(1, min(points, moved // TILE_BYTES))
    return min(rates.bandwidth, programs * rates.program_bandwidth)


def kernel_time(rates: DeviceRates, moved: int, points: int, work: float) -> float:
    """Microseconds of one kernel: memory and arithmetic overlap, the launch does not."""
    memory = moved / parallel_bandwidth(rates, points, moved)
    lanes = min(1.0, max(1, points) / rates.processors)
    return rates.launch + max(memory, work / (rates.operations * lanes))


def transfer_time(rates: DeviceRates, moved: int) -> float:
    """Microseconds that moving these bytes takes at full bandwidth."""
    return moved / rates.bandwidth


# ---------------------------------------------------------------- matrix products


@dataclass(frozen=True)
class ProductSize:
    """A matrix product in numbers: `batch` times rows x depth by depth x columns.  `precise`: of fp32 in fp32."""

    batch: int
    rows: int
    columns: int
    depth: int
    halves: bool
    precise: bool = False

    @property
    def operations(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.rows * self.columns * self.depth

    @property
    def few(self) -> bool:
        """Whether memory rather than arithmetic is what it waits for."""
        return min(self.rows, self.columns) <= FEW

    @property
    def sums(self) -> int:
        """Bytes of its sums in fp32."""
        return 4 * self.batch * self.rows * self.columns


# (rows, columns, speed of such a tile): what the library offers and what Triton's powers of two leave of it
LIBRARY_TILES = ((128, 256, 1.0), (128, 192, 1.0), (128, 128, 0.95), (64, 128, 0.85), (64, 64, 0.7))
OUR_TILES = ((128, 256, 0.99), (128, 128, 0.88), (64, 128, 0.75), (64, 64, 0.6))
MOST_PARTS, SHORTEST = 8, 1024  # of the depth: how many, and the length that is worth joining
OUR_SPLIT = 0.85  # speed of our kernel where it joins parts, of the library's
# multiplications and additions in the time of a cheap operation
HALF_RATE, TF32_RATE, FLOAT_RATE = 11.7, 5.8, 0.8
PRECISE_LOSS = 0.5  # Triton's fp32 products, of the library's speed
PROLOGUE_LOSS = 0.8  # operands that are computed on their way in cannot be copied by the hardware
# Rows or columns of a product up to which it waits for memory, and the share of the bandwidth that it then draws: the
# library's 0.40 at 1x4096x4096 and 0.65 at 16x4096x14336 on an H200
FEW, LIBRARY_STREAM, OUR_STREAM = 64, 0.6, 0.85
EXPOSED = 0.6  # of the time of an epilogue's bytes, which the next tile's products do not hide


def product_rate(rates: DeviceRates, product: ProductSize) -> float:
    """Multiplications and additions per microsecond at best."""
    of_floats = FLOAT_RATE if product.precise else TF32_RATE
    return rates.operations * (HALF_RATE if product.halves else of_floats)


def _main_time(rates: DeviceRates, product: ProductSize, tiles: tuple[tuple[int, int, float], ...], best: float,
               ) -> float:
    """Microseconds of the main loops with the best of these tiles: whole waves of them or, where there are few, parts
    of the depth, which have to be joined.  `best` is the speed of those that fill the device."""
    tiled = float("inf")
    for rows, columns, speed in tiles:
        count = product.batch * -(-product.rows // rows) * -(-product.columns // columns)
        waves = -(-count // rates.processors)
        one = 2.0 * rows * columns * product.depth * rates.processors / (product_rate(rates, product) * speed)
        tiled = min(tiled, waves * one)
    whole = product.operations / (product_rate(rates, product) * best)
    parts = max(1, min(MOST_PARTS, product.depth // SHORTEST))
    return min(tiled, max(whole, tiled / parts) + rates.launch)


def library_time(rates: DeviceRates, product: ProductSize, moved: int) -> float:
    """Microseconds of the library's kernel."""
    share = LIBRARY_STREAM if product.few else 1.0
    return rates.launch + max(_main_time(rates, product, LIBRARY_TILES, 1.0), transfer_time(rates, moved) / share)


@dataclass(frozen=True)
class FusedWork:
    """What our kernel of a product does besides the product: the bytes that its main loop and its epilogue move, the
    weighted operations of both, whether its factors are computed on their way in."""

    main: int = 0
    epilogue: int = 0
    operations: float = 0.0
    prologue: bool = False


def fused_time(rates: DeviceRates, product: ProductSize, work: FusedWork) -> float:
    """Microseconds of our kernel."""
    speed = (PRECISE_LOSS if product.precise else 1.0) * (PROLOGUE_LOSS if work.prologue else 1.0)
    main = _main_time(rates, product, OUR_TILES, OUR_SPLIT) / speed
    after = EXPOSED * transfer_time(rates, work.epilogue) + work.operations / rates.operations
    return rates.launch + max(main + after, transfer_time(rates, work.main + work.epilogue))


def parts_time(rates: DeviceRates, products: Sequence[ProductSize], main: int) -> float:
    """Microseconds of a kernel that reads `main` bytes of factors and leaves sums for another."""
    arithmetic = sum(_main_time(rates, p, OUR_TILES, OUR_SPLIT) for p in products)
    share = OUR_STREAM if any(p.few for p in products) else 1.0
    moved = main + sum(p.sums for p in products)
    return rates.launch + max(arithmetic, transfer_time(rates, moved) / share)


def rows_time(rates: DeviceRates, moved: int) -> float:
    """Microseconds of a kernel that multiplies a matrix and a vector, and moves so many bytes."""
    return rates.launch + transfer_time(rates, moved) / OUR_STREAM
