"""One computation by several compilers, measured in turns: what a product with work behind it costs over the product.

Enters: a `Case` and names of VARIANTS.  Leaves: one row per variant: device time and its ratio to the library's plain
product, memory, errors against float64, whether runs agree bit for bit, kernels, and what of it was fused.  Invariants:
all times of a case come from rounds in which the variants take turns, since clock rates drift by more than what is to
be told apart; a variant that fails is a row with its error.  Where there is no GPU the time is a call's and says so.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from benchmarks import policies, suite
from fxfuser import observe
from fxfuser.runtime import timing
from fxfuser.runtime.timing import Clock

MB = 1 << 20
PRODUCT = "mm"  # the variant that every other is compared with
PIECE = 1 << 26  # elements that are compared at once
# A result may be so much further from float64 than eager's; elements of discrete results that may differ from eager's
ALLOWED, FLOOR, DIFFERENT = 1.5, 1e-6, 0.005
LOST = ("CUDA error", "AcceleratorError", "cudaError")  # after these the process is of no use

Row = dict[str, Any]
Function = Callable[..., Any]
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Operand:
    """A tensor of random numbers, normal with this deviation."""

    shape: tuple[int, ...]
    deviation: float = 1.0
    dtype: torch.dtype = BF16

    def draw(self, device: torch.device) -> Tensor:
        return (torch.randn(self.shape, device=device) * self.deviation).to(self.dtype)


@dataclass(frozen=True)
class Case:
    """`fn` of operands, and `product`, the matrix products in it.  `repeats`: runs that must agree bit for bit;
    `variants`: those of SOME that say something of this case; `mutated`: positions of operands that `fn` writes to."""

    name: str
    size: str
    fn: Function
    product: Function
    operands: tuple[Operand, ...]
    repeats: int = 5
    variants: tuple[str, ...] = ()
    mutated: tuple[int, ...] = ()

    def arguments(self, operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Operands for one call, of which those that it writes to are copies."""
        return tuple(t.clone() if i in self.mutated else t for i, t in enumerate(operands))

    @property
    def key(self) -> str:
        return f"{self.name}/{self.size}"

    def shrunk(self, most: int) -> Case:
        """The same with no dimension beyond `most`, under the same key."""
        small = tuple(replace(o, shape=tuple(min(n, most) for n in o.shape)) for o in self.operands)
        return replace(self, operands=small)


@dataclass(frozen=True)
class Settings:
    """`clock_seconds` for all variants of a case together; `per_variant` seconds to compile and check one."""

    device: torch.device
    clock_seconds: float = 0.5
    per_variant: float = 90.0
    compile_only: bool = False


def fresh(fn: Function) -> FunctionType:
    """A copy that Dynamo has not seen: it keeps what it compiled, and counts how often, by code object."""
    assert isinstance(fn, FunctionType)
    return FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)


def _compiled(fn: Function, **arguments: Any) -> Function:
    return torch.compile(fresh(fn), dynamic=False, fullgraph=True, **arguments)


def _ours(fn: Function, gemm: str, deferred: bool = False) -> Function:
    options = {"gemm": gemm, "strict": True, "defer_normalisation": deferred}
    return _compiled(fn, backend="fxfuser", options=options)


def _policy(fn: Function, name: str) -> Function:
    return _compiled(fn, backend=policies.backend(name))


VARIANTS: Mapping[str, Callable[[Function], Function]] = {
    PRODUCT: lambda fn: fn,  # of the case's product
    "eager": lambda fn: fn,
    "inductor": _compiled,
    "library": partial(_ours, gemm="library"),  # the library's product and kernels of ours for the rest
    "fused": partial(_ours, gemm="fused"),  # our fused kernel, its policy and tile by measurement
    "auto": partial(_ours, gemm="auto"),  # what users get
    "deferred": partial(_ours, gemm="fused", deferred=True),  # row statistics applied behind the product
    "deferred_auto": partial(_ours, gemm="auto", deferred=True),
    **{name: partial(_policy, name=name) for name in policies.EVERY},
}

SOME = frozenset({"deferred", "deferred_auto"})  # variants that are measured of cases alone that name them


def wide(t: Tensor) -> Tensor:
    """In float32 at least: `.float()` would narrow the float64 reference."""
    return t if t.dtype == torch.float64 else t.float()


# ---------------------------------------------------------------- errors


