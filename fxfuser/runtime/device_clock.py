"""Device time of single launches, for choices that depend on it.

Enters: a function that launches something on the current stream.  Leaves: microseconds on the device, one number per
run.  Invariant: a run finds the L2 cache full of what it does not read, filled by reading, since lines that a fill had
written would be written back at the expense of what is measured.
"""

from __future__ import annotations

from typing import Protocol

import torch

from fxfuser.runtime.timing import L2_FLUSH_BYTES, Run, event


class Clock(Protocol):
    """What a search needs of a device."""

    def name(self) -> str:
        """The kind of device: what was measured on one holds for all of this name."""

    def capturing(self) -> bool:
        """Whether somebody captures the current stream: then nothing can be measured."""

    def samples(self, run: Run, count: int) -> list[float]:
        """Microseconds of each of `count` runs; raises what a run raises."""


class CudaClock:
    """One CUDA device; None is the current one."""

    def __init__(self, device: int | None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)

    def name(self) -> str:
        found = torch.cuda.get_device_properties(self.device)
        return f"{found.name}, {found.multi_processor_count} multiprocessors"

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def samples(self, run: Run, count: int) -> list[float]:
        """The reading keeps the device busy while the host enqueues the run, so no launch gap is measured."""
        with torch.cuda.device(self.device), torch.no_grad():
            flush = self._flush()
            pairs = [(event(), event()) for _ in range(count)]
            for start, end in pairs:
                if flush is not None:
                    flush.sum()
                start.record()
                run()
                end.record()
            torch.cuda.current_stream().synchronize()
            return [start.elapsed_time(end) * 1e3 for start, end in pairs]

    def _flush(self) -> torch.Tensor | None:
        try:
            return torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)
        except torch.OutOfMemoryError:  # a warm cache for all candidates is better than no measurement
            return None
