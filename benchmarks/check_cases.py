"""Checks of small functions, each about one thing that generated kernels get wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.checks import BF16, F32, I64, Inputs, add, draw, large, of, shift, short
from benchmarks.rope_modules import MODULES

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

# ---- pointwise ops over dtypes

FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, y: (x * y + 1.5, (x - y) / (y.abs() + 1), -x),
    "exponential": lambda x, y: (torch.exp(-x.abs()), torch.log(y.abs() + 0.5), torch.expm1(x), torch.log1p(y.abs())),
    "trigonometric": lambda x, y: (x.sin(), y.cos(), torch.atan(x), torch.tan(y * 0.5)),
    "activation": lambda x, y: (torch.sigmoid(x), torch.tanh(y), F.gelu(x), F.silu(y), F.relu(x), F.softplus(y)),
    "hyperbolic": lambda x, y: (torch.sinh(x), torch.cosh(y), torch.erf(x), torch.erfc(y)),
    "power": lambda x, y: (x.abs().sqrt(), (y.abs() + 0.1).rsqrt(), x**2, y**3, (x.abs() + 0.1) ** 0.7,
                           1 / (y * y + 1)),
    "select": lambda x, y: (torch.where(x > y, x, y), torch.maximum(x, y), torch.minimum(x, y), x.clamp(-0.5, 0.5)),
    "rounding": lambda x, y: (x.floor(), y.ceil(), x.trunc(), y.round(), x.sign(), x.frac()),
    "compare": lambda x, y: (x > y, x <= y, x == x, x != y, ~(x < 0), torch.isnan(x), torch.isfinite(y)),
    "casts": lambda x, y: (x.to(torch.int32), y.double(), x.bool(), (x * 4).to(torch.int64), y.half().float()),
    "scalar": lambda x, y: (x + 2, 3 - y, x * 0.1, torch.add(x, y, alpha=2), torch.addcmul(x, x, y, value=0.5)),
}
INT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, y: (x + y, x * y * y, x - 3, -x, x.abs(), x * 100),
    "division": lambda x, y: (x // (y * y + 1), x % (y * y + 1), x / (y * y + 1),
                              torch.div(x, 3, rounding_mode="trunc")),
    "bits": lambda x, y: (x & y, x | y, x ^ y, ~x, x << 2, x >> 1),
    "compare": lambda x, y: (x > y, x == y, torch.where(x > y, x, y), x.clamp(2, 9), x.bool()),
    "casts": lambda x, y: (x.float() * 0.5, y.to(torch.int8), x.to(torch.uint8), y.double(), x.to(BF16)),
}


def _pointwise() -> None:
    for dtype in FLOATS:
        for name, fn in FLOAT_FUNCTIONS.items():
            add(f"pointwise/{name}/{short(dtype)}", fn, of((37, 29), (37, 29), dtype=dtype),
                reference=name not in ("casts", "rounding"))
    for dtype in INTS:
        for name, fn in INT_FUNCTIONS.items():
            add(f"pointwise/{name}/{short(dtype)}", fn, of((37, 29), (37, 29), dtype=dtype))
    add("pointwise/logic/bool", lambda x, y: (x & y, x | y, x ^ y, ~x, torch.where(x, 1.5, -2.0), x + y, x.float()),
        of((37, 29), (37, 29), dtype=torch.bool))
    add("pointwise/special_values", lambda x, y: (
        x + y, x * y, torch.maximum(x, y), torch.minimum(x, y), x.clamp(-1, 1), F.relu(x), x.sign(), torch.exp(x),
        torch.sqrt(x), torch.where(x == x, x, 0.0), x / y, torch.isinf(x), x.nan_to_num()), _specials)
    pairs = ((BF16, F32), (I64, BF16), (torch.bool, torch.int8), (torch.float16, BF16), (torch.int32, I64),
             (torch.uint8, torch.int8), (torch.float64, F32), (torch.bool, torch.float16))
    for a, b in pairs:
        add(f"promotion/{short(a)}_{short(b)}", lambda x, y: (x + y, x * y, x > y, torch.where(x == y, x, y)),
            of((33, 17), (33, 17), dtypes=(a, b)))
    add("promotion/weak_tensor", lambda x, s: (x + s, x * s, s - x), of((65, 9), (), dtypes=(BF16, torch.float64)))


def _specials(device: torch.device) -> tuple[Tensor, Tensor]:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.5, 3e38, 1e-40])
    grid = torch.cartesian_prod(values, values)
    return grid[:, 0].contiguous().to(device), grid[:, 1].contiguous().to(device)


# ---- shapes, strides, alignment

LAYOUTS: dict[str, Callable[[torch.device, torch.dtype], tuple[Tensor, ...]]] = {
    "transposed": lambda d, t: (draw(d, 65, 33, dtype=t).t(), draw(d, 33, 65, dtype=t)),
    "both_transposed": lambda d, t: (draw(d, 65, 33, dtype=t).t(), draw(d, 65, 33, dtype=t).t()),
    "stride_two": lambda d, t: (draw(d, 33, 130, dtype=t)[:, ::2], draw(d, 66, 65, dtype=t)[::2]),
    "expanded_row": lambda d, t: (draw(d, 1, 65, dtype=t).expand(33, 65), draw(d, 33, 65, dtype=t)),
    "expanded_column": lambda d, t: (draw(d, 33, 1, dtype=t).expand(33, 65), draw(d, 65, dtype=t)),
    "all_expanded": lambda d, t: (draw(d, 1, 1, dtype=t).expand(33, 65), draw(d, 1, dtype=t).expand(65)),
    "offset": lambda d, t: (shift(draw(d, 33, 65, dtype=t)), shift(draw(d, 33, 65, dtype=t), 3)),
    "window": lambda d, t: (draw(d, 40, 80, dtype=t)[3:36, 7:72], draw(d, 33, 65, dtype=t)),
    "permuted": lambda d, t: (draw(d, 5, 7, 9, dtype=t).permute(2, 0, 1), draw(d, 9, 5, 7, dtype=t)),
    "channels_last": lambda d, t: (draw(d, 2, 6, 5, 7, dtype=t).to(memory_format=torch.channels_last),
                                   draw(d, 2, 6, 5, 7, dtype=t)),
    "broadcast": lambda d, t: (draw(d, 4, 1, 33, dtype=t), draw(d, 17, 1, dtype=t)),
    "scalar_tensor": lambda d, t: (draw(d, 33, 65, dtype=t), draw(d, dtype=t)),
    "diagonal": lambda d, t: (draw(d, 40, 40, dtype=t).diagonal(), draw(d, 40, dtype=t)),
    "unfolded": lambda d, t: (draw(d, 70, dtype=t).unfold(0, 6, 4), draw(d, 17, 6, dtype=t)),
}
LENGTHS = (0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 129, 1021, 1023, 1024, 1025, 4097)
SHAPES = ((1, 1), (0, 5), (5, 0), (1, 1025), (1025, 1), (33, 65), (127, 129), (13, 17), (64, 64), (2, 3, 5, 7, 2))


def _layouts() -> None:
    for name, maker in LAYOUTS.items():
        for dtype in (F32, BF16, torch.int8):
            add(f"layout/{name}/{short(dtype)}", lambda x, y: (x * 2 + y, x - y), lambda d, m=maker, t=dtype: m(d, t))
    for n in LENGTHS:
        add(f"length/{n}", lambda x, y: (x * y + 1, torch.sin(x)), of((n,), (n,), dtype=BF16))
    for s in SHAPES:
        add(f"shape/{'x'.join(map(str, s))}", lambda x, y: (x * y + 1, (x - y).transpose(0, 1)), of(s, s))
    add("length/million", lambda x, y: x * y + 1, lambda d: (draw(d, large(d, 5000, 1048583)),) * 2)
    add("alignment/changes", lambda x, y: x * 2 + y, of((4096,), (4096,), dtype=BF16),
        lambda d: (shift(draw(d, 4096, dtype=BF16)), draw(d, 4096, dtype=BF16)),
        lambda d: (draw(d, 4096, dtype=BF16), shift(draw(d, 4096, dtype=BF16), 5)))
    outputs: dict[str, Callable[..., Any]] = {
        "transposed": lambda x: (x.t() * 2, x.t().contiguous() + 1),
        "permuted": lambda x: x.view(5, 7, 9).permute(2, 0, 1).sin(),
        "clone_transposed": lambda x: (x.t() + 1).t().clone(),
        "channels_last": lambda x: (x.view(1, 9, 5, 7) * 2).to(memory_format=torch.channels_last),
        "views": lambda x: (x * 2, (x * 2).t(), x[1:], (x + 1).view(-1)[3:]),
        "many": lambda x: (x + 1, x * 2, x.sum(-1), x.t(), x.amax(0), x.to(BF16)),
        "same_twice": lambda x: (lambda y: (y, y))(x * 3),
        "constant": lambda x: (torch.ones_like(x) * 2, torch.arange(9, device=x.device) + 1, x * 0 + 1),
        "input_itself": lambda x: (x, x + 1),
    }
    for name, fn in outputs.items():
        add(f"output/{name}", fn, of((45, 7)))


# ---- operations that only move data

MOVES: dict[str, Callable[..., Any]] = {
    "cat_columns": lambda x, y: torch.cat((x * 2, y, x + y), 1),
    "cat_rows": lambda x, y: torch.cat((x, y * 3), 0) + 1,
    "stack": lambda x, y: torch.stack((x, y), 1) * 2,
    "pad": lambda x, y: F.pad(x, (3, 2, 1, 4), value=0.5) * 2,
    "crop": lambda x, y: F.pad(x * 2, (-3, -2)),
    "slice": lambda x, y: x[2:30, 1::3] + y[1:29, ::3],
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:, 3:9] * 2, 1, 3, 9),
    "strided_scatter": lambda x, y: torch.slice_scatter(x, y[:, :17] * 2, 1, 0, None, 2),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[3] + 1, 0, 5),
    "flip": lambda x, y: x.flip(1) + y.flip(0),
    "roll": lambda x, y: torch.roll(x, (3, -2), (0, 1)) * y,
    "repeat": lambda x, y: x.repeat(2, 3) - 1,
    "reshape": lambda x, y: (x.reshape(3, -1) * 2, y.t().reshape(-1) + 1,
                             x.view(11, 3, 33).transpose(0, 1).reshape(-1)),
    "split": lambda x, y: [p * 2 for p in x.split(10, 1)] + list(y.chunk(4, 0)),
    "rotate_half": lambda x, y: x * 2 + torch.cat((-y[:, 16:32], y[:, :16], y[:, 32:]), 1),
    "interleave": lambda x, y: torch.stack((x[:, ::2] * 2, x[:, ::2] + 1), -1).flatten(-2),
    "unfold": lambda x, y: x.unfold(1, 5, 3) * 2,
    "triangle": lambda x, y: (x.tril(), y.triu(1) * 2),
    "gather_rows": lambda x, y: x[torch.arange(0, 33, 2, device=x.device)] + 1,
}


def _moves() -> None:
    for name, fn in MOVES.items():
        for dtype in (F32, BF16):
            add(f"move/{name}/{short(dtype)}", fn, of((33, 33), (33, 33), dtype=dtype))
    for name in ("cat_columns", "pad", "slice", "slice_scatter", "repeat", "reshape", "rotate_half"):
        add(f"move_backward/{name}", MOVES[name], of((33, 33), (33, 33)), grad=True)
    add("mutation/add", lambda x, y: (x.add_(1), x * 2)[1], of((33, 17), (33, 17)))
    add("mutation/slice", lambda x, y: x[1:, 2:5].mul_(2).sum(), of((33, 17), (33, 17)))
    add("mutation/view", lambda x, y: x.t().add_(y.t()), of((33, 17), (33, 17)))
    add("mutation/copy", lambda x, y: x.copy_(y * 2), of((33, 17), (33, 17), dtypes=(BF16, F32)))


# ---- reductions

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, d: x.sum(d), "mean": lambda x, d: x.mean(d), "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d), "sum_keepdim": lambda x, d: (x * 2).sum(d, keepdim=True) + x,
    "sum_of_squares": lambda x, d: (x * x).sum(d),
}
ROWS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: torch.softmax(x, -1), "log_softmax": lambda x: torch.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1), "var_mean": lambda x: torch.var_mean(x, -1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1), "std": lambda x: x.std(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]), "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "softmax_columns": lambda x: torch.softmax(x, 0), "centred": lambda x: x - x.mean(-1, keepdim=True),
}
ROW_SHAPES = ((1, 1), (3, 7), (5, 128), (4, 129), (2, 1023), (7, 1024), (3, 1025), (2, 5000))


def _reductions() -> None:
    dims: dict[str, Any] = {"last": -1, "first": 0, "middle": 1, "outer_two": (0, 2), "all": (0, 1, 2)}
    for name, fn in REDUCTIONS.items():
        for where, d in dims.items():
            add(f"reduce/{name}/{where}", lambda x, f=fn, d=d: f(x, d), of((6, 17, 33)))
        for dtype in (torch.float64, BF16, torch.float16, I64, torch.int8):
            if dtype.is_floating_point or name not in ("mean",):
                add(f"reduce/{name}/{short(dtype)}", lambda x, f=fn: f(x, -1), of((13, 70), dtype=dtype))
    for rows, columns in ROW_SHAPES:
        for name in ("sum", "amax"):
            add(f"reduce/{name}/{rows}x{columns}", lambda x, f=REDUCTIONS[name]: (f(x, -1), f(x, 0)),
                of((rows, columns)))
        for name, fn in ROWS.items():
            if columns > 1 or name not in ("var_mean", "std"):  # the variance of one value is NaN by definition
                add(f"rows/{name}/{rows}x{columns}", fn, of((rows, columns)))
    for name, fn in ROWS.items():
        for dtype in (BF16, torch.float16, torch.float64):
            add(f"rows/{name}/{short(dtype)}", fn, of((5, 200), dtype=dtype))
    for name in ("softmax", "log_softmax", "layer_norm", "rms_norm", "logsumexp", "centred"):
        add(f"rows_backward/{name}", ROWS[name], of((6, 130)), grad=True)
    add("reduce/large", lambda x: (x.sum(), x.sum(0), x.sum(1), x.amax()),
        lambda d: (draw(d, large(d, 50, 3001), large(d, 90, 2053)),))
    add("reduce/empty", lambda x: (x.sum(1), x.sum(0), x.sum()), of((0, 5)), of((5, 0)), dynamic=None)
    add("reduce/transposed", lambda x: (x.sum(0), x.amax(-1), torch.softmax(x, -1)), lambda d: (draw(d, 90, 40).t(),))
    add("reduce/expanded", lambda x: (x.sum(0), x.mean(-1)), lambda d: (draw(d, 1, 40).expand(30, 40),))
    add("reduce/nan", lambda x: (x.amax(-1), x.amin(-1), x.sum(-1), torch.softmax(x, -1)), _with_nan)
    add("reduce/infinite", lambda x: (torch.softmax(x, -1), torch.logsumexp(x, -1)), _masked)
    add("reduce/bool", lambda x: (x.any(-1), x.all(-1), x.sum(-1), x.any()), of((9, 70), dtype=torch.bool))
    add("reduce/arguments", lambda x: (x.argmax(-1), x.argmin(0), x.argmax(), x.max(-1)), of((9, 70)))
    add("reduce/dtype", lambda x: (x.sum(-1, dtype=F32), x.sum(dtype=torch.float64), x.mean(0, dtype=F32)),
        of((9, 70), dtype=BF16))
    add("reduce/product", lambda x: (x.prod(-1), torch.cumsum(x, -1)), of((9, 20)))
    add("reduce/of_cat", lambda x, y: torch.cat((x, y * 2), -1).sum(-1), of((9, 33), (9, 20)))
    add("reduce/two_in_a_row", lambda x: torch.softmax(x.sum(0), -1) * x.amax(-1, keepdim=True), of((33, 70)))


def _with_nan(device: torch.device) -> tuple[Tensor]:
    x = torch.randn(7, 70)
    x[2, 3] = x[4, 69] = float("nan")
    x[5, 0] = float("inf")
    return (x.to(device),)


def _masked(device: torch.device) -> tuple[Tensor]:
    x = torch.randn(7, 70)
    x[:, 40:] = -float("inf")
    x[3] = -float("inf")
    return (x.to(device),)


# ---- models in small

def _block(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), w1, b1)), w2)


def _models() -> None:
    for dtype in (F32, BF16):
        for grad in (False, True):
            end = f"{short(dtype)}{'_backward' if grad else ''}"
            add(f"model/block/{end}", _block, of((6, 32), (64, 32), (64,), (32, 64), dtype=dtype), grad=grad)
            add(f"model/cross_entropy/{end}", lambda x, y: F.cross_entropy(x, y),
                lambda d, t=dtype: (draw(d, 12, 100, dtype=t), torch.randint(100, (12,)).to(d)), grad=grad)
            add(f"model/norm_affine/{end}", lambda x, w, b: F.layer_norm(x, (70,), w, b) * F.rms_norm(x, (70,), w),
                of((9, 70), (70,), (70,), dtype=dtype), grad=grad)
            add(f"model/chain/{end}", lambda x, y: (F.silu(x * y) * torch.tanh(y) + x.sigmoid()).sum(0),
                of((37, 29), (29,), dtype=dtype), grad=grad)
    for module in MODULES:
        for grad in (False, True):
            add(f"model/{module.name}{'_backward' if grad else ''}", module.function(),
                lambda d, m=module: m.inputs(large(d, 2, 96), d, False), grad=grad)
    products: dict[str, tuple[Callable[..., Any], Inputs]] = {
        "mm": (lambda x, y: torch.mm(x, y) * 2, of((33, 1), (1, 17))),
        "bmm": (lambda x, y: torch.bmm(x, y) + 1, of((3, 33, 1), (3, 1, 17), dtype=BF16)),
        "outer": (lambda x, y: torch.outer(x, y).cos(), of((33,), (17,))),
        "addmm": (lambda b, x, y: torch.addmm(b, x, y, alpha=2), of((17,), (33, 1), (1, 17))),
        "two_columns": (lambda x, y: torch.mm(x, y).relu(), of((33, 2), (2, 17))),
    }
    for name, (fn, maker) in products.items():
        add(f"product/{name}", fn, maker)
    add("model/embedding", lambda i, t: F.embedding(i, t) * 2,
        lambda d: (torch.randint(50, (4, 9)).to(d), draw(d, 50, 33)))
    add("model/batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), of((4, 6, 5, 7), (6,), (6,)))
    add("model/attention", lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v,
        of((2, 9, 16), (2, 11, 16), (2, 11, 16)), grad=True)


# ---- dynamic shapes, devices, streams, size

def _environment() -> None:
    sizes = [(2, 3), (5, 7), (16, 128), (9, 129), (1, 9), (0, 4), (7, 1)]
    pair = tuple(of(s, s) for s in sizes)
    add("dynamic/pointwise", lambda x, y: x * 2 + y.sin(), *pair, dynamic=True)
    add("dynamic/automatic", lambda x, y: x * 2 + y.sin(), *pair, dynamic=None)
    add("dynamic/broadcast", lambda x, y: x[:, None] * y[None], *(of((a,), (b,)) for a, b in sizes[:5]), dynamic=True)
    add("dynamic/sum", lambda x, y: (x.sum(-1), y.sum(0), (x * y).sum()), *pair[:5], dynamic=True)
    add("dynamic/softmax", lambda x, y: torch.softmax(x + y, -1), *pair[:5], dynamic=True)
    add("dynamic/cat", lambda x, y: torch.cat((x, y * 2), 1) + 1, *pair[:5], dynamic=True)
    add("dynamic/transpose", lambda x, y: x.t().contiguous() + y.t(), *pair[:5], dynamic=True)
    add("dynamic/flatten", lambda x, y: (x.flatten() * 2, y.reshape(-1, 1) + x.shape[0]), *pair[:5], dynamic=True)
    add("dynamic/backward", lambda x, y: torch.softmax(x * y, -1), *(of(s, s) for s in ((2, 3), (5, 7), (9, 33))),
        dynamic=True, grad=True)
    rope = MODULES[4]
    add("dynamic/rope", rope.function(), *(lambda d, n=n: rope.inputs(n, d, False) for n in (3, 2, 5)), dynamic=True)
    add("device/cpu_scalar", lambda x, s: x * s + 1, lambda d: (draw(d, 33, 17), torch.tensor(1.7)))
    add("device/python_scalars", lambda x, s: x * s + 1,
        *(lambda d, s=s: (draw(d, 33, 17), s) for s in (2, 3, 0.5, 0.25)), dynamic=None)
    add("device/threads", lambda x, y: torch.softmax(x * 2 + y, -1).sum(0), of((33, 70), (33, 70)), threads=6)
    add("device/threads_pointwise", lambda x, y: (x * 2 + y, x.t() - 1), of((129, 65), (129, 65)), threads=6)
    huge = {"pointwise": lambda x: x * 3 + 1, "reduction": lambda x: x.view(-1, 8193).sum(-1, dtype=torch.int32)}
    for name, fn in huge.items():
        add(f"huge/{name}", fn, partial(_huge, 262177 * 8193), risky=True, cuda_only=True, reference=False)
    add("huge/transposed", lambda x: x.t() + 1, lambda d: (_huge(46349 * 46351, d)[0].view(46349, 46351),),
        risky=True, cuda_only=True, reference=False)
    add("huge/expanded", lambda x, y: (x + y).amax(0), lambda d: (_huge(1 << 16, d)[0][:, None], _huge(40000, d)[0]),
        risky=True, cuda_only=True, reference=False)


def _huge(elements: int, device: torch.device) -> tuple[Tensor]:
    """More than 2^31 elements, drawn on the device."""
    return (torch.randint(-100, 100, (elements,), dtype=torch.int8, device=device),)


def register() -> None:
    for section in (_pointwise, _layouts, _moves, _reductions, _models, _environment):
        section()
