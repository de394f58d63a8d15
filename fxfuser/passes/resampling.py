"""Bodies of resampling with an antialiasing filter: sums over windows (see windows.py), one dimension after the other.

    y = aten._upsample_bilinear2d_aa(x, [4], ...)    ->    w = x.unfold(-1, ...);  y = aten.sum(w * filter, [-1])

The filter's weights are computed where they are needed, in float32 for half types, with ATen's formulas.  A gradient
asks which results an element has been weighted into.  A body answers NotImplemented where a size is symbolic, and for
integers, which eager resamples with weights of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxfuser.ops.promotion import opmath
from fxfuser.passes.windows import Window, fitted, places, shown

aten = torch.ops.aten


@dataclass(frozen=True)
class Filter:
    """A kernel over [-reach, reach], as the weight of a distance that is not negative."""

    reach: int
    weight: Callable[[Tensor], Tensor]


def _triangle(distance: Tensor) -> Tensor:
    return (1 - distance).clamp_min(0)


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = -1/2 (1981), as Pillow's."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))


TRIANGLE, CUBIC = Filter(1, _triangle), Filter(2, _cubic)


@dataclass(frozen=True)
class Resampling:
    """How one dimension of `inputs` elements becomes one of `outputs`."""

    filter: Filter
    inputs: int
    outputs: int
    scale: float  # elements of the input per element of the result

    @property
    def support(self) -> float:
        """How far the filter reaches, in elements of the input."""
        return self.filter.reach * max(self.scale, 1.0)

    def reached(self, i: int) -> tuple[int, int]:
        """The positions [first, last) that result i averages."""
        center = self.scale * (i + 0.5)
        return max(int(center - self.support + 0.5), 0), min(int(center + self.support + 0.5), self.inputs)

    def window(self) -> Window:
        """The positions that each result averages."""
        firsts, lasts = zip(*map(self.reached, range(self.outputs)))
        return fitted(firsts, lasts, self.inputs, self.outputs)

    def readers(self) -> Window:
        """The results that average each position."""
        firsts, lasts = [self.outputs] * self.inputs, [0] * self.inputs
        for i in range(self.outputs):
            for p in range(*self.reached(i)):
                firsts[p], lasts[p] = min(firsts[p], i), max(lasts[p], i + 1)
        # a position that no result averages asks what its neighbour does
        for p in range(1, self.inputs):
            if lasts[p] == 0:
                firsts[p], lasts[p] = firsts[p - 1], lasts[p - 1]
        return fitted(firsts, lasts, self.outputs, self.inputs)

    def weights(self, i: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight, not normalised, of position p in result i."""
        center = (i.to(dtype) + 0.5) * self.scale
        first = (center - self.support + 0.5).to(torch.int64).clamp_min(0)
        last = (center + self.support + 0.5).to(torch.int64).clamp_max(self.inputs)
        weight = self.filter.weight(((p.to(dtype) - center + 0.5) / max(self.scale, 1.0)).abs())
        return torch.where((p >= first) & (p < last), weight, 0)

    def totals(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The sum of each result's weights."""
        i = torch.arange(self.outputs, device=device).unsqueeze(1)
        total = self.weights(i, places(self.window(), device), dtype).sum(-1)
        return torch.where(total == 0, 1, total)


def _weighted(x: Tensor, window: Window, weights: Tensor) -> Tensor:
    """Sums of the last dimension's windows; an element without a weight may be anything."""
    wide = shown(x, [window], 0)
    return torch.where(weights == 0, 0, wide * weights).sum(-1)


def _resampled(x: Tensor, how: Resampling) -> Tensor:
    window = how.window()
    i = torch.arange(how.outputs, device=x.device).unsqueeze(1)
    weights = how.weights(i, places(window, x.device), x.dtype) / how.totals(x.dtype, x.device).unsqueeze(1)
    return _weighted(x, window, weights)


def _handed(grad: Tensor, how: Resampling) -> Tensor:
    window = how.readers()
    p = torch.arange(how.inputs, device=grad.device).unsqueeze(1)
    totals = shown(how.totals(grad.dtype, grad.device), [window], 1)
    return _weighted(grad, window, how.weights(places(window, grad.device), p, grad.dtype) / totals)


def _each(
    filter: Filter, inputs: Sequence[int], outputs: Sequence[int], align_corners: bool, scales: Sequence[float | None]
) -> list[Resampling] | None:
    """How each dimension is resampled; None where a size is symbolic."""
    if not all(isinstance(s, int) and s > 0 for s in (*inputs, *outputs)):
        return None
    found = []
    for size, count, scale in zip(inputs, outputs, scales):
        if align_corners:
            ratio = (size - 1) / (count - 1) if count > 1 else 0.0
        else:
            ratio = 1 / scale if scale is not None and scale > 0 else size / count
        found.append(Resampling(filter, size, count, ratio))
    return found


def _along_each(x: Tensor, ways: Sequence[Resampling], one: Callable[[Tensor, Resampling], Tensor]) -> Tensor:
    """The last dimension first, as eager does."""
    wide = x.to(opmath(x.dtype))
    for d, how in reversed(list(enumerate(ways, x.dim() - len(ways)))):
        wide = one(wide.transpose(d, -1), how).transpose(d, -1)
    return wide.to(x.dtype)


def _antialiased(filter: Filter) -> Callable[..., Tensor]:
    def body(
        x: Tensor, outputs: Sequence[int], align_corners: bool, scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Any:
        ways = _each(filter, x.shape[2:], outputs, align_corners, (scales_h, scales_w))
        return NotImplemented if ways is None or not x.is_floating_point() else _along_each(x, ways, _resampled)

    return body


def _antialiased_backward(filter: Filter) -> Callable[..., Tensor]:
    def body(
        grad: Tensor, outputs: Sequence[int], inputs: Sequence[int], align_corners: bool,
        scales_h: float | None = None, scales_w: float | None = None,
    ) -> Any:
        ways = _each(filter, inputs[2:], outputs, align_corners, (scales_h, scales_w))
        return NotImplemented if ways is None else _along_each(grad, ways, _handed)

    return body


BODIES: Mapping[OpOverload, Callable[..., Any]] = {
    aten._upsample_bilinear2d_aa.default: _antialiased(TRIANGLE),
    aten._upsample_bilinear2d_aa_backward.default: _antialiased_backward(TRIANGLE),
    aten._upsample_bicubic2d_aa.default: _antialiased(CUBIC),
    aten._upsample_bicubic2d_aa_backward.default: _antialiased_backward(CUBIC),
}
