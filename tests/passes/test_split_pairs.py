"""Pairs of long reductions are cut together: one read for both, the values of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser import observe
from fxfuser.passes import LATE
from fxfuser.passes.dce import remove_dead_nodes
from tests.passes.rewriting import apply, assert_rewrites, assert_untouched, targets, trace

aten = torch.ops.aten
PAIRS = next(p for p in LATE if p.__name__ == "split_pairs")
INF = float("inf")


def scaled(a: Tensor) -> Tensor:
    m = aten.amax.default(a, [1], True)
    return aten.sum.dim_IntList(aten.exp.default(aten.sub.Tensor(a, m)), [1])


def squares(a: Tensor) -> Tensor:
    d = aten.sub.Tensor(a, aten.mean.dim(a, [1], True))
    return aten.sum.dim_IntList(aten.mul.Tensor(d, d), [1], True)


def logsumexp(a: Tensor) -> Tensor:
    m = aten.amax.default(a, [1], True)
    m = aten.masked_fill.Scalar(m, aten.eq.Scalar(aten.abs.default(m), INF), 0)
    total = aten.sum.dim_IntList(aten.exp.default(aten.sub.Tensor(a, m)), [1], True)
    return aten.add.Tensor(aten.log.default(total), m)


def columns(a: Tensor) -> Tensor:
    return squares(a.view(1, -1, 8))


def test_a_maximum_and_its_sum() -> None:
    def expected(a: Tensor) -> Tensor:
        v = aten.view.default(a, [2, 16, 4096])
        p = aten.amax.default(v, [2], True)
        short = aten.squeeze.dims(p, [2])
        m = aten.view.default(aten.amax.default(short, [1]), [2, 1])
        shift = aten.view.default(m, [2, 1])
        distance, apart = aten.sub.Tensor(v, p), aten.sub.Tensor(short, shift)
        q = aten.sum.dim_IntList(aten.exp.default(distance), [2])
        q = aten.masked_fill.Scalar(q, aten.eq.Scalar(aten.abs.default(short), INF), 1.0)
        return aten.sum.dim_IntList(aten.mul.Tensor(q, aten.exp.default(apart)), [1])

    assert_rewrites(scaled, expected, [torch.randn(2, 65536)], [PAIRS, remove_dead_nodes], exact=False)


VALUES: dict[str, Callable[[], Tensor]] = {
    "ordinary": lambda: torch.randn(3, 65536 + 7 * 13) * 8,
    "chunks divide": lambda: torch.randn(3, 65536),
    "a chunk of -inf": lambda: torch.cat((torch.full((2, 9000), -INF), torch.randn(2, 60000)), 1),
    "all -inf": lambda: torch.full((1, 65536), -INF),
    "an inf": lambda: torch.cat((torch.randn(2, 65535), torch.tensor([[INF], [0.0]])), 1),
    "a nan": lambda: torch.cat((torch.randn(2, 65535), torch.tensor([[float("nan")], [0.0]])), 1),
}


@pytest.mark.parametrize("function", [scaled, logsumexp])
@pytest.mark.parametrize("name", VALUES)
def test_values(function: Callable[[Tensor], Tensor], name: str) -> None:
    a = VALUES[name]()
    module = trace(function, [a])
    assert apply(module, [PAIRS]) == 1
    torch.testing.assert_close(module(a), function(a), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("function, shape", [(squares, (3, 65536)), (columns, (1, 65536))])
def test_squared_distances(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    """The chunks' own means lie far apart."""
    a = torch.randn(shape) + torch.linspace(-50, 50, shape[1])
    module = trace(function, [a])
    assert apply(module, [PAIRS]) == 1
    torch.testing.assert_close(module(a), function(a.double()).float(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("function, shape", [
    (scaled, (2, 4000)),  # short
    (scaled, (300, 65536)),  # its results fill the device
    (squares, (3, 65537)),  # a prime: chunks of unequal length have means of unequal weight
    (lambda a: (a - a.amax(1, keepdim=True)).sum(1), (2, 65536)),  # no exponential
    (lambda a: (a - a.amin(1, keepdim=True)).exp().sum(1), (2, 65536)),  # no maximum
    (lambda a: (a * 2 - a.amax(1, keepdim=True)).exp().sum(1), (2, 65536)),  # of something else
    (lambda a: (a - a.amax(0, keepdim=True)).exp().sum(1), (2, 65536)),  # along another dimension
])
def test_left_alone(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    assert_untouched(function, [torch.randn(shape)], [PAIRS])


def test_half_types_are_left_alone() -> None:
    assert_untouched(scaled, [torch.randn(2, 65536, dtype=torch.bfloat16)], [PAIRS])


def test_fuel() -> None:
    module = trace(lambda a: (scaled(a), squares(a)), [torch.randn(2, 65536)])
    assert apply(module, [PAIRS], fuel=1) == 1
    assert targets(module).count("mean.dim") == 1


@pytest.mark.parametrize("function, kernels, reads", [
    (lambda a: torch.softmax(a, -1), 3, 2),
    (lambda a: torch.logsumexp(a, -1), 2, 1),
    (lambda a: torch.nn.functional.layer_norm(a, a.shape[-1:]), 3, 2),
    (lambda a: torch.nn.functional.cross_entropy(a, torch.arange(3)), 3, 2),  # the second at one column
])
def test_reads_of_the_whole(function: Callable[[Tensor], Tensor], kernels: int, reads: int) -> None:
    """One for both statistics and one where elements are wanted after them; a kernel for each half and no more."""
    a = torch.randn(3, 65536)
    with observe.recording() as recording:
        compiled = torch.compile(function, backend="fxfuser", options={"executor": "interpret", "strict": True})
        torch.testing.assert_close(compiled(a), function(a))
    segmentation = recording.graphs[-1].segmentation
    assert segmentation is not None
    source = next(n for n in recording.graphs[-1].segmentation.segments[0].inputs)
    assert len(segmentation.segments) == kernels
    assert sum(source in s.inputs for s in segmentation.segments) == reads
