"""Correctness before timing: functions of the *_cases modules compiled, compared with eager and float64.

    python -m benchmarks.gpu_check --jobs 16                        everything
    python -m benchmarks.gpu_check --only reduce,rows --show 5
    python -m benchmarks.gpu_check --pytest                         then the repository's own tests that need a GPU
    FXFUSER_EXECUTOR=interpret python -m benchmarks.gpu_check --device cpu --jobs 2

Worker processes take one check at a time.  A crash, a CUDA error (after which a context is useless) or a check past
its limit costs that check alone: the worker is replaced.  FXFUSER_STRICT=1 is set: no kernel may fall back to ATen.
Before each run the memory that the caching allocator would hand out is filled with NaN, so that what no kernel wrote
shows; results must be bitwise equal from run to run; inputs must be left as eager leaves them.  Reads past the end of
a tensor show under PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --target-processes all (with --jobs 1).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import (
    attention_cases,
    backends,
    cache_cases,
    check_cases,
    checks,
    float8_cases,
    loop_cases,
    policies,
    product_cases,
    record,
    sibling_cases,
)
from benchmarks.checks import Check
from benchmarks.judge import Verdict, exact, judge
from benchmarks.kernel_loops import features
from benchmarks.threads import in_threads
from fxfuser import observe
from fxfuser.coverage import kernels_by_segment

check_cases.register()
product_cases.register()
sibling_cases.register()
loop_cases.register()
cache_cases.register()
attention_cases.register()
float8_cases.register()
MARK = "RESULT "  # a worker's answers among whatever else is printed
REPEATS = 2
POISON_SIZES = tuple(1 << k for k in range(9, 27))
Values = list[object]


def values_of(result: object) -> Values:
    return [v for part in result for v in values_of(part)] if isinstance(result, (tuple, list)) else [result]


def make_inputs(check: Check, call: int, device: torch.device, seed: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(1000 * seed + call)
    inputs = check.makers[call](device)
    if check.grad:
        for t in inputs[:check.leaves]:
            if isinstance(t, Tensor) and t.is_floating_point():
                t.requires_grad_()
    return inputs


def widened(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs in float64, requiring gradients as before."""
    return tuple(t.detach().double().requires_grad_(t.requires_grad)
                 if isinstance(t, Tensor) and t.is_floating_point() else t for t in inputs)


def evaluate(check: Check, fn: Callable[..., Any], inputs: tuple[Any, ...]) -> Values:
    """Results, then gradients for fixed tangents, then the inputs as the call left them."""
    results = values_of(fn(*inputs))
    gradients: Values = []
    if check.grad:
        outputs = [t for t in results if isinstance(t, Tensor) and t.requires_grad]
        generator = torch.Generator().manual_seed(7)
        # drawn in bf16: exact in every dtype, so that the reference sees the same tangents
        tangents = [torch.randn(t.shape, generator=generator).bfloat16().to(t.device, t.dtype) for t in outputs]
        if check.as_outputs:
            tangents = [torch.empty_like(t).copy_(tangent) for t, tangent in zip(outputs, tangents)]
        leaves = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        gradients = list(torch.autograd.grad(outputs, leaves, tangents, allow_unused=True))
    left = [t.detach() for t in inputs if isinstance(t, Tensor)]
    return [t.detach() if isinstance(t, Tensor) else t for t in [*results, *gradients]] + left


@contextmanager
def poisoned(device: torch.device) -> Iterator[None]:
    """Memory that is handed out uninitialised holds NaN (all bits set) at first."""
    if device.type == "cuda":
        held = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in POISON_SIZES for _ in range(6)]
        del held
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # on the CPU PyTorch fills new memory itself
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def compile_check(check: Check, backend: str) -> Callable[..., Any]:
    if not check.policy or not backend.startswith("fxfuser"):
        return backends.with_dynamic(backend, check.dynamic)(check.fn)
    return torch.compile(check.fn, backend=policies.backend(check.policy, check.tile), dynamic=check.dynamic)


