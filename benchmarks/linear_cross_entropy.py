"""Linear layers with cross entropy: time, peak memory, kernels and errors of the loss and its gradients.

    python -m benchmarks.linear_cross_entropy --seconds 500
    python -m benchmarks.linear_cross_entropy --only 12288 --variants inductor,fxfuser-auto --no-checks

One call is the forward and the backward; `forward` rows run without gradients.  Peak memory is the most that is
allocated during a call less what was before it, gradients included, and comes from a call of its own.  Errors are
||a - b|| / ||b|| against float64.  `repeats`: two calls agree bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor
from torch._inductor import list_options

from benchmarks import record, suite
from fxfuser.runtime import timing

SIZES = ((12288, 768, 50304), (8192, 4096, 32000), (8192, 4096, 128256))
SMALL = ((256, 64, 1000),)  # where there is no GPU
PIECE = 512  # rows of the float64 reference at a time
MB = 1 << 20

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """x [rows, inner] and w [columns, inner] in bf16, labels [rows]; logits are of the order of 1."""

    rows: int
    inner: int
    columns: int
    backward: bool

    @property
    def key(self) -> str:
        return f"{self.rows}x{self.inner}x{self.columns}/{'both' if self.backward else 'forward'}"

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator(device=device).manual_seed(0)
        x = torch.randn(self.rows, self.inner, device=device, generator=generator).bfloat16()
        w = (torch.randn(self.columns, self.inner, device=device, generator=generator) / self.inner ** 0.5).bfloat16()
        y = torch.randint(self.columns, (self.rows,), device=device, generator=generator)
        return x.requires_grad_(self.backward), w.requires_grad_(self.backward), y


def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def fxfuser(option: str) -> Callable[[], Loss]:
    return lambda: torch.compile(loss, backend="fxfuser", dynamic=False, options={"linear_cross_entropy": option})


def auto_chunker() -> Loss:
    names = [n for n in list_options() if n.startswith("auto_chunker") and n.endswith("enable")]
    if not names:
        raise ImportError("this Inductor has no auto_chunker")
    return torch.compile(loss, dynamic=False, options=dict.fromkeys(names, True))


def pytorch() -> Loss:
    function = vars(F).get("linear_cross_entropy")
    if function is None:
        raise ImportError("this torch has no linear_cross_entropy")
    return lambda x, w, y: function(x, w, y)  # type: ignore[no-any-return]


def liger() -> Loss:
    fused = import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda x, w, y: fused(w, x, y)  # type: ignore[no-any-return]


def cut_cross_entropy() -> Loss:
    function = import_module("cut_cross_entropy").linear_cross_entropy
    return lambda x, w, y: function(x, w, y)  # type: ignore[no-any-return]


VARIANTS: Mapping[str, Callable[[], Loss]] = {
    "mm": lambda: lambda x, w, y: F.linear(x, w)[0, 0],  # of the forward alone: the floor
    "eager": lambda: loss,
    "inductor": lambda: torch.compile(loss, dynamic=False),
    "inductor-auto-chunker": auto_chunker,
    "torch": pytorch, "liger": liger, "cce": cut_cross_entropy,
    **{f"fxfuser-{option.replace('_', '-')}": fxfuser(option) for option in ("off", "fast", "auto", "low_memory")},
}


@cache
def exact(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and the gradients of x and w in float64, rounded to float32 to be kept."""
    x, w, y = (t.detach() for t in case.inputs(device))
    wide = w.double()
    total = torch.zeros((), dtype=torch.float64, device=device)
    dx, dw = torch.empty(x.shape, device=device), torch.zeros(w.shape, dtype=torch.float64, device=device)
    for start in range(0, case.rows, PIECE):
        part, labels = x[start:start + PIECE].double(), y[start:start + PIECE]
        logs = torch.log_softmax(part @ wide.t(), -1)
        total -= logs.gather(1, labels[:, None]).sum()
        if case.backward:
            g = logs.exp_()
            g[torch.arange(len(labels), device=device), labels] -= 1
            g /= case.rows
            dx[start:start + PIECE] = (g @ wide).float()
            dw.addmm_(g.t(), part)
        del logs
    return (total / case.rows).float(), dx, dw.float()


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, piece by piece: a float32 copy of a gigabyte would not fit beside it everywhere."""
    above = sum((p.float() - q.float()).square().sum(dtype=torch.float64) for p, q in zip(a.split(8192), b.split(8192)))
    below = sum(q.float().square().sum(dtype=torch.float64) for q in b.split(8192))
    return float((above / below).sqrt())


def call_of(case: Case, function: Loss, inputs: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    x, w, y = inputs

    def both() -> Sequence[Tensor]:
        x.grad = w.grad = None
        value = function(x, w, y)
        value.backward()
        assert x.grad is not None and w.grad is not None
        return value.detach(), x.grad, w.grad

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return (function(x, w, y),)

    return both if case.backward else forward


def measured(case: Case, name: str, device: torch.device, seconds: float, checks: bool) -> dict[str, Any]:
    inputs = case.inputs(device)
    run = call_of(case, VARIANTS[name](), inputs)
    start = time.perf_counter()
    results = run()
    row: dict[str, Any] = {"status": "ok", "compile_s": round(time.perf_counter() - start, 2)}
    if checks and name != "mm":
        wanted = exact(case, device)[:len(results)]
        parts = ("loss", "dx", "dw")
        row["errors"] = {p: distance(a.view(-1) if not a.dim() else a, b.view(-1) if not b.dim() else b)
                         for p, a, b in zip(parts, results, wanted)}
        first = [r.clone() for r in results]
        row["repeats"] = all(torch.equal(a, b) for a, b in zip(first, run()))
        del first, wanted
    del results
    inputs[0].grad = inputs[1].grad = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        row["peak_mb"] = round(_peak(run, inputs, device) / MB, 1)
        busy = timing.busy_clock([run], device)
        row["kernels"], row["busy_ms"] = busy.count, round(busy.microseconds / 1000, 3)
    row["ms"] = round(_milliseconds(run, device, seconds), 3)
    return row


def _peak(run: Callable[[], object], inputs: Sequence[Tensor], device: torch.device) -> int:
    inputs[0].grad = inputs[1].grad = None
    torch.cuda.empty_cache()
    return timing.peak_bytes(run, device)


def _milliseconds(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median time of one of a burst of calls, which the host has no part in if it is fast enough."""
    for _ in range(3):
        run()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(samples) < 3:
        if device.type != "cuda":
            start = time.perf_counter()
            run()
            samples.append(1000 * (time.perf_counter() - start))
            continue
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for _ in range(5):
            run()
        marks[1].record()
        torch.cuda.synchronize(device)
        samples.append(marks[0].elapsed_time(marks[1]) / 5)
    return statistics.median(samples)


