"""Exponentials and quotients of softmaxes: values of extreme rows, and what is left as it is."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from torch import Tensor

from fxfuser.config import Config

from .harness import check, compiled

LONG = 17000  # more than a program holds


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def rows(length: int, dtype: torch.dtype) -> Tensor:
    x = (torch.randn(9, length) * 20).to(dtype)
    x[1, ::3] = -float("inf")
    x[2] = -float("inf")
    x[3, 5] = float("inf")
    x[4, 7] = float("nan")
    x[5] = torch.finfo(dtype).min
    x[6] = torch.finfo(dtype).max
    x[7] *= 1e4
    return x


@pytest.mark.parametrize("length", [3, 100, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(length: int, dtype: torch.dtype) -> None:
    x = rows(max(length, 8), dtype)[:, -length:]
    _, lowered = check(softmax, [x])
    source = lowered.kernel.source
    assert "tl.exp(" not in source and "div_0 = exp_0 * inverse_0" in source


@pytest.mark.parametrize("fn", [
    lambda x: (x - x.amax(-1, keepdim=True)).exp(),  # no sum
    lambda x: x.exp() / x.exp().sum(-1, keepdim=True),  # no maximum: the sum may be as small as any
    lambda x: x / (x - x.amax(-1, keepdim=True)).cos().sum(-1, keepdim=True),  # may be 0
])
def test_others_are_divided(fn: Callable[[Tensor], Tensor]) -> None:
    _, lowered = check(fn, [torch.randn(3, 40)], tolerance=2e-5)
    assert "inverse" not in lowered.kernel.source


def test_a_quotient_of_one_number_a_row_is_one() -> None:
    """Nothing would be computed less often."""
    def first(x: Tensor) -> Tensor:
        top = x.amax(-1)
        return top / (x - top[:, None]).exp().sum(-1)

    _, lowered = check(first, [torch.randn(3, 40)])
    assert "inverse" not in lowered.kernel.source


def test_eager_numerics_divide() -> None:
    _, _, lowered = compiled(softmax, [torch.randn(3, 40)], config=Config(numerics="eager"))
    assert "tl.div_rn" in lowered.kernel.source and "tl.exp2" not in lowered.kernel.source
