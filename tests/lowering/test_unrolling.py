"""Neighbours that read the same, side by side in one thread: values, accesses, and where there are none."""

from __future__ import annotations

import re
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxfuser.lowering import unrolling
from fxfuser.lowering.neighbours import Vector, vectors
from fxfuser.passes.pooling import BODIES
from fxfuser.runtime.build import Variant, report

from .harness import check, compiled, run

aten = torch.ops.aten
Body = Callable[..., Any]
FORWARD: Body = BODIES[aten.max_pool2d_with_indices.default]
BACKWARD: Body = BODIES[aten.max_pool2d_with_indices_backward.default]
# kernel, stride, padding, dilation, ceil mode
POOLED = [([3, 3], [2, 2], [1, 1], [1, 1], False), ([3, 3], [2, 2], [1, 1], [1, 1], True),
          ([2, 2], [2, 2], [0, 0], [1, 1], False), ([3, 5], [2, 3], [1, 2], [1, 1], True),
          ([2, 3], [1, 2], [1, 1], [2, 1], False), ([3, 3], [2, 2], [1, 0], [1, 2], True)]
SIZES = [(16, 16), (8, 24), (13, 10), (9, 17), (15, 7)]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Small tensors leave enough programs too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unrolling, "FILLED", 0)
        yield


def images(size: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Ties, infinities and NaN."""
    x = torch.randint(-3, 4, (2, *size)).to(dtype)
    if dtype.is_floating_point:
        x[0, :4, :4], x[1, 2, 2:5], x[1, 5, 5] = -float("inf"), float("nan"), float("inf")
    return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pooled", POOLED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_maxima_and_their_places(size: tuple[int, int], pooled: tuple[Any, ...], dtype: torch.dtype) -> None:
    x = images(size, dtype)
    graph, segment, lowered = compiled(lambda x: FORWARD(x, *pooled), [x])
    values, places = run(graph, lowered, segment, [x])
    expected, chosen = aten.max_pool2d_with_indices(x, *pooled)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(places, chosen, rtol=0, atol=0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pooled", POOLED)
def test_gradients(size: tuple[int, int], pooled: tuple[Any, ...]) -> None:
    x = torch.randn(2, *size)
    values, places = aten.max_pool2d_with_indices(x, *pooled)
    grad = torch.randn_like(values)
    graph, segment, lowered = compiled(lambda g, x, p: BACKWARD(g, x, *pooled, p), [grad, x, places])
    found, = run(graph, lowered, segment, [grad, x, places])
    torch.testing.assert_close(found, aten.max_pool2d_with_indices_backward(grad, x, *pooled, places))


def largest(x: Tensor) -> Tensor:
    padded = F.pad(x, (1, 1, 1, 1), value=-float("inf"))
    return padded.unfold(1, 3, 2).unfold(2, 3, 2).amax((-2, -1))


def test_windows_share_what_they_read() -> None:
    """Of 3 x 9 numbers for four results, eight of each row in one access."""
    x = torch.randn(3, 16, 32).bfloat16()
    _, lowered = check(largest, [x])
    source = lowered.kernel.source
    assert source.count("tl.load(") == 6 and source.count("tl.arange(0, 8)") == 3
    assert source.count("tl.store(") == 1
    found = report(lowered.kernel, 90, Variant.usual(lowered.kernel))
    assert found.shared == 0  # no part moves to another thread
    assert found.ptx.count(".v4.b32") == 3


def test_a_length_that_is_odd_leaves_neighbours_apart() -> None:
    _, lowered = check(largest, [torch.randn(3, 16, 30)])
    assert lowered.kernel.source.count("tl.load(") == 9


def test_what_is_repeated_is_loaded_once() -> None:
    def repeated(x: Tensor) -> Tensor:
        return (x[:, :, None, :, None] * 2).expand(3, 5, 2, 7, 2).reshape(3, 10, 14) + 1

    _, lowered = check(repeated, [torch.randn(3, 5, 7)])
    assert lowered.kernel.source.count("tl.load(") == 1
    assert len(re.findall(r"tl.store\(.*tl.join", lowered.kernel.source)) == 2


@pytest.mark.parametrize("fn", [
    lambda x: x * 2 + x.flip(0),  # each element once
    lambda x: x.sum(1),  # a loop
    lambda x: x[:, 1:] - x[:, :-1],  # neighbours of one thread already
    lambda x: x.unfold(1, 2, 2).sum(-1),  # no element twice
])
def test_others_stay_as_they_are(fn: Callable[[Tensor], Tensor]) -> None:
    _, lowered = check(fn, [torch.randn(6, 32)])
    assert "tl.split" not in lowered.kernel.source and "tl.join" not in lowered.kernel.source


def test_few_elements_stay_with_many_threads() -> None:
    # not by the fixture, which may outlive `small` and would then put its number back for all tests that follow
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unrolling, "FILLED", 1 << 15)
        _, lowered = check(largest, [torch.randn(3, 16, 32)])
    assert "tl.split" not in lowered.kernel.source


def test_vectors_are_aligned() -> None:
    assert vectors(range(-1, 8), (), 8) == (Vector(0, 8),)
    assert vectors([-4, -3, -2, -1, 1, 2, 3], (), 8) == (Vector(-4, 4), Vector(2, 2))
    assert vectors([1, 2], (), 4) == ()
