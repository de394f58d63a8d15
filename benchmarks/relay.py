"""Runs a lineup's cases in processes, one after the other, a few cases each, and writes their rows.

Enters: cases, names of variants, options.  Leaves: the results file and its rows.  Invariants: one process measures at
a time; a variant that ends its process, or loses the device, becomes a row, and the rest of its case is measured anew
without it; all that fxfuser chooses by measurement is measured in this run, alone on the device, while what is compiled
has been compiled before by many processes at once; the call ends in time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import lineup, record
from benchmarks.lineup import Case, Row, Settings
from fxfuser.runtime import timing

CEILING_BYTES = 2 << 30  # of the copy whose rate is the ceiling
SMALL = 32  # largest dimension where there is no GPU
GO = "go"  # what a process that has imported everything waits for


@dataclass(frozen=True)
class Job:
    """A case and the variants of it that are still to be measured."""

    case: Case
    variants: tuple[str, ...]


def parser(description: str, variants: Sequence[str]) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--variants", default=",".join(variants), help=f"of: {', '.join(lineup.VARIANTS)}")
    p.add_argument("--only", help="cases that contain one of these texts (commas); =case/size for exactly one")
    p.add_argument("--quick", action="store_true", help="few cases")
    p.add_argument("--seconds", type=float, default=540, help="the whole call ends in about this time")
    p.add_argument("--per-variant", type=float, default=90, help="limit to compile and check one variant, in seconds")
    p.add_argument("--clock-seconds", type=float, default=0.5, help="measuring time of a case")
    p.add_argument("--per-process", type=int, default=4, help="cases that one process measures")
    p.add_argument("--warm", type=int, metavar="N",
                   help="compile everything in N processes first (default: one per core on a GPU, 0 elsewhere)")
    p.add_argument("--here", action="store_true", help="measure in this process")
    p.add_argument("--json", type=Path, help="the results file (benchmarks/results/<date>-<name>.json)")
    p.add_argument("--commit", help="recorded in the results, where the tree has no history")
    p.add_argument("--list", action="store_true", help="print the cases")
    p.add_argument("--worker", choices=("measure", "compile"), help=argparse.SUPPRESS)
    return p


def names(text: str) -> tuple[str, ...]:
    """Variants separated by commas.  Raises ValueError that lists the known ones."""
    found = tuple(n for n in text.split(",") if n)
    unknown = [n for n in found if n not in lineup.VARIANTS]
    if unknown:
        raise ValueError(f"unknown variant {', '.join(unknown)}; known: {', '.join(lineup.VARIANTS)}")
    return found


def selected(cases: Sequence[Case], only: str | None) -> list[Case]:
    texts = only.split(",") if only else [""]
    return [c for c in cases if any(c.key == s[1:] if s.startswith("=") else s in c.key for s in texts)]


def run(name: str, args: argparse.Namespace, cases: Sequence[Case]) -> record.Results | None:
    """Everything after the options: the results of all selected cases; None where nothing was to be measured."""
    chosen = selected(cases, args.only)
    if args.list:
        print("\n".join(c.key for c in chosen))
        return None
    jobs = [Job(case, tuple(n for n in names(args.variants) if n not in lineup.SOME or n in case.variants))
            for case in chosen]
    if args.worker:
        work(jobs, args)
        return None
    device = torch.device(args.device)
    results = record.start(name, device, args.json, args.commit)

    def add(row: Row) -> None:
        results.add(row)
        print(line(row), flush=True)

    deadline = time.monotonic() + args.seconds
    if args.here:
        for job in jobs:
            _measure_here(job, args, deadline, add)
        return _with_rate(results, device)
    with tempfile.TemporaryDirectory() as folder:
        caches = Path(folder) / "cache"
        count = args.warm if args.warm is not None else (os.cpu_count() or 1) if device.type == "cuda" else 0
        if count:
            warm(name, jobs, args, caches, count)
            print(f"compiled in {count} processes: {args.seconds - deadline + time.monotonic():.0f} s", flush=True)
        _Relay(name, args, caches, deadline, add).run(jobs)
    return _with_rate(results, device)


def _with_rate(results: record.Results, device: torch.device) -> record.Results:
    """The results, with the rate of a large copy, which bounds what moves bytes alone."""
    rate = CEILING_BYTES / timing.copy_clock(CEILING_BYTES, device).median if device.type == "cuda" else None
    results.head["copy_bytes_per_us"] = rate
    results.write()
    return results


# ---------------------------------------------------------------- in a process that measures


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(torch.device(args.device), args.clock_seconds, args.per_variant, args.worker == "compile")


def sized(case: Case, device: torch.device) -> Case:
    return case if device.type == "cuda" else case.shrunk(SMALL)


def rows_of(job: Job, settings: Settings, begin: Callable[[str], None]) -> Iterator[Row]:
    """The case's rows; where its inputs or eager itself fail, each variant's row says so."""
    try:
        yield from lineup.measure(sized(job.case, settings.device), job.variants, settings, begin)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        for name in job.variants:
            yield _row(job, name, "failed", text[:2000], traceback=traceback.format_exc()[-3000:])


def _measure_here(job: Job, args: argparse.Namespace, deadline: float, add: Callable[[Row], None]) -> None:
    if time.monotonic() > deadline:
        for name in job.variants:
            add(_row(job, name, "skipped", "the time budget was spent"))
        return
    for row in rows_of(job, settings_of(args), lambda name: None):
        add(row)


def work(jobs: Sequence[Job], args: argparse.Namespace) -> None:
    """A process's part: writes rows, and what is about to run, to `args.json` after each."""
    torch.set_float32_matmul_precision("highest")
    if args.worker == "measure" and sys.stdin.readline().strip() != GO:
        return
    rows: list[Row] = []
    finished: list[str] = []

    def write(at: tuple[str, str] | None) -> None:
        part = args.json.with_suffix(".part")
        part.write_text(json.dumps({"rows": rows, "at": at, "finished": finished}))
        part.replace(args.json)

    for job in jobs:
        for row in rows_of(job, settings_of(args), lambda name, job=job: write((job.case.key, name))):
            rows.append(row)
            write((job.case.key, str(row["variant"])))
            if row.get("lost"):
                sys.exit(1)
        finished.append(job.case.key)
        write(None)


