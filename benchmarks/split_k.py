"""Products whose sum is split over programs: weight gradients and decoding, beside the library's product.

    python -m benchmarks.split_k                                    every shape
    python -m benchmarks.split_k --quick                            without decoding 4 and 64 rows
    python -m benchmarks.split_k --only gradient_cast --variants mm,library,last_arriver,turnstile

`mm` is the library's product alone, `library` that and our kernel for the rest, `fused` our own kernels with the policy
and tile that were measured to be fastest, `auto` what users get; a policy's name stands for our kernel under that
policy alone; `parts` is two kernels, of which the second adds up what the first leaves.  Times are device times of
variants that take turns, ratios to `mm` in the same round.  `of floor` is the time that the bytes alone take, read or
written once at the rate of a large copy, over the variant's time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import policies, relay
from benchmarks.lineup import (
    PRODUCT,
    Case,
    Operand,
    Row,
    bits,
    by_variant,
    microseconds,
    note,
    scientific,
    wide,
)
from fxfuser.runtime import timing

VARIANTS = (PRODUCT, "eager", "inductor", "library", "fused", *policies.EVERY, "auto")
OURS = policies.SINGLE  # one kernel of our own; "fused" may be two, that leave and add up parts

# rows and columns of the gradient, and the samples that are summed
GRADIENTS = ((768, 768, 12288), (768, 768, 65536), (2304, 768, 12288), (3072, 768, 12288), (256, 256, 65536),
             (128, 128, 262144), (1024, 1024, 4096))
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096))  # inner, columns
ROWS, QUICK_ROWS = (1, 4, 16, 64), (1, 16)
MANY = 1000  # runs that must agree bit for bit, of the cases in REPEATED
REPEATED = ("gradient_cast/768x768x12288", "gradient_accumulate/256x256x65536", "decode/1x4096x4096",
            "decode/16x4096x14336")

# At least so much of the library's speed, by one kernel of ours
SPEEDS = {"768x768x12288": 0.95, "768x768x65536": 0.9, "256x256x65536": 0.85}
DEFAULT_SPEED = 0.97  # of the default choice at every shape
ACCUMULATE = 1.15  # times the plain product, with accumulation in fp32, by the default choice
DECODE = {(4096, 4096): 0.7, (4096, 14336): 0.8, (14336, 4096): 0.8}  # times Inductor's time


# ---------------------------------------------------------------- the cases' functions


def gradient(a: Tensor, b: Tensor, *others: Tensor) -> Tensor:
    return a.t() @ b


def gradient_cast(a: Tensor, b: Tensor) -> Tensor:
    return wide(a.t() @ b)


def gradient_accumulate(a: Tensor, b: Tensor, total: Tensor) -> Tensor:
    return total.add_(a.t() @ b)


def gradient_bias(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return wide(torch.addmm(bias, a.t(), b))


def product(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
    return x @ w.t()


def decode(x: Tensor, w: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream and what the next layer reads of it."""
    h = residual + x @ w.t()
    return h, F.rms_norm(h, g.shape, g)


# ---------------------------------------------------------------- cases


def _gradient(fn: Callable[..., Any], rows: int, columns: int, samples: int, *others: Operand) -> Case:
    size = f"{rows}x{columns}x{samples}"
    mutated = (2,) if fn is gradient_accumulate else ()
    return Case(fn.__name__, size, fn, gradient, (Operand((samples, rows)), Operand((samples, columns)), *others),
                mutated=mutated)


def gradients() -> Iterable[Case]:
    for rows, columns, samples in GRADIENTS:
        yield _gradient(gradient_cast, rows, columns, samples)
        yield _gradient(gradient_accumulate, rows, columns, samples,
                        Operand((rows, columns), samples ** 0.5, torch.float32))
        yield _gradient(gradient_bias, rows, columns, samples, Operand((columns,), samples ** 0.5))


def decodings(counts: Sequence[int]) -> Iterable[Case]:
    for rows in counts:
        for inner, columns in LAYERS:
            yield Case("decode", f"{rows}x{inner}x{columns}", decode, product, (
                Operand((rows, inner)), Operand((columns, inner), inner ** -0.5), Operand((rows, columns)),
                Operand((columns,))))


def cases(quick: bool) -> list[Case]:
    found = [*gradients(), *decodings(QUICK_ROWS if quick else ROWS)]
    return [replace(c, repeats=MANY) if c.key in REPEATED else c for c in found]


