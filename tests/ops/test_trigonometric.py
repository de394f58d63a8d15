"""Sines and cosines of one reduction, and the coarse hyperbolic tangent, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import fxfuser  # noqa: F401  (registers the backend)

INTERPRET = {"executor": "interpret", "strict": True}


def compiled(function):
    return torch.compile(function, backend="fxfuser", options=INTERPRET)


@compiled
def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos()


@compiled
def tanh(x: Tensor) -> Tensor:
    return x.tanh()


def units(found: Tensor, exact: Tensor) -> float:
    """The largest error in units of fp32's last place."""
    return float(((found.double() - exact).abs() / 2.0 ** (exact.abs().log2().floor() - 23)).max())


@pytest.mark.parametrize("limit", [1e-3, 1.0, 10.0, 5000.0, 65536.0, 1e6, 1e20])
def test_within_two_units_of_the_last_place(limit: float) -> None:
    x = ((torch.rand(4096, dtype=torch.float64) * 2 - 1) * limit).float()
    sine, cosine = pair(x)
    assert units(sine, x.double().sin()) < 2 and units(cosine, x.double().cos()) < 2


def test_beside_multiples_of_a_quarter_turn() -> None:
    x = (torch.arange(1, 41000, 7).double() * (math.pi / 2)).float()
    sine, cosine = pair(x)
    assert units(sine, x.double().sin()) < 2 and units(cosine, x.double().cos()) < 2


def test_special_values() -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, math.nan])
    sine, cosine = pair(x)
    torch.testing.assert_close(sine, x.sin(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(cosine, x.cos(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(sine[:4].signbit(), x[:4].signbit())


def test_an_element_depends_on_no_neighbour() -> None:
    x = torch.randn(256) * 100
    beside = x.clone()
    beside[7::16] = 1e9
    same = beside == x
    for alone, among in zip(pair(x), pair(beside)):
        assert torch.equal(alone[same], among[same])


@pytest.mark.parametrize(("dtype", "units"), [(torch.bfloat16, 0), (torch.float16, 1)])
def test_a_coarse_tangent_of_every_half(dtype: torch.dtype, units: int) -> None:
    """Rounded to bfloat16 it is the exact one, to float16 a neighbour at most."""
    x = torch.arange(-2**15, 2**15).to(torch.int16).view(dtype)
    found, exact = tanh(x), x.double().tanh().to(dtype)
    assert torch.equal(found.isnan(), x.isnan())
    usual = ~x.isnan()
    steps = (found.view(torch.int16)[usual].int() - exact.view(torch.int16)[usual].int()).abs()
    assert steps.max() <= units and (steps > 0).sum() <= 8


def test_a_coarse_pair_of_every_bfloat16() -> None:
    """Rounded to bfloat16 nearly all are the exact ones, the others neighbours."""
    x = torch.arange(-2**15, 2**15).to(torch.int16).view(torch.bfloat16)
    for found, exact in zip(pair(x), (x.double().sin(), x.double().cos())):
        exact = exact.to(torch.bfloat16)
        assert torch.equal(found.isnan(), exact.isnan())
        assert torch.equal(found.signbit()[~exact.isnan()], exact.signbit()[~exact.isnan()])
        usual = ~exact.isnan()
        steps = (found.view(torch.int16)[usual].int() - exact.view(torch.int16)[usual].int()).abs()
        assert steps.max() <= 1 and (steps > 0).sum() <= 16


def test_only_results_of_bfloat16_are_coarse() -> None:
    x = torch.linspace(-50, 50, 4096)
    sine, cosine = compiled(lambda x: (x.bfloat16().float().sin(), x.half().cos()))(x)
    exact = x.bfloat16().double().sin()
    assert units(sine, exact) < 2
    torch.testing.assert_close(cosine, x.half().double().cos().half(), rtol=1e-3, atol=0)
