"""Fake quantisation: eager's values, masks and gradients in one kernel each way; what is left to ATen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxfuser import observe

OPTIONS = {"executor": "interpret", "strict": True}
aten = torch.ops.aten


def per_tensor(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.037, 3, -128, 127)


def coarse(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.5, 0, -2, 2)


def by_tensors(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x, torch.tensor([0.037]), torch.tensor([3], dtype=torch.int32), 0, 255)


def per_channel(x: Tensor) -> Tensor:
    channels = x.shape[1]
    scale = torch.linspace(0.01, 0.3, channels)
    zero = torch.arange(channels, dtype=torch.int32) % 5 - 2
    return torch.fake_quantize_per_channel_affine(x, scale, zero, 1, -8, 7)


def ran(fn: Callable[..., Any], x: Tensor, **options: Any) -> tuple[Tensor, Tensor, list[Any]]:
    """The result, the gradient, and the graphs."""
    torch.compiler.reset()
    leaf = x.clone().requires_grad_()
    with observe.recording() as recording:
        result = torch.compile(fn, backend="fxfuser", options={**OPTIONS, **options}, dynamic=False)(leaf)
        (gradient,) = torch.autograd.grad(result.sum() * 2, leaf)
    return result.detach(), gradient, recording.graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fn", [per_tensor, coarse, by_tensors, per_channel], ids=lambda f: f.__name__)
def test_as_eager(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    """Ties, what is far out of range or no number, both zeros."""
    ties = torch.arange(-12, 12).view(4, 6) * 0.25
    far, zeros = torch.tensor([[1e4, 6e4, 1e30, float("inf"), float("nan"), 40.0]]), torch.zeros(1, 6)
    x = torch.cat([torch.randn(40, 6) * 3, ties, far, -far, zeros, -zeros]).to(dtype)
    if fn is per_channel:  # whose kernel for CPUs casts such to int64, where that has no number as large
        x = x.nan_to_num(0.0).clamp(-1e4, 1e4)
    want = fn(leaf := x.clone().requires_grad_())
    (tangent,) = torch.autograd.grad(want.sum() * 2, leaf)
    result, gradient, graphs = ran(fn, x)
    # vectors of eager's on a CPU multiply the difference of two products, a step is thousands of times as large
    torch.testing.assert_close(result, want.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, tangent, rtol=0, atol=0)
    plans = [graph.plan for graph in graphs if graph.plan]
    assert plans and not any("fake_quant" in plan[plan.index("def call"):] for plan in plans)


def test_switched_off() -> None:
    def fn(x: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
        value, mask = aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
            x, torch.tensor([0.1]), torch.tensor([0], dtype=torch.int32), on, -8, 7)
        return value, mask

    x = torch.randn(5, 7)
    compiled = torch.compile(fn, backend="fxfuser", options=OPTIONS, dynamic=False)
    for on in (0, 1):
        given = torch.tensor([on])
        for got, want in zip(compiled(x, given), fn(x, given), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_with_what_stands_around_it() -> None:
    """A layer of training for quantised inference: the weights' steps are a prologue or a kernel, no call."""
    weight = torch.randn(24, 32)

    def fn(x: Tensor) -> Tensor:
        return torch.relu(per_tensor(x) @ per_channel(weight).t())

    x = torch.randn(8, 32)
    torch.compiler.reset()
    with torch.no_grad(), observe.recording() as recording:
        result = torch.compile(fn, backend="fxfuser", options=OPTIONS, dynamic=False)(x)
    torch.testing.assert_close(result, fn(x), rtol=1e-5, atol=1e-5)
    assert "fake_quant" not in recording.graphs[0].plan[recording.graphs[0].plan.index("def call"):]


def test_zero_points_that_are_no_whole_numbers_stay() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_channel_affine(x, torch.full((3,), 0.1), torch.full((3,), 0.5), 1, 0, 15)

    x = torch.randn(4, 3)
    torch.compiler.reset()
    result = torch.compile(fn, backend="fxfuser", options=OPTIONS, dynamic=False)(x)
    torch.testing.assert_close(result, fn(x), rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.0, 1e-46, -0.1, 1e39])
def test_scales_of_every_size(scale: float) -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, scale, 0, -8, 7)

    x = torch.randn(4, 3)
    torch.compiler.reset()
    result = torch.compile(fn, backend="fxfuser", options=OPTIONS, dynamic=False)(x)
    torch.testing.assert_close(result, fn(x), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_what_eager_refuses() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 300, 0, 255)

    torch.compiler.reset()
    with pytest.raises(Exception, match="zero_point|zero point"):
        torch.compile(fn, backend="fxfuser", options=OPTIONS, dynamic=False)(torch.randn(3))
