"""Windows: views that show, beside each position of a result, the elements that its window covers.

Enters: a tensor, and for each of its last dimensions a `Window`.  Leaves: the tensor with these dimensions as long as
the result, and the windows' own dimensions behind all others, made of a pad, unfolds and slices.  No element is copied:
a kernel reads through all of them, and a window of a few elements becomes as many reads.  Every length is static.

A gradient is a window too: an element of the input asks the results that it may be part of, and nothing is scattered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Window:
    """Which positions p each i < outputs asks: (i * step + first) // over <= p < (i * step + last) // over, each
    `dilation`-th of them."""

    outputs: int
    step: int
    first: int
    last: int
    over: int = 1
    dilation: int = 1

    def start(self, i: int) -> int:
        return (i * self.step + self.first) // self.over

    def end(self, i: int) -> int:
        return (i * self.step + self.last) // self.over

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each i asks."""
        return tuple(-(-(self.end(i) - self.start(i)) // self.dilation) for i in range(self.outputs))

    @property
    def length(self) -> int:
        """The longest; a shorter one's last positions must be masked."""
        return max(self.lengths)

    @property
    def span(self) -> int:
        """From the first position to behind the last."""
        return (self.length - 1) * self.dilation + 1

    @property
    def ragged(self) -> bool:
        return min(self.lengths) != self.length


def sliding(outputs: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> Window:
    """The window of a pooling op: `kernel` positions from i * stride - padding on."""
    return Window(outputs, stride, -padding, -padding + (kernel - 1) * dilation + 1, 1, dilation)


def adaptive(inputs: int, outputs: int) -> Window:
    """The window of adaptive pooling: from floor(i * inputs / outputs) to ceil((i + 1) * inputs / outputs)."""
    if inputs % outputs == 0:
        return sliding(outputs, inputs // outputs, inputs // outputs, 0)
    return Window(outputs, inputs, 0, inputs + outputs - 1, outputs)


def covering(window: Window, inputs: int) -> Window:
    """The results whose sliding `window` may cover each position of the input; of a dilated one some do not."""
    assert window.over == 1
    return Window(inputs, 1, window.step - window.last, window.step - window.first, window.step)


def shown(x: Tensor, windows: Sequence[Window], fill: float) -> Tensor:
    """x: [..., H, W] -> [..., outputs, outputs, length, length]; `fill` where a position is outside of x."""
    first = x.dim() - len(windows)
    x = _padded(x, windows, fill)
    for i, (window, low) in enumerate(zip(windows, _low(windows))):
        x = _shown(x, first + i, window, low)
    return x


def _low(windows: Sequence[Window]) -> list[int]:
    return [max(0, -window.start(0)) for window in windows]


def _padded(x: Tensor, windows: Sequence[Window], fill: float) -> Tensor:
    pads: list[int] = []
    for window, low, size in zip(windows, _low(windows), x.shape[x.dim() - len(windows):]):
        end = window.start(window.outputs - 1) + window.span
        pads = [low, max(0, end - size), *pads]
    return aten.constant_pad_nd.default(x, pads, fill) if any(pads) else x


def _shown(x: Tensor, dim: int, window: Window, low: int) -> Tensor:
    if window.over == 1:
        x = aten.slice.Tensor(x, dim, window.first + low, None)
        x = aten.slice.Tensor(x.unfold(dim, window.span, window.step), dim, 0, window.outputs)
    else:
        # at i * step + first of a dimension whose every element stands `over` times is what (...) // over asks
        x = x.unfold(dim, window.span, 1).unsqueeze(dim + 1)
        x = x.expand(*x.shape[:dim + 1], window.over, *x.shape[dim + 2:]).flatten(dim, dim + 1)
        begin = window.first + low * window.over
        x = aten.slice.Tensor(x, dim, begin, begin + (window.outputs - 1) * window.step + 1, window.step)
    return x if window.dilation == 1 else aten.slice.Tensor(x, -1, 0, None, window.dilation)


def along(values: Tensor, place: int, rank: int) -> Tensor:
    """A vector along dimension `place` of `rank` ones."""
    return values.reshape([-1 if d == place else 1 for d in range(rank)])


def starts(window: Window, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Where each window begins: [outputs]."""
    return _places(window, window.first, device, dtype)


def ends(window: Window, device: torch.device) -> Tensor:
    """Where each window has ended: [outputs]."""
    return _places(window, window.last, device, torch.int64)


def _places(window: Window, offset: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    i = torch.arange(window.outputs, device=device, dtype=dtype) * window.step + offset
    return i if window.over == 1 else i // window.over


def asked(windows: Sequence[Window], device: torch.device) -> Tensor | None:
    """[outputs, outputs, length, length]: whether i asks for its j-th position; None where each does."""
    mask, rank = None, 2 * len(windows)
    for d, window in enumerate(windows):
        if not window.ragged:
            continue
        count = ends(window, device) - starts(window, device)
        j = torch.arange(window.length, device=device)
        one = along(j, len(windows) + d, rank) < along(count, d, rank)
        mask = one if mask is None else mask & one
    return mask


def fitted(firsts: Sequence[int], lasts: Sequence[int], step: int, over: int) -> Window:
    """The closest window that asks firsts[i] <= p < lasts[i] for each i, of those that move by step / over."""
    shared = math.gcd(step, over)
    step, over = step // shared, over // shared
    first = min(p * over + over - 1 - i * step for i, p in enumerate(firsts))
    last = max(p * over - i * step for i, p in enumerate(lasts))
    return Window(len(firsts), step, first, max(last, first + over), over)


def places(window: Window, device: torch.device) -> Tensor:
    """The positions that each i asks: [outputs, length]."""
    j = torch.arange(window.length, device=device) * window.dilation
    return starts(window, device).unsqueeze(1) + j
