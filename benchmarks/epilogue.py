"""Matrix products with pointwise and reduction epilogues: our fused kernels beside the library's product.

    python -m benchmarks.epilogue                                   every case
    python -m benchmarks.epilogue --quick                           without the ten shapes of layers
    python -m benchmarks.epilogue --only logsumexp,amax --variants mm,library,fused,auto --seconds 120

`mm` is the library's product alone (two of them where the case has two), `library` that product and our kernel for the
rest, `fused` our own kernel with the library disabled, `auto` what users get, `deferred` and `deferred_auto` the last
two under the option defer_normalisation, where a normalisation lies between products.  Times are device times of
variants that take turns; a ratio is the median over the rounds of a variant's time over that of `mm` in the same round.
Memory is what a call holds at most beyond its inputs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import relay
from benchmarks.lineup import (
    PRODUCT,
    SOME,
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

VARIANTS = (PRODUCT, "eager", "inductor", "library", "fused", "auto", "deferred", "deferred_auto")

# What issue and README call the case; at most so many times the plain product (None: see `bound`)
LIMITS: Mapping[str, float] = {
    "logsumexp": 1.06, "argmax": 1.06, "amax": 1.06, "gate_interleaved": 1.05, "gate_halves": 1.05,
    "gelu_erf_sum": 1.35, "gelu_tanh_sum": 1.25, "rms_norm_mm": 1.15, "layer_norm_mm": 1.15,
}
DEFERRED = 1.08  # the same under the option defer_normalisation
LAYERS = ("plain", "addmm")
BESIDE = 1.03  # times the best of cuBLAS and Inductor, for layers under the default choice

# tokens, then (name, inner, columns) of every type of linear layer in a forward pass
GPT = ("gpt", 12288, (("qkv", 768, 2304), ("projection", 768, 768), ("up", 768, 3072), ("down", 3072, 768),
                      ("head", 768, 50304)))
LLAMA = ("llama", 8192, (("query", 4096, 4096), ("key", 4096, 1024), ("up", 4096, 14336), ("down", 14336, 4096),
                         ("head", 4096, 128256)))


# ---------------------------------------------------------------- the cases' functions


def product(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
    return x @ w.t()


def two_products(x: Tensor, w1: Tensor, residual: Tensor, w2: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w1.t(), residual @ w2.t()


def logsumexp(x: Tensor, w: Tensor) -> Tensor:
    return torch.logsumexp(wide(x @ w.t()), -1)


def argmax(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).argmax(-1)


def amax(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).amax(-1)


def gate_interleaved(x: Tensor, w: Tensor) -> Tensor:
    h = x @ w.t()
    return F.silu(h[:, ::2]) * h[:, 1::2]


def gate_halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w.t()).chunk(2, -1)
    return F.silu(gate) * up


def gelu_erf_sum(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = F.gelu(x @ w.t())
    return h, h.sum(0)


def gelu_tanh_sum(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = F.gelu(x @ w.t(), approximate="tanh")
    return h, h.sum(0)


def rms_norm_mm(x: Tensor, w1: Tensor, residual: Tensor, w2: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(residual + x @ w1.t(), g.shape, g) @ w2.t()


def rms_norm_mm_stream(x: Tensor, w1: Tensor, residual: Tensor, w2: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As in a model, where a later layer adds to the residual stream."""
    h = residual + x @ w1.t()
    return h, F.rms_norm(h, g.shape, g) @ w2.t()


