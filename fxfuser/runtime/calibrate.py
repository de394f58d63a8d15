"""Measures the rates of one device that the segmenter's cost model uses.

Enters: a `Bench`, which runs four kinds of work and says how long each took.  Leaves: `DeviceRates`.  What a launch
takes is the slope over launches that follow one another in a CUDA graph, so no time of the host is in it; it is
subtracted from the others.
"""

from __future__ import annotations

import statistics
from typing import Callable, Protocol

import torch

from fxfuser.runtime import rate_kernels
from fxfuser.runtime.device_clock import CudaClock
from fxfuser.segmenter.cost import DeviceRates

LAUNCHES = 200
COPIED = 512 << 20  # bytes read, and as many written: several times the largest L2
COPIED_BY_ONE = 1 << 20
OPERATIONS = 1 << 34
SAMPLES = 15


class Bench(Protocol):
    """Microseconds of work on a device, medians."""

    def name(self) -> str:
        """The kind of device."""

    def processors(self) -> int:
        """Its multiprocessors."""

    def launched(self, count: int) -> float:
        """So many kernels that do nothing, one after the other."""

    def copied(self, count: int, programs: int) -> float:
        """One kernel of this many programs that reads `count` bytes and writes as many."""

    def computed(self, count: int) -> float:
        """One kernel that fills the device and does about so many multiplications and additions."""


def measure(bench: Bench) -> DeviceRates:
    """The rates of the bench's device."""
    processors = bench.processors()
    launch = max(0.1, (bench.launched(LAUNCHES) - bench.launched(1)) / (LAUNCHES - 1))

    def rate(amount: int, microseconds: float) -> float:
        return amount / max(0.1, microseconds - launch)

    return DeviceRates(
        bandwidth=rate(2 * COPIED, bench.copied(COPIED, 16 * processors)),
        launch=launch,
        processors=processors,
        program_bandwidth=rate(2 * COPIED_BY_ONE, bench.copied(COPIED_BY_ONE, 1)),
        operations=rate(OPERATIONS, bench.computed(OPERATIONS)))


class CudaBench:
    """The work on the current CUDA device.  Torch raises where there is none, or too little memory."""

    def __init__(self) -> None:
        self._clock = CudaClock(None)
        source = torch.randint(1 << 30, (COPIED // 4,), dtype=torch.int32, device=self._clock.device)
        self._source, self._target = source, torch.empty_like(source)

    def name(self) -> str:
        return self._clock.name()

    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self._clock.device).multi_processor_count)

    def launched(self, count: int) -> float:
        rate_kernels.nothing[(1,)](self._target)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                rate_kernels.nothing[(1,)](self._target)
        return self._median(graph.replay)

    def copied(self, count: int, programs: int) -> float:
        steps = count // (4 * rate_kernels.COPY_BLOCK * programs)
        return self._median(lambda: rate_kernels.copy[(programs,)](
            self._source, self._target, steps, BLOCK=rate_kernels.COPY_BLOCK, num_warps=8))

    def computed(self, count: int) -> float:
        programs, block = 16 * self.processors(), rate_kernels.COMPUTE_BLOCK
        steps = count // (rate_kernels.OPERATIONS_PER_STEP * block * programs)
        target = self._target.view(torch.float32)
        return self._median(lambda: rate_kernels.compute[(programs,)](target, steps, BLOCK=block, num_warps=8))

    def _median(self, run: Callable[[], object]) -> float:
        run()  # the first builds the kernel
        return statistics.median(self._clock.samples(run, SAMPLES))
