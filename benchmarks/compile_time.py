"""Where the compilation of GPT-2 spends its time, cold and warm, stage by stage.

    python -m benchmarks.compile_time                  12 layers; on a GPU with bf16 autocast, as benchmarks.nanogpt
    python -m benchmarks.compile_time --layers 2 --profile 30

Each row is a process of its own on the same caches, empty at first.  `total` is the wall time of the first forward and
backward; stages are seconds without those that they call, measured in that process; what is left over is Dynamo's and
AOTAutograd's, the first run of each kernel included.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.nanogpt import CACHES, synchronize
from examples import nanogpt as example
from fxfuser import backend, capture
from fxfuser.runtime import build_plan, stored_graphs, stored_segments

# where a stage's function is looked up when it is called, and the stage
STAGES = {(capture, "min_cut_rematerialization_partition"): "cut", (capture, "run"): "passes",
          (backend, "segment"): "segment", (backend, "lower_segments"): "lower", (backend, "build"): "plan",
          (build_plan, "build_ahead"): "kernels",
          # texts and keys of what is kept, and reading it
          (capture, "origin"): "kept", (stored_graphs.Origin, "load"): "kept",
          (backend, "entry"): "kept", (stored_segments.Entry, "load"): "kept"}


class Stages:
    """Seconds by stage, without those of the stages inside."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STAGES.values(), 0.0)
        self._inside: list[float] = []

    def watch(self) -> None:
        for (module, name), stage in STAGES.items():
            setattr(module, name, self._timed(getattr(module, name), stage))

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            self._inside.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.perf_counter() - start
                self.seconds[stage] += spent - self._inside.pop()
                if self._inside:
                    self._inside[-1] += spent
        return timed


def measure(args: argparse.Namespace) -> dict[str, float]:
    """One first forward and backward in this process."""
    device = torch.device(args.device)
    small = {} if device.type == "cuda" else {"batch": 2, "context": 64}  # so that a CPU compiles more than it runs
    size = replace(example.SIZES["gpt2"], layers=args.layers, **small)
    model = example.GPT(size).to(device)
    loss_of = torch.compile(example.loss_closure(model, device.type), backend=args.backend)
    tokens = torch.zeros(size.batch, size.context, dtype=torch.long, device=device)
    eager = example.loss_closure(model, device.type)(tokens, tokens)  # loads the libraries
    torch.autograd.grad(eager, list(model.parameters()))
    synchronize(device)
    stages, profile = Stages(), cProfile.Profile()
    stages.watch()
    if args.profile:
        profile.enable()
    start = time.perf_counter()
    torch.autograd.grad(loss_of(tokens, tokens), list(model.parameters()))
    synchronize(device)
    total = time.perf_counter() - start
    if args.profile:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(args.profile)
    return {"total": total, **stages.seconds, "rest": total - sum(stages.seconds.values())}


def in_process(args: argparse.Namespace, caches: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.compile_time", *sys.argv[1:], "--worker"]
    environment = {**os.environ, **{name: str(caches / name) for name in CACHES}}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True,
                          cwd=Path(__file__).parent.parent)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backend", default="fxfuser")
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--profile", type=int, default=0, metavar="N", help="print the N dearest functions of each process")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        print(json.dumps(measure(args)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = {name: in_process(args, Path(folder)) for name in ("cold", "warm")}
    print(tabulate([(name, *row.values()) for name, row in rows.items()], ("caches", *rows["cold"]), floatfmt=".2f"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
