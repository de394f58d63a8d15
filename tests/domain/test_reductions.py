"""Reductions: values, which axes meet, roles, and what is refused."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch

from fxfuser.domain.points import Domain, PointKind, Reject
from tests.domain.groups import check, trace
from tests.domain.test_views import tensors


def layer_norm(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + 1e-5)


def group_norm(x: torch.Tensor, groups: int, weight: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return layer_norm(x.view(n, groups, c // groups * h * w), (2,)).view(n, c, h, w) * weight.view(1, c, 1, 1)


CASES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "rows": (lambda x: x.sum(-1), [(6, 30)]),
    "columns": (lambda x: x.sum(0), [(16, 30)]),
    "all": (lambda x: x.sum(), [(6, 16, 3)]),
    "several dimensions": (lambda x: (x.sum((0, 2)), x.amax((0, 2))), [(6, 16, 9)]),
    "kept and not": (lambda x: (x.mean(1), x.mean(1, keepdim=True) * x), [(6, 16, 3)]),
    "of a view": (lambda x, b: (x.t() + b).sum(0), [(6, 12), (6,)]),
    "of a cat": (lambda x, y: torch.cat([x, y], 1).sum(1), [(6, 12), (6, 5)]),
    "short": (lambda x: x.sum(1), [(6, 4, 30)]),
    "short and contiguous": (lambda x: x.sum(1), [(6, 4)]),
    "short argmax": (lambda x: x.argmax(1), [(6, 4, 30)]),
    "argmax": (lambda x: x.argmax(1), [(6, 16)]),
    "argmax of a permuted whole": (lambda x: x.permute(1, 0, 2).argmax(), [(6, 16, 3)]),
    "empty": (lambda x: x.sum(1) + 1, [(6, 0)]),
    "empty product": (lambda x: x.prod(0) + 1, [(0, 5)]),
    "truth": (lambda x: ((x > 0).any(1), (x > 0).all(1)), [(6, 16)]),
    "softmax": (lambda x: torch.softmax(x, -1), [(6, 30)]),
    "softmax over the first": (lambda x: torch.softmax(x, 0), [(16, 30)]),
    "log_softmax in the middle": (lambda x: torch.log_softmax(x, 1), [(6, 30, 4)]),
    "layer norm": (lambda x, w: layer_norm(x, (2,)) * w, [(6, 7, 30), (30,)]),
    "layer norm over two": (lambda x, w: layer_norm(x, (1, 2)) * w, [(6, 7, 30), (7, 30)]),
    "group norm": (lambda x, w: group_norm(x, 4, w), [(3, 8, 5, 7), (8,)]),
    "gram": (lambda x: (x[:, None, :] * x[None, :, :]).sum(-1), [(6, 16)]),
    "shifted": (lambda x: ((x[:, :-1] * x[:, 1:]).sum(-1), x.sum(-1)), [(5, 33)]),
    "scalar over all": (lambda x: x / x.sum(), [(6, 16)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, shapes = CASES[name]
    check(fn, tensors(*shapes))


@pytest.mark.parametrize("fn", [lambda x: torch.softmax(x, -1), lambda x: layer_norm(x, (1,)), lambda x: x.sum(0)])
def test_symbolic_values(fn: Callable[..., Any]) -> None:
    check(fn, tensors((6, 30)), [(0, 1)], [tensors((3, 17))])


def roles(domain: Domain) -> tuple[list[object], list[object]]:
    return [a.size for a in domain.program], [a.size for a in domain.axes if a not in domain.program]


def test_the_stored_axis_of_a_softmax_is_the_reduced_one() -> None:
    domain = check(lambda x: torch.softmax(x, -1), tensors((6, 30)))
    assert roles(domain) == ([6], [30])
    assert len([p for p in domain.points() if p.kind is PointKind.LOAD]) == 1


def test_a_group_norm_has_one_inner_axis() -> None:
    domain = check(lambda x: layer_norm(x.view(3, 4, 70), (2,)).view(3, 8, 5, 7), tensors((3, 8, 5, 7)))
    assert roles(domain) == ([12], [70])


def test_a_gram_matrix_keeps_rows_and_columns_apart() -> None:
    assert roles(check(lambda x: (x[:, None] * x[None]).sum(-1), tensors((6, 16)))) == ([6, 6], [16])


def test_a_store_and_a_sum_of_its_parts_share_digits() -> None:
    domain = check(lambda x: ((y := x * 2), y.view(5, 4, 16).sum(-1)), tensors((5, 64)))
    assert roles(domain) == ([20], [16])


def test_short_reductions_unroll() -> None:
    reduce = next(check(lambda x: x.sum(1), tensors((6, 4, 30))).reductions())
    assert len(reduce.operands) == 4 and not any(reduce.axes)


def test_the_contiguous_dimension_never_unrolls() -> None:
    reduce = next(check(lambda x: x.sum(1), tensors((6, 4))).reductions())
    assert len(reduce.operands) == 1 and [a.size for a in reduce.axes[0]] == [4]


@pytest.mark.parametrize("size, step, reads", [(3, 1, 3), (3, 2, 3), (20, 3, 20), (3, 3, 1), (33, 1, 1)])
def test_windows_that_overlap_unroll_up_to_their_limit(size: int, step: int, reads: int) -> None:
    """Each element is read by neighbours then, which a tile would hold several times."""
    reduce = next(check(lambda x: x.unfold(1, size, step).sum(-1), tensors((6, 50))).reductions())
    assert len(reduce.operands) == reads


def test_a_window_over_a_window_unrolls_once() -> None:
    """The outer one's steps each fold the inner one as a tile: 5 * 5 * 5 * 5 reads would be one kernel's text."""
    def twice(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x.unfold(1, 5, 1).unfold(2, 5, 1).amax((-2, -1))
        return x

    inner, outer = sorted(check(twice, tensors((3, 12, 12))).reductions(), key=lambda r: len(r.operands))[::25]
    assert [len(outer.operands), len(inner.operands)] == [25, 1] and any(inner.axes)


def test_a_reduced_axis_that_is_stored_does_not_unroll() -> None:
    domain = check(lambda x: x / x.sum(1, keepdim=True), tensors((6, 4, 30)))
    assert roles(domain) == ([6, 30], [4])


def reject(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Reject:
    found = trace(fn, [torch.empty(shape, device="meta") for shape in shapes]).resolve()
    assert isinstance(found, Reject), found
    return found


def test_rows_then_columns_is_refused_where_neither_fits() -> None:
    found = reject(lambda x: torch.softmax(x.sum(-1), 0), (65536, 32768))
    assert "keeps an axis of size 65536 over which amax reduces" in str(found)
    assert found.node is not None and found.node.name == "sum_1"


def test_two_long_directions_are_refused() -> None:
    assert "keeps an axis of size" in str(reject(lambda x: (x.sum(0), x.sum(1)), (65536, 32768)))


def test_a_value_for_each_step_of_a_loop_is_refused() -> None:
    found = reject(lambda x, y: (x.sum(-1), y * 2), (6, 65536, 32768), (6, 5))
    assert "along an axis of size 65536 that not all results share" in str(found)


def test_products_are_refused() -> None:
    traced = trace(lambda x, y: x @ y, tensors((6, 16), (16, 5)))
    traced.nodes = [n for n in traced.graph.graph.nodes if n.op == "call_function"]
    traced.outputs = traced.nodes[-1:]
    assert "does not lower to loops" in str(traced.resolve())
