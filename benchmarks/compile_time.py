"""Where the first step of GPT-2 spends its time: compilation cold and warm, and the libraries' first calls.

    python -m benchmarks.compile_time                  12 layers; on a GPU with bf16 autocast, as benchmarks.nanogpt
    python -m benchmarks.compile_time --layers 2 --profile 30
    python -m benchmarks.compile_time --rows warm,alone --runs 3 --caches DIR     again, on caches that are kept

Each row is a process of its own, in which nothing ran on the device before; `total` is the wall time of its first
forward and backward.

    eager   nothing is compiled: what libraries need at their first call
    cold    the caches are empty
    warm    the caches hold what a process before has left
    alone   the same, and no library is called while the graph is traced (fxfuser/runtime/warm_up.py)

Stages are seconds without those of the stages that they call: `dynamo` traces Python, `aot` traces what that found into
ATen, `cut` to `kept` are fxfuser's own, `wait` is for libraries that are not ready when all is compiled, `plan runs`
allocates and launches, `loads` puts kernels onto the device, and `libraries` are the plan's calls of ATen.  Below the
table stand those whose first call was dear.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from benchmarks.nanogpt import CACHES, synchronize
from examples import nanogpt as example
from fxfuser import backend, capture
from fxfuser.runtime import build_plan, launcher, plan, stored_graphs, stored_segments, warm_up

ROWS = ("eager", "cold", "warm", "alone")
DEAR = 0.01  # seconds of a first call that is listed
PLAN, LIBRARIES = "plan runs", "libraries"

# where a stage's function is looked up when it is called, and the stage
STAGES = {(backend, "capture"): "aot", (capture, "min_cut_rematerialization_partition"): "cut",
          (capture, "run"): "passes", (backend, "segment"): "segment", (backend, "lower_segments"): "lower",
          (backend, "build"): "plan", (plan.Plan, "compile"): "plan", (build_plan, "build_ahead"): "kernels",
          # texts and keys of what is kept, and reading it
          (capture, "origin"): "kept", (stored_graphs.Origin, "load"): "kept",
          (backend, "entry"): "kept", (stored_segments.Entry, "load"): "kept",
          (warm_up.threading.Thread, "join"): "wait", (launcher.Cuda, "_load"): "loads"}


class Stages:
    """Seconds by stage, without those of the stages inside.  `first` has those of each ATen op's first call."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("dynamo", *STAGES.values(), PLAN, LIBRARIES), 0.0)
        self.first: dict[str, float] = {}
        self._inside: list[tuple[str, list[float]]] = []

    def watch(self) -> None:
        for (owner, name), stage in STAGES.items():
            setattr(owner, name, self._timed(getattr(owner, name), stage))
        compiled, called = plan.Plan.compile, torch._ops.OpOverload.__call__

        def compile_timed(one: plan.Plan) -> plan.BoxedCallable:
            run = self._timed(compiled(one), PLAN)
            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        def call_timed(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not self._inside or self._inside[-1][0] != PLAN:
                return called(op, *args, **kwargs)
            with self.stage(LIBRARIES) as spent:
                result = called(op, *args, **kwargs)
            self.first.setdefault(str(op), spent[0])
            return result

        plan.Plan.compile = compile_timed  # type: ignore[method-assign]
        torch._ops.OpOverload.__call__ = call_timed  # type: ignore[method-assign]

    @contextmanager
    def stage(self, name: str) -> Iterator[list[float]]:
        """Counts the block; its seconds are in the list afterwards."""
        start, inner, whole = time.perf_counter(), [0.0], [0.0]
        self._inside.append((name, inner))
        try:
            yield whole
        finally:
            self._inside.pop()
            whole[0] = time.perf_counter() - start
            self.seconds[name] += whole[0] - inner[0]
            if self._inside:
                self._inside[-1][1][0] += whole[0]

    def _timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.stage(stage):
                return function(*args, **kwargs)
        return timed


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One first forward and backward in this process."""
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    small = {} if device.type == "cuda" else {"batch": 2, "context": 64}  # so that a CPU compiles more than it runs
    size = replace(example.SIZES["gpt2"], layers=args.layers, **small)
    model = example.GPT(size).to(device)
    loss_of = example.loss_closure(model, device.type)
    parameters = list(model.parameters())
    tokens = torch.zeros(size.batch, size.context, dtype=torch.long, device=device)
    synchronize(device)
    if args.worker == "eager":
        start = time.perf_counter()
        torch.autograd.grad(loss_of(tokens, tokens), parameters)
        synchronize(device)
        return {"total": time.perf_counter() - start}
    if args.worker == "alone":
        capture.libraries = lambda module: nullcontext()  # type: ignore[assignment]
    loss_of = torch.compile(loss_of, backend=args.backend)
    stages, profile = Stages(), cProfile.Profile()
    stages.watch()
    if args.profile:
        profile.enable()
    start = time.perf_counter()
    with stages.stage("dynamo"):
        loss = loss_of(tokens, tokens)
    torch.autograd.grad(loss, parameters)
    synchronize(device)
    total = time.perf_counter() - start
    if args.profile:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(args.profile)
    return {"total": total, **stages.seconds, "rest": total - sum(stages.seconds.values()), "first": stages.first}


def in_process(row: str, caches: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.compile_time", *sys.argv[1:], "--worker", row]
    environment = {**os.environ, **{name: str(caches / name) for name in CACHES}}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True,
                          cwd=Path(__file__).parent.parent)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"row": row, **found}


def table(rows: list[dict[str, Any]]) -> str:
    """One line per process, then the dear first calls of each."""
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "first"))
    lines = [[row.get(name) for name in columns] for row in rows]
    text = [tabulate(lines, columns, floatfmt=".2f")]
    for row in rows:
        dear = sorted(((s, op) for op, s in row.get("first", {}).items() if s >= DEAR), reverse=True)
        if dear:
            text.append(f"{row['row']}: " + ", ".join(f"{op} {s:.3f}" for s, op in dear))
    return "\n".join(text)


def rows_of(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen).difference(ROWS):
        raise argparse.ArgumentTypeError(f"unknown row {', '.join(unknown)}; known: {', '.join(ROWS)}")
    return chosen


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backend", default="fxfuser")
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--rows", type=rows_of, default=list(ROWS), help=f"separated by commas, of: {', '.join(ROWS)}")
    p.add_argument("--runs", type=int, default=1, help="of each row but cold")
    p.add_argument("--caches", type=Path, help="a folder that is kept, instead of one that is removed")
    p.add_argument("--json", type=Path, help="writes the rows there")
    p.add_argument("--profile", type=int, default=0, metavar="N", help="print the N dearest functions of each process")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        print(json.dumps(measure(args)))
        return 0
    with nullcontext(args.caches) if args.caches else tempfile.TemporaryDirectory() as folder:
        rows = [in_process(row, Path(folder).absolute())
                for row in args.rows for _ in range(1 if row == "cold" else args.runs)]
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
