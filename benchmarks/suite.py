"""Runs benchmark tasks over backends within a time budget and writes their results.

Enters: `Task`s.  Leaves: one row per (task, backend) in the results file, and the rows as a list.  Invariants: every
compiled result is compared with eager's before it is timed, a task that fails or does not end costs only itself, and
the call ends in time: a task that the budget no longer holds gets a row that says so.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import backends, record
from benchmarks.judge import significant_strides
from fxfuser import observe
from fxfuser.runtime import timing

ROTATION_BYTES = 256 << 20  # input sets rotate until together they are past any L2
MAX_SETS = 8
# Relative distance ||out - eager|| / ||eager||; a wrong kernel is far outside, rounding order is inside.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Problem:
    """Work on one set of inputs.  `bytes` counts what must move at least; None: inputs once and outputs once."""

    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    backward: bool = False
    bytes: int | None = None


@dataclass(frozen=True)
class Task:
    """`build(device)` makes a Problem with fresh random inputs; every call makes the same function."""

    name: str
    size: str
    build: Callable[[torch.device], Problem]

    @property
    def key(self) -> str:
        return f"{self.name}/{self.size}"


class OutOfTime(BaseException):
    """A task ran past its limit.  No Exception, so that no compiler on the way takes it for a failure of its own."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the main thread once `seconds` have passed."""

    def expire(signum: int, frame: object) -> None:
        raise OutOfTime(f"ran past its limit of {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in tensors(part)] if isinstance(value, (tuple, list)) else []


def touched_bytes(t: Tensor) -> int:
    """Bytes that a tensor's elements occupy: an expanded dimension counts once."""
    count = t.element_size()
    for size, stride in zip(t.shape, t.stride()):
        count *= size if stride else min(size, 1)
    return count


def moved_bytes(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
    """Each input read once and each output written once; what aliases an input moves nothing."""
    held = {t.untyped_storage().data_ptr() for t in reads}
    return sum(map(touched_bytes, reads)) + sum(
        touched_bytes(t) for t in writes if t.untyped_storage().data_ptr() not in held)


def distance(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest ||a - b|| / ||b|| over the outputs; infinite where they do not fit together."""
    if len(outputs) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(outputs, expected):
        if a.shape != b.shape or a.dtype != b.dtype or significant_strides(a) != significant_strides(b):
            return float("inf")
        # norms in float32 and piece by piece: a float64 copy of a gigabyte would not fit beside it
        difference = torch.linalg.vector_norm((a.float() - b.float()).flatten())
        scale = torch.linalg.vector_norm(b.float().flatten()).item()
        ratio = difference.item() / scale if scale else difference.item()
        worst = max(worst, ratio) if ratio == ratio else float("inf")
    return worst


def forward_run(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> timing.Run:
    def run() -> object:
        with torch.no_grad():
            return fn(*inputs)

    return run


def backward_run(fn: Callable[..., Any], inputs: tuple[Tensor, ...]) -> timing.Run:
    """Runs the forward now; the run is the backward alone, for random tangents."""
    leaves = [t for t in inputs if t.requires_grad]
    outputs = [t for t in tensors(fn(*inputs)) if t.requires_grad]
    generator = torch.Generator(device=outputs[0].device).manual_seed(1)
    tangents = [torch.empty_like(t).normal_(generator=generator) for t in outputs]

    def run() -> object:
        return torch.autograd.grad(outputs, leaves, tangents, retain_graph=True)

    return run


def make_run(fn: Callable[..., Any], problem: Problem) -> timing.Run:
    return (backward_run if problem.backward else forward_run)(fn, problem.inputs)


@dataclass(frozen=True)
class Settings:
    """How a suite runs; see the options' help texts."""

    device: torch.device
    backends: tuple[str, ...]
    seconds: float
    per_task: float
    clock_seconds: float
    compile_only: bool = False


def minimal_bytes(problem: Problem, run: timing.Run) -> int:
    if problem.bytes is not None:
        return problem.bytes
    outputs = tensors(run())
    reads = list(problem.inputs)
    if problem.backward:
        leaf_forward = tensors(problem.fn(*problem.inputs))
        reads += [t for t in leaf_forward if t.requires_grad]  # a tangent has the shape of its output
    return moved_bytes(reads, outputs)


def run_task(task: Task, settings: Settings, deadline: float) -> Iterator[dict[str, Any]]:
    """One row per backend.  Inputs are built once; the function is compiled anew for each backend."""
    with timing.stream(settings.device):
        torch.manual_seed(0)
        problem = task.build(settings.device)
        input_bytes = sum(map(touched_bytes, problem.inputs))
        sets = 1 if settings.compile_only else max(2, min(MAX_SETS, ROTATION_BYTES // max(input_bytes, 1)))
        problems = [problem] + [task.build(settings.device) for _ in range(sets - 1)]
        eager = make_run(problem.fn, problem)
        nbytes = minimal_bytes(problem, eager)
        expected = tensors(eager())
        copy = None if settings.compile_only else timing.copy_clock(nbytes, settings.device)
        for name in settings.backends:
            row: dict[str, Any] = {"case": task.name, "size": task.size, "bytes": nbytes, "backend": name,
                                   "direction": "backward" if problem.backward else "forward"}
            if copy is not None:
                row["copy_us"] = round(copy.median, 3)
            left = deadline - time.monotonic()
            yield row | _attempt(problems, name, expected, settings, min(left, settings.per_task))


def _attempt(problems: Sequence[Problem], name: str, expected: Sequence[Tensor], settings: Settings,
             seconds: float) -> dict[str, Any]:
    torch.compiler.reset()
    gc.collect()
    try:
        with limit(seconds), searches(name) as found:
            return _measured(problems, backends.BACKENDS[name](problems[0].fn), expected, settings) | found()
    except OutOfTime as error:
        return {"status": "out of time", "error": str(error)}
    except Exception as error:  # one backend's failure on one case is a row, not the end of the run
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"[:2000],
                "traceback": traceback.format_exc()[-3000:]}


@contextmanager
def searches(name: str) -> Iterator[Callable[[], dict[str, Any]]]:
    """Yields what our tile searches found in the context: the default, the winner and the times of each kernel's."""
    if name != "fxfuser-autotune":
        yield dict
        return
    with observe.recording() as recording:
        yield lambda: {"tiles": [
            {"kernel": t.kernel, "chosen": t.tile, "default": t.times[0][0] if t.times else t.tile,
             "times": [[tile, us and round(us, 2)] for tile, us in t.times], "remembered": t.remembered}
            for trace in recording.graphs for t in trace.tunings]}


def _measured(problems: Sequence[Problem], fn: Callable[..., Any], expected: Sequence[Tensor],
              settings: Settings) -> dict[str, Any]:
    start = time.perf_counter()
    run = make_run(fn, problems[0])
    outputs = tensors(run())
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
    row: dict[str, Any] = {"status": "ok", "compile_s": round(time.perf_counter() - start, 3)}
    error = distance(outputs, expected)
    row["distance"] = error
    allowed = max((TOLERANCE.get(t.dtype, 0.0) for t in expected), default=0.0)
    if not error <= allowed:
        return row | {"status": "wrong", "error": f"distance {error:.3g} from eager, allowed {allowed:.3g}"}
    if settings.compile_only:
        return row
    del outputs
    runs = [run] + [make_run(fn, p) for p in problems[1:]]
    return row | timing.measure(runs, settings.device, settings.clock_seconds).to_json()


def run_isolated(task: Task, module: str, settings: Settings, deadline: float) -> Iterator[dict[str, Any]]:
    """The same rows from a process of the task's own, so that a crash costs this task only."""
    seconds = min(deadline - time.monotonic(), settings.per_task * len(settings.backends) + 30)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", module, "--only", f"={task.key}", "--json", str(path), "--seconds",
                   str(seconds - 5), "--device", settings.device.type, "--backends", ",".join(settings.backends),
                   "--clock-seconds", str(settings.clock_seconds), "--per-task", str(settings.per_task)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(seconds, 1))
            problem = f"exit status {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            problem = f"ran past {seconds:.0f} s"
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
    yield from rows
    seen = {row["backend"] for row in rows}
    yield from ({"case": task.name, "size": task.size, "backend": name, "status": "crashed", "error": problem}
                for name in settings.backends if name not in seen)


def selected(tasks: Sequence[Task], only: str | None) -> list[Task]:
    """Tasks that contain one of the comma-separated texts; `=text` must be the whole key."""
    if not only:
        return list(tasks)
    texts = only.split(",")
    return [t for t in tasks if any(t.key == s[1:] if s.startswith("=") else s in t.key for s in texts)]


def parser(description: str, default_backends: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backends", default=default_backends, type=backends.parse,
                   help=f"separated by commas, of: {', '.join(backends.BACKENDS)}")
    p.add_argument("--only", help="tasks that contain one of these texts (commas); =case/size for exactly one")
    p.add_argument("--quick", action="store_true", help="few sizes")
    p.add_argument("--json", type=Path, help="the results file (benchmarks/results/<date>-<name>.json)")
    p.add_argument("--seconds", type=float, default=540, help="the whole call ends in about this time")
    p.add_argument("--per-task", type=float, default=60, help="limit of one task on one backend, in seconds")
    p.add_argument("--clock-seconds", type=float, default=0.2, help="measuring time of each clock")
    p.add_argument("--commit", help="recorded in the results, where the tree has no history")
    p.add_argument("--isolate", action="store_true", help="a process per task")
    p.add_argument("--warm", type=int, default=0, metavar="N",
                   help="first compile all tasks in N processes, which fills the compilers' caches on disk")
    p.add_argument("--shard", help=argparse.SUPPRESS)  # i/n: compile every n-th task and stop
    p.add_argument("--list", action="store_true", help="print the tasks")
    return p


def warm(module: str, names: Sequence[str], count: int, seconds: float) -> None:
    """Compiles everything in `count` processes; their failures show again in the measured run.

    Not for backends that tune: measuring beside each other on one device, they would remember poor choices.
    """
    kept = [n for n in names if not n.endswith(("-autotune", "-strongest")) and n != "eager"]
    if not kept:
        return
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        workers = [subprocess.Popen(
            [sys.executable, "-m", module, *sys.argv[1:], "--warm", "0", "--shard", f"{i}/{count}", "--backends",
             ",".join(kept), "--seconds", str(seconds), "--json", str(Path(folder) / f"{i}.json")],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) for i in range(count)]
        deadline = time.monotonic() + seconds + 20
        for worker in workers:
            try:
                worker.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                worker.kill()


def run(name: str, args: argparse.Namespace, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Everything after the options: measures the selected tasks and returns the rows."""
    chosen = selected(tasks, args.only)
    if args.list:
        print("\n".join(t.key for t in chosen))
        return []
    started = time.monotonic()
    deadline = started + args.seconds
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("highest")
    torch._functorch.config.donated_buffer = False  # a backward is timed again and again on one forward
    settings = Settings(device, args.backends, args.seconds, args.per_task, args.clock_seconds, args.shard is not None)
    if args.shard:
        index, count = map(int, args.shard.split("/"))
        chosen = chosen[index::count]
    elif args.warm:
        warm(f"benchmarks.{name}", args.backends, args.warm, args.seconds * 0.5)
        print(f"compiled in {args.warm} processes: {time.monotonic() - started:.0f} s", flush=True)
    results = record.start(name, device, args.json, args.commit)
    for task in chosen:
        if time.monotonic() > deadline - 2:
            results.add({"case": task.name, "size": task.size, "backend": None, "status": "skipped",
                         "error": "the time budget was spent"})
            continue
        for row in _rows(task, f"benchmarks.{name}", settings, deadline, args.isolate):
            results.add(row)
            print(line(row), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    results.write()
    return results.rows


def _rows(task: Task, module: str, settings: Settings, deadline: float, isolate: bool) -> Iterator[dict[str, Any]]:
    try:
        if isolate:
            yield from run_isolated(task, module, settings, deadline)
        else:
            yield from run_task(task, settings, deadline)
    except Exception as error:  # building the inputs or eager itself failed
        yield {"case": task.name, "size": task.size, "backend": None, "status": "failed",
               "error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-3000:]}


def microseconds(row: dict[str, Any], clock: str) -> float | None:
    """A row's median of `call` or `graph`, or its `busy` sum; None where it was not measured."""
    found = row.get(clock)
    if not found:
        return None
    return float(found["microseconds"] if clock == "busy" else found["median"])


def line(row: dict[str, Any]) -> str:
    """A row as it scrolls by while the suite runs."""
    head = f"{row['case']}/{row['size']} {row['backend']}: "
    if row["status"] != "ok":
        return head + f"{row['status']}: {str(row.get('error', '')).splitlines()[0][:160] if row.get('error') else ''}"
    if "call" not in row:
        return head + f"compiled in {row['compile_s']} s"
    parts = [f"{clock} {us:.1f}" for clock in ("graph", "busy", "call")
             if (us := microseconds(row, clock)) is not None]
    kernels = f", {row['busy']['kernels']:g} kernels" if row.get("busy") else ""
    return head + ", ".join(parts) + f" us{kernels}, copy {row['copy_us']:.1f} us"
