"""Checks of how long rows and windows are walked: whole steps and a rest, and neighbours side by side in one thread; of
sums of rows that lie in many places; and of what stands behind a product's rows.

Sizes are those at which the forms are chosen on a GPU, and one more or less; small where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.checks import BF16, F32, add, draw, large, short

ROWS = 301
LENGTHS = (50304, 50303, 50305, 49152, 49153, 65535)  # bf16 steps are of 16384
LONG: dict[str, Callable[..., Any]] = {
    "softmax": lambda x: torch.softmax(x, -1),
    "log_softmax": lambda x: torch.log_softmax(x.float(), -1).to(x.dtype),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "variance": lambda x: torch.var(x.float(), -1),  # what the mean of an infinity is depends on the order
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "argmax": lambda x: (x.argmax(-1), x.amax(-1)),
}
IMAGES = ((16, 96, 56, 58), (16, 64, 57, 61), (9, 31, 112, 112))
# kernel, stride, padding, dilation, ceil mode
POOLS = {"overlapping": (3, 2, 1, 1, False), "ceiling": (3, 2, 1, 1, True), "apart": (2, 2, 0, 1, False),
         "uneven": ((3, 5), (2, 3), (1, 2), 1, True), "dilated": ((2, 3), (1, 2), (1, 1), (2, 1), False)}


def _rows(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, n], with infinities and a NaN in the last elements of some."""
    x = draw(device, large(device, 3, ROWS), large(device, n // 512, n), dtype=dtype)
    x[0, -3:], x[1, -1], x[2, :-1] = -float("inf"), float("nan"), -float("inf")
    return x


def _labels(x: Tensor) -> Tensor:
    labels = torch.arange(len(x), device=x.device) * 977 % x.shape[1]
    labels[::5], labels[1] = x.shape[1] - 1, -100
    return labels


def _own_row(n: int, device: torch.device) -> tuple[Any, ...]:
    """Hidden states, weights and labels of a loss whose gradient may be written over the logits."""
    x, w = (draw(device, rows, 64, dtype=BF16) for rows in (large(device, 4, ROWS), large(device, n // 512, n)))
    return x, w, _labels(x @ w.T)


def _images(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """Whole numbers, so that maxima tie; an infinity and a NaN."""
    shape = shape if device.type == "cuda" else (2, 2, shape[2] // 4, shape[3] // 4)
    x = torch.randint(-3, 4, shape).to(dtype)
    x[0, 0, :4, :4], x[1, 0, 2, 2], x[1, 1, 5, 5] = -float("inf"), float("nan"), float("inf")
    return (x.to(device),)


def _long_rows() -> None:
    for n in LENGTHS:
        for name, fn in LONG.items():
            for dtype in (BF16, F32) if n == LENGTHS[2] else (BF16,):
                # a rounding decides which element is the largest
                add(f"long_rows/{name}/{n}/{short(dtype)}", fn, lambda d, n=n, t=dtype: (_rows(n, t, d),),
                    reference=name != "argmax")
        add(f"long_rows/cross_entropy/{n}", lambda x, labels: F.cross_entropy(x.float(), labels, reduction="none"),
            lambda d, n=n: (x := _rows(n, BF16, d), _labels(x)))
        add(f"long_rows/over_logits/{n}", lambda x, w, labels: F.cross_entropy((x @ w.T).float(), labels),
            lambda d, n=n: _own_row(n, d), grad=True)
        add(f"long_rows/over_products/{n}", lambda x, w, labels: torch.softmax(x @ w.T, -1),
            lambda d, n=n: _own_row(n, d))


def _heads(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """[batches, positions, heads, size], of which heads lie farther apart than positions."""
    b, t, h, d = shape if device.type == "cuda" else (3, shape[1] // 16, 2, 5)
    return draw(device, b, h, t, d, dtype=BF16).transpose(1, 2)


def _places() -> None:
    for shape in ((7, 1021, 13, 65), (32, 1024, 16, 64), (1, 4099, 3, 128), (16, 129, 5, 31)):
        name = "x".join(map(str, shape))
        add(f"places/sums/{name}",
            lambda x: ((x.float() * 2).sum((0, 1, 2)), x.amax((0, 1, 2)), x.float().mean((0, 1, 2))),
            lambda d, s=shape: (_heads(s, d),))
        add(f"places/norm/{name}", lambda x, w: F.rms_norm(x, w.shape, w).transpose(1, 2).contiguous(),
            lambda d, s=shape: (x := _heads(s, d), draw(d, x.shape[-1], dtype=BF16)), grad=True)


def _behind_products() -> None:
    for n in (50304, 50305):
        add(f"behind/half_logits/{n}", lambda x, w, labels: F.cross_entropy(x @ w.T, labels),
            lambda d, n=n: _own_row(n, d), grad=True)
        add(f"behind/own_sum/{n}", lambda x, w, labels: torch.softmax(x @ w.T, -1) * x.float().sum(-1, keepdim=True),
            lambda d, n=n: _own_row(n, d))
    for rows, columns in ((64, 1000), (5, 777), (1, 1000)):
        add(f"behind/computed_bias/{rows}x{columns}",
            lambda x, w, b: torch.softmax(torch.addmm(b * 0.5, x, w).float(), -1),
            lambda d, m=rows, n=columns: tuple(draw(d, *s, dtype=BF16) for s in (
                (m, large(d, 528, 1024)), (large(d, 528, 1024), n), (n,))))


def _windows() -> None:
    for i, shape in enumerate(IMAGES):
        for name, (kernel, stride, padding, dilation, ceil) in POOLS.items():
            for dtype in (BF16, F32) if i == 0 else (BF16,):
                add(f"windows/{name}/{'x'.join(map(str, shape))}/{short(dtype)}",
                    lambda x, a=(kernel, stride, padding, dilation, ceil): F.max_pool2d(x, *a, return_indices=True),
                    lambda d, s=shape, t=dtype: _images(s, t, d), grad=True)


def register() -> None:
    _long_rows()
    _windows()
    _places()
    _behind_products()