# ---------------------------------------------------------------- in the process that started


def command(name: str, jobs: Sequence[Job], args: argparse.Namespace, kind: str, path: Path) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", "--worker", kind, "--device", args.device, "--json", str(path),
            "--only", ",".join(f"={j.case.key}" for j in jobs), "--variants", ",".join(jobs[0].variants),
            "--clock-seconds", str(args.clock_seconds), "--per-variant", str(args.per_variant)]


def environment(caches: Path) -> dict[str, str]:
    return {**os.environ, "FXFUSER_CACHE_DIR": str(caches), "OMP_NUM_THREADS": "1"}


def warm(name: str, jobs: Sequence[Job], args: argparse.Namespace, caches: Path, count: int) -> None:
    """Compiles all variants of all cases in processes that share the cores; then forgets what they measured.

    A process on one core builds its kernels by itself.
    """
    cores = sorted(os.sched_getaffinity(0))
    count = min(count, len(jobs))
    variables = {**environment(caches), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    deadline = time.monotonic() + args.seconds * 0.5
    running = []
    for i in range(count):
        part = command(name, jobs[i::count], args, "compile", caches.with_name(f"warm{i}.json"))
        kept = ",".join(str(c) for c in cores[i::count] or [cores[i % len(cores)]])
        running.append(subprocess.Popen(["taskset", "-c", kept, *part] if shutil.which("taskset") else part,
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        env=variables))
    for process in running:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
    shutil.rmtree(caches / "tiles", ignore_errors=True)


class _Process:
    """A process that has been told its cases and waits for its turn."""

    def __init__(self, name: str, jobs: Sequence[Job], args: argparse.Namespace, caches: Path, number: int) -> None:
        self.jobs = tuple(jobs)
        self._path = caches.with_name(f"rows{number}.json")
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command(name, jobs, args, "measure", self._path), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=self._errors, env=environment(caches))

    def measure(self, deadline: float) -> tuple[Mapping[str, Any], str]:
        """What it wrote, and what is to be said of a variant in which it ended; "" where it went to its end."""
        problem = ""
        try:
            self._process.communicate(f"{GO}\n".encode(), timeout=max(deadline - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            problem = "the time budget was spent"
        except BrokenPipeError:
            pass
        self.stop()
        if self._process.returncode and not problem:
            self._errors.seek(0)
            tail = self._errors.read()[-1500:].decode(errors="replace")
            problem = f"exit status {self._process.returncode}: {tail}"
        written = json.loads(self._path.read_text()) if self._path.exists() else {}
        return {"rows": [], "at": None, "finished": [], **written}, problem

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


@dataclass
class _Relay:
    name: str
    args: argparse.Namespace
    caches: Path
    deadline: float
    add: Callable[[Row], None]
    started: int = 0

    def run(self, jobs: Sequence[Job]) -> None:
        """While one process measures, the next one imports."""
        pending = list(jobs)
        current = self._start(pending)
        while current is not None:
            following = self._start(pending)
            left = self._take(current, *current.measure(self.deadline))
            if following is not None and (left or self._spent()):  # what is left comes first
                following.stop()
                left += following.jobs
                following = None
            pending[:0] = left
            current = following or self._start(pending)
        for job in pending:
            self._skip(job)

    def _start(self, pending: list[Job]) -> _Process | None:
        """A process for the next few jobs of `pending` that have equal variants; None where none or no time is left."""
        if not pending or self._spent():
            return None
        count = next((i for i, j in enumerate(pending) if j.variants != pending[0].variants), len(pending))
        count = min(count, self.args.per_process)
        taken, pending[:count] = pending[:count], []
        self.started += 1
        return _Process(self.name, taken, self.args, self.caches, self.started)

    def _spent(self) -> bool:
        return time.monotonic() > self.deadline - 5

    def _take(self, process: _Process, written: Mapping[str, Any], problem: str) -> list[Job]:
        """Adds the rows of a process; the jobs that are to be done again or have not been begun."""
        for row in written["rows"]:
            self.add(row)
        seen = {(r["case"], r["size"], r["variant"]) for r in written["rows"]}
        unfinished = [j for j in process.jobs if j.case.key not in written["finished"]]
        left = []
        for job in unfinished:
            missing = [v for v in job.variants if (job.case.name, job.case.size, v) not in seen]
            at = written["at"] if written["at"] and written["at"][0] == job.case.key else None
            if at is None and job is unfinished[0] or at and at[1] not in job.variants:
                # ended before the first variant, or in what all variants share
                for name in missing:
                    self.add(_row(job, name, "crashed", problem or "gone"))
                continue
            if at and at[1] in missing:
                self.add(_row(job, at[1], "crashed", problem or "gone"))
                missing.remove(at[1])
            if missing:
                left.append(Job(job.case, tuple(missing)))
        return left

    def _skip(self, job: Job) -> None:
        for name in job.variants:
            self.add(_row(job, name, "skipped", "the time budget was spent"))


def _row(job: Job, variant: str, status: str, text: str, **more: str) -> Row:
    return {"case": job.case.name, "size": job.case.size, "variant": variant, "status": status, "error_text": text,
            **more}


def line(row: Row) -> str:
    """A row as it scrolls by."""
    head = f"{row['case']}/{row['size']} {row['variant']}: "
    us = lineup.microseconds(row)
    parts = [f"{us:.1f} us"] if us is not None else []
    if "ratio" in row:
        parts.append(f"{row['ratio']:.3f} x {lineup.PRODUCT}")
    if row["status"] != "ok":
        parts.append(f"{row['status']}: {' '.join(str(row.get('error_text', '')).split())[:200]}")
    return head + ", ".join(parts or [f"compiled in {row.get('compile_s')} s"])
