"""Tile search: a kernel's tiles as routes of a search.

Enters: a kernel with its candidates, under max-autotune.  Leaves: its `Search`.  The default tile wins unless another
is clearly faster.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Sequence

from fxfuser.lowering.kernel import Kernel
from fxfuser.runtime.ahead import FirstCall
from fxfuser.runtime.build import Options, language_lock
from fxfuser.runtime.device_clock import Clock, CudaClock
from fxfuser.runtime.launcher import Cuda, cuda
from fxfuser.runtime.search import MARGIN, Route, Search, Subject
from fxfuser.runtime.store import Store, store


def best(times: Sequence[float | None], scratch: Sequence[int] = ()) -> int:
    """The position that wins: the first, unless it failed or another is faster by MARGIN; kernels have no `scratch`."""
    known = [(t, i) for i, t in enumerate(times) if t is not None]
    if not known:
        return 0
    fastest, winner = min(known)
    return 0 if times[0] is not None and fastest >= times[0] * (1 - MARGIN) else winner


def search(kernels: Sequence[Cuda], clock: Clock, records: Store | None = None) -> Search:
    """Among the same kernel with several tiles, the default first."""
    default = kernels[0]
    kernel = default.kernel
    subject = Subject(
        kernel.name, len(kernel.inputs), len(kernel.outputs), kernel.sizes, lambda *sizes: default.shape(sizes)[0] == 0,
        json.dumps([described(kernel), asdict(default.options)]))
    return Search(subject, [_route(k) for k in kernels], best, clock, records)


def described(kernel: Kernel) -> tuple[str, ...]:
    """What a kernel's times depend on beside its tile."""
    return (kernel.source, kernel.grid, str(kernel.dependence), *map(str, (*kernel.inputs, *kernel.outputs)))


def _route(kernel: Cuda) -> Route:
    return Route(str(kernel.kernel.tile), kernel.bind, lambda sizes, pointers: [FirstCall(kernel, sizes, pointers)])


@cache
def _tuned(kernel: Kernel, device: int | None, options: Options, cache_dir: Path) -> Search:
    kernels = store(cache_dir, "kernels")
    found = [cuda(replace(kernel, tile=tile), device, options, kernels) for tile in (kernel.tile, *kernel.candidates)]
    return search(found, CudaClock(device), store(cache_dir, "tiles"))


def tuned(kernel: Kernel, device: int | None, options: Options, cache_dir: Path) -> Search:
    """The kernel with all its tiles on this device, one for all segments that have it."""
    with language_lock:
        return _tuned(replace(kernel, notes=()), device, options, cache_dir)
