"""Two nodes judged as a pair, and the advice that only marks on nodes or other devices can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fxfuser.ops.attention import ATTEND_PIECES
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.pair import why_apart
from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import marked, named, random_graph, trace

SLOW = DeviceRates(operations=1e4)  # a device whose arithmetic is dear


def bias(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + torch.sin(b)


def unrelated(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sin(x), torch.cos(y)


@pytest.mark.parametrize(("f", "shapes", "pair", "rule", "rates"), [
    (bias, ((4096, 256), (256,)), ("sin", "add"), "recompute", SLOW),
    (unrelated, ((4096, 8), (300, 7)), ("sin", "cos"), "extents", DeviceRates()),
    (unrelated, ((8192, 768), (4096, 768)), ("sin", "cos"), "parallelism", DeviceRates()),
])
def test_what_does_not_pay_is_done_on_request(
    f: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], pair: tuple[str, str], rule: str, rates: DeviceRates,
) -> None:
    graph = trace(f, *(torch.randn(s) for s in shapes))
    first, second = (named(graph, n) for n in pair)
    found = why_apart(segment(graph, rates), first, second)
    assert found is not None and found.rule == rule and "fxfuser.fuse()" in found.remedy
    granted = segment(marked(graph), rates)
    assert why_apart(granted, first, second) is None and len(granted.segments) == 1
    assert granted.requests[0].granted and granted.requests[0].nodes == pair


def on_devices(*devices: str) -> fx.GraphModule:
    graph, nodes = fx.Graph(), []
    with torch._subclasses.FakeTensorMode() as mode:
        for device in devices:
            source = graph.placeholder(f"x{len(nodes)}")
            source.meta["val"] = torch.empty(64, device=device)
            nodes.append(graph.call_function(torch.ops.aten.sin.default, (source,)))
            with mode:
                nodes[-1].meta["val"] = torch.empty_like(source.meta["val"])
    graph.output(tuple(nodes))
    return fx.GraphModule({}, graph)


def calls(graph: fx.GraphModule) -> list[fx.Node]:
    return [n for n in graph.graph.nodes if n.op == "call_function"]


def test_two_devices_and_one() -> None:
    apart, together = on_devices("cpu", "cuda"), on_devices("cuda", "cuda")
    found = why_apart(segment(apart), *calls(apart))
    assert found is not None and (found.rule, found.remedy) == ("device", "put both tensors on one device")
    assert why_apart(segment(together), *calls(together)) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_pair_is_judged_as_its_boundary_was(seed: int) -> None:
    graph = random_graph(seed, 25)
    found = segment(graph)
    listed = [b for b in found.boundaries if b.rule not in ("domain", "parallelism", "recompute")]
    for b in listed:
        again = why_apart(found, named(graph, b.producer), named(graph, b.consumer))
        assert again is not None and (again.rule, again.bytes, again.reason) == (b.rule, b.bytes, b.reason)
    owner = {n: s.index for s in found.segments for n in s.nodes}
    for first in list(owner)[::3]:
        for second in list(owner)[::7]:
            apart = why_apart(found, first, second)
            assert (apart is None) == (owner[first] == owner[second]), (first, second)


def test_nothing_removes_the_boundaries_of_a_kernel_of_its_own() -> None:
    def f(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return ATTEND_PIECES(q.sin(), k, k, None, 0.3, 64).cos()

    graph = trace(f, torch.randn(1, 2, 1, 16).bfloat16(), torch.randn(1, 2, 150, 16).bfloat16())
    found = segment(graph)
    assert [s.kind.value for s in found.segments] == ["pointwise", "attention", "pointwise"]
    for pair in (("sin", "attend_pieces"), ("attend_pieces", "cos")):
        reject = why_apart(found, *(named(graph, n) for n in pair))
        assert reject is not None and (reject.rule, reject.remedy) == ("attention", "")


def test_nobody_is_told_to_write_attention_as_other_ops() -> None:
    def f(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, k).cos()

    graph = trace(f, *(torch.randn(1, 2, 32, 16) for _ in range(2)))
    reject = why_apart(segment(graph), named(graph, "_scaled_dot_product_flash_attention_for_cpu"), named(graph, "cos"))
    assert reject is not None and reject.rule == "lowerable" and reject.remedy.startswith("keep aten._scaled_dot")
