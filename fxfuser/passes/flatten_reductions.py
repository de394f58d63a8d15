"""A reduction over neighbouring dimensions that lie in one piece becomes one over a single dimension.

    s = aten.sum(a, [0, 1])    # a: [12, 1024, 768]    ->    v = aten.view(a, [12288, 768]);  s = aten.sum(v, [0])

So the gradients of a norm's weight and of a linear layer's bias, of which only the latter comes as rows already, are
cut into the same chunks by split_reductions and meet in one kernel.

Left alone: reductions that keep no dimension behind the reduced ones, whose chunks are contiguous either way, and
symbolic sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import Make, replace_each

aten = torch.ops.aten
TARGETS = frozenset({aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default})


@dataclass(frozen=True)
class Run:
    """Dimensions `first` to `last` of the operand, all reduced, are one piece of memory."""

    first: int
    last: int


def flatten_reductions(graph: fx.Graph, scope: Scope) -> int:
    return replace_each(graph, scope, _run_of, _rewritten)


def _run_of(node: fx.Node) -> Run | None:
    if node.target not in TARGETS or len(node.args) < 2 or not isinstance(node.args[0], fx.Node):
        return None
    value, dims = node.args[0].meta["val"], node.args[1]
    if not isinstance(dims, (list, tuple)) or len(dims) < 2 or not all(isinstance(s, int) for s in value.shape):
        return None
    chosen = sorted(d % value.dim() for d in dims)
    first, last = chosen[0], chosen[-1]
    if chosen != list(range(first, last + 1)) or last == value.dim() - 1 or value.numel() == 0:
        return None
    pairs = zip(range(first, last), range(first + 1, last + 1))
    whole = all(value.stride(d) == value.stride(e) * value.shape[e] for d, e in pairs)
    return Run(first, last) if whole else None


def _rewritten(make: Make, node: fx.Node, run: Run) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    shape = list(operand.meta["val"].shape)
    shape[run.first:run.last + 1] = [math.prod(shape[run.first:run.last + 1])]
    flat = make(aten.view.default, operand, shape)
    total = make(node.target, flat, [run.first], **node.kwargs)
    kept = list(node.meta["val"].shape)
    return total if list(total.meta["val"].shape) == kept else make(aten.view.default, total, kept)

