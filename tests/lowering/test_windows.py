"""Windows in kernels: values at borders, one load for each element of a window, and builds for Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.ops.window_place import WINDOW_PLACE
from fxfuser.runtime.build import Variant, report
from tests.lowering.harness import check, compiled

Tensor = torch.Tensor


def windows(x: Tensor, size: int, step: int, pad: int, fill: float) -> Tensor:
    padded = F.pad(x, (pad, pad, pad, pad), value=fill)
    return padded.unfold(1, size, step).unfold(2, size, step)


def total(x: Tensor) -> Tensor:
    return windows(x, 3, 2, 1, 0).sum((-2, -1))


def place(x: Tensor) -> tuple[Tensor, Tensor]:
    wide = windows(x, 3, 1, 1, -float("inf"))
    return wide.amax((-2, -1)), WINDOW_PLACE(wide, [3, 4])


def tiled(x: Tensor) -> Tensor:
    return windows(x, 2, 2, 0, 0).amax((-2, -1))


def large(x: Tensor) -> Tensor:
    return windows(x, 7, 3, 3, 0).sum((-2, -1))


CASES: dict[str, tuple[Any, int]] = {"total": (total, 9), "place": (place, 9), "tiled": (tiled, 1), "large": (large, 1)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_and_loads(name: str, dtype: torch.dtype) -> None:
    fn, loads = CASES[name]
    x = torch.randint(-3, 4, (2, 13, 10)).to(dtype)
    x[0, :4, :4], x[1, 5, 2:6] = (0, 1) if name in ("total", "large") else (-float("inf"), float("nan"))
    _, lowered = check(fn, [x])
    assert lowered.kernel.source.count("tl.load(") == loads
    assert ("tl.reduce(" in lowered.kernel.source) == (loads == 1)


def largest(x: Tensor) -> Tensor:
    return windows(x, 3, 2, 1, -float("inf")).amax((-2, -1))


def test_a_border_is_loaded() -> None:
    """Selects between loads and maxima would keep these from being taken in bf16."""
    x = torch.randn(2, 13, 10).bfloat16()
    _, lowered = check(largest, [x])
    assert lowered.kernel.source.count(', float("-inf")).to(tl.float32)') == 9
    assert "tl.where" not in lowered.kernel.source
    _, _, lowered = compiled(largest, [torch.empty(64, 112, 112, dtype=torch.bfloat16)])
    assert "max.NaN.bf16" in report(lowered.kernel, 90, Variant.usual(lowered.kernel)).ptx


def two_borders(x: Tensor) -> tuple[Tensor, Tensor]:
    return (windows(x, 3, 2, 1, -1).amax((-2, -1)), windows(x, 3, 2, 1, 0).sum((-2, -1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.int8])
def test_one_load_may_stand_in_two_borders(dtype: torch.dtype) -> None:
    check(two_borders, [torch.randint(-5, 4, (2, 13, 10)).to(dtype)])


def test_a_border_that_the_dtype_does_not_have_is_selected() -> None:
    def wide(x: Tensor) -> Tensor:
        return windows(x.float(), 3, 2, 1, 0.1).sum((-2, -1))

    _, lowered = check(wide, [torch.randn(2, 13, 10).bfloat16()])
    assert "tl.where" in lowered.kernel.source


@pytest.mark.parametrize("name", CASES)
def test_they_build_for_hopper(name: str) -> None:
    _, _, lowered = compiled(CASES[name][0], [torch.empty(64, 112, 112, dtype=torch.bfloat16)])
    found = report(lowered.kernel, 90, Variant.usual(lowered.kernel))
    assert found.spills == 0


def test_whole_numbers() -> None:
    check(place_of_numbers, [torch.randint(-3, 4, (2, 9, 8))])


def place_of_numbers(x: Tensor) -> Tensor:
    return WINDOW_PLACE(x.unfold(1, 3, 2).unfold(2, 3, 2), [3, 4])