def run_check(check: Check, backend: str, device: torch.device) -> Verdict:
    torch.compiler.reset()
    compiled = compile_check(check, backend)
    worst = Verdict(None)
    for call in range(len(check.makers)):
        eager = evaluate(check, check.fn, make_inputs(check, call, device))
        exact_inputs = make_inputs(check, call, device)
        reference = evaluate(check, check.fn, widened(exact_inputs)) if check.reference else eager
        verdict = run_call(check, compiled, call, device, eager, reference)
        if verdict.fault:
            return Verdict(f"call {call}: {verdict.fault}", verdict.ratio)
        worst = max(worst, verdict, key=lambda v: v.ratio)
    return run_threads(check, compiled, device) if check.threads else worst


def run_call(check: Check, compiled: Callable[..., Any], call: int, device: torch.device, eager: Values,
             reference: Values) -> Verdict:
    first: Values | None = None
    worst = Verdict(None)
    for repeat in range(REPEATS if check.repeatable else 1):
        inputs = make_inputs(check, call, device)
        with poisoned(device):
            ours = evaluate(check, compiled, inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if first is None:
            first = ours
            worst = judge(ours, eager, reference)
            if worst.fault:
                return worst
        else:
            for i, (a, b) in enumerate(zip(ours, first)):
                if isinstance(a, Tensor) and isinstance(b, Tensor) and (fault := exact(a, b).fault):
                    return Verdict(f"result {i} of run {repeat} is not that of run 0: {fault}")
    return worst


def run_threads(check: Check, compiled: Callable[..., Any], device: torch.device) -> Verdict:
    """The compiled function from several threads at once; inputs are drawn before, for seeds are global."""
    assert not check.grad
    sets = [make_inputs(check, 0, device, seed=i) for i in range(check.threads)]
    expected = [evaluate(check, check.fn, inputs) for inputs in sets]
    if device.type == "cuda":
        torch.cuda.synchronize(device)

    def body(i: int) -> list[Values]:
        if device.type != "cuda":
            return [evaluate(check, compiled, sets[i]) for _ in range(3)]
        with torch.cuda.stream(torch.cuda.Stream(device)):
            results = [evaluate(check, compiled, sets[i]) for _ in range(20)]
            torch.cuda.current_stream(device).synchronize()
        return results

    for i, results in enumerate(in_threads(check.threads, body)):
        for ours in results:
            verdict = judge(ours, expected[i], expected[i])
            if verdict.fault:
                return Verdict(f"thread {i}: {verdict.fault}")
    return Verdict(None)


def structure_fault(check: Check, traces: Sequence[observe.GraphTrace]) -> str | None:
    """Why what was compiled is not what the check is about; None where it is."""
    shown: set[str] = set()
    for trace in (t for t in traces if t.segmentation is not None):
        kernels = [k for found in kernels_by_segment(trace).values() for k in found]
        shown |= {f for k in kernels for f in features(k)}
        if check.launches is not None and (len(kernels) != check.launches or trace.externs):
            beside = f" and {', '.join(e.op for e in trace.externs)}" if trace.externs else ""
            return f"{trace.name}: {len(kernels)} kernels{beside}, not {check.launches}"
    missing = check.shows - shown
    return f"no kernel shows {', '.join(sorted(missing))}" if missing else None


def outcome(name: str, backend: str, device: torch.device) -> dict[str, Any]:
    """One check's row: status ok, wrong or error."""
    start, check = time.perf_counter(), checks.CHECKS[name]
    try:
        with observe.recording() as recording:
            verdict = run_check(check, backend, device)
        if not verdict.fault and backend.startswith("fxfuser") and device.type == "cuda":  # small sizes have others
            verdict = Verdict(structure_fault(check, recording.graphs), verdict.ratio)
        row = {"status": "wrong" if verdict.fault else "ok", "detail": verdict.fault, "ratio": round(verdict.ratio, 3),
               "kernels": sum(len(kernels_by_segment(t)) for t in recording.graphs),
               "extern": sorted({e.op for t in recording.graphs for e in t.externs})}
    except Exception as error:  # a failing check is a row
        row = {"status": "error", "detail": f"{type(error).__name__}: {error}"[:3000],
               "traceback": traceback.format_exc()[-4000:]}
    return {"check": name, **row, "seconds": round(time.perf_counter() - start, 2)}


def work(backend: str, device: torch.device) -> int:
    """A worker: reads check names, one a line, and answers each with a row; ends when a CUDA context is lost."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for line in sys.stdin:
        row = outcome(line.strip(), backend, device)
        lost = row["status"] == "error" and any(s in row["detail"] for s in ("CUDA error", "AcceleratorError"))
        print(MARK + json.dumps(row | {"lost": lost}), flush=True)
        if lost:
            return 1
    return 0


@dataclass
class Worker:
    """A worker process and the text that it has written to stderr."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    fresh: bool = True

    @staticmethod
    def start(arguments: Sequence[str]) -> Worker:
        errors = tempfile.TemporaryFile()
        environment = {**os.environ, "FXFUSER_STRICT": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu_check", "--worker", *arguments],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment)
        return Worker(process, errors)

    def ask(self, name: str, seconds: float) -> dict[str, Any]:
        """The row of one check; "crash" or "timeout" where the worker gave none, and then it is gone."""
        assert self.process.stdin and self.process.stdout
        deadline = time.monotonic() + seconds + (60 if self.fresh else 0)  # the first one imports torch
        self.fresh = False
        self.process.stdin.write(name.encode() + b"\n")
        self.process.stdin.flush()
        text = b""
        descriptor = self.process.stdout.fileno()
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([descriptor], [], [], left)
            piece = os.read(descriptor, 1 << 16) if ready else b""
            if ready and not piece:
                self.process.wait()
                return self._gone(name, "crash", f"exit status {self.process.returncode}")
            text += piece
            for line in text.split(b"\n")[:-1]:
                if line.startswith(MARK.encode()):
                    row: dict[str, Any] = json.loads(line[len(MARK):])
                    return row
        self.stop()
        return self._gone(name, "timeout", f"ran past {seconds:.0f} s")

    def _gone(self, name: str, status: str, what: str) -> dict[str, Any]:
        self.errors.seek(0)
        tail = self.errors.read()[-1500:].decode(errors="replace")
        return {"check": name, "status": status, "detail": what, "traceback": tail, "lost": True}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def drive(jobs: SimpleQueue[str], arguments: Sequence[str], seconds: float, deadline: float,
          report: Callable[[dict[str, Any]], None]) -> None:
    """One worker's supervisor: hands out checks until none is left; each risky check has a process of its own."""
    worker: Worker | None = None
    while time.monotonic() < deadline:
        try:
            name = jobs.get_nowait()
        except Empty:
            break
        risky = checks.CHECKS[name].risky
        if risky and worker is not None:
            worker.stop()
            worker = None
        worker = worker or Worker.start(arguments)
        try:
            row = worker.ask(name, min(seconds, max(deadline - time.monotonic(), 1)))
        except BrokenPipeError:
            row = {"check": name, "status": "crash", "detail": "the worker was gone", "lost": True}
        report(row)
        if risky or row.pop("lost", False):
            worker.stop()
            worker = None
    if worker is not None:
        worker.stop()


def run_all(names: Sequence[str], args: argparse.Namespace, results: record.Results) -> list[dict[str, Any]]:
    jobs: SimpleQueue[str] = SimpleQueue()
    # risky ones first: they are long
    for name in sorted(names, key=lambda n: not checks.CHECKS[n].risky):
        jobs.put(name)
    deadline = time.monotonic() + args.seconds
    lock = threading.Lock()

    def report(row: dict[str, Any]) -> None:
        with lock:
            results.add(row)
            if row["status"] != "ok":
                print(f"{row['status']:8}{row['check']}: {str(row['detail']).splitlines()[0][:200]}", flush=True)

    arguments = ["--device", args.device, "--backend", args.backend]
    threads = [threading.Thread(target=drive, args=(jobs, arguments, args.limit, deadline, report))
               for _ in range(min(args.jobs, len(names)))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    done = {row["check"] for row in results.rows}
    for name in names:
        if name not in done:
            results.add({"check": name, "status": "skipped", "detail": "the time budget was spent"})
    return results.rows


def report_text(rows: Sequence[dict[str, Any]], show: int) -> str:
    """Counts by section, then the first failures with the end of their tracebacks."""
    present = {r["status"] for r in rows}
    statuses = [s for s in ("ok", "wrong", "error", "crash", "timeout", "skipped") if s in present]
    counts = Counter((r["check"].split("/")[0], r["status"]) for r in rows)
    sections = list(dict.fromkeys(r["check"].split("/")[0] for r in rows))
    lines = [(section, *(counts[section, s] for s in statuses)) for section in sorted(sections)]
    lines.append(("all", *(sum(r["status"] == s for r in rows) for s in statuses)))
    kernels = sum(r.get("kernels", 0) for r in rows)
    extern = Counter(op for r in rows for op in r.get("extern", ()))
    parts = [tabulate(lines, ("section", *statuses)),
             f"{kernels} kernels; as ATen: {', '.join(f'{op} ({n})' for op, n in extern.most_common()) or 'nothing'}"]
    bad = [r for r in rows if r["status"] not in ("ok", "skipped")]
    parts += [f"--- {r['check']}: {r['status']}: {str(r['detail'])[:600]}\n{str(r.get('traceback', ''))[-900:]}"
              for r in bad[:show]]
    return "\n".join(parts)


def run_pytest(seconds: float, jobs: int) -> int:
    """The repository's tests that need a GPU or name CUDA; the exit status, 5 (none found) counting as success."""
    command = [sys.executable, "-m", "pytest", "-q", "--maxfail=20", "-k", "cuda or gpu", "tests", "-p",
               "no:cacheprovider", "-n", str(jobs)]
    try:
        done = subprocess.run(command, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"pytest ran past {seconds:.0f} s")
        return 1
    return 0 if done.returncode == 5 else done.returncode


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backend", default="fxfuser", choices=list(backends.BACKENDS))
    p.add_argument("--only", help="checks that contain one of these texts (commas)")
    p.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 16))
    p.add_argument("--limit", type=float, default=60, help="seconds of one check")
    p.add_argument("--seconds", type=float, default=480, help="the whole call ends in about this time")
    p.add_argument("--json", type=Path, help="the results file (benchmarks/results/<date>-gpu_check.json)")
    p.add_argument("--show", type=int, default=8, help="failures shown in full")
    p.add_argument("--commit", help="recorded in the results, where the tree has no history")
    p.add_argument("--pytest", action="store_true", help="also run the tests that need a GPU")
    p.add_argument("--list", action="store_true", help="print the checks")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = p.parse_args()
    device = torch.device(args.device)
    if args.worker:
        return work(args.backend, device)
    names = checks.names(device, args.only)
    if args.list:
        print("\n".join(names))
        return 0
    started = time.monotonic()
    results = record.start("gpu_check", device, args.json, args.commit)
    rows = run_all(names, args, results)
    print(report_text(rows, args.show))
    status = 0 if all(r["status"] == "ok" for r in rows) else 1
    if args.pytest:
        status |= run_pytest(max(args.seconds - (time.monotonic() - started), 30), args.jobs)
    return status


if __name__ == "__main__":
    sys.exit(main())
