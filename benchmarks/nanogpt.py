"""Training GPT-2 124M beside eager and Inductor: step time, peak memory, kernels, compile time, loss curve.

    python -m benchmarks.nanogpt                                    12 x 1024 tokens, bf16 autocast on a GPU
    python -m benchmarks.nanogpt --profile 40                       and the kernels that take longest, per backend
    python -m benchmarks.nanogpt --size tiny --steps 5 --device cpu

The model, text and schedule are those of examples/nanogpt.py; every side compiles a closure that returns the loss
alone and updates with fused AdamW.  Each backend has a process of its own with empty caches, so `compile_s` is cold;
a second process on the same caches gives `warm_compile_s`.  Step times are between events on the device, one after
every step, and hold the launch gaps that training has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

from benchmarks import backends, record, suite
from examples import nanogpt as example
from fxfuser import observe, report, words
from fxfuser.runtime import timing

Row = dict[str, Any]
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FXFUSER_CACHE_DIR")
STEP_SECONDS = 4.0  # of timed steps
STARTED = 3.0  # seconds in which a process has imported what reads its time limit
CEILING_BYTES = 1 << 30  # moved by the copy whose speed is the floor of each kernel
# the first that a kernel's name contains
CLASSES = {"attention": r"flash|fmha|sdpa|attention|mha", "product": r"gemm|nvjet|cutlass|cublas|xmma|splitk|wgrad",
           "optimizer": r"multi_tensor|adam", "copy or fill": r"^mem(cpy|set)",
           "generated": r"^triton_|^pointwise_|^reduction_|^fused_"}


# ---------------------------------------------------------------- in a backend's own process


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def step_clock(step: Callable[[], object], device: torch.device, seconds: float) -> timing.Clock:
    """Steps one after the other, nothing read in between; on a GPU from event to event."""
    for _ in range(3):
        step()
    each = seconds_of(step, device)
    count = max(5, min(200, int(seconds / max(each, 1e-4))))
    if device.type != "cuda":
        return timing.Clock(tuple(seconds_of(step, device) * 1e6 for _ in range(count)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return timing.Clock(tuple(a.elapsed_time(b) * 1e3 for a, b in zip(events, events[1:])))


def kernel_sites(recording: observe.Recording) -> dict[str, Row]:
    """For each of fxfuser's kernels: how many segments it serves, what they move on average, the first one's ops."""
    found: dict[str, Row] = {}
    for trace in recording.graphs:
        nodes = report.nodes_by_name(trace)
        for segment in report.segment_rows(trace):
            if not segment.kernel:
                continue
            ops = words.counted(words.op_name(nodes[n]) for n, _, _ in segment.nodes)
            site = found.setdefault(segment.kernel, {"segments": 0, "bytes": 0, "graph": trace.graph.kind,
                                                     "first": segment.name, "ops": ops})
            site["segments"] += 1
            site["bytes"] += segment.bytes_in + segment.bytes_out
    return {name: {**site, "bytes": site["bytes"] // site["segments"]} for name, site in found.items()}


def sites(work: Callable[[], object], args: argparse.Namespace) -> Row:
    """`segments`, for the profile, from a compilation of its own: one that is recorded is slower."""
    if not args.profile:
        return {}
    torch.compiler.reset()
    with observe.recording() as recording:
        work()
    return {"segments": kernel_sites(recording)}


def measure_nanogpt(backend: str, args: argparse.Namespace) -> Row:
    """Compile time, then the loss curve from fresh weights, then every clock."""
    device, size = torch.device(args.device), nanogpt_size(args)
    torch.manual_seed(0)
    text, generator = example.read_text(None), torch.Generator().manual_seed(0)
    model = example.GPT(size).to(device)
    parameters = list(model.parameters())
    optimizer = example.make_optimizer(model, size.rate, device.type)
    loss_of = backends.BACKENDS[backend](example.loss_closure(model, device.type))
    held = [example.batch(text, size, device.type, torch.Generator().manual_seed(i)) for i in range(4)]

    def gradients(number: int = 0) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of(*held[number % len(held)]), parameters)

    row: Row = {"compile_s": round(seconds_of(gradients, device), 3)}
    if args.compile_only:
        return row
    row["parameters"] = sum(p.numel() for p in parameters)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses: list[Tensor] = []
    for number in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = example.learning_rate(number, args.steps, size.rate)
        losses.append(step(*example.batch(text, size, device.type, generator)))
    row["losses"] = [round(loss, 5) for loss in torch.stack(losses).tolist()]
    row["step"] = step_clock(lambda: step(*held[0]), device, args.step_seconds).to_json()
    row |= timing.measure([gradients], device, args.step_seconds / 8).to_json()
    if device.type == "cuda":
        row["step_kernels"] = round(timing.busy_clock([lambda: step(*held[0])], device).count, 1)
        row["copy_bytes_per_us"] = round(CEILING_BYTES / timing.copy_clock(CEILING_BYTES, device).median)
    return row | sites(gradients, args)


def worker(args: argparse.Namespace) -> int:
    """Measures `args.worker` and writes rows to `args.json` after each."""
    device, rows = torch.device(args.device), list[Row]()
    deadline = time.monotonic() + args.seconds

    def attempt(case: str, work: Callable[[], Row]) -> None:
        head: Row = {"backend": args.worker, "case": case}
        try:
            with suite.limit(deadline - time.monotonic()):
                rows.append({**head, "status": "ok", **work()})
        except suite.OutOfTime as error:
            rows.append({**head, "status": "out of time", "error": str(error)})
        except Exception as error:  # a row says so; what follows is measured all the same
            rows.append({**head, "status": "failed", "error": f"{type(error).__name__}: {error}"[:2000],
                         "traceback": traceback.format_exc()[-3000:]})
        args.json.write_text(json.dumps(rows))

    with timing.stream(device):
        torch.set_float32_matmul_precision("high")
        attempt("nanogpt", lambda: measure_nanogpt(args.worker, args))
    return 0


# ---------------------------------------------------------------- in the first process


def nanogpt_size(args: argparse.Namespace) -> example.Size:
    size = example.SIZES[args.size]
    return replace(size, batch=args.batch or size.batch, context=args.context or size.context)


def in_process(backend: str, args: argparse.Namespace, caches: Path, seconds: float, *extra: str) -> list[Row]:
    """The rows of a worker; one row says so where it crashed or ran past its time."""
    if seconds < 5:
        return [{"backend": backend, "status": "skipped", "error": "the time budget was spent"}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        options = {"--device": args.device, "--size": args.size, "--steps": args.steps, "--batch": args.batch,
                   "--context": args.context, "--step-seconds": args.step_seconds, "--seconds": seconds - STARTED,
                   "--profile": args.profile}
        command = [sys.executable, "-m", "benchmarks.nanogpt", "--worker", backend, "--json", str(path),
                   *(text for name, value in options.items() if value for text in (name, str(value))), *extra]
        environment = {**os.environ, **{name: str(caches / name) for name in CACHES}}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment,
                                  cwd=Path(__file__).parent.parent)
            status, problem = "crashed", f"exit status {done.returncode}: {done.stderr[-1500:]}"
            failed = done.returncode != 0
        except subprocess.TimeoutExpired:
            status, problem, failed = "out of time", f"ran past {seconds:.0f} s", True
        rows: list[Row] = json.loads(path.read_text()) if path.exists() else []
    return rows + ([{"backend": backend, "status": status, "error": problem}] if failed or not rows else [])


def line(row: Row) -> str:
    """A row as it scrolls by."""
    head = f"{row.get('case', '')} {row['backend']}: "
    if row["status"] != "ok":
        head += f"{row['status']} {str(row.get('error', ''))[:300]} "
    if "step" not in row:
        return head
    kernels = f", {row['busy']['kernels']:g} kernels" if row.get("busy") else ""
    return head + f"step {row['step']['median'] / 1e3:.3f} ms, compiled in {row['compile_s']:.1f} s{kernels}"


def measure_all(args: argparse.Namespace, results: record.Results) -> None:
    deadline = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory() as folder:
        folders = {backend: Path(folder) / backend for backend in args.backends}
        for caches in folders.values():
            caches.mkdir()
        for backend in args.backends:
            add(results, args, in_process(backend, args, folders[backend], deadline - time.monotonic()))
        for row in [r for r in results.rows if r["status"] == "ok" and r["backend"] != "eager"]:
            left = deadline - time.monotonic()
            warm = in_process(row["backend"], args, folders[row["backend"]], left, "--compile-only")
            row["warm_compile_s"] = warm[0].get("compile_s")
            results.write()


def add(results: record.Results, args: argparse.Namespace, rows: Sequence[Row]) -> None:
    for row in rows:
        results.add({"size": args.size, **row})
        print(line(row), flush=True)


# ---------------------------------------------------------------- tables


def columns(rows: Sequence[Row], case: str) -> dict[str, Row]:
    """backend -> row, of the rows of one case that were measured."""
    return {r["backend"]: r for r in rows if r.get("case") == case and "step" in r}


def ratio(rows: Mapping[str, Row], over: str, row: Row) -> float | None:
    """How many times the speed of `over` this is."""
    return rows[over]["step"]["median"] / row["step"]["median"] if over in rows else None


def curve_distance(losses: Sequence[float], eager: Sequence[float]) -> tuple[float, float]:
    """(mean, largest) of the difference, relative to eager's loss."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, eager)]
    return statistics.fmean(apart), max(apart)


