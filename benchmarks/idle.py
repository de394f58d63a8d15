"""Kernels whose few programs leave most of a device idle, found on a machine without one.

    python -m benchmarks.idle                                 a step of every model, at full sizes
    python -m benchmarks.idle --models qwen3 --kinds training

A model of one layer is compiled for the interpreter at the sizes of `benchmarks.models`, and its plans run: products as
ATen calls, while kernels are counted and not interpreted, so that a step takes seconds.  Each kernel is listed that has
fewer programs than `--programs` and reads and writes more than `--megabytes`.  (The gradient of the weights of Qwen3's
norms of heads was such a one, a single program: 42.6 of the 60.5 ms of kernels in a step of 8 layers on an H200.)
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import transformer_models
from benchmarks.models import some_of
from fxfuser.runtime.interpret import Interpreted
from fxfuser.runtime.launcher import grid_function

MULTIPROCESSORS = 132  # of an H200
MB = 1 << 20


@dataclass(frozen=True)
class Launch:
    """A kernel's launch: how many programs it has, and the bytes of the tensors that it was given."""

    kernel: str
    programs: int
    bytes: int


@contextmanager
def counted() -> Iterator[list[Launch]]:
    """Inside, kernels for the interpreter are not run but listed; their results are zeros."""
    launches: list[Launch] = []

    def run(self: Interpreted, arguments: Sequence[Any], debug: bool = True) -> None:
        kernel, reads = self.kernel, len(self.kernel.inputs)
        tensors = arguments[:reads + len(kernel.outputs)]
        sizes = [int(n) for n in arguments[len(tensors):]]
        distinct = {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors}
        programs = grid_function(kernel, MULTIPROCESSORS)(*sizes)[0]
        launches.append(Launch(kernel.name, programs, sum(distinct.values())))
        for tensor in tensors[reads:]:
            if not any(t.data_ptr() == tensor.data_ptr() for t in tensors[:reads]):  # what is in place may be an input
                tensor.zero_()

    with mock.patch.object(Interpreted, "run", run):
        yield launches


def idle(launches: Sequence[Launch], programs: int, least: int) -> list[tuple[Launch, int]]:
    """The launches with fewer programs and more bytes than these, and how often each; most bytes a program first."""
    found = [x for x in dict.fromkeys(launches) if 0 < x.programs < programs and x.bytes > least]
    return [(x, launches.count(x)) for x in sorted(found, key=lambda x: -x.bytes / x.programs)]


def compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(fn, backend="fxfuser", dynamic=False, options={"executor": "interpret", "gemm": "library"})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    p.add_argument("--models", default=transformer_models.NAMES, type=some_of(transformer_models.NAMES),
                   help=f"of: {', '.join(transformer_models.NAMES)}")
    p.add_argument("--kinds", default=("training", "inference"), type=some_of(transformer_models.KINDS),
                   help=f"of: {', '.join(transformer_models.KINDS)}")
    p.add_argument("--size", choices=transformer_models.SCALES, default="full")
    p.add_argument("--programs", type=int, default=MULTIPROCESSORS // 2, help="fewer leave the device idle")
    p.add_argument("--megabytes", type=float, default=4.0, help="less is not worth a thought")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args, rows = parse(argv), list[tuple[Any, ...]]()
    scale = replace(transformer_models.SCALES[args.size], layers=1)
    for name, kind in itertools.product(args.models, args.kinds):
        if not transformer_models.supported(name, kind):
            continue
        torch.compiler.reset()
        work = transformer_models.workload(name, kind, scale, torch.device("cpu"))
        with counted() as launches:
            work.run(compiled(work.fn))
        found = idle(launches, args.programs, int(args.megabytes * MB))
        rows += [(f"{name} {kind}", x.kernel, x.programs, x.bytes / MB, n) for x, n in found]
        print(f"{name} {kind}: {len(launches)} launches, {len(found)} of kernels with few programs", flush=True)
    if rows:
        print(tabulate(rows, ("step", "kernel", "programs", "MB", "launches"), floatfmt=".1f"))
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main())
