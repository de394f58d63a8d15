"""Arrival counters: device memory that is zero before and after every launch that uses it.

Enters: a stream, or the fact that the current one is being captured, and how many bytes.  Leaves: memory that no other
launch uses at the same time.  Invariants: what launches on one stream share, only that stream's order lets them share
(streams are told apart by their handles: those of torch are never destroyed);
a captured launch has memory of its own, since its graph may be replayed on any stream, and it is not given back, since
nobody tells when a graph is gone; nothing is cleared at a launch, except in a capture that finds the reserve used up.
"""

from __future__ import annotations

import threading
from functools import cache

import torch

ALIGNMENT = 128
LEAST = 1 << 14  # bytes of one stream
RESERVE = 1 << 20  # bytes that wait for captures, in which nothing could be cleared but at each replay


class Counters:
    """Zeros on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._streams: dict[int, torch.Tensor] = {}
        self._reserve: torch.Tensor | None = None
        self._used = 0

    def on_stream(self, stream: int, size: int) -> torch.Tensor:
        """At least `size` bytes for launches on this stream, which must be the current one and not be captured."""
        with self._lock:
            found = self._streams.get(stream)
            if found is None or found.numel() < size:
                # what others hold of a smaller one stays valid
                found = self._streams[stream] = self._zeros(max(LEAST, 1 << (size - 1).bit_length()))
            if self._reserve is None or self._reserve.numel() - self._used < RESERVE // 2:
                reserve = self._zeros(RESERVE)
                _synchronize(self.device)  # a replay may come on any stream
                self._reserve, self._used = reserve, 0
            return found

    def captured(self, size: int) -> torch.Tensor:
        """`size` bytes for one launch that the current stream's capture records."""
        with self._lock:
            start = self._used
            if self._reserve is not None and start + size <= self._reserve.numel():
                self._used = start + -(-size // ALIGNMENT) * ALIGNMENT
                return self._reserve[start:start + size]
        return self._zeros(size)  # the graph's own memory, and its clearing a part of the graph

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


@cache
def counters_on(device: torch.device) -> Counters:
    """The process's counters on a device."""
    return Counters(device)
