"""Tangents of views with gaps: dense ones reach the kernels uncopied, and any others are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from fxfuser.runtime.tangents import with_gaps
from tests.test_capture import Captured

HEADS, DIM = 3, 8


def packed(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """[B, S, 3 * heads * dim] -> a rotated q and v, a view with gaps: [B, heads, S, dim] each."""
    q, _, v = (x.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for x in qkv.chunk(3, -1))
    return q.sin() * 2, v


def like_attention(t: Tensor) -> Tensor:
    return torch.randn(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2)


def like_a_slice(t: Tensor) -> Tensor:
    return torch.randn(t.shape[0], t.shape[2], 3 * t.shape[1], t.shape[3])[:, :, :t.shape[1]].transpose(1, 2)


def contiguous(t: Tensor) -> Tensor:
    return torch.randn(t.shape)


def of_one_number(t: Tensor) -> Tensor:
    return torch.randn(()).expand(t.shape)


class Received(Captured):
    """Keeps the addresses of what each graph is called with."""

    def keep(self, graph: fx.GraphModule, *rest: Any) -> Callable[..., Any]:
        function = super().keep(graph, *rest)

        def call(args: list[Any]) -> Any:
            self.addresses = [a.data_ptr() for a in args if isinstance(a, Tensor)]
            return function(args)

        return call


@pytest.mark.parametrize("batch", [1, 2])
def test_what_attention_hands_back_is_not_copied(batch: int) -> None:
    received = Received()
    compiled = torch.compile(packed, backend=received, dynamic=False)
    x = torch.randn(batch, 5, 3 * HEADS * DIM, requires_grad=True)
    for _ in range(2):  # the backward is compiled in the first, when AOTAutograd has made its copy
        outputs = compiled(x)
        given = [like_attention(t) for t in outputs]
        gradient, = torch.autograd.grad(outputs, x, given)
        torch.testing.assert_close(gradient, torch.autograd.grad(packed(x), x, given)[0])
    assert {t.data_ptr() for t in given} <= set(received.addresses)


@pytest.mark.parametrize("make", [like_attention, like_a_slice, contiguous, of_one_number])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(make: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    compiled = torch.compile(packed, backend="fxfuser", dynamic=dynamic,
                             options={"executor": "interpret", "strict": True})
    for length in (5, 6):
        x = torch.randn(2, length, 3 * HEADS * DIM, requires_grad=True)
        outputs, want = compiled(x), packed(x)
        given = [make(t) for t in outputs]
        assert [t.stride() for t in outputs] == [t.stride() for t in want]
        got, expected = (torch.autograd.grad(y, x, given)[0] for y in (outputs, want))
        torch.testing.assert_close(got, expected)
        assert got.stride() == expected.stride()


def graph_of(size: tuple[int, ...], stride: tuple[int, ...]) -> fx.Graph:
    graph = fx.Graph()
    tangent = graph.placeholder("tangents_1")
    tangent.meta["val"] = torch.empty(10_000).as_strided(size, stride)
    graph.output(tangent)
    return graph


@pytest.mark.parametrize("size, stride, dense", [
    ((2, 4, 6, 8), (600, 8, 100, 1), (192, 8, 32, 1)),
    ((1, 4, 6, 8), (7, 8, 100, 1), (192, 8, 32, 1)),  # the stride of a lone element says nothing
    ((4, 8), (16, 2), (8, 1)),
])
def test_gaps(size: tuple[int, ...], stride: tuple[int, ...], dense: tuple[int, ...]) -> None:
    found, = with_gaps(graph_of(size, stride))
    kept = [(a, b) for n, a, b in zip(size, found.stride, dense) if n > 1]
    assert all(a == b for a, b in kept) and (found.position, found.number, found.size) == (0, 0, size)


@pytest.mark.parametrize("size, stride", [
    ((4, 8), (8, 1)), ((4, 8), (1, 4)), ((4, 8), (4, 1)), ((0, 8), (16, 1)), ((1, 1), (16, 3)),
    ((), ()), ((1, 8), (16, 1)),
])
def test_what_stays(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert with_gaps(graph_of(size, stride)) == []


def test_an_expanded_output_gets_a_place_for_each_element() -> None:
    (found,) = with_gaps(graph_of((4, 8), (0, 1)))
    assert found.stride == (8, 1)


@pytest.mark.parametrize("function", [
    lambda x: (x * 2).expand(3, 4, 5), lambda x: x.sin()[:, None].expand(4, 6, 5), lambda x: x.sum().expand(7),
    lambda x: ((x * 2).expand(3, 4, 5), x.cos())])
def test_gradients_of_expanded_outputs(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 5, requires_grad=True)
    compiled = torch.compile(function, backend="fxfuser", options={"executor": "interpret"})
    for _ in range(2):
        outputs, expected = compiled(x), function(x)
        pairs = zip(outputs, expected) if isinstance(outputs, tuple) else [(outputs, expected)]
        for output, eager in pairs:
            assert output.stride() == eager.stride()
            tangent = torch.randn(eager.shape)
            found, = torch.autograd.grad(output, x, tangent, retain_graph=True)
            torch.testing.assert_close(found, torch.autograd.grad(eager, x, tangent, retain_graph=True)[0])


def test_a_graph_that_asks_for_places_keeps_them() -> None:
    graph = graph_of((4, 8), (16, 2))
    node = next(iter(graph.nodes))
    with graph.inserting_after(node):
        graph.call_function(torch.ops.aten.as_strided.default, (node, [2], [1]))
    assert with_gaps(graph) == []


@torch.library.custom_op("fxfuser_tests::twice_at", mutates_args=())
def twice_at(x: Tensor, first: int, second: int) -> Tensor:
    """2 * x, read at the strides that it is told."""
    return x.as_strided(x.shape, (first, second), x.storage_offset()) * 2


@torch.library.custom_op("fxfuser_tests::twice_with_gaps", mutates_args=())
def twice_with_gaps(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, (2 * x.shape[1], 1)).copy_(x * 2)


twice_at.register_fake(lambda x, first, second: torch.empty(x.shape))
twice_with_gaps.register_fake(lambda x: torch.empty_strided(x.shape, (2 * x.shape[1], 1)))
twice_with_gaps.register_autograd(lambda ctx, grad: twice_at(grad, grad.stride(0), grad.stride(1)))


@pytest.mark.parametrize("then", [lambda x: x, lambda x: x.unbind(1), lambda x: x.view(2, 2, 8).transpose(0, 1)])
def test_an_op_that_is_told_strides_gets_them(then: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    compiled = torch.compile(lambda x: then(twice_with_gaps(x)), backend="fxfuser")
    given = torch.randn(4, 8)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(compiled(x), x, then(given))[0], 2 * given)
