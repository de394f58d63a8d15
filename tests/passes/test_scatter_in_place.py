"""Which writes to inputs become stores in place, as graphs; values and plans are in tests/runtime."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxfuser.ops import REFUSED, SCATTER_INTO
from fxfuser.ops.products import AFTER
from fxfuser.passes import scatter_in_place
from fxfuser.passes.saved import SHARED
from tests.passes.rewriting import apply, assert_meta, targets, trace

PASS = (scatter_in_place,)
aten = torch.ops.aten


def cache(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 16, 8)))


def index(*positions: int) -> Tensor:
    return torch.tensor(positions or (1, 2))


def written(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    new = aten.index_copy.default(c, 1, i, aten.sin.default(k))
    total = aten.sum.dim_IntList(new, [1])
    aten.copy_.default(c, new)
    return total


def rewritten(fn: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    module = trace(fn, inputs, dynamic)
    assert apply(module, PASS) == 1
    assert_meta(module)
    return module


def test_a_write_becomes_a_store_and_readers_wait_for_it() -> None:
    module = rewritten(written, cache(), cache(3, 2, 8), index())
    assert targets(module) == ["sin.default", "fxfuser.scatter_into.default", "fxfuser.after.default",
                               "sum.dim_IntList", "copy_.default"]
    stored, new = (next(n for n in module.graph.nodes if n.target is t) for t in (SCATTER_INTO, AFTER))
    assert stored.meta["val"].shape == (3, 2, 8) and new.args[1] == [stored]
    ours, eager = cache(), None
    eager = ours.clone()
    k = cache(3, 2, 8)
    torch.testing.assert_close(module(ours, k, index()), eager.index_copy_(1, index(), k.sin()).sum(1))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("sizes", [((3, 16, 8), (3, 2, 8)), ((5, 40, 16), (5, 2, 16))])
def test_sizes_may_vary(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rewritten(written, cache(*sizes[0]), cache(*sizes[1]), index(), dynamic=True)


def test_a_write_to_a_slice_goes_to_the_slice() -> None:
    def part(c: Tensor, k: Tensor, i: Tensor) -> None:
        inner = aten.index_copy.default(aten.slice.Tensor(c, 1, 0, 9), 1, i, k)
        aten.copy_.default(c, aten.slice_scatter.default(c, inner, 1, 0, 9))

    module = rewritten(part, cache(), cache(3, 2, 8), index())
    stored = next(n for n in module.graph.nodes if n.target is SCATTER_INTO)
    assert stored.args[0].target is aten.slice.Tensor and "slice_scatter.default" not in targets(module)


def test_a_view_that_another_undoes() -> None:
    def turned(c: Tensor, k: Tensor, i: Tensor) -> None:
        inner = aten.index_copy.default(aten.permute.default(c, [1, 0, 2]), 0, i, k)
        aten.copy_.default(c, aten.permute.default(inner, [1, 0, 2]))

    rewritten(turned, cache(), cache(2, 3, 8), index())


def test_views_of_the_new_value_have_the_strides_of_the_tensor() -> None:
    def rows(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
        new = aten.index_copy.default(c, 0, i, k)
        column = aten.mul.Tensor(aten.select.int(new, 1, 3), 2)
        aten.copy_.default(c, new)
        return column

    module = rewritten(rows, torch.randn(30, 16)[:, 3:11], torch.randn(2, 8), index())
    view = next(n for n in module.graph.nodes if n.target is aten.select.int)
    assert view.meta["val"].stride() == (16,)


# ---------------------------------------------------------------- left alone


def swapped(c: Tensor, k: Tensor, i: Tensor) -> None:
    inner = aten.index_copy.default(aten.permute.default(c, [1, 0, 2]), 0, i, k)
    aten.copy_.default(c, aten.permute.default(inner, [0, 1, 2]))


def other_slice(c: Tensor, k: Tensor, i: Tensor) -> None:
    inner = aten.index_copy.default(aten.slice.Tensor(c, 1, 0, 9), 1, i, k)
    aten.copy_.default(c, aten.slice_scatter.default(c, inner, 1, 1, 10))


def read_later(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    new = aten.index_copy.default(c, 1, i, k)
    old = aten.sum.dim_IntList(c, [1])
    aten.copy_.default(c, new)
    return old


def returned(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    new = aten.index_copy.default(c, 1, i, k)
    aten.copy_.default(c, new)
    return aten.slice.Tensor(new, 1, 0, 4)


def itself(c: Tensor, k: Tensor, i: Tensor) -> None:
    new = aten.index_copy.default(c, 1, i, aten.slice.Tensor(c, 1, 5, 7))
    aten.copy_.default(c, new)


def between(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    first = aten.index_copy.default(c, 1, i, k)
    second = aten.index_copy.default(first, 1, i, k)
    total = aten.sum.dim_IntList(first, [1])
    aten.copy_.default(c, second)
    return total


@pytest.mark.parametrize("fn, reason", [
    (other_slice, "small"), (read_later, "sum_1 reads the value before it later on"),
    (between, "sum_1 reads the value before it later on"), (returned, "the caller gets the new value"),
    (itself, "elements of the tensor itself")])
def test_what_could_be_told_from_a_copy(fn: Callable[..., Any], reason: str) -> None:
    module = trace(fn, [cache(), cache(3, 2, 8), index()])
    assert apply(module, PASS) == 0
    assert any(reason in n.meta.get(REFUSED, "") for n in module.graph.nodes)


def test_a_view_that_another_does_not_undo() -> None:
    module = trace(swapped, [cache(8, 8, 8), cache(2, 8, 8), index()])
    assert apply(module, PASS) == 0


@pytest.mark.parametrize("mark", ["shared", "tangent"])
def test_tensors_that_are_not_the_callers_alone(mark: str) -> None:
    module = trace(written, [cache(), cache(3, 2, 8), index()])
    first = module.graph.find_nodes(op="placeholder")[0]
    if mark == "shared":
        first.meta[SHARED] = True
    else:
        first.name = "tangents_1"
    assert apply(module, PASS) == 0


def test_elements_that_share_a_place() -> None:
    module = trace(written, [torch.randn(3, 1, 8).expand(3, 16, 8), cache(3, 2, 8), index()])
    assert apply(module, PASS) == 0


def test_a_whole_tensor_is_a_kernels_result() -> None:
    def whole(c: Tensor, k: Tensor) -> None:
        aten.copy_.default(c, aten.copy.default(c, operator.mul(k, 2)))

    assert apply(trace(whole, [cache(), cache()]), PASS) == 0
