"""Writes dimensions and signs of reductions and views in one way, so that equal ones have equal text.

    m = aten.amax(a, [-1], True)            m = aten.amax(a, [1], True)
    s = aten.sum(b, [])              ->     s = aten.sum(b, [0, 1])
    t = aten.permute(c, [-1, 0])            t = aten.permute(c, [1, 0])

A 0-d operand keeps its text: [], [0] and [-1] all mean it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxfuser.passes.funnel import Scope

aten = torch.ops.aten

EMPTY_MEANS_ALL = frozenset({aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default})
LISTS = EMPTY_MEANS_ALL | frozenset({aten.permute.default, aten.flip.default, aten.squeeze.dims})
SINGLE = frozenset({
    aten.select.int, aten.slice.Tensor, aten.any.dim, aten.all.dim, aten.prod.dim_int, aten.argmax.default,
    aten.argmin.default, aten._softmax.default, aten._log_softmax.default, aten.gather.default, aten.cumsum.default,
})


def canonicalise_dims(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    for node in graph.nodes:
        if len(node.args) < 2 or node.target not in LISTS and node.target not in SINGLE:
            continue
        rank = node.args[0].meta["val"].dim()
        new = _positive(node.target, node.args[1], rank)
        if rank == 0 or new == node.args[1]:
            continue
        if not scope.fuel.take():
            break
        node.args = (node.args[0], new, *node.args[2:])
        changes += 1
    return changes


def _positive(target: Any, dims: Any, rank: int) -> Any:
    if isinstance(dims, int):
        return dims % rank if target in SINGLE and rank else dims
    if not isinstance(dims, (list, tuple)) or not rank:
        return dims
    if not dims and target in EMPTY_MEANS_ALL:
        return list(range(rank))
    return [d % rank for d in dims]
