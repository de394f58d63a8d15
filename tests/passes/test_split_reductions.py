"""Long reductions become two; each monoid keeps its value, and what fills the device is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser.passes import LATE
from fxfuser.passes.split_reductions import Split, split_of
from tests.passes.rewriting import apply, assert_rewrites, assert_untouched, targets, trace

aten = torch.ops.aten
SPLIT = next(p for p in LATE if p.__name__ == "split_reductions")


def test_a_long_row() -> None:
    def before(a: Tensor) -> Tensor:
        return aten.sum.dim_IntList(a, [1])

    def expected(a: Tensor) -> Tensor:
        partial = aten.sum.dim_IntList(aten.view.default(a, [2, 16, 4096]), [2], dtype=torch.float32)
        return aten.sum.dim_IntList(partial, [1], dtype=torch.float32)

    assert_rewrites(before, expected, [torch.randn(2, 65536)], [SPLIT], exact=False)


def test_columns_side_by_side() -> None:
    def before(a: Tensor) -> Tensor:
        return aten.sum.dim_IntList(a, [0], True)

    def expected(a: Tensor) -> Tensor:
        partial = aten.sum.dim_IntList(aten.view.default(a, [64, 32, 5]), [1], dtype=torch.float32)
        return aten.view.default(aten.sum.dim_IntList(partial, [0], dtype=torch.float32), [1, 5])

    assert_rewrites(before, expected, [torch.randn(2048, 5)], [SPLIT], exact=False)


@pytest.mark.parametrize("shape, strides, dims, split", [
    ((16, 1024, 64), (1 << 20, 64, 1), (0, 1), Split(1, 32, 32, whole=(0,))),  # rows in 16 places
    ((8, 1024, 16, 64), (1 << 20, 64, 1 << 16, 1), (0, 1, 2), Split(1, 4, 256, whole=(0, 2))),  # heads are apart
    ((32, 1024, 16, 64), (1 << 20, 64, 1 << 16, 1), (0, 1, 2), Split(2, 16, 1, whole=(0,))),  # enough of these alone
    ((3, 7, 1024, 64), (1 << 20, 1 << 17, 64, 1), (0, 1, 2), Split(2, 32, 32, whole=(0, 1))),
    ((8, 64, 64), (1 << 20, 64, 1), (0, 1), Split(1, 2, 32, whole=(0,))),
    ((16, 1021, 64), (1 << 20, 64, 1), (0, 1), Split(1, 31, 33, padding=2, whole=(0,))),
    ((8, 32, 64), (1 << 20, 64, 1), (0, 1), None),
])
def test_rows_in_many_places(
    shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], split: Split | None
) -> None:
    a = torch.empty_strided(shape, strides).normal_()
    module = trace(lambda a: (a.sum(dims), a.amax(dims, keepdim=True), a.mean(dims)), [a])
    found = [split_of(n) for n in module.graph.nodes if n.op == "call_function"]
    assert found[:2] == [split, split]
    assert apply(module, [SPLIT]) == (3 if split else 0)
    for got, want in zip(module(a), (a.sum(dims), a.amax(dims, keepdim=True), a.mean(dims))):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-3)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda a: a.sum(1),
    "mean of all": lambda a: a.mean(),
    "mean keepdim": lambda a: a.mean(1, keepdim=True),
    "amax": lambda a: a.amax(1),
    "amin keepdim": lambda a: a.amin(1, keepdim=True),
    "argmax": lambda a: a.argmax(1),
    "argmin keepdim": lambda a: a.argmin(1, keepdim=True),
    "any": lambda a: (a > 3.9).any(1),
    "all": lambda a: (a > -4.2).all(1),
    "prod": lambda a: (1 + a / 1000).prod(1),
    "two dimensions": lambda a: a.view(3, 16, -1).sum((1, 2)),
    "columns": lambda a: a.t().amax(0),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("length", [65536, 65536 + 7 * 13])
def test_every_monoid(name: str, length: int) -> None:
    """A length that chunks divide, and one that needs padding (and ties, for the arg-reductions)."""
    if name == "two dimensions":
        length -= length % 16
    a = (torch.randn(3, length) * 64).round() / 64
    module = trace(REDUCTIONS[name], [a])
    assert apply(module, [SPLIT]) == 1
    torch.testing.assert_close(module(a), REDUCTIONS[name](a), rtol=1e-4, atol=1e-4)


def test_nan_wins_in_the_chunk_that_has_it() -> None:
    a = torch.randn(2, 65536)
    a[1, 54321] = float("nan")
    module = trace(lambda a: (a.amax(1), a.argmax(1)), [a])
    assert apply(module, [SPLIT]) == 2
    best, place = module(a)
    assert best[1].isnan() and place[1] == 54321


def test_half_partials_are_float32() -> None:
    module = trace(lambda a: a.sum(1), [torch.ones(2, 65536, dtype=torch.bfloat16)])
    assert apply(module, [SPLIT]) == 1
    assert [n.meta["val"].dtype for n in module.graph.nodes if n.target is aten.sum.dim_IntList] == [torch.float32] * 2
    assert module(torch.ones(2, 65536, dtype=torch.bfloat16)).tolist() == [65536.0, 65536.0]


@pytest.mark.parametrize("function, shape", [
    (lambda a: a.sum(1), (2, 4000)),  # short
    (lambda a: a.sum(1), (300, 65536)),  # its results fill the device
    (lambda a: a.sum(0), (2048, 17000)),  # the same, side by side
    (lambda a: a.cumsum(1), (2, 65536)),  # no reduction
    (lambda a: a.sum(1), (0, 65536)),  # nothing to do
])
def test_left_alone(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    assert_untouched(function, [torch.randn(shape)], [SPLIT])


def test_symbolic_lengths_are_left_alone() -> None:
    assert_untouched(lambda a: a.sum(1), [torch.randn(2, 65536)], [SPLIT], dynamic=True)


def test_fuel() -> None:
    module = trace(lambda a: (a.sum(1), a.amax(1)), [torch.randn(2, 65536)])
    assert apply(module, [SPLIT], fuel=1) == 1
    assert targets(module).count("amax.default") == 1