def distance(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, piece by piece: a wide copy of gigabytes would not fit beside it everywhere."""
    if a.shape != b.shape:
        return float("inf")
    rows = max(1, PIECE * len(b) // max(b.numel(), 1)) if b.dim() else 1
    above = below = 0.0
    for p, q in zip(torch.atleast_1d(a).split(rows), torch.atleast_1d(b).split(rows)):
        above += (p.double() - q.double()).square().sum().item()
        below += q.double().square().sum().item()
    return (above / below) ** 0.5 if below else above ** 0.5


@dataclass(frozen=True)
class Yardstick:
    """Results in float64 and eager's."""

    exact: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]

    @staticmethod
    def of(case: Case, inputs: Sequence[Tensor]) -> Yardstick:
        with torch.no_grad():
            eager = tuple(suite.tensors(case.fn(*case.arguments(inputs))))
            exact = tuple(suite.tensors(case.fn(*(t.double() for t in case.arguments(inputs)))))
        return Yardstick(exact, eager)

    def judge(self, outputs: Sequence[Tensor]) -> Row:
        """`error`, the largest distance from float64; `differs`, the part of discrete results that is not eager's."""
        row: Row = {"status": "ok"}
        for i, (a, b, c) in enumerate(zip(outputs, self.eager, self.exact, strict=True)):
            if (a.shape, a.dtype, suite.significant_strides(a)) != (b.shape, b.dtype, suite.significant_strides(b)):
                return row | {"status": "wrong", "error_text": f"result {i}: {_form(a)}, eager's {_form(b)}"}
            if not b.is_floating_point():
                row["differs"] = max(row.get("differs", 0.0), (a != b).double().mean().item())
                continue
            found, allowed = distance(a, c), ALLOWED * distance(b, c) + FLOOR
            row["error"] = max(row.get("error", 0.0), found)
            if not found <= allowed:
                row |= {"status": "wrong", "error_text": f"result {i}: distance {found:.2e}, allowed {allowed:.2e}"}
        if row.get("differs", 0.0) > DIFFERENT:
            row |= {"status": "wrong", "error_text": f"{row['differs']:.1%} of a discrete result is not eager's"}
        return row


def _form(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} with strides {list(t.stride())}"


def runs_that_differ(run: timing.Run, count: int) -> int:
    """How many of `count` further runs do not give the bits of the first."""
    first = suite.tensors(run())
    different = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(count):
        apart = [(a != b).any() for a, b in zip(suite.tensors(run()), first)]
        different += torch.stack(apart).any()
    return int(different)


# ---------------------------------------------------------------- one case


@dataclass
class Entry:
    """A variant that is ready to be measured, or failed: then `run` is None."""

    row: Row
    run: timing.Run | None = None


def prepare(case: Case, name: str, inputs: Sequence[Tensor], yardstick: Yardstick | None, settings: Settings) -> Entry:
    """Compiles and checks a variant; nothing is timed yet."""
    start = time.perf_counter()
    function = VARIANTS[name](case.product if name == PRODUCT else case.fn)
    timed = case.arguments(inputs)  # the others are drawn once, and checks of later variants start from them

    def run() -> object:
        with torch.no_grad():
            return function(*timed)

    def anew() -> object:
        with torch.no_grad():
            return function(*case.arguments(inputs))

    with observe.recording() as recording:
        outputs = suite.tensors(anew())
    if settings.device.type == "cuda":
        torch.cuda.synchronize(settings.device)
    row: Row = {"status": "ok", "compile_s": round(time.perf_counter() - start, 2), **compiled(recording)}
    if settings.compile_only or yardstick is None:
        return Entry(row)
    if name != PRODUCT:
        row |= yardstick.judge(outputs)
        row["runs"], row["runs_that_differ"] = case.repeats, runs_that_differ(anew, case.repeats)
    del outputs
    if settings.device.type == "cuda":
        row["peak_mb"] = round(timing.peak_bytes(run, settings.device) / MB, 2)
        busy = timing.busy_clock([run], settings.device)
        row["kernels"] = round(busy.count, 2)
        row["by_name"] = {kernel: [round(n, 2), round(us, 2)] for kernel, (n, us) in busy.kernels.items()}
    return Entry(row, run)


def compiled(recording: observe.Recording) -> Row:
    """What fxfuser made of it: fused products, why there are none, and the routes that were measured."""
    segmentations = [found for _, found in recording.segmentations]
    if not segmentations:
        return {}
    fused = sum(s.kind.value == "gemm" for found in segmentations for s in found.segments)
    reasons = dict.fromkeys(b.reason for found in segmentations for b in found.boundaries
                            if b.rule in ("gemm", "epilogue", "prologue"))
    routes = [{"chosen": t.tile, "times": [[name, us and round(us, 2)] for name, us in t.times]}
              for trace in recording.graphs for t in trace.tunings if t.subject == "route"]
    return {"fused": fused, "reasons": list(reasons), "routes": routes}


