"""Bodies of pooling ops and their gradients: reductions over windows (see windows.py).

    y = aten.avg_pool2d(x, [2, 2])    ->    w = x.unfold(2, 2, 2).unfold(3, 2, 2);  s = aten.sum(w, [4, 5]);  y = s / 4

Each body takes its op's arguments and returns its results, in eager's order of rounding: half types are summed in
float32.  It answers NotImplemented where a pooled length is symbolic; the op then stays whole.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxfuser.ops.monoids import lowest
from fxfuser.ops.promotion import opmath
from fxfuser.ops.window_place import WINDOW_PLACE
from fxfuser.passes.windows import Window, adaptive, along, asked, covering, ends, shown, sliding, starts

aten = torch.ops.aten
Ints = Sequence[int]


def _static(x: Tensor, rank: int) -> list[int] | None:
    """The pooled lengths; None where one is symbolic or nothing is pooled."""
    sizes = list(x.shape[x.dim() - rank:])
    return sizes if all(isinstance(s, int) and s > 0 for s in sizes) else None


def _each(values: Ints, rank: int) -> list[int]:
    """An argument that may name one number for all dimensions."""
    return [values] * rank if isinstance(values, int) else list(values) * (rank if len(values) == 1 else 1)


def _outputs(size: int, window: tuple[int, int, int, int], ceil_mode: bool) -> int:
    """How many windows a dimension has; in ceil mode none begins in the padding at the end."""
    kernel, stride, padding, dilation = window
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + padding else count


def _sliding(
    sizes: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> list[Window]:
    rank = len(sizes)
    kernels = _each(kernel, rank)
    strides = _each(stride, rank) if stride else kernels
    each = zip(kernels, strides, _each(padding, rank), _each(dilation, rank))
    return [sliding(_outputs(size, one, ceil_mode), *one) for size, one in zip(sizes, each)]


def _last(rank: int) -> list[int]:
    return list(range(-rank, 0))


# ---------------------------------------------------------------- averages


def _counts(sizes: Ints, windows: Sequence[Window], padding: Ints | None, device: torch.device) -> Tensor | int:
    """How many elements each window averages, as [outputs, outputs] or one number; `padding`: what counts besides."""
    total: Tensor | int = 1
    for d, (size, window) in enumerate(zip(sizes, windows)):
        edge = 0 if padding is None else padding[d]
        counts = [min(window.end(i), size + edge) - max(window.start(i), -edge) for i in range(window.outputs)]
        if len(set(counts)) == 1:
            total = total * counts[0]
            continue
        count = ends(window, device).clamp_max(size + edge) - starts(window, device).clamp_min(-edge)
        total = total * along(count, d, len(sizes))
    return total


def _average(x: Tensor, windows: Sequence[Window], count: Tensor | int) -> Tensor:
    wide = shown(x.to(opmath(x.dtype)), windows, 0)
    mask = asked(windows, x.device)
    wide = wide if mask is None else torch.where(mask, wide, 0)
    total = torch.sum(wide, _last(len(windows)), dtype=wide.dtype)
    if x.dtype.is_floating_point:
        return (total / count).to(x.dtype)
    return torch.div(total, count, rounding_mode="trunc").to(x.dtype)


def _spread(grad: Tensor, windows: Sequence[Window], count: Tensor | int) -> Tensor:
    """What the windows that cover each element hand it; `windows` are those of the gradient."""
    wide = shown(grad.to(opmath(grad.dtype)) / count, windows, 0)
    mask = asked(windows, grad.device)
    wide = wide if mask is None else torch.where(mask, wide, 0)
    return torch.sum(wide, _last(len(windows))).to(grad.dtype)


def _avg_pool(rank: int) -> Callable[..., Tensor]:
    def body(
        x: Tensor, kernel: Ints, stride: Ints = (), padding: Ints = (0,), ceil_mode: bool = False,
        count_include_pad: bool = True, divisor: int | None = None,
    ) -> Any:
        sizes = _static(x, rank)
        if sizes is None:
            return NotImplemented
        windows = _sliding(sizes, kernel, stride, padding, (1,), ceil_mode)
        edges = _each(padding, rank) if count_include_pad else None
        return _average(x, windows, divisor or _counts(sizes, windows, edges, x.device))

    return body


def _avg_pool_backward(rank: int) -> Callable[..., Tensor]:
    def body(
        grad: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, ceil_mode: bool, count_include_pad: bool,
        divisor: int | None,
    ) -> Any:
        sizes = _static(x, rank)
        if sizes is None:
            return NotImplemented
        windows = _sliding(sizes, kernel, stride, padding, (1,), ceil_mode)
        edges = _each(padding, rank) if count_include_pad else None
        count = divisor or _counts(sizes, windows, edges, x.device)
        return _spread(grad, [covering(w, size) for w, size in zip(windows, sizes)], count)

    return body


def _adaptive_avg_pool(x: Tensor, outputs: Ints) -> Any:
    sizes = _static(x, len(outputs))
    if sizes is None or not all(isinstance(n, int) and n > 0 for n in outputs):
        return NotImplemented
    windows = [adaptive(size, n) for size, n in zip(sizes, outputs)]
    return _average(x, windows, _counts(sizes, windows, None, x.device))


def _adaptive_avg_pool_backward(rank: int) -> Callable[..., Tensor]:
    def body(grad: Tensor, x: Tensor) -> Any:
        sizes, outputs = _static(x, rank), _static(grad, rank)
        if sizes is None or outputs is None:
            return NotImplemented
        count = _counts(sizes, [adaptive(size, n) for size, n in zip(sizes, outputs)], None, x.device)
        return _spread(grad, [adaptive(n, size) for size, n in zip(sizes, outputs)], count)

    return body


# ---------------------------------------------------------------- maxima


def _maxima(x: Tensor, windows: Sequence[Window], sizes: Ints) -> tuple[Tensor, Tensor]:
    """Each window's maximum, and where in the pooled dimensions, numbered in row-major order, it is."""
    rank, none = len(windows), lowest(x.dtype)
    wide, mask = shown(x, windows, none), asked(windows, x.device)
    wide = wide if mask is None else torch.where(mask, wide, none)
    dims = [wide.dim() - rank + d for d in range(rank)]
    return torch.amax(wide, dims), _position(WINDOW_PLACE(wide, dims), windows, sizes)


