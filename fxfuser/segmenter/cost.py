"""What a kernel takes: launch, bytes over the bandwidth that its programs can draw, arithmetic.

Enters: bytes, independent points and operations of a group.  Leaves: microseconds, for comparing one
grouping with another; absolute values hold for one card only.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    lanes = min(1.0, points / rates.processors)
    return rates.launch + max(memory, work / (rates.operations * lanes))


def transfer_time(rates: DeviceRates, moved: int) -> float:
    """Microseconds that moving these bytes takes at full bandwidth."""
    return moved / rates.bandwidth