def attempt(case: Case, name: str, device: torch.device, seconds: float, checks: bool, limit: float) -> dict[str, Any]:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        with suite.limit(limit):
            return measured(case, name, device, seconds, checks)
    except suite.OutOfTime as error:
        return {"status": "out of time", "error": str(error)}
    except ImportError as error:
        return {"status": "not installed", "error": str(error)}
    except Exception as error:  # one variant's failure is a row, not the end of the run
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"[:1000],
                "traceback": traceback.format_exc()[-3000:]}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        errors = row.get("errors", {})
        lines.append((row["case"], row["variant"], row.get("ms"), row.get("peak_mb"), row.get("kernels"),
                      row.get("busy_ms"), *(f"{errors[p]:.2e}" if p in errors else None for p in ("loss", "dx", "dw")),
                      row.get("repeats"), "" if row["status"] == "ok" else f"{row['status']}: {row['error'][:60]}"))
    headers = ("case", "variant", "ms", "peak MB", "kernels", "busy ms", "loss error", "dx error", "dw error",
               "repeats", "")
    return tabulate(lines, headers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of: {', '.join(VARIANTS)}")
    parser.add_argument("--only", help="cases whose name contains one of these texts (commas)")
    parser.add_argument("--seconds", type=float, default=540, help="the whole call ends in about this time")
    parser.add_argument("--per-variant", type=float, default=60, help="limit of one variant of one case, in seconds")
    parser.add_argument("--clock-seconds", type=float, default=0.5, help="measuring time")
    parser.add_argument("--no-checks", action="store_true", help="no errors against float64")
    parser.add_argument("--json", type=Path, help="the results file")
    parser.add_argument("--commit", help="recorded in the results, where the tree has no history")
    args = parser.parse_args()
    device, deadline = torch.device(args.device), time.monotonic() + args.seconds
    names = args.variants.split(",")
    unknown = [n for n in names if n not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {', '.join(unknown)}; known: {', '.join(VARIANTS)}")
    sizes = SIZES if device.type == "cuda" else SMALL
    cases = [Case(*size, backward) for size in sizes for backward in (True, False)]
    cases = [c for c in cases if not args.only or any(t in c.key for t in args.only.split(","))]
    results = record.start("linear_cross_entropy", device, args.json, args.commit)
    for case in cases:
        for name in names:
            if name == "mm" and case.backward:
                continue
            left = deadline - time.monotonic()
            row = {"status": "skipped", "error": "the time budget was spent"} if left < 5 else attempt(
                case, name, device, args.clock_seconds, not args.no_checks, min(left, args.per_variant))
            results.add({"case": case.key, "variant": name, **row})
            print(table(results.rows[-1:]).splitlines()[-1], flush=True)
        exact.cache_clear()
    print("\n" + table(results.rows))
    return 0 if all(r["status"] in ("ok", "skipped", "not installed") for r in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