def bytes_of(case: Case) -> int:
    """What a call reads and writes at least: operands once, results once."""
    with torch.device("meta"):
        operands = [torch.empty(o.shape, dtype=o.dtype) for o in case.operands]
        results = case.fn(*operands)
    every = [*operands, *(results if isinstance(results, tuple) else (results,))]
    return sum(t.numel() * t.element_size() for t in every)


# ---------------------------------------------------------------- tables


def speed(row: Row) -> float | None:
    """Of the library's plain product."""
    return 1 / row["ratio"] if row.get("ratio") else None


def table(rows: Sequence[Row], rate: float | None) -> str:
    """A line per case and variant; `rate` in bytes per microsecond."""
    sizes = {(c.name, c.size): bytes_of(c) for c in cases(False)}
    lines = []
    for key, columns in by_variant(rows).items():
        inductor = columns.get("inductor", {})
        for variant, row in columns.items():
            us, theirs = microseconds(row), microseconds(inductor)
            floor = sizes[key] / rate / us if rate and us and key in sizes else None
            lines.append((*key, variant, us, speed(row), us / theirs if us and theirs else None, floor,
                          row.get("peak_mb"), scientific(row.get("error")), bits(row), row.get("kernels"), note(row)))
    headers = ("case", "size", "variant", "us", "of mm's speed", "x inductor", "of floor", "peak MB", "error", "bits",
               "kernels", "")
    return str(tabulate(lines, headers, floatfmt=("", "", "", ".1f", ".3f", ".3f", ".2f", ".1f", "", "", "g", "")))


def verdicts(rows: Sequence[Row]) -> list[str]:
    """What is asked of weight gradients and of decoding, and whether it is so."""
    found = by_variant(rows)
    said: list[str] = []

    def check(what: str, value: float | None, bound: float, most: bool) -> None:
        if value is not None:
            met = value <= bound if most else value >= bound
            wanted = f"at {'most' if most else 'least'} {bound}"
            said.append(f"{'met   ' if met else 'missed'} {what}: {value:.3f}, {wanted}")

    for (case, size), columns in found.items():
        auto, inductor = columns.get("auto", {}), columns.get("inductor", {})
        if case == "gradient_cast":
            check(f"{case} {size}, default over mm", speed(auto), DEFAULT_SPEED, False)
            if size in SPEEDS:
                best = max((s for v in OURS if (s := speed(columns.get(v, {})))), default=None)
                check(f"{case} {size}, our kernel over mm", best, SPEEDS[size], False)
        if case == "gradient_accumulate":
            check(f"{case} {size}, default x mm", auto.get("ratio"), ACCUMULATE, True)
            check(f"{case} {size}, default x inductor", against(auto, inductor), 1.0, True)
        if case == "decode":
            _, inner, columns_count = map(int, size.split("x"))
            check(f"{case} {size}, default x inductor", against(auto, inductor), DECODE[inner, columns_count], True)
            check(f"{case} {size}, kernels", auto.get("kernels"), 2, True)
    for row in rows:
        memsets = [k for k in row.get("by_name", {}) if "memset" in k.lower()]
        if row["variant"] in ("fused", *policies.EVERY, "auto") and memsets:
            said.append(f"missed {row['case']} {row['size']} {row['variant']}: {', '.join(memsets)}")
    return said


def against(row: Row, other: Row) -> float | None:
    """The time over another variant's, by the rounds in which they took turns."""
    if "graph" not in row or "graph" not in other:
        return None
    return timing.ratio(*(timing.Clock(tuple(r["graph"]["samples"])) for r in (row, other)))


def wins(rows: Sequence[Row]) -> str:
    """How often one kernel of ours beats the library's plain product, and that with a kernel behind it."""
    found = [c for (case, _), c in by_variant(rows).items() if case.startswith("gradient_")]
    plain, both = 0, 0
    for columns in found:
        times = [us for v in OURS if (us := microseconds(columns.get(v, {})))]
        mm, library = (microseconds(columns.get(v, {})) for v in (PRODUCT, "library"))
        plain += bool(times and mm and min(times) < mm)
        both += bool(times and library and min(times) < library)
    return (f"one kernel of ours is faster than the library's plain product in {plain} of {len(found)} weight "
            f"gradients, and than that product with a kernel behind it in {both}")


def main() -> int:
    args = relay.parser(__doc__.splitlines()[0], VARIANTS).parse_args()
    results = relay.run("split_k", args, cases(args.quick))
    if results is None:
        return 0
    rate = results.head["copy_bytes_per_us"]
    assert rate is None or isinstance(rate, float)
    print("\n" + "\n\n".join((table(results.rows, rate), "\n".join(verdicts(results.rows)), wins(results.rows))))
    return 0 if all(r["status"] in ("ok", "skipped", "no program") for r in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
