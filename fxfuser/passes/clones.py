"""Drops copies that nobody can tell from their source.

    b = aten.clone(a)                 c = aten.add(a, 1)
    c = aten.add(b, 1)         ->     return c
    return c

A copy stays where its storage reaches the caller, where its strides differ from its source's (readers may be views
that rely on them), and where its source is an input: the caller may update that before the backward reads it.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.passes.aliasing import escaping, is_write_back, mutates, root
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_layout
from fxfuser.passes.rebuild import forward

aten = torch.ops.aten


def drop_clones(graph: fx.Graph, scope: Scope) -> int:
    if any(mutates(node) and not is_write_back(node) for node in graph.nodes):
        return 0
    outside = escaping(graph)
    changes = 0
    for node in list(graph.nodes):
        if node.target is not aten.clone.default or node in outside:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or root(source).op in ("placeholder", "get_attr"):
            continue
        if not same_layout(node.meta["val"], source.meta["val"]):
            continue
        if not scope.fuel.take():
            break
        forward(node, source, graph)
        changes += 1
    return changes
