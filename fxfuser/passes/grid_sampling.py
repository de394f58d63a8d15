"""Bodies of grid_sampler_3d: gathers at positions that a grid names, weighted by the distance to them.

    y = aten.grid_sampler_3d(x, grid, ...)    ->    p = (grid + 1) * size ...;  v = aten.index(x, [n, c, p, p, p]) ...

Formulas, and what is read outside, are those of ATen's kernels; of two dimensions PyTorch has a decomposition.  Half
types are summed in float32.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxfuser.ops.promotion import opmath

aten = torch.ops.aten
LINEAR, NEAREST = 0, 1  # interpolation modes
BORDER, REFLECTION = 1, 2  # padding modes; 0 reads zeros outside


def _reflected(at: Tensor, low: float, high: float) -> Tensor:
    """`at`, its distance to [low, high] folded back into it."""
    span = high - low
    if span == 0:
        return torch.zeros_like(at)
    distance = (at - low).abs()
    extra, flips = torch.fmod(distance, span), torch.floor(distance / span)
    return torch.where(torch.remainder(flips, 2) == 0, extra + low, span - extra + low)


def _source(coordinate: Tensor, size: Any, padding: int, align_corners: bool) -> Tensor:
    """Where in a dimension of `size` elements a coordinate of [-1, 1] is."""
    at: Tensor = (coordinate + 1) / 2 * (size - 1) if align_corners else ((coordinate + 1) * size - 1) / 2
    if padding == REFLECTION:
        at = _reflected(at, 0.0, float(size - 1)) if align_corners else _reflected(at, -0.5, size - 0.5)
    return at.clamp(0, size - 1) if padding in (BORDER, REFLECTION) else at


def _read(x: Tensor, at: Sequence[Tensor]) -> Tensor:
    """x at whole positions [N, D, H, W] of its last three dimensions, 0 outside: [N, C, D, H, W]."""
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for p, size in zip(at, x.shape[2:]):
        inside = inside & (p >= 0) & (p < size)
    n = torch.arange(x.shape[0], device=x.device).reshape(-1, 1, 1, 1, 1)
    c = torch.arange(x.shape[1], device=x.device).reshape(1, -1, 1, 1, 1)
    inside = inside.unsqueeze(1)
    places = [torch.where(inside, p.unsqueeze(1), 0).to(torch.int64) for p in at]
    return torch.where(inside, aten.index.Tensor(x, [n, c, *places]), 0)


def _grid_sampler_3d(x: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Any:
    if mode not in (LINEAR, NEAREST) or any(isinstance(s, int) and s == 0 for s in (*x.shape, *grid.shape)) \
            or not all(isinstance(s, int) for s in x.shape[2:]):
        return NotImplemented
    wide, coordinates = x.to(opmath(x.dtype)), grid.to(opmath(grid.dtype))
    at = [_source(coordinates[..., 2 - d], size, padding, align_corners) for d, size in enumerate(x.shape[2:])]
    if mode == NEAREST:
        return _read(wide, [p.round() for p in at]).to(x.dtype)
    low = [p.floor() for p in at]
    total: Any = 0
    for corner in itertools.product((0, 1), repeat=3):
        weight: Any = 1
        for step, p, below in zip(corner, at, low):
            weight = weight * (p - below if step else below + 1 - p)
        total = total + _read(wide, [p + step for step, p in zip(corner, low)]) * weight.unsqueeze(1)
    result: Tensor = total.to(x.dtype)
    return result


BODIES: Mapping[OpOverload, Callable[..., Any]] = {aten.grid_sampler_3d.default: _grid_sampler_3d}
