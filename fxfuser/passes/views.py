"""Drops views that change nothing and merges chains of views.

    b = aten.view(a, [6, 4])            c = aten.view(a, [24])
    c = aten.view(b, [24])        ->    e = aten.permute(c', ...)
    d = aten.permute(p, [0, 1])         return c, p
    return c, d

A view that is itself an output stays: what the caller gets is then still a tensor of its own.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.passes.aliasing import HIDDEN_VIEWS, aliased
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import is_contiguous, known_equal, same_layout
from fxfuser.passes.rebuild import forward

aten = torch.ops.aten
RESHAPES = frozenset({aten.view.default, *HIDDEN_VIEWS})
TRIVIAL = frozenset({
    *RESHAPES, aten.expand.default, aten.permute.default, aten.transpose.int, aten.t.default, aten.slice.Tensor,
    aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default, aten.alias.default, aten.detach.default,
    aten.as_strided.default,
})


def canonicalise_views(graph: fx.Graph, scope: Scope) -> int:
    outputs = set(graph.output_node().all_input_nodes)
    changes = 0
    for node in list(graph.nodes):
        if node.target not in TRIVIAL or node in outputs or not node.users:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node):
            continue
        if _changes_nothing(node, source):
            if not scope.fuel.take():
                break
            forward(node, source, graph)
            changes += 1
        elif _merges(node, source):
            if not scope.fuel.take():
                break
            _merge(graph, node, source)
            changes += 1
    return changes


def _changes_nothing(node: fx.Node, source: fx.Node) -> bool:
    value, base = node.meta["val"], source.meta["val"]
    if value.layout is not torch.strided or not same_layout(value, base):
        return False
    return known_equal(value.storage_offset(), base.storage_offset())


def _merges(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node` can read the base of `source`: view of a view of a dense base, permute of a permute."""
    if not aliased(source):
        return False
    if node.target in RESHAPES and source.target in RESHAPES:
        base = source.args[0]
        return isinstance(base, fx.Node) and is_contiguous(base.meta["val"])
    return node.target is source.target and node.target in (aten.permute.default, aten.expand.default)


def _merge(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    base = source.args[0]
    if node.target is aten.permute.default:
        inner, outer = source.args[1], node.args[1]
        assert isinstance(inner, (list, tuple)) and isinstance(outer, (list, tuple))
        rank = len(inner)
        node.args = (base, [inner[int(d) % rank] for d in outer])  # type: ignore[arg-type]
        return
    if node.target is aten.expand.default:
        _merge_expand(node, source)
        return
    node.args = (base, *node.args[1:])


def _merge_expand(node: fx.Node, source: fx.Node) -> None:
    """-1 keeps the size that the inner expand gave."""
    inner, outer = source.args[1], node.args[1]
    assert isinstance(inner, (list, tuple)) and isinstance(outer, (list, tuple))
    lead = len(outer) - len(inner)
    sizes = [inner[i - lead] if isinstance(s, int) and s == -1 and i >= lead else s for i, s in enumerate(outer)]
    node.args = (source.args[0], sizes)