def attempt(case: Case, name: str, inputs: Sequence[Tensor], yardstick: Yardstick | None, settings: Settings) -> Entry:
    """`prepare` within its limit; an error becomes the row, `lost` where the process can do nothing more."""
    try:
        with suite.limit(settings.per_variant):
            return prepare(case, name, inputs, yardstick, settings)
    except suite.OutOfTime as error:
        return Entry({"status": "out of time", "error_text": str(error)})
    except Exception as error:  # one variant's failure is a row, not the end of the run
        text = f"{type(error).__name__}: {error}"
        if policies.NoProgram.__name__ in text:  # Dynamo wraps what a backend raises
            return Entry({"status": "no program", "error_text": text.splitlines()[1][:300]})
        return Entry({"status": "failed", "error_text": text[:2000], "traceback": traceback.format_exc()[-3000:],
                      **({"lost": True} if any(s in text for s in LOST) else {})})


def measure(case: Case, names: Sequence[str], settings: Settings, begin: Callable[[str], None]) -> Iterator[Row]:
    """One row per variant, the failed ones first; `begin` is told what is about to run, a variant or "clocks"."""
    head = {"case": case.name, "size": case.size}
    with timing.stream(settings.device):
        torch.manual_seed(0)
        inputs = tuple(o.draw(settings.device) for o in case.operands)
        begin("inputs")
        yardstick = None if settings.compile_only else Yardstick.of(case, inputs)
        entries: dict[str, Entry] = {}
        for name in names:
            begin(name)
            entry = entries[name] = attempt(case, name, inputs, yardstick, settings)
            if entry.run is None:
                yield {**head, "variant": name, **entry.row}
                if entry.row.get("lost"):
                    return
        del yardstick
        begin("clocks")
        ready = {name: e for name, e in entries.items() if e.run is not None}
        for name, times in clocks({n: e.run for n, e in ready.items() if e.run is not None}, settings).items():
            yield {**head, "variant": name, **ready[name].row, **times}
        del entries, ready, inputs
    gc.collect()
    torch.compiler.reset()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()


def clocks(runs: Mapping[str, timing.Run], settings: Settings) -> dict[str, Row]:
    """Times of runs that take turns, and where the plain product is one of them, the ratio to it."""
    if not runs:
        return {}
    if settings.device.type != "cuda":
        seconds = settings.clock_seconds / len(runs)
        calls = {name: timing.call_clock([run], settings.device, seconds) for name, run in runs.items()}
        return {name: {"call": clock.to_json()} for name, clock in calls.items()}
    found = dict(zip(runs, timing.interleaved(list(runs.values()), settings.device, settings.clock_seconds)))
    product = found.get(PRODUCT)
    rows: dict[str, Row] = {}
    for name, clock in found.items():
        if not isinstance(clock, Clock):
            rows[name] = {"status": "failed", "error_text": f"no graph: {clock}"[:2000]}
            continue
        rows[name] = {"graph": clock.to_json()}
        if isinstance(product, Clock):
            rows[name]["ratio"] = round(timing.ratio(clock, product), 4)
    return rows


def microseconds(row: Row) -> float | None:
    """Device time, or a call's where there is no device clock; None where the variant failed."""
    found = row.get("graph") or row.get("call")
    return float(found["median"]) if found else None


# ---------------------------------------------------------------- tables


def by_variant(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """(case, size) -> variant -> row, cases in the order in which they were measured, variants in that of VARIANTS."""
    order = {name: i for i, name in enumerate(VARIANTS)}
    found: dict[tuple[str, str], dict[str, Row]] = {(r["case"], r["size"]): {} for r in rows}
    for row in sorted(rows, key=lambda r: order.get(r["variant"], len(order))):
        found[row["case"], row["size"]][row["variant"]] = row
    return found


def scientific(value: float | None) -> str | None:
    return None if value is None else f"{value:.1e}"


def bits(row: Row) -> str | None:
    """Runs that gave the bits of the first, of all."""
    if "runs" not in row:
        return None
    return "equal" if not row["runs_that_differ"] else f"{row['runs_that_differ']} of {row['runs']} differ"


def note(row: Row) -> str:
    """Why a variant has no times or is not fused; else what was chosen for it."""
    if row["status"] != "ok":
        return f"{row['status']}: {' '.join(str(row.get('error_text', '')).split())[:80]}"
    chosen = [str(r["chosen"]) for r in row.get("routes", ())]
    if row["variant"] in ("fused", "auto") and not row.get("fused") and row.get("reasons"):
        return f"not fused: {row['reasons'][0][:80]}"
    return "; ".join(c[-90:] for c in chosen)
