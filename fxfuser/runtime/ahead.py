"""All kernels of a graph, built before the first launch.

Enters: the kernels that a plan binds and the sizes of a likely first call.  Leaves: nothing; each kernel has been
supplied with its binary, from the disk cache or from the workers.  What could not be supplied is built at its first
launch, as is every other variant.  Invariant: no error leaves.
"""

from __future__ import annotations

import logging
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Iterable

from tqdm import tqdm

from fxfuser.runtime import binary, workers
from fxfuser.runtime.assemble import Recipe
from fxfuser.runtime.binary import Binary
from fxfuser.runtime.build import Variant
from fxfuser.runtime.launcher import Cuda

log = logging.getLogger("fxfuser")

PATIENCE = 3.0  # seconds without a word to the user


@dataclass(frozen=True)
class Need:
    """One variant of one kernel that a plan is going to launch."""

    kernel: Cuda
    variant: Variant
    recipe: Recipe

    def supply(self, made: Binary | Exception) -> None:
        self.kernel.supply(self.variant, made)


def needs(first_calls: Iterable[tuple[Cuda, tuple[int, ...]]]) -> list[Need]:
    """What calls of these kernels with these sizes need and nobody has built, each once."""
    found = {}
    for kernel, sizes in first_calls:
        variant = kernel.likely(sizes)
        if variant is not None:
            found[kernel, variant] = Need(kernel, variant, kernel.recipe(variant))
    return list(found.values())


def build_ahead(first_calls: Iterable[tuple[Cuda, tuple[int, ...]]]) -> None:
    """Supplies the kernels; returns when all that the workers can do is done."""
    try:
        missing = [need for need in needs(first_calls) if not _from_cache(need)]
        if workers.worth_it(len(missing)):
            _build(missing)
    except Exception:  # the first launch meets the same fault, where it has a segment to be told of
        log.info("kernels are not built ahead", exc_info=True)


def _from_cache(need: Need) -> bool:
    found = binary.find(need.recipe, need.kernel.store)
    if found is not None:
        need.supply(found)
    return found is not None


def _build(missing: list[Need]) -> None:
    futures = dict(zip(workers.pool().submit([need.recipe for need in missing]), missing))
    # disable=None: only where stderr is a terminal
    with tqdm(total=len(futures), desc="fxfuser: kernels", delay=PATIENCE, leave=False, disable=None) as bar:
        for future in as_completed(futures):
            need = futures[future]
            bar.update()
            error = future.exception()
            made = None if error is not None else future.result()
            if isinstance(error, Exception):
                need.supply(error)
            elif made is not None:
                need.supply(made)
                binary.keep(need.recipe, made, need.kernel.store)
