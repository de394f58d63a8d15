"""All kernels of a graph, built before the first launch and while later segments are still lowered.

Enters: kernels and the sizes of a likely first call, one by one (`begin`), and at last those that a plan binds
(`build_ahead`).  Leaves: nothing; each kernel has been supplied with its binary, from the disk cache or from the
workers.  What could not be supplied is built at its first launch, as is every other variant.  Invariant: no error
leaves.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple

from tqdm import tqdm

from fxfuser.runtime import binary, workers
from fxfuser.runtime.assemble import Recipe
from fxfuser.runtime.binary import Binary
from fxfuser.runtime.build import Variant
from fxfuser.runtime.launcher import Cuda

log = logging.getLogger("fxfuser")

PATIENCE = 3.0  # seconds without a word to the user


class FirstCall(NamedTuple):
    """A kernel, and what it is likely to be called with; all pointers are aligned, unless they are given."""

    kernel: Cuda
    sizes: tuple[int, ...]
    pointers: tuple[int, ...] | None = None



@dataclass(frozen=True)
class Need:
    """One variant of one kernel that a plan is going to launch."""

    kernel: Cuda
    variant: Variant
    recipe: Recipe

    def supply(self, made: Binary | Exception) -> None:
        self.kernel.supply(self.variant, made)


@dataclass
class Builds:
    """What is needed and not yet built.  `waiting` are too few so far to be worth the start of a worker."""

    waiting: dict[tuple[Cuda, Variant], Need] = field(default_factory=dict)
    started: dict[tuple[Cuda, Variant], tuple[Need, Future[Binary | None]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, kernel: Cuda, sizes: tuple[int, ...], pointers: tuple[int, ...] | None = None) -> None:
        """Takes the kernel from the disk cache, or sees that it is built."""
        variant = kernel.likely(sizes, pointers)
        with self.lock:
            if variant is None or (kernel, variant) in self.waiting or (kernel, variant) in self.started:
                return
            need = Need(kernel, variant, kernel.recipe(variant))
            found = binary.find(need.recipe, kernel.store)
            if found is not None:
                need.supply(found)
                return
            self.waiting[kernel, variant] = need
            if workers.worth_it(len(self.waiting) + len(self.started)):
                futures = workers.pool().submit([n.recipe for n in self.waiting.values()])
                self.started.update({k: (n, f) for (k, n), f in zip(self.waiting.items(), futures)})
                self.waiting.clear()

    def finish(self, kernels: set[Cuda]) -> None:
        """Waits for what was begun for these kernels and supplies it."""
        with self.lock:
            self.waiting = {k: n for k, n in self.waiting.items() if k[0] not in kernels}
            mine = {k: pair for k, pair in self.started.items() if k[0] in kernels}
        futures = {future: need for need, future in mine.values()}
        # disable=None: only where stderr is a terminal
        with tqdm(total=len(futures), desc="fxfuser: kernels", delay=PATIENCE, leave=False, disable=None) as bar:
            for future in as_completed(futures):
                _supply(futures[future], future)
                bar.update()
        with self.lock:
            self.started = {k: pair for k, pair in self.started.items() if k not in mine}


def begin(kernel: Cuda, sizes: tuple[int, ...], pointers: tuple[int, ...] | None = None) -> None:
    """The kernel will be called with sizes like these; returns at once."""
    try:
        _builds.begin(kernel, sizes, pointers)
    except Exception:  # the first launch meets the same fault, where it has a segment to be told of
        log.info("kernel %s is not built ahead", kernel.kernel.name, exc_info=True)


def build_ahead(first_calls: Iterable[FirstCall]) -> None:
    """Supplies the kernels; returns when all that the workers can do for them is done."""
    first_calls = list(first_calls)
    for call in first_calls:
        begin(*call)
    _builds.finish({call.kernel for call in first_calls})


def _supply(need: Need, future: Future[Binary | None]) -> None:
    error = future.exception()
    made = None if error is not None else future.result()
    if isinstance(error, Exception):
        need.supply(error)
    elif made is not None:
        need.supply(made)
        binary.keep(need.recipe, made, need.kernel.store)


def _after_fork() -> None:
    """A forked child has no threads that would answer what was begun."""
    global _builds
    _builds = Builds()


_builds = Builds()
os.register_at_fork(after_in_child=_after_fork)
