from __future__ import annotations

import pytest
import torch

from fxfuser.passes.picks import one_hot_sums
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, trace

PASS = (one_hot_sums,)
aten = torch.ops.aten
LABELS = torch.tensor([[3], [0], [-100], [4]])
VALUES = torch.randn(4, 1)


def row(label: torch.Tensor, value: torch.Tensor, start: int = 0, keepdim: bool = True) -> torch.Tensor:
    number = aten.arange.start_step(start, start + 5, 1, dtype=torch.int64, device=torch.device("cpu"),
                                    pin_memory=False)
    zero = aten.full.default([], 0.0, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
    chosen = aten.bitwise_and.Tensor(aten.eq.Tensor(number, label), aten.ne.Scalar(label, 4))
    return aten.sum.dim_IntList(aten.where.self(chosen, value, zero), [1], keepdim)


@pytest.mark.parametrize("keepdim", [True, False])
def test_the_sum_of_a_one_hot_row_is_its_number(keepdim: bool) -> None:
    module = trace(lambda y, v: row(y, v, keepdim=keepdim), [LABELS, VALUES])
    assert apply(module, PASS) == 1
    assert_meta(module)
    got = module(LABELS, VALUES)
    assert_same(got, row(LABELS, VALUES, keepdim=keepdim))
    assert got[3].item() == got[2].item() == 0 != got[0].item()
    assert "sum.dim_IntList" not in targets(module)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float64,)])
def test_a_row_that_is_cast(dtypes: tuple[torch.dtype, ...]) -> None:
    """As where cross entropy of bfloat16 logits is taken back: its gradient of the log-probabilities is rounded."""
    def cast(y: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        number = aten.arange.start_step(0, 5, 1, dtype=torch.int64, device=torch.device("cpu"), pin_memory=False)
        zero = aten.full.default([], 0.0, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
        found = aten.where.self(aten.eq.Tensor(number, y), v, zero)
        for dtype in dtypes:
            found = aten._to_copy.default(found, dtype=dtype)
        return aten.sum.dim_IntList(found, [1], True)

    module = trace(cast, [LABELS, VALUES])
    assert apply(module, PASS) == 1
    assert_meta(module)
    assert_same(module(LABELS, VALUES), cast(LABELS, VALUES))
    assert "sum.dim_IntList" not in targets(module)


def test_one_number_for_all_rows() -> None:
    module = trace(row, [LABELS, torch.tensor(2.0)])
    assert apply(module, PASS) == 1
    assert_same(module(LABELS, torch.tensor(2.0)), row(LABELS, torch.tensor(2.0)))


def test_values_of_columns_and_other_numbers_stay() -> None:
    assert_untouched(row, [LABELS, torch.randn(4, 5)], PASS)
    assert_untouched(lambda y, v: row(y, v, start=1), [LABELS, VALUES], PASS)
    assert "sum.dim_IntList" in targets(trace(row, [LABELS, VALUES]))