def _position(place: Tensor, windows: Sequence[Window], sizes: Ints) -> Tensor:
    """Where the element that is number `place` of its window is.

    Where no element is above the lowest value, a window that begins before the tensor names its own first position; it
    then is the first one inside.
    """
    dtype = _narrowest(math.prod(sizes) * math.prod(w.span for w in windows))
    rest, parts = place.to(dtype), list[Tensor]()
    for window in reversed(windows):
        parts.insert(0, rest % window.length if len(parts) < len(windows) - 1 else rest)
        rest = rest // window.length
    position: Any = 0
    first: Any = 0
    outside: Tensor | None = None
    for d, (window, part, size) in enumerate(zip(windows, parts, sizes)):
        begin = along(starts(window, place.device, dtype), d, len(windows))
        at = begin + part * window.dilation
        if window.start(0) < 0:
            outside = at < 0 if outside is None else outside | (at < 0)
            begin = begin + _skipped(begin, window.dilation)
        position, first = position * size + at, first * size + begin
    found: Tensor = position if outside is None else torch.where(outside, first, position)
    return found.to(torch.int64)


def _narrowest(end: int) -> torch.dtype:
    """The type in which numbers below `end` are computed: 64 bits make dear what divides and what compares."""
    return torch.int32 if end < 2**31 else torch.int64


def _skipped(start: Tensor, dilation: int) -> Tensor:
    """How far the first element inside is from a start before the tensor."""
    before = (-start).clamp_min(0)
    return before if dilation == 1 else (before + (dilation - 1)) // dilation * dilation


def _max_pool(rank: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def body(
        x: Tensor, kernel: Ints, stride: Ints = (), padding: Ints = (0,), dilation: Ints = (1,),
        ceil_mode: bool = False,
    ) -> Any:
        sizes = _static(x, rank)
        if sizes is None:
            return NotImplemented
        return _maxima(x, _sliding(sizes, kernel, stride, padding, dilation, ceil_mode), sizes)

    return body


def _adaptive_max_pool(x: Tensor, outputs: Ints) -> Any:
    sizes = _static(x, len(outputs))
    if sizes is None or not all(isinstance(n, int) and n > 0 for n in outputs):
        return NotImplemented
    return _maxima(x, [adaptive(size, n) for size, n in zip(sizes, outputs)], sizes)


def _chosen(grad: Tensor, indices: Tensor, windows: Sequence[Window]) -> Tensor:
    """What the windows that have chosen an element hand it; `windows` are those of the gradient."""
    dtype = _narrowest(math.prod(w.outputs for w in windows))
    position: Any = 0
    for d, window in enumerate(windows):
        i = torch.arange(window.outputs, device=grad.device, dtype=dtype)
        position = position * window.outputs + along(i, d, 2 * len(windows))
    # a window that does not cover an element has not chosen it either
    choice, wide = shown(indices.to(dtype), windows, -1), shown(grad.to(opmath(grad.dtype)), windows, 0)
    return torch.sum(torch.where(choice == position, wide, 0), _last(len(windows))).to(grad.dtype)


def _max_pool_backward(rank: int) -> Callable[..., Tensor]:
    def body(
        grad: Tensor, x: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool,
        indices: Tensor,
    ) -> Any:
        sizes = _static(x, rank)
        if sizes is None:
            return NotImplemented
        windows = _sliding(sizes, kernel, stride, padding, dilation, ceil_mode)
        return _chosen(grad, indices, [covering(w, size) for w, size in zip(windows, sizes)])

    return body


def _adaptive_max_pool_backward(rank: int) -> Callable[..., Tensor]:
    def body(grad: Tensor, x: Tensor, indices: Tensor) -> Any:
        sizes, outputs = _static(x, rank), _static(grad, rank)
        if sizes is None or outputs is None:
            return NotImplemented
        return _chosen(grad, indices, [adaptive(n, size) for size, n in zip(sizes, outputs)])

    return body


BODIES: Mapping[OpOverload, Callable[..., Any]] = {
    aten.avg_pool2d.default: _avg_pool(2),
    aten.avg_pool3d.default: _avg_pool(3),
    aten.avg_pool2d_backward.default: _avg_pool_backward(2),
    aten.avg_pool3d_backward.default: _avg_pool_backward(3),
    aten._adaptive_avg_pool2d.default: _adaptive_avg_pool,
    aten._adaptive_avg_pool3d.default: _adaptive_avg_pool,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool_backward(2),
    aten._adaptive_avg_pool3d_backward.default: _adaptive_avg_pool_backward(3),
    aten.max_pool2d_with_indices.default: _max_pool(2),
    aten.max_pool3d_with_indices.default: _max_pool(3),
    aten.max_pool2d_with_indices_backward.default: _max_pool_backward(2),
    aten.max_pool3d_with_indices_backward.default: _max_pool_backward(3),
    aten.adaptive_max_pool2d.default: _adaptive_max_pool,
    aten.adaptive_max_pool3d.default: _adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: _adaptive_max_pool_backward(2),
    aten.adaptive_max_pool3d_backward.default: _adaptive_max_pool_backward(3),
}
