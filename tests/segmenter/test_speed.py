"""The segmenter's speed on large graphs: 10,000 nodes within 3 s of one core, 40,000 within 15 s."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode

from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import trace

aten = torch.ops.aten

BUDGET = 3.0  # seconds for 10,000 nodes
EXPONENT = math.log(15 / 3) / math.log(40_000 / 10_000)  # of the growth from there
MARGIN = 2.5  # the machine that tests may be slower, and is shared


def layers(nodes: int) -> fx.GraphModule:
    """A deep model: a norm, a product, an activation, a rotation of halves and a residual, again and again."""
    def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(nodes // 24 + 1):
            mean = x.mean(-1, keepdim=True)
            hidden = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + 1e-5) * b
            hidden = torch.mm(hidden, w)
            heads = hidden.view(64, 4, 64).transpose(0, 1)
            left, right = heads.chunk(2, -1)
            hidden = (heads * 2 + torch.cat([right.neg(), left], -1)).transpose(0, 1).reshape(64, 256)
            x = torch.sigmoid(hidden) * hidden + x
        return x

    return trace(model, torch.randn(64, 256), torch.randn(256, 256), torch.randn(256))


def irregular(nodes: int) -> fx.GraphModule:
    """Products, softmaxes, residuals, views and pointwise runs in no order."""
    r, graph = random.Random(0), _Written()
    x, w, b = graph.input(64, 256), graph.input(256, 256), graph.input(256)
    values = [x]
    while len(graph.graph.nodes) < nodes:
        values.append(_random_step(r, graph, values, w, b))
    graph.graph.output((values[-1],))
    return fx.GraphModule({}, graph.graph)


class _Written:
    """A graph that is written node by node, which is much faster than it is traced: equal calls have equal results."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.known: dict[object, torch.Tensor] = {}

    def input(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        return node

    def __call__(self, target: OpOverload, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        key = (target, *((tuple(a.shape), a.stride()) if isinstance(a, torch.Tensor) else repr(a) for a in values))
        if key not in self.known:
            with self.mode:
                self.known[key] = target(*values)
        node.meta["val"] = self.known[key]
        return node


def _random_step(r: random.Random, call: _Written, values: list[fx.Node], w: fx.Node, b: fx.Node) -> fx.Node:
    x, kind = values[-1], r.random()
    if kind < 0.12:
        return call(aten.mm.default, x, w)
    if kind < 0.2:
        e = call(aten.exp.default, call(aten.sub.Tensor, x, call(aten.amax.default, x, [-1], True)))
        return call(aten.div.Tensor, e, call(aten.sum.dim_IntList, e, [-1], True))
    if kind < 0.35:
        heads = call(aten.transpose.int, call(aten.view.default, x, [64, 4, 64]), 0, 1)
        more = call(aten.add.Tensor, call(aten.mul.Tensor, heads, 2), 1)
        back = call(aten.clone.default, call(aten.transpose.int, more, 0, 1))
        return call(aten._unsafe_view.default, back, [64, 256])
    if kind < 0.5:
        return call(aten.add.Tensor, x, r.choice(values[-6:]))
    return call(aten.add.Tensor, call(aten.mul.Tensor, call(aten.sin.default, x), b), 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("build, nodes", [(layers, 10_000), (irregular, 10_000), (irregular, 40_000)])
def test_time_grows_with_the_nodes(build: Callable[[int], fx.GraphModule], nodes: int) -> None:
    graph = build(nodes)
    count = len(graph.graph.nodes)
    assert count > 0.99 * nodes
    start = time.process_time()
    segmentation = segment(graph)
    spent = time.process_time() - start
    assert len(segmentation.segments) > nodes / 100
    assert spent < BUDGET * MARGIN * count / nodes * (nodes / 10_000) ** EXPONENT, f"{spent:.2f} s"
