"""The segmenter's speed on large graphs: 10,000 nodes within 3 s of one core, 40,000 within 15 s."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import fx

from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import trace

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
    r = random.Random(0)

    def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values, count = [x], 0
        while count < nodes:
            x, done = _random_step(r, values, w, b)
            values.append(x)
            count += done
        return x

    return trace(model, torch.randn(64, 256), torch.randn(256, 256), torch.randn(256))


def _random_step(
    r: random.Random, values: list[torch.Tensor], w: torch.Tensor, b: torch.Tensor,
) -> tuple[torch.Tensor, int]:
    x, kind = values[-1], r.random()
    if kind < 0.12:
        return torch.mm(x, w), 1
    if kind < 0.2:
        e = torch.exp(x - torch.amax(x, -1, keepdim=True))
        return e / torch.sum(e, -1, keepdim=True), 5
    if kind < 0.35:
        return (x.view(64, 4, 64).transpose(0, 1) * 2 + 1).transpose(0, 1).reshape(64, 256), 6
    if kind < 0.5:
        return x + r.choice(values[-6:]), 1
    return torch.sin(x) * b + 0.5, 3


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
