"""How many neighbours a thread takes: fewer where what is read lies apart and is read often."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F

from fxfuser.lowering.coalescing import MOST, elements
from fxfuser.lowering.kernel import Kernel
from fxfuser.lowering.schedule import schedule
from tests.lowering.harness import compiled, segment_of, trace

Tensor = torch.Tensor
Function = Callable[..., Any]
IMAGES = (64, 112, 112)


def windows(x: Tensor, size: int, step: int) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1), value=-float("inf"))
    return padded.unfold(1, size, step).unfold(2, size, step)


def pooled(x: Tensor) -> Tensor:
    return windows(x, 3, 2).amax((-2, -1))


def pooled_at_stride_1(x: Tensor) -> Tensor:
    return windows(x, 3, 1).amax((-2, -1))


def product(x: Tensor) -> Tensor:
    return x[..., ::2] * x[..., 1::2]


def difference(x: Tensor) -> Tensor:
    return x[:, :, 1:] - x[:, :, :-1]


def every_second(x: Tensor) -> Tensor:
    return x[..., ::2] * 2


def scaled(x: Tensor) -> Tensor:
    return x * x.amax(0)


def upsampled(x: Tensor) -> Tensor:
    return x[:, :, None, :, None].expand(-1, -1, 2, -1, 2).reshape(x.shape[0], 2 * x.shape[1], 2 * x.shape[2]) * 2


def taken(fn: Function, shape: tuple[int, ...], dtype: torch.dtype, dynamic: set[int] | None = None) -> int:
    graph = trace(fn, [torch.empty(shape, dtype=dtype)], [dynamic or set()])
    domain = segment_of(graph).domain
    assert domain is not None
    dim, = schedule(domain).dims
    return elements(domain, dim, {})


@pytest.mark.parametrize("fn, dtype, expected", [
    (pooled, torch.bfloat16, 1), (pooled, torch.float32, 2), (pooled_at_stride_1, torch.bfloat16, 4),
    (product, torch.bfloat16, 4), (difference, torch.bfloat16, 4),
])
def test_what_lies_apart_and_is_read_often_is_left_to_other_threads(fn: Function, dtype: torch.dtype,
                                                                      expected: int) -> None:
    assert taken(fn, IMAGES, dtype) == expected


@pytest.mark.parametrize("fn", [torch.neg, every_second, upsampled])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_memory_bounds_anyway_keeps_wide_stores(fn: Function, dtype: torch.dtype) -> None:
    assert taken(fn, IMAGES, dtype) == MOST


def test_sizes_may_be_symbols() -> None:
    assert taken(torch.neg, IMAGES, torch.bfloat16, {0, 1, 2}) == MOST
    assert taken(pooled, IMAGES, torch.bfloat16, {0}) == 1


def kernel_of(fn: Function) -> Kernel:
    return compiled(fn, [torch.empty(IMAGES, dtype=torch.bfloat16)])[2].kernel


def test_threads_take_no_more() -> None:
    tile = kernel_of(pooled).tile
    assert dict(tile.blocks)["XBLOCK"] == 32 * tile.num_warps
    wide = kernel_of(torch.neg).tile
    assert dict(wide.blocks)["XBLOCK"] == 32 * MOST * wide.num_warps