def layer_norm_mm(x: Tensor, w1: Tensor, residual: Tensor, w2: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(residual + x @ w1.t(), g.shape, g, b) @ w2.t()


def softmax(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax(x @ w.t(), -1)


def rms_norm(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(x @ w.t(), g.shape, g)


def bias_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def bias_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.linear(x, w, b))


# ---------------------------------------------------------------- cases


def _weight(columns: int, inner: int) -> Operand:
    """Products of normal numbers with it are of the order of 1."""
    return Operand((columns, inner), inner ** -0.5)


def _one(fn: Callable[..., Any], rows: int, inner: int, columns: int, *others: Operand) -> Case:
    operands = (Operand((rows, inner)), _weight(columns, inner), *others)
    return Case(fn.__name__, f"{rows}x{inner}x{columns}", fn, product, operands)


def _two(fn: Callable[..., Any], rows: int, inner: int, middle: int, columns: int, vectors: int) -> Case:
    operands = (Operand((rows, inner)), _weight(middle, inner), Operand((rows, middle)), _weight(columns, middle),
                *[Operand((middle,))] * vectors)
    return Case(fn.__name__, f"{rows}x{inner}x{middle}x{columns}", fn, two_products, operands,
                variants=("deferred", "deferred_auto"))


def epilogues() -> list[Case]:
    return [
        _one(logsumexp, 8192, 1024, 50304), _one(argmax, 8192, 1024, 50304), _one(amax, 8192, 1024, 50304),
        _one(gate_interleaved, 8192, 4096, 14336), _one(gate_halves, 8192, 4096, 14336),
        _one(gelu_erf_sum, 8192, 1024, 4096), _one(gelu_tanh_sum, 8192, 1024, 4096),
        _two(rms_norm_mm, 12288, 768, 768, 3072, 1), _two(rms_norm_mm_stream, 12288, 768, 768, 3072, 1),
        _two(layer_norm_mm, 12288, 768, 768, 3072, 2),
        _one(softmax, 8192, 1024, 4096), _one(rms_norm, 8192, 4096, 4096, Operand((4096,)))]


def layers() -> list[Case]:
    """The plain product and bias + activation behind it, of every type of layer."""
    found = []
    for (model, rows, types), activation in ((GPT, bias_gelu), (LLAMA, bias_silu)):
        for name, inner, columns in types:
            operands = (Operand((rows, inner)), _weight(columns, inner))
            size = f"{model}_{name}_{rows}x{inner}x{columns}"
            found += [Case("plain", size, product, product, operands),
                      Case("addmm", size, activation, product, (*operands, Operand((columns,))))]
    return found


def cases(quick: bool) -> list[Case]:
    return epilogues() if quick else epilogues() + layers()


# ---------------------------------------------------------------- tables


def _ratios(columns: Mapping[str, Row], *variants: str) -> list[float]:
    return [columns[v]["ratio"] for v in variants if "ratio" in columns.get(v, {})]


def beside_others(case: str, columns: Mapping[str, Row]) -> float | None:
    """Of a layer, the default choice's time over the best of the library and Inductor; None for other cases."""
    mine, others = _ratios(columns, "auto"), _ratios(columns, "eager", "inductor", "library")
    return mine[0] / min(others) if case in LAYERS and mine and others else None


def bound(case: str, columns: Mapping[str, Row]) -> float | None:
    """How many times the plain product our kernel may take; for layers, the default choice."""
    if case in LAYERS:
        return min((BESIDE * r for r in _ratios(columns, "eager", "inductor", "library")), default=None)
    if case in ("softmax", "rms_norm"):
        return min(_ratios(columns, "library"), default=None)
    return LIMITS.get(case)


def table(rows: Sequence[Row]) -> str:
    """A line per case and variant."""
    lines = []
    for (case, size), columns in by_variant(rows).items():
        limit = bound(case, columns)
        for variant, row in columns.items():
            judged = variant in ("auto", *SOME) or variant == "fused" and case not in LAYERS
            most = DEFERRED if variant in SOME else limit if judged else None
            ratio = row.get("ratio")
            verdict = "" if most is None or ratio is None else "met" if ratio <= most else "missed"
            lines.append((case, size, variant, microseconds(row), ratio, most, verdict,
                          row.get("peak_mb"), scientific(row.get("error")), scientific(row.get("differs")), bits(row),
                          row.get("kernels"), note(row)))
    headers = ("case", "size", "variant", "us", "x mm", "at most", "", "peak MB", "error", "differs", "bits",
               "kernels", "")
    return str(tabulate(lines, headers, floatfmt=("", "", "", ".1f", ".3f", ".3f", "", ".1f", "", "", "", "g", "")))


def main() -> int:
    args = relay.parser(__doc__.splitlines()[0], VARIANTS).parse_args()
    results = relay.run("epilogue", args, cases(args.quick))
    if results is None:
        return 0
    print("\n" + table(results.rows))
    return 0 if all(r["status"] in ("ok", "skipped") for r in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
