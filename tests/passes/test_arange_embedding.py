"""Lookups of rows in order become slices, their gradients copies; any other lookup stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxfuser import observe
from fxfuser.passes.arange_embedding import rows_in_order
from tests.passes.rewriting import apply, assert_rewrites, assert_untouched, targets, trace

aten = torch.ops.aten
PASSES = [rows_in_order]


def test_a_lookup() -> None:
    def before(table: Tensor) -> Tensor:
        return aten.embedding.default(table, torch.arange(5).unsqueeze(0))

    def expected(table: Tensor) -> Tensor:
        torch.arange(5).unsqueeze(0)
        return aten.clone.default(aten.view.default(aten.slice.Tensor(table, 0, 0, 5), [1, 5, 4]))

    assert_rewrites(before, expected, [torch.randn(8, 4)], PASSES)


@pytest.mark.parametrize("rows", [5, 8])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_gradient(rows: int, contiguous: bool) -> None:
    def backward(tangent: Tensor) -> Tensor:
        return aten.embedding_dense_backward.default(tangent, torch.arange(5).unsqueeze(0), rows, -1, False)

    tangent = torch.randn(1, 5, 4) if contiguous else torch.randn(1, 4, 5).transpose(1, 2)
    module = trace(backward, [tangent])
    want = module(tangent)
    assert apply(module, PASSES) == 1
    assert "embedding_dense_backward.default" not in targets(module)
    assert torch.equal(module(tangent), want)


NEGATIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "other indices": lambda t, i: aten.embedding.default(t, i),
    "not from zero": lambda t, i: aten.embedding.default(t, torch.arange(1, 4)),
    "every second": lambda t, i: aten.embedding.default(t, torch.arange(0, 6, 2)),
    "transposed": lambda t, i: aten.embedding.default(t, torch.arange(6).view(2, 3).t()),
    "no indices": lambda t, i: aten.embedding.default(t, torch.arange(0)),
    "padding row": lambda t, i: aten.embedding_dense_backward.default(t, torch.arange(8), 8, 2, False),
    "scaled": lambda t, i: aten.embedding_dense_backward.default(t, torch.arange(8), 8, -1, True),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_other_lookups_stay(name: str) -> None:
    assert_untouched(NEGATIVE[name], [torch.randn(8, 4), torch.tensor([0, 1, 2])], PASSES)


def test_learned_positions_need_no_gather_and_results_stay_apart_from_the_table() -> None:
    table = torch.randn(8, 4, requires_grad=True)

    def look_up(t: Tensor) -> Tensor:
        return F.embedding(torch.arange(5), t)

    with observe.recording() as recording:
        found = torch.compile(look_up, backend="fxfuser")(table)
        found.square().sum().backward()
    assert torch.equal(found, table[:5])
    assert torch.equal(table.grad[:5], 2 * table[:5]) and not table.grad[5:].any()
    with torch.no_grad():
        found += 1
    assert not torch.equal(found, table[:5])
    ops = {str(n.target) for _, s in recording.segmentations for segment in s.segments for n in segment.nodes}
    assert not any("embedding" in op for op in ops)
