"""Effects keep their order through fusion."""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops import UPDATE_MARK
from fxfuser.segmenter.effects import effectful, order_edges
from fxfuser.segmenter.segment import SegmentKind
from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import trace

aten = torch.ops.aten


def edges(graph: fx.GraphModule) -> set[tuple[str, str]]:
    return {(a.name, b.name) for a, b in order_edges(graph.graph.nodes)}


def test_readers_stay_on_their_side_of_a_write() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.sin(x)
        aten.mul_.Tensor(x, y)
        return before, torch.cos(x)

    graph = trace(f, torch.randn(8), torch.randn(8))
    assert {("sin", "mul_"), ("mul_", "cos")} <= edges(graph)
    found = segment(graph).segments
    assert [s.nodes[0].name for s in found] == ["sin", "mul_", "cos"]
    assert found[1].kind is SegmentKind.EXTERN


def test_without_the_write_they_fuse() -> None:
    found = segment(trace(lambda x: (torch.sin(x), torch.cos(x)), torch.randn(8))).segments
    assert [len(s.nodes) for s in found] == [2]


def test_a_write_through_a_view_is_a_write_of_its_base() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = torch.sin(x)
        aten.copy_.default(x.view(2, 4)[0], y)
        return before, torch.cos(x.view(4, 2))

    found = edges(trace(f, torch.randn(8), torch.randn(4)))
    assert {("sin", "copy_"), ("copy_", "cos")} <= found


def test_what_will_be_written_over_an_input_comes_after_its_readers() -> None:
    def f(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        read, new = x * step, step + 1
        aten.copy_.default(step, new)
        return read

    graph = trace(f, torch.randn(4), torch.tensor(1.0))
    assert ("mul", "add") not in edges(graph) and ("mul", "copy_") in edges(graph)
    next(n for n in graph.graph.nodes if n.name == "add").meta[UPDATE_MARK] = True
    assert ("mul", "add") in edges(graph)


def test_random_ops_keep_their_order() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand_like(x), torch.bernoulli(x)

    graph = trace(f, torch.rand(8))
    random = [n for n in graph.graph.nodes if effectful(n)]
    assert len(random) == 2 and (random[0].name, random[1].name) in edges(graph)


def test_pure_ops_have_no_order() -> None:
    graph = trace(lambda x: (torch.sin(x), torch.mm(x, x)), torch.randn(8, 8))
    assert not edges(graph) and not any(map(effectful, graph.graph.nodes))
