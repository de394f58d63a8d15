"""Checks of matrix products and what is fused with them, for gpu_check: each by our program of one policy.

Sizes are odd, so that every tile has a border and operands are loaded by pointers, or EVEN, where Hopper's tensor
descriptors can load them.  Windows lie in memory full of NaN, so that what is read beyond a border shows.  Where a
rounding decides a discrete result, operands are whole numbers: their products have the same sums in any order, so that
results must be eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import policies
from benchmarks.checks import BF16, F32, Inputs, add, draw, large, of, shift, short
from benchmarks.lineup import wide

DTYPES = (BF16, torch.float16, F32)
PERSISTENT, *SPLITTING = policies.NAMES
TILES = 10


@dataclass(frozen=True)
class Sizes:
    """Rows, columns and the sum's length of a product; long enough to be split."""

    rows: int
    columns: int
    inner: int


def odd(device: torch.device) -> Sizes:
    return Sizes(large(device, 19, 401), large(device, 23, 757), large(device, 519, 1031))  # no parts: tiles alone


def even(device: torch.device) -> Sizes:
    return Sizes(large(device, 32, 256), large(device, 48, 384), large(device, 528, 1040))


def long_odd(device: torch.device) -> Sizes:
    """Factors that outweigh the result, so that others may add up what programs leave of it."""
    return Sizes(large(device, 19, 201), large(device, 23, 309), large(device, 519, 4111))


def long_even(device: torch.device) -> Sizes:
    return Sizes(large(device, 32, 192), large(device, 48, 256), large(device, 528, 4096))


SIZES: Mapping[str, Callable[[torch.device], Sizes]] = {"odd": odd, "even": even}
LONG: Mapping[str, Callable[[torch.device], Sizes]] = {"long_odd": long_odd, "long_even": long_even}
# Few rows or columns, whose steps of the sum may be sliced
FEW: Mapping[str, Callable[[torch.device], Sizes]] = {
    "few_odd": lambda d: Sizes(5, large(d, 23, 757), large(d, 519, 2071)),
    "few_even": lambda d: Sizes(16, large(d, 48, 768), large(d, 528, 2048)),
    "few_columns": lambda d: Sizes(large(d, 23, 757), 13, large(d, 528, 2048)),
    "several": lambda d: Sizes(large(d, 33, 61), large(d, 48, 384), large(d, 528, 1040))}


# ---------------------------------------------------------------- operands


