from __future__ import annotations

import pytest
import torch

from fxfuser.passes.rows_before_product import rows_before_product
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, trace

PASS = (rows_before_product,)
aten = torch.ops.aten
X, W = torch.randn(12, 3), torch.randn(5, 3)


def shapes(module: torch.fx.GraphModule, target: object) -> list[tuple[int, ...]]:
    return [tuple(n.meta["val"].shape) for n in module.graph.nodes if n.target is target]


def rewritten(function, inputs):
    module = trace(function, inputs)
    assert apply(module, PASS) == 1
    assert_meta(module)
    assert_same(module(*inputs), function(*inputs), exact=False)
    return module


@pytest.mark.parametrize(("dim", "start", "stop"), [(1, 0, -1), (1, 1, 2**63 - 1), (0, 1, 3), (1, -2, -1)])
def test_sliced_rows_of_a_product(dim: int, start: int, stop: int) -> None:
    def function(x, w):
        logits = aten.view.default(aten.mm.default(x, aten.permute.default(w, [1, 0])), [3, 4, 5])
        return aten.exp.default(aten.slice.Tensor(logits, dim, start, stop))

    module = rewritten(function, [X, W])
    rows = 12 - 4 if dim == 0 else {0: 9, 1: 9, -2: 3}[start]
    assert shapes(module, aten.mm.default) == [(8 if dim == 0 else rows, 5)]


def test_a_bias_and_a_matrix_without_a_view() -> None:
    def function(b, x, w):
        return aten.exp.default(aten.slice.Tensor(aten.addmm.default(b, x, aten.permute.default(w, [1, 0])), 0, 0, 7))

    assert shapes(rewritten(function, [torch.randn(5), X, W]), aten.addmm.default) == [(7, 5)]


def scattered(g: torch.Tensor) -> torch.Tensor:
    zeros = aten.full.default([3, 4, 5], 0.0, dtype=torch.float32, device=torch.device("cpu"), pin_memory=False)
    return aten.view.default(aten.slice_scatter.default(zeros, g, 1, 0, -1), [12, 5])


@pytest.mark.parametrize("turned", [False, True])
def test_gradients_of_rows_left_out_are_not_multiplied(turned: bool) -> None:
    def function(g, x, w):
        z = scattered(g)
        across = aten.mm.default(aten.permute.default(x, [1, 0]), z) if turned else \
            aten.mm.default(aten.permute.default(z, [1, 0]), x)
        return aten.mm.default(z, w), across, aten.sum.dim_IntList(z, [0], True)

    module = rewritten(function, [torch.randn(3, 3, 5), X, W])
    assert sorted(shapes(module, aten.mm.default)) == sorted([(9, 3), (3, 5) if turned else (5, 3)])
    assert shapes(module, aten.slice_scatter.default) == [(3, 4, 3)]  # as wide as x, not as the logits


def test_other_readers_keep_all_rows() -> None:
    def read_twice(x, w):
        logits = aten.view.default(aten.mm.default(x, aten.permute.default(w, [1, 0])), [3, 4, 5])
        return aten.exp.default(aten.slice.Tensor(logits, 1, 0, -1)), aten.exp.default(logits)

    assert_untouched(read_twice, [X, W], PASS)
    assert_untouched(lambda g: (scattered(g), aten.exp.default(scattered(g))), [torch.randn(3, 3, 5)], PASS)


def test_columns_and_steps_are_left_alone() -> None:
    for dim, step in ((2, 1), (1, 2)):
        def function(x, w, dim=dim, step=step):
            logits = aten.view.default(aten.mm.default(x, aten.permute.default(w, [1, 0])), [3, 4, 5])
            return aten.exp.default(aten.slice.Tensor(logits, dim, 0, 3, step))

        assert_untouched(function, [X, W], PASS)


def test_a_narrow_result_is_cheaper_to_slice() -> None:
    def function(x, w):
        return aten.exp.default(aten.slice.Tensor(aten.mm.default(x, w), 0, 0, 7))

    assert_untouched(function, [X, torch.randn(3, 2)], PASS)


def test_fuel_stops_it() -> None:
    module = trace(lambda x, w: aten.exp.default(aten.slice.Tensor(aten.mm.default(x, w), 0, 0, 7)),
                   [X, torch.randn(3, 8)])
    assert apply(module, PASS, fuel=0) == 0
    assert "slice.Tensor" in targets(module)