def table(rows: Sequence[Row]) -> str:
    """One line per case and backend."""
    lines: list[tuple[Any, ...]] = []
    for case in dict.fromkeys(r["case"] for r in rows if "step" in r):
        found = columns(rows, case)
        for backend, row in found.items():
            busy, losses = row.get("busy") or {}, found.get("eager", {}).get("losses")
            apart = curve_distance(row["losses"], losses)[0] if losses and backend != "eager" else None
            lines.append((case, backend, row["step"]["median"] / 1e3, ratio(found, "eager", row),
                          ratio(found, "inductor", row), busy.get("microseconds", 0) / 1e3 or None,
                          busy.get("kernels"), row["peak_bytes"] / 1e6 if row.get("peak_bytes") else None,
                          row["compile_s"], row.get("warm_compile_s"), apart, row.get("error_to_float32")))
    headers = ("case", "backend", "step ms", "x eager", "x inductor", "busy ms", "kernels", "peak MB", "compile s",
               "warm s", "curve", "error")
    return str(tabulate(lines, headers, floatfmt=("", "", ".3f", ".3f", ".3f", ".2f", "g", ".0f", ".1f", ".1f", ".1e",
                                                  ".1e")))


def curve_table(rows: Sequence[Row]) -> str:
    """The loss of every backend at about ten steps."""
    found = {b: r["losses"] for b, r in columns(rows, "nanogpt").items() if r.get("losses")}
    if not found:
        return ""
    count = min(map(len, found.values()))
    steps = sorted({*range(0, count, max(count // 10, 1)), count - 1})
    return str(tabulate([(n + 1, *(losses[n] for losses in found.values())) for n in steps], ("step", *found),
                        floatfmt=("", *[".4f"] * len(found))))


def class_of(kernel: str) -> str:
    return next((name for name, pattern in CLASSES.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def profile(row: Row, most: int) -> str:
    """Kernels of one forward and backward by total time; for fxfuser's own their bytes, floor and segments."""
    kernels, sites, speed = row["busy"]["by_name"], row.get("segments", {}), row.get("copy_bytes_per_us")
    totals: dict[str, tuple[float, float]] = {}
    for name, (count, us) in kernels.items():
        n, total = totals.get(class_of(name), (0.0, 0.0))
        totals[class_of(name)] = n + count, total + us
    lines = []
    for name, (count, us) in sorted(kernels.items(), key=lambda item: -item[1][1])[:most]:
        site = sites.get(name, {})
        floor = count * site["bytes"] / speed if site and speed else None
        where = f"{site['graph']} {site['first']}: {site['ops']}" if site else ""
        lines.append((us, count, floor, floor / us if floor else None, name[:70], where[:90]))
    classes = ", ".join(f"{name} {us / 1e3:.2f} ms in {n:g}" for name, (n, us) in
                        sorted(totals.items(), key=lambda item: -item[1][1]))
    head = f"{row['case']} {row['backend']}: {row['busy']['microseconds'] / 1e3:.2f} ms busy; {classes}"
    return f"{head}\n" + str(tabulate(lines, ("us", "count", "floor us", "of copy", "kernel", "segment"),
                                      floatfmt=(".1f", "g", ".1f", ".2f", "", ""), disable_numparse=[4, 5]))


def concluded(rows: Sequence[Row], most: int) -> int:
    """Prints the `most` top kernels of each row that has some; returns the exit status."""
    for row in rows if most else ():
        if row.get("busy"):
            print(f"\n{profile(row, most)}")
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backends", default="eager,inductor,fxfuser", type=backends.parse,
                   help=f"separated by commas, of: {', '.join(backends.BACKENDS)}")
    p.add_argument("--size", choices=example.SIZES, default="gpt2")
    p.add_argument("--batch", type=int, default=0, help="sequences a step (by default the size's own)")
    p.add_argument("--context", type=int, default=0, help="their length (by default the size's own)")
    p.add_argument("--steps", type=int, default=200, help="of the loss curve")
    p.add_argument("--step-seconds", type=float, default=STEP_SECONDS, help="measuring time of the steps")
    p.add_argument("--seconds", type=float, default=540, help="the whole call ends in about this time")
    p.add_argument("--profile", type=int, nargs="?", const=30, default=0, metavar="N", help="print the top kernels")
    p.add_argument("--json", type=Path, help="the results file (benchmarks/results/<date>-nanogpt.json)")
    p.add_argument("--commit", help="recorded in the results, where the tree has no history")
    p.add_argument("--worker", help=argparse.SUPPRESS)  # measure this backend in this process
    p.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    return p.parse_args()


def main() -> int:
    args = parse()
    if args.worker:
        return worker(args)
    results = record.start("nanogpt", torch.device(args.device), args.json, args.commit)
    results.head["model"] = asdict(nanogpt_size(args))
    measure_all(args, results)
    print(f"\n{table(results.rows)}\n\n{curve_table(results.rows)}")
    return concluded(results.rows, args.profile)


if __name__ == "__main__":
    sys.exit(main())
