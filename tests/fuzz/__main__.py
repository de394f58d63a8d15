"""The fuzzer's long runs: programs by seed, in worker processes, resumable.

    python -m tests.fuzz --programs 5000 --executor interpret --jobs 2 --seconds 3000 --out fuzz.jsonl
    python -m tests.fuzz --programs 5000 --executor triton --jobs 16 --seconds 540        on a GPU
    python -m tests.fuzz --programs 5000 --count                                          the rows alone
    python -m tests.fuzz --seed 317 --executor interpret                                  one, shrunk to a test

A worker that crashes or hangs loses the seed it was at, which
is a failure, and is replaced.  Seeds that --out already holds are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import queue
import select
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.fuzz import generate, shrink
from tests.fuzz.compare import WITHOUT_US, Fault, check
from tests.fuzz.program import Program

HANGS = 90.0  # seconds without an answer
EXECUTORS = ("reference", "interpret", "triton")
Row = dict[str, Any]


def one(seed: int, executor: str) -> Row:
    """One seed's row: its fault, its lines' ops, seconds."""
    start = time.perf_counter()
    program = generate.program(seed)
    fault = check(program, executor)
    return {"seed": seed, "status": fault.kind if fault else "ok", "detail": fault.text[:1500] if fault else "",
            "rows": generate.rows_of(program), "interesting": generate.interesting(program),
            "seconds": round(time.perf_counter() - start, 3)}


def work(executor: str) -> int:
    """A worker: seeds on stdin, one a line; a row of JSON for each on stdout."""
    _quiet()
    for line in sys.stdin:
        row = one(int(line), executor)
        print(json.dumps(row), flush=True)
        if "CUDA error" in row["detail"] or "AcceleratorError" in row["detail"]:
            return 1  # the context is lost
    return 0


def _quiet() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # Dynamo logs what a fault already says
    torch.set_num_threads(1)


class Worker:
    """A process and how to ask it."""

    def __init__(self, executor: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz", "--worker", "--executor", executor],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
        self._text = b""
        self._limit = HANGS + 60  # the first imports torch

    def ask(self, seed: int) -> tuple[Row, bool]:
        """A seed's row, and whether the worker is still there."""
        process = self._process
        assert process.stdin and process.stdout
        deadline, self._limit = time.monotonic() + self._limit, HANGS
        try:
            process.stdin.write(b"%d\n" % seed)
            process.stdin.flush()
        except BrokenPipeError:
            return _lost(seed, "crash", "the worker was gone"), False
        while b"\n" not in self._text:
            ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0))
            piece = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not ready:
                return _lost(seed, "timeout", f"no answer in {HANGS:.0f} s"), False
            if not piece:
                process.wait()
                return _lost(seed, "crash", f"exit status {process.returncode}"), False
            self._text += piece
        line, _, self._text = self._text.partition(b"\n")
        row: Row = json.loads(line)
        return row, "CUDA error" not in row["detail"]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _lost(seed: int, status: str, detail: str) -> Row:
    return {"seed": seed, "status": status, "detail": detail, "rows": [], "interesting": False, "seconds": 0.0}


