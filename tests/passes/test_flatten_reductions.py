"""Neighbouring reduced dimensions become one where memory allows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxfuser.passes.flatten_reductions import flatten_reductions
from tests.passes.rewriting import apply, assert_rewrites, assert_untouched, trace

aten = torch.ops.aten
PASSES = [flatten_reductions]


def test_leading_dimensions() -> None:
    def before(a: Tensor) -> Tensor:
        return aten.sum.dim_IntList(a, [0, 1], dtype=torch.float64)

    def expected(a: Tensor) -> Tensor:
        return aten.sum.dim_IntList(aten.view.default(a, [12, 5]), [0], dtype=torch.float64)

    assert_rewrites(before, expected, [torch.randn(3, 4, 5)], PASSES, exact=False)


def test_kept_dimensions() -> None:
    def before(a: Tensor) -> Tensor:
        return aten.amax.default(a, [2, 1], True)

    def expected(a: Tensor) -> Tensor:
        return aten.view.default(aten.amax.default(aten.view.default(a, [2, 12, 5]), [1]), [2, 1, 1, 5])

    assert_rewrites(before, expected, [torch.randn(2, 3, 4, 5)], PASSES)


@pytest.mark.parametrize("case", ["apart", "transposed", "innermost", "single", "empty"])
def test_left_alone(case: str) -> None:
    a = torch.randn(3, 4, 5, 2)
    operand, dims = {
        "apart": (a, [0, 2]), "transposed": (a.transpose(0, 1), [0, 1]), "innermost": (a, [2, 3]),
        "single": (a, [1]), "empty": (a[:0], [0, 1]),
    }[case]
    assert_untouched(lambda x: aten.sum.dim_IntList(x, dims), [operand], PASSES)


def test_symbolic_sizes_are_left_alone() -> None:
    module = trace(lambda x: aten.sum.dim_IntList(x, [0, 1]), [torch.randn(3, 4, 5)], dynamic=True)
    assert apply(module, PASSES) == 0
