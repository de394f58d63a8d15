from __future__ import annotations

import pytest
import torch

from fxfuser.passes.lone_scatter import compare_instead_of_lone_scatter
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, trace

PASS = (compare_instead_of_lone_scatter,)
aten = torch.ops.aten


def x(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def at(size: int, *shape: int) -> torch.Tensor:
    return torch.randint(size, shape)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_each_kind_of_scatter(dim: int, dtype: torch.dtype) -> None:
    shape = [4, 5, 6]
    shape[dim] = 1
    inputs = [(x(4, 5, 6) * 9).to(dtype), at(4, *shape), (x(*shape) * 9).to(dtype)]
    for function in (lambda a, i, v: aten.scatter_add.default(a, dim, i, v),
                     lambda a, i, v: aten.scatter.src(a, dim, i, v),
                     lambda a, i, v: aten.scatter.value(a, dim, i, 3)):
        module = trace(function, inputs)
        assert apply(module, PASS) == 1
        assert not [t for t in targets(module) if "scatter" in t] and "where.self" in targets(module)
        assert_meta(module)
        assert_same(module(*inputs), function(*inputs))


def test_gradient_of_a_gathered_element_has_no_scatter() -> None:
    def gradient(a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(a.log_softmax(-1).gather(-1, i).sum(), a)[0]

    inputs = [x(4, 7).requires_grad_(), at(7, 4, 1)]
    module = trace(gradient, inputs)
    assert apply(module, PASS) == 1
    assert_same(module(*inputs), gradient(*inputs), exact=False)


def test_symbolic_rows() -> None:
    inputs = [x(4, 7), at(7, 4, 1), x(4, 1)]
    module = trace(lambda a, i, v: aten.scatter_add.default(a, 1, i, v), inputs, dynamic=True)
    assert apply(module, PASS) in (0, 1)  # only where the graph has the row's length among its inputs
    assert_same(module(*inputs), inputs[0].scatter_add(1, inputs[1], inputs[2]))


@pytest.mark.parametrize(("rows", "columns"), [((4, 2), (4, 2)), ((3, 1), (3, 1)), ((4, 1), (4, 2))])
def test_left_alone(rows: tuple[int, ...], columns: tuple[int, ...]) -> None:
    """Two elements in a row; a row without one; a source that is longer than the positions."""
    assert_untouched(lambda a, i, v: aten.scatter_add.default(a, 1, i, v), [x(4, 7), at(7, *rows), x(*columns)], PASS)


def test_numbers_are_left_alone() -> None:
    assert_untouched(lambda a, i, v: aten.scatter_add.default(a, 0, i, v), [x(), at(1), x()], PASS)
