"""Models of transformers beside eager and Inductor: training, inference and decoding.

    python -m benchmarks.models                                      every model, every kind of work
    python -m benchmarks.models --models llama --kinds decoding --backends inductor-graphs,fxfuser-graphs --profile
    python -m benchmarks.models --size tiny --device cpu

Each backend compiles each model in a process of its own with empty caches, as many at once as the machine has cores
for: `compile_s` is that of a busy machine.  Once all have compiled they measure one after the other while the others
wait.  Step times are between events on the device, one after every step, and hold the launch gaps that a user has; in
decoding a step is one token of every sequence.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks import backends, record, suite, transformer_models
from benchmarks.nanogpt import CACHES, STEP_SECONDS, Row, concluded, line, seconds_of, sites, step_clock, table
from fxfuser.runtime import timing

CORES_PER_PROCESS = 2  # of those that compile beside each other
COMPILING = 0.6  # of the time, at most
READY = "ready"  # what a worker writes once it has compiled
T = TypeVar("T")

# ---------------------------------------------------------------- in a process of its own


def prepared(work: transformer_models.Workload, args: argparse.Namespace) -> Callable[[], Row]:
    """Compiles and checks; leaves what measures."""
    device, exact, eager = torch.device(args.device), work.exact(), work.run(work.fn)
    eager_error = transformer_models.error(eager, exact)
    del eager
    torch.compiler.reset()
    fn = backends.BACKENDS[args.worker](work.fn)
    compile_s = round(seconds_of(lambda: work.run(fn), device), 3)
    # a call of its own: kept results would count as held memory
    verdict = transformer_models.verdict(transformer_models.error(work.run(fn), exact), eager_error)

    def measure() -> Row:
        row: Row = {"compile_s": compile_s, **verdict}
        row["step"] = step_clock(lambda: work.run(fn), device, args.step_seconds / 2).to_json()
        row |= timing.measure([lambda: work.run(fn)], device, args.step_seconds / 8).to_json()
        return row | sites(lambda: work.run(fn), args)

    return measure


def worker(args: argparse.Namespace) -> int:
    """Compiles all cases of one backend, says so, waits for its turn, and writes a row for each to `args.json`."""
    device, rows = torch.device(args.device), dict[str, Row]()
    deadline = time.monotonic() + args.seconds
    scale = transformer_models.SCALES[args.size]

    def attempt(case: str, seconds: float, work: Callable[[], T]) -> T | None:
        head: Row = {"backend": args.worker, "case": case}
        try:
            with suite.limit(seconds):
                return work()
        except suite.OutOfTime as error:
            rows[case] = {**head, "status": "out of time", "error": str(error)}
        except Exception as error:  # a row says so; what follows is measured all the same
            rows[case] = {**head, "status": "failed", "error": f"{type(error).__name__}: {error}"[:2000],
                          "traceback": traceback.format_exc()[-3000:]}
        return None

    with timing.stream(device):
        ready: dict[str, Callable[[], Row]] = {}
        for name, kind in itertools.product(args.models, args.kinds):
            if not transformer_models.supported(name, kind):
                continue
            case = f"{name} {kind}"
            left = COMPILING * args.seconds - (args.seconds - (deadline - time.monotonic()))
            found = attempt(case, left, lambda name=name, kind=kind: prepared(
                transformer_models.workload(name, kind, scale, device), args))
            if found is not None:
                ready[case] = found
        print(READY, flush=True)
        sys.stdin.readline()
        for case, measure in ready.items():
            row = attempt(case, deadline - time.monotonic(), measure)
            if row is not None:
                rows[case] = {"backend": args.worker, "case": case, "status": "ok", **row}
            args.json.write_text(json.dumps(list(rows.values())))
    args.json.write_text(json.dumps(list(rows.values())))
    return 0


# ---------------------------------------------------------------- in the first process


@dataclass
class Job:
    """A process that compiles one model with one backend, and measures when told to."""

    model: str
    backend: str
    folder: Path
    process: subprocess.Popen[str] = field(init=False)

    def start(self, args: argparse.Namespace, seconds: float) -> None:
        options = {"--device": args.device, "--size": args.size, "--step-seconds": args.step_seconds,
                   "--models": self.model, "--kinds": ",".join(args.kinds), "--seconds": seconds,
                   "--profile": args.profile, "--json": self.rows_path}
        command = [sys.executable, "-m", "benchmarks.models", "--worker", self.backend,
                   *(text for name, value in options.items() if value for text in (name, str(value)))]
        self.folder.mkdir(parents=True)
        environment = {**os.environ, **{name: str(self.folder / name) for name in CACHES}}
        with (self.folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                                            text=True, env=environment, cwd=Path(__file__).parent.parent)
        watch = threading.Timer(seconds + 5, self.process.kill)  # the limits in the process should end it before
        watch.daemon = True
        watch.start()

    @property
    def rows_path(self) -> Path:
        return self.folder / "rows.json"

    def wait_until_compiled(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.strip() == READY:
                return

    def measured(self) -> list[Row]:
        """Its rows, one of which says so where it crashed or was killed."""
        self.process.communicate("\n")
        rows: list[Row] = json.loads(self.rows_path.read_text()) if self.rows_path.exists() else []
        if self.process.returncode == 0 and rows:
            return rows
        problem = f"exit status {self.process.returncode}: {(self.folder / 'errors').read_text()[-1500:]}"
        return [*rows, {"backend": self.backend, "case": self.model, "status": "crashed", "error": problem}]


def batches(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    """As many at once as there are cores for."""
    count = max(1, (os.cpu_count() or 1) // CORES_PER_PROCESS)
    return (jobs[i:i + count] for i in range(0, len(jobs), count))


def measure_all(args: argparse.Namespace, results: record.Results) -> None:
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        jobs = [Job(model, backend, Path(folder) / model / backend)
                for model, backend in itertools.product(args.models, args.backends)]
        groups = list(batches(jobs))
        for place, group in enumerate(groups):
            share = (deadline - time.monotonic()) / (len(groups) - place)
            for job in group:
                job.start(args, share)
            with ThreadPoolExecutor(len(group)) as pool:
                list(pool.map(Job.wait_until_compiled, group))
            for job in group:
                for row in job.measured():
                    results.add({"size": args.size, **row})
                    print(line(row), flush=True)


def some_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Parses names of these, separated by commas."""
    def parsed(text: str) -> tuple[str, ...]:
        chosen = tuple(n for n in text.split(",") if n)
        if unknown := [n for n in chosen if n not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {unknown[0]}; known: {', '.join(known)}")
        return chosen

    return parsed


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backends", default="eager,inductor,fxfuser", type=backends.parse,
                   help=f"separated by commas, of: {', '.join(backends.BACKENDS)}")
    p.add_argument("--models", default=transformer_models.NAMES, type=some_of(transformer_models.NAMES),
                   help=f"of: {', '.join(transformer_models.NAMES)}")
    p.add_argument("--kinds", default=transformer_models.KINDS, type=some_of(transformer_models.KINDS),
                   help=f"of their work, of: {', '.join(transformer_models.KINDS)}")
    p.add_argument("--size", choices=transformer_models.SCALES, default="full")
    p.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="measuring time of a case")
    p.add_argument("--seconds", type=float, default=540, help="the whole call ends in about this time")
    p.add_argument("--profile", type=int, nargs="?", const=30, default=0, metavar="N", help="print the top kernels")
    p.add_argument("--json", type=Path, help="the results file (benchmarks/results/<date>-transformers.json)")
    p.add_argument("--commit", help="recorded in the results, where the tree has no history")
    p.add_argument("--worker", help=argparse.SUPPRESS)  # compile with this backend in this process
    return p.parse_args()


def main() -> int:
    args = parse()
    if args.worker:
        return worker(args)
    results = record.start("transformers", torch.device(args.device), args.json, args.commit, "models")
    measure_all(args, results)
    print(f"\n{table(results.rows)}")
    return concluded(results.rows, args.profile)


if __name__ == "__main__":
    sys.exit(main())
