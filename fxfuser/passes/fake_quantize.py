"""Fake quantisation as pointwise ops: what training that knows of quantisation computes of weights and activations.

    q = zero + round(x / scale)          mask = (low <= q) & (q <= high)
    y = (clamp(q, low, high) - zero) * scale

PyTorch has a kernel for each form and no decomposition.  As its kernels do, this multiplies by the reciprocal of the
scale, which is float32, and rounds ties to even (FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp of
aten/src/ATen/native/quantized).  Halves are float32 on the way.
"""

from __future__ import annotations

import struct
from typing import Any, Callable, Mapping

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
TINY = 2.0 ** -126  # the least float32 whose reciprocal is one


def bodies() -> Mapping[OpOverload, Callable[..., Any]]:
    """Each overload and what it is traced as."""
    return {aten.fake_quantize_per_tensor_affine_cachemask.default: _per_tensor,
            aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: _by_tensors,
            aten.fake_quantize_per_channel_affine_cachemask.default: _per_channel}


def _per_tensor(x: torch.Tensor, scale: float, zero_point: int, quant_min: int, quant_max: int) -> Any:
    """What eager refuses stays its call, as do scales that have no reciprocal in float32."""
    usual = TINY <= abs(scale) <= 1 / TINY and quant_min <= zero_point <= quant_max
    if not _known(x, quant_min, quant_max) or not usual:
        return NotImplemented
    single = _single(scale)
    return _quantised(x, _single(1.0 / single), single, zero_point, quant_min, quant_max)


def _by_tensors(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, fake_quant_enabled: torch.Tensor,
                quant_min: int, quant_max: int) -> Any:
    """Here and of channels, zero points are not asked whether they lie within: that would wait for the device."""
    numbers = scale.dtype is torch.float32 and not zero_point.is_floating_point() and all(
        t.shape.numel() == 1 for t in (scale, zero_point, fake_quant_enabled))
    if not _known(x, quant_min, quant_max) or not numbers:
        return NotImplemented
    step, zero, on = (t.reshape([]) for t in (scale, zero_point, fake_quant_enabled))
    value, mask = _quantised(x, 1.0 / step, step, zero, quant_min, quant_max)
    return torch.where(on != 0, value, x), mask | (on == 0)


def _per_channel(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int, quant_min: int,
                 quant_max: int) -> Any:
    """Zero points that are no whole numbers have a formula of their own, and stay ATen's."""
    fit = scale.dtype is torch.float32 and zero_point.dtype is torch.int32 and 0 <= axis < x.dim() and \
        scale.dim() == zero_point.dim() == 1 and scale.shape[0] == zero_point.shape[0] == x.shape[axis]
    if not _known(x, quant_min, quant_max) or not fit:
        return NotImplemented
    shape = [1] * axis + [-1] + [1] * (x.dim() - axis - 1)
    step, zero = scale.reshape(shape), zero_point.reshape(shape)
    return _quantised(x, 1.0 / step, step, zero, quant_min, quant_max)


def _known(x: torch.Tensor, quant_min: int, quant_max: int) -> bool:
    return x.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16) and quant_min <= quant_max


def _quantised(x: torch.Tensor, inverse: Any, scale: Any, zero: Any, low: int, high: int) -> Any:
    wide = x if x.dtype is torch.float64 else x.to(torch.float32)
    found = torch.round(wide * inverse) + zero
    # not by `clamp`: NaN is the lowest
    inside = torch.where(found > high, high, torch.where(found >= low, found, low))
    return ((inside - zero) * scale).to(x.dtype), (found >= low) & (found <= high)


def _single(number: float) -> float:
    """The number as float32 has it."""
    return float(struct.unpack("f", struct.pack("f", number))[0])