def run(seeds: Iterable[int], executor: str, jobs: int, seconds: float, report: Callable[[Row], None]) -> None:
    """Asks `jobs` workers until the seeds or the seconds are spent."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        waiting.put(seed)
    deadline, lock = time.monotonic() + seconds, threading.Lock()

    def drive() -> None:
        worker: Worker | None = None
        while time.monotonic() < deadline:
            try:
                seed = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker(executor)
            row, alive = worker.ask(seed)
            with lock:
                report(row)
            if not alive:
                worker.stop()
                worker = None
        if worker is not None:
            worker.stop()

    threads = [threading.Thread(target=drive) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summary(rows: Iterable[Row], show: int = 12) -> str:
    """What a run found, in a few lines."""
    rows = list(rows)
    if not rows:
        return "no programs"
    status = Counter(r["status"] for r in rows)
    drawn = [r for r in rows if r["rows"]]
    counts = Counter(n for r in rows for n in r["rows"])
    rare = sorted((counts[n], n) for n in generate.NAMES)[:8]
    bad = [r for r in rows if r["status"] not in ("ok", *WITHOUT_US)]
    lines = [
        f"{len(rows)} programs: " + ", ".join(f"{n} {s}" for s, n in status.most_common()),
        f"median {statistics.median(len(r['rows']) for r in drawn):.0f} rows a program; "
        f"{100 * sum(r['interesting'] for r in drawn) / len(drawn):.0f}% with a reduction, a view or an alias",
        f"{len(generate.NAMES)} rows of the table; rarest: " + ", ".join(f"{n} {c}" for c, n in rare),
        f"mean {statistics.mean(r['seconds'] for r in rows):.2f} s a program",
    ]
    lines += [f"seed {r['seed']}: {r['status']}: {' '.join(r['detail'].split())[:220]}" for r in bad[:show]]
    return "\n".join(lines)


def as_test(seed: int, executor: str) -> str | None:
    """The shrunk program of a seed as a test's text; None where it passes."""
    program = generate.program(seed)
    fault = check(program, executor)
    if fault is None:
        return None
    small = shrunk_alike(program, fault, executor)
    return shrink.test_text(small, (check(small, executor) or fault).text, executor, f"seed_{seed}")


def shrunk_alike(program: Program, fault: Fault, executor: str) -> Program:
    def fails(candidate: Program) -> bool:
        found = check(candidate, executor)
        return found is not None and signature(found) == signature(fault)

    return shrink.shrunk(program, fails)


def signature(fault: Fault) -> str:
    """What must stay while a program shrinks: the error's class, or what is wrong (strides, NaN, the error)."""
    head = fault.text.partition(":")
    return f"{fault.kind} {head[0] if fault.kind == 'error' else head[2].split()[0]}"


def _known(path: Path | None) -> Mapping[int, Row]:
    if path is None or not path.exists():
        return {}
    return {row["seed"]: row for row in map(json.loads, path.read_text().splitlines())}


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    p.add_argument("--programs", type=int, default=500)
    p.add_argument("--start", type=int, default=0, help="the first seed")
    p.add_argument("--executor", choices=EXECUTORS, default="triton" if torch.cuda.is_available() else "interpret")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--seconds", type=float, default=600)
    p.add_argument("--out", type=Path, help="a file of rows; seeds that it holds are not run again")
    p.add_argument("--count", action="store_true", help="draw the programs and count their rows, compiling none")
    p.add_argument("--seed", type=int, help="one seed: print it as a test, shrunk")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        return work(args.executor)
    if args.seed is not None:
        _quiet()
        text = as_test(args.seed, args.executor)
        print(text or f"seed {args.seed}: as eager\n\n{generate.program(args.seed).source()}")
        return 1 if text else 0
    seeds = range(args.start, args.start + args.programs)
    if args.count:
        print(summary({"seed": s, "status": "ok", "detail": "", "rows": generate.rows_of(q), "seconds": 0.0,
                       "interesting": generate.interesting(q)} for s in seeds for q in (generate.program(s),)))
        return 0
    return _long_run(args, seeds)


def _long_run(args: argparse.Namespace, seeds: range) -> int:
    rows = dict(_known(args.out))
    file = args.out.open("a") if args.out else None

    def report(row: Row) -> None:
        rows[row["seed"]] = row
        if file:
            print(json.dumps(row), file=file, flush=True)
        if row["status"] not in ("ok", *WITHOUT_US):
            print(f"seed {row['seed']}: {row['status']}: {' '.join(row['detail'].split())[:160]}", flush=True)

    run([s for s in seeds if s not in rows], args.executor, args.jobs, args.seconds, report)
    if file:
        file.close()
    mine = [rows[s] for s in seeds if s in rows]
    print(summary(mine, 0))
    return 1 if any(r["status"] not in ("ok", *WITHOUT_US) for r in mine) else 0


if __name__ == "__main__":
    sys.exit(main())
