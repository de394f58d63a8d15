"""Merges equal expressions.

    b = aten.exp(a)                  b = aten.exp(a)
    c = aten.exp(a)            ->    d = aten.add(b, b)
    d = aten.add(b, c)

Never merged: what draws random numbers, writes or is not ATen; uninitialised memory; nodes that differ in their
checkpoint tag; and two nodes whose storages both reach the caller, who may update one of them
(pytorch/pytorch#114338).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.passes.aliasing import escaping, is_pure, is_write_back, mutates
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_layout
from fxfuser.passes.rebuild import forward

UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def merge_equal_expressions(graph: fx.Graph, scope: Scope) -> int:
    if any(mutates(node) and not is_write_back(node) for node in graph.nodes):
        return 0  # a read before and a read after a write are two values; such graphs are rare
    outside = set(escaping(graph))
    seen: dict[Any, fx.Node] = {}
    changes = 0
    for node in list(graph.nodes):
        if not _mergeable(node):
            continue
        first = seen.setdefault(_key(node), node)
        if first is node or (first in outside and node in outside) or not _same_value(first, node):
            continue
        if not scope.fuel.take():
            break
        if node in outside:
            outside.add(first)
        forward(node, first, graph)
        changes += 1
    return changes


def _mergeable(node: fx.Node) -> bool:
    if not is_pure(node) or str(node.meta.get("partitioner_tag", "")).startswith("must_be"):
        return False
    if not isinstance(node.target, OpOverload):
        return True
    data_dependent = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(node.target.tags)
    return not data_dependent and node.target._schema.name.split("::")[1] not in UNINITIALISED


def _key(node: fx.Node) -> Any:
    tags = (node.meta.get("recompute"), node.meta.get("ac_graph_id"))
    return node.target, _freeze(node.args), _freeze(dict(node.kwargs)), tags


def _freeze(value: Any) -> Any:
    """A hashable form in which 1, 1.0 and True differ, and -0.0 from 0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(v) for v in value)
    if isinstance(value, dict):
        return tuple(sorted((k, _freeze(v)) for k, v in value.items()))
    if isinstance(value, slice):
        return "slice", _freeze((value.start, value.stop, value.step))
    if isinstance(value, fx.Node):
        return "node", value.name
    return type(value).__name__, repr(value)


def _same_value(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta["val"], second.meta["val"]
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_equal_values(x, y) for x, y in zip(a, b))
    return _equal_values(a, b)


def _equal_values(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same_layout(a, b)
    return type(a) is type(b) and repr(a) == repr(b)
