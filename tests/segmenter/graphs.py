"""ATen graphs for the segmenter's tests: traced from functions, or drawn at random."""

from __future__ import annotations

import random
from typing import Any, Callable

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser.ops.hints import FUSE_MARK
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.domains import Domains
from fxfuser.segmenter.facts import gather_facts
from fxfuser.segmenter.group import atom
from fxfuser.segmenter.quotient import Quotient
from fxfuser.segmenter.rules import Candidate, Context

aten = torch.ops.aten


def trace(function: Callable[..., Any], *inputs: Any, mode: str = "fake") -> fx.GraphModule:
    """The function's ATen graph with fake tensors as meta."""
    return make_fx(function, tracing_mode=mode)(*inputs)


def named(graph_module: fx.GraphModule, name: str) -> fx.Node:
    """The node of this name."""
    return next(n for n in graph_module.graph.nodes if n.name == name)


def marked(graph: fx.GraphModule) -> fx.GraphModule:
    """The graph as if all of it stood inside `fxfuser.fuse()`."""
    for node in graph.graph.nodes:
        node.meta["custom"] = {f"{FUSE_MARK}0": True}
    return graph


def context_of(graph_module: fx.GraphModule, rates: DeviceRates | None = None) -> Context:
    """A context before growth."""
    facts = gather_facts(graph_module.graph, {})
    return Context(facts, Quotient(len(facts.vertices), facts.edges), Domains(facts), rates or DeviceRates())


def candidate(graph_module: fx.GraphModule, first: str, second: str, rates: DeviceRates | None = None) -> Candidate:
    """The two groups of one node each that hold these nodes."""
    context = context_of(graph_module, rates)
    number = context.facts.number
    a, b = (number[named(graph_module, name)] for name in (first, second))
    return Candidate(atom(a, context.facts), atom(b, context.facts), context)


def random_graph(seed: int, steps: int) -> fx.GraphModule:
    """A graph of pointwise ops, products, reductions, views, layouts and factories over a few shapes."""
    r = random.Random(seed)

    def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, x + 1]
        for _ in range(steps):
            values.append(_step(r, values, w, b))
        return tuple(dict.fromkeys([values[-1], *r.sample(values[1:], min(3, len(values) - 1))]))

    return trace(program, torch.randn(64, 256), torch.randn(256, 256), torch.randn(256))


def _step(r: random.Random, values: list[torch.Tensor], w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x, y = r.choice(values[-4:]), r.choice(values)
    kind = r.choice(["unary", "binary", "mm", "softmax", "view", "cat", "bias", "mean", "flip", "full", "column"])
    if kind == "unary":
        return torch.sin(x)
    if kind == "binary":
        return x * y
    if kind == "mm":
        return torch.mm(x, w)
    if kind == "softmax":
        e = torch.exp(x - torch.amax(x, -1, keepdim=True))
        return e / torch.sum(e, -1, keepdim=True)
    if kind == "view":
        heads = x.view(64, 4, 64).transpose(0, 1) * 2
        return heads.transpose(0, 1).reshape(64, 256)
    if kind == "cat":
        left, right = x.chunk(2, -1)
        return torch.cat([right.neg(), left], -1)
    if kind == "bias":
        return x + b
    if kind == "mean":
        return x - x.mean(-1).unsqueeze(-1)
    if kind == "flip":
        return x + torch.flip(y, [0])
    if kind == "full":
        return torch.full((64, 256), 0.5) * x
    return x * torch.sum(y, 0)