def window(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Part of a larger matrix whose other elements are NaN; as well aligned as its columns are."""
    base = torch.full((rows + 5, columns + 16), float("nan"), dtype=dtype, device=device)
    base[2:rows + 2, 8:columns + 8] = draw(device, rows, columns, dtype=dtype)
    return base[2:rows + 2, 8:columns + 8]


LAYOUTS: Mapping[str, Callable[[torch.device, int, int, torch.dtype], Tensor]] = {
    "plain": lambda d, m, n, t: draw(d, m, n, dtype=t),
    "transposed": lambda d, m, n, t: draw(d, n, m, dtype=t).t(),
    "window": window,
    "transposed_window": lambda d, m, n, t: window(d, n, m, t).t(),
    "strided": lambda d, m, n, t: draw(d, m, 2 * n, dtype=t)[:, ::2],
    "misaligned": lambda d, m, n, t: shift(draw(d, m, n, dtype=t)),
    "one_row": lambda d, m, n, t: draw(d, 1, n, dtype=t).expand(m, n),
    "one_column": lambda d, m, n, t: draw(d, m, 1, dtype=t).expand(m, n),
}
BASIC = ("plain", "transposed")


def operands(sizes: str, left: str = "plain", right: str = "transposed", dtype: torch.dtype = BF16) -> Inputs:
    """[M, K], [K, N], [M, N], [N]: what epilogues take, in order."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        s = {**SIZES, **LONG, **FEW}[sizes](device)
        return (LAYOUTS[left](device, s.rows, s.inner, dtype), LAYOUTS[right](device, s.inner, s.columns, dtype) / 16,
                draw(device, s.rows, s.columns, dtype=dtype), draw(device, s.columns, dtype=dtype))

    return make


def whole(sizes: str, dtype: torch.dtype = BF16) -> Inputs:
    """The same in whole numbers, whose sums agree in any order and need no rounding: eager rounds a product before it
    adds to it, and kernels do not."""
    def make(device: torch.device) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = operands(sizes, dtype=dtype)(device)
        for t in made:
            t.copy_(torch.randint(-1, 2, t.shape).to(t.dtype))
        return made

    return make


# ---------------------------------------------------------------- epilogues

Epilogue = Callable[[Tensor, Tensor, Tensor, Tensor], Any]


def _outputs(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    h = x @ w
    return h, torch.relu(h), (h + r).t().contiguous(), (h * 2).float()


def _gate_interleaved(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Tensor:
    h = x @ w[:, :w.shape[1] // 2 * 2]
    return F.silu(h[:, ::2]) * h[:, 1::2]


def _gate_halves(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Tensor:
    gate, up = (x @ w[:, :w.shape[1] // 2 * 2]).chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def _logsumexp(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Tensor:
    h = wide(x @ w)
    m = h.amax(-1, keepdim=True)
    return (h - m).exp().sum(-1, keepdim=True).log() + m


def _gelu_sums(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    h = F.gelu(x @ w + b)
    return h, h.sum(0), wide(h).sum(-1), wide(h).sum()


def _heads(x: Tensor, w: Tensor, r: Tensor, b: Tensor) -> Tensor:
    columns = w.shape[1] // 4 * 4
    return ((x @ w[:, :columns]) * 0.5).view(-1, 4, columns // 4).transpose(0, 1).contiguous()


FLOATING: Mapping[str, Epilogue] = {
    "bias_relu": lambda x, w, r, b: torch.relu(x @ w + b),
    "addmm": lambda x, w, r, b: torch.sigmoid(torch.addmm(b, x, w, beta=0.5, alpha=2.0)),
    "beta_zero": lambda x, w, r, b: torch.relu(torch.addmm(b * float("nan"), x, w, beta=0)),
    "residual": lambda x, w, r, b: r + x @ w,
    "column_scale": lambda x, w, r, b: (x @ w) * r[:, :1] + 1,
    "cast": lambda x, w, r, b: wide(x @ w),
    "accumulate": lambda x, w, r, b: wide(r) + (x @ w) * 0.5,
    "outputs": _outputs, "heads": _heads, "gate_interleaved": _gate_interleaved, "gate_halves": _gate_halves,
    "amax": lambda x, w, r, b: ((x @ w).amax(-1), (x @ w).amin(0)),
    "logsumexp": _logsumexp, "gelu_sums": _gelu_sums,
    "squares": lambda x, w, r, b: wide(r + x @ w).square().mean(-1),
}
DISCRETE: Mapping[str, Epilogue] = {
    "argmax": lambda x, w, r, b: (x @ w).argmax(-1),
    "argmin_columns": lambda x, w, r, b: (x @ w + b).argmin(0),
    "compare": lambda x, w, r, b: (x @ w > r * 20, x @ w == r),
    "floor": lambda x, w, r, b: (torch.floor((x @ w) * 0.125), (x @ w).to(torch.int32)),
    "any": lambda x, w, r, b: ((x @ w) > 100).any(-1),
}
# also where the product's whole row is needed before its elements, by whatever the segmenter makes of it
WHOLE_ROWS: Mapping[str, Epilogue] = {
    "softmax": lambda x, w, r, b: torch.softmax(x @ w, -1),
    "rms_norm": lambda x, w, r, b: F.rms_norm(r + x @ w, b.shape, b),
    "layer_norm": lambda x, w, r, b: F.layer_norm(r + x @ w, b.shape, b, b),
    "logsumexp": lambda x, w, r, b: torch.logsumexp(wide(x @ w), -1),
    "norm_mm": lambda x, w, r, b: F.rms_norm(r + x @ w, b.shape, b) @ w.t(),
    "softmax_less_one": lambda x, w, r, b: torch.softmax(wide(x @ w), -1) - F.one_hot(
        r[:, 0].abs().long(), w.shape[1]),
}
PROLOGUES: Mapping[str, Epilogue] = {
    "relu": lambda x, w, r, b: torch.relu(torch.relu(x) @ w),
    "scaled": lambda x, w, r, b: (x * 2 + 1) @ w + b,
    "cast": lambda x, w, r, b: (x.float() * 0.5).to(x.dtype) @ w + r,
    "right": lambda x, w, r, b: torch.relu(x @ torch.tanh(w)),
    "normalised": lambda x, w, r, b: torch.relu(F.rms_norm(x, x.shape[-1:]) @ w),
}


# ---------------------------------------------------------------- the checks


def _relu(x: Tensor, w: Tensor, *others: Tensor) -> Tensor:
    return torch.relu(x @ w)


def _layouts() -> None:
    for sizes in SIZES:
        pairs = [(left, right) for left in LAYOUTS for right in BASIC]
        pairs += [(left, right) for left in BASIC for right in LAYOUTS if right not in BASIC]
        for left, right in pairs:
            add(f"product/layout/{left}_{right}/{sizes}", _relu, operands(sizes, left, right), policy=PERSISTENT)
        for policy in SPLITTING:
            for left, right in ((a, b) for a in BASIC for b in BASIC):
                add(f"product/{policy}/{left}_{right}/{sizes}", _relu, operands(sizes, left, right), policy=policy)
            add(f"product/{policy}/windows/{sizes}", _relu, operands(sizes, "window", "transposed_window"),
                policy=policy)
        for policy in policies.NAMES:
            for dtype in DTYPES:
                add(f"product/dtype/{short(dtype)}/{policy}/{sizes}", FLOATING["gelu_sums"],
                    operands(sizes, dtype=dtype), policy=policy)


def _epilogues() -> None:
    for policy in policies.NAMES:
        for name, fn in FLOATING.items():
            add(f"product/epilogue/{name}/{policy}", fn, operands("odd"), policy=policy)
        for name, fn in DISCRETE.items():
            add(f"product/discrete/{name}/{policy}", fn, whole("odd"), policy=policy, reference=False)
        add(f"product/discrete/ties/{policy}", lambda x, w, r, b: ((x @ w) * 0).argmax(-1), whole("even"),
            policy=policy, reference=False)
        add(f"product/special/{policy}", lambda x, w, r, b: ((x @ w).amax(-1), (x @ w).sum(0), (x @ w).argmax(-1)),
            _with_nan, policy=policy)
        for sizes in SIZES:
            add(f"product/mask/{policy}/{sizes}", lambda x, w, r, m: (torch.where(m, x @ w, 0.0), (x @ w > r) | m),
                _with_mask(sizes), policy=policy)
    for name, fn in {**FLOATING, **DISCRETE}.items():
        add(f"product/epilogue/{name}/even", fn, whole("even") if name in DISCRETE else operands("even"),
            policy=PERSISTENT, reference=name not in DISCRETE)
    for name, fn in WHOLE_ROWS.items():
        add(f"product/rows/{name}", fn, operands("odd"))
    for name, fn in PROLOGUES.items():
        add(f"product/prologue/{name}", fn, operands("even"))
    for number in range(TILES):
        for policy in policies.NAMES:
            add(f"product/tile/{policy}/{number}", FLOATING["gelu_sums"], operands("odd"), policy=policy, tile=number)
            add(f"product/tile/{policy}/{number}/argmax", DISCRETE["argmax"], whole("even"), policy=policy,
                tile=number, reference=False)


def _apart() -> None:
    """Parts that a second kernel adds up, or programs behind those that leave them."""
    for policy in policies.APART:
        for sizes in LONG:
            for left, right in ((a, b) for a in BASIC for b in BASIC):
                add(f"product/{policy}/{left}_{right}/{sizes}", _relu, operands(sizes, left, right), policy=policy)
            add(f"product/{policy}/windows/{sizes}", _relu, operands(sizes, "window", "transposed_window"),
                policy=policy)
            for dtype in DTYPES:
                add(f"product/dtype/{short(dtype)}/{policy}/{sizes}", FLOATING["outputs"],
                    operands(sizes, dtype=dtype), policy=policy)
        for name, fn in FLOATING.items():
            if name != "gate_halves":  # whose halves are not read as one
                add(f"product/epilogue/{name}/{policy}", fn, operands("long_odd"), policy=policy)
        for name, fn in DISCRETE.items():
            add(f"product/discrete/{name}/{policy}", fn, whole("long_odd"), policy=policy, reference=False)
        for name in ("softmax", "rms_norm", "layer_norm"):
            add(f"product/rows/{name}/{policy}", WHOLE_ROWS[name], operands("long_odd"), policy=policy)
        for number in range(TILES):
            add(f"product/tile/{policy}/{number}", FLOATING["outputs"], operands("long_odd"), policy=policy,
                tile=number)
        add(f"product/threads/{policy}", _relu, whole("long_even"), policy=policy, threads=6)


def _sliced() -> None:
    """Few rows or columns, each step of whose sum is one of each warp's slices."""
    policy = policies.SLICES
    for sizes in FEW:
        for left, right in ((a, b) for a in BASIC for b in BASIC):
            add(f"product/{policy}/{left}_{right}/{sizes}", _relu, operands(sizes, left, right), policy=policy)
        add(f"product/{policy}/windows/{sizes}", _relu, operands(sizes, "window", "transposed_window"), policy=policy)
        for dtype in (BF16, torch.float16):
            add(f"product/dtype/{short(dtype)}/{policy}/{sizes}", FLOATING["outputs"], operands(sizes, dtype=dtype),
                policy=policy)
    for name, fn in FLOATING.items():
        add(f"product/epilogue/{name}/{policy}", fn, operands("few_odd"), policy=policy)
    for name, fn in DISCRETE.items():
        if name != "argmin_columns":  # a fold of few rows is another kernel's
            add(f"product/discrete/{name}/{policy}", fn, whole("few_odd"), policy=policy, reference=False)
    for number in range(TILES):
        add(f"product/tile/{policy}/{number}", FLOATING["outputs"], operands("few_even"), policy=policy, tile=number)
    add(f"product/threads/{policy}", _relu, whole("few_even"), policy=policy, threads=6)
    add(f"product/dynamic/{policy}", lambda x, w, b: (lambda h: (h, h * 2))(torch.relu(x @ w.t() + b)),
        *(of((m, k), (n, k), (n,), dtype=BF16) for m, n, k in ((5, 48, 528), (33, 70, 1029), (16, 17, 2048))),
        dynamic=True, policy=policy)


def _with_mask(sizes: str) -> Inputs:
    def make(device: torch.device) -> tuple[Tensor, ...]:
        x, w, r, _ = whole(sizes)(device)
        return x, w, r, draw(device, *r.shape, dtype=torch.bool)

    return make


def _with_nan(device: torch.device) -> tuple[Tensor, ...]:
    x, w, r, b = whole("odd")(device)
    x[3, 5] = float("nan")
    x[7, 1] = float("inf")
    return x, w, r, b


def _batches() -> None:
    def batched(sizes: str, expanded: bool = False) -> Inputs:
        def make(device: torch.device) -> tuple[Tensor, ...]:
            s = SIZES[sizes](device)
            right = draw(device, 1 if expanded else 3, s.columns, s.inner, dtype=BF16).transpose(1, 2) / 16
            return (draw(device, 3, s.rows, s.inner, dtype=BF16), right.expand(3, s.inner, s.columns),
                    draw(device, 3, s.rows, s.columns, dtype=BF16))
        return make

    for policy in policies.NAMES:
        for sizes in SIZES:
            add(f"product/batch/bmm/{policy}/{sizes}", lambda x, w, r: F.silu(torch.bmm(x, w)), batched(sizes),
                policy=policy)
        add(f"product/batch/baddbmm/{policy}", lambda x, w, r: torch.relu(torch.baddbmm(r, x, w, alpha=0.5)),
            batched("odd"), policy=policy)
        add(f"product/batch/sums/{policy}", lambda x, w, r: (wide(torch.bmm(x, w)).sum(-1), torch.bmm(x, w).amax(1)),
            batched("odd"), policy=policy)
        add(f"product/batch/expanded/{policy}", lambda x, w, r: torch.relu(torch.bmm(x, w)), batched("even", True),
            policy=policy)


def _calls() -> None:
    """Sizes that change, nothing to compute, several threads, and the choice among routes."""
    shapes = ((64, 48, 528), (33, 70, 529), (130, 17, 1040), (16, 16, 520))
    for policy in policies.NAMES:
        add(f"product/dynamic/{policy}", lambda x, w, b: (lambda h: (h, h.sum(0)))(torch.relu(x @ w.t() + b)),
            *(of((m, k), (n, k), (n,), dtype=BF16) for m, n, k in shapes), dynamic=True, policy=policy)
        add(f"product/alignment/{policy}", _relu, operands("even"), operands("even", "misaligned"),
            operands("even", "plain", "transposed"), policy=policy)
        add(f"product/threads/{policy}", _relu, whole("even"), policy=policy, threads=6)
    for name, (m, n, k) in {"rows": (0, 9, 24), "columns": (9, 0, 24), "inner": (9, 16, 0), "one": (1, 1, 1),
                            "vector": (1, 40, 48), "column": (40, 1, 48)}.items():
        add(f"product/small/{name}", lambda x, w, r, b: (torch.relu(x @ w + b), r + x @ w),
            of((m, k), (k, n), (m, n), (n,), dtype=BF16))
    for name in ("bias_relu", "gelu_sums", "logsumexp", "gate_halves"):
        add(f"product/choice/{name}", FLOATING[name], operands("even"))
        add(f"product/backward/{name}", FLOATING[name], operands("even", dtype=F32), grad=True)


def _huge() -> None:
    """Offsets beyond 31 bits: rows far apart, and a result of more than 2^31 elements."""
    def far(device: torch.device) -> tuple[Tensor, Tensor]:
        base = torch.empty(70 * 40_000_000, dtype=BF16, device=device)
        x = base.as_strided((70, 1040), (40_000_000, 1))
        x.copy_(torch.randint(-3, 4, x.shape).to(BF16))
        return x, torch.randint(-3, 4, (1040, 96)).to(BF16).to(device)

    def wide_result(device: torch.device) -> tuple[Tensor, Tensor]:
        x, w = (torch.randint(-3, 4, (n, 16)).to(BF16).to(device) for n in (46349, 46351))
        return x, w.t()

    for policy in policies.NAMES:
        add(f"product/huge/rows/{policy}", lambda x, w: torch.relu(x @ w)[:, :8].contiguous(), far, risky=True,
            cuda_only=True, reference=False, policy=policy)
    add("product/huge/result", lambda x, w: (x @ w).to(torch.int8), wide_result, risky=True, cuda_only=True,
        reference=False, policy=PERSISTENT)


def register() -> None:
    for section in (_layouts, _epilogues, _apart, _sliced, _batches, _calls, _huge):
        section()
