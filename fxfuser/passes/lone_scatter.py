"""A scatter of one element into each row is a comparison of its position with the place.

    y = aten.scatter_add(x, 1, i, v)    # x: [N, C]; i, v: [N, 1]    ->    p = aten.arange(C);  w = aten.add(x, v)
                                                                           h = aten.eq(p, i);   y = aten.where(h, w, x)

also scatter with a source (`w` is `v`) or a number.  The gradient of a gather of one element per row, as of the
log-probability of a label, arrives here: it then is pointwise and joins what reads it.  Left alone: several elements
per row, rows without an element, a symbolic row length that the graph has no size for.  Eager refuses a position out
of range; here it changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import known_equal
from fxfuser.passes.rebuild import call, replace
from fxfuser.passes.sizes import Sizes, size_inputs

aten = torch.ops.aten
SCATTERS = frozenset({aten.scatter_add.default, aten.scatter.src, aten.scatter.value})


def compare_instead_of_lone_scatter(graph: fx.Graph, scope: Scope) -> int:
    sizes = size_inputs(graph)
    changes = 0
    for node in list(graph.nodes):
        if node.target not in SCATTERS or not _applies(node):
            continue
        length = _length(node, sizes)
        if length is None:
            continue
        if not scope.fuel.take():
            break
        with graph.inserting_before(node):
            new = _rewritten(graph, scope, node, length)
        replace(node, new, graph, scope)
        changes += 1
    return changes


def _applies(node: fx.Node) -> bool:
    if len(node.args) != 4 or node.kwargs:
        return False
    operands = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    if not all(isinstance(v, torch.Tensor) and v.layout is torch.strided for v in operands):
        return False
    x, index, *source = operands
    if x.dim() == 0 or index.dim() != x.dim() or (source and source[0].dim() != x.dim()):
        return False
    if x.dtype.is_complex or (x.dtype is torch.bool and node.target is aten.scatter_add.default):
        return False
    dim = _dim(node)
    rows = all(known_equal(index.shape[d], 1 if d == dim else x.shape[d]) for d in range(x.dim()))
    return rows and all(known_equal(s, i) for v in source for s, i in zip(v.shape, index.shape))


def _dim(node: fx.Node) -> int:
    dim: Any = node.args[1]
    return int(dim) % int(node.meta["val"].dim())


def _length(node: fx.Node, sizes: Sizes) -> int | fx.Node | None:
    length = node.meta["val"].shape[_dim(node)]
    return length if isinstance(length, int) else sizes.get(str(length))


def _rewritten(graph: fx.Graph, scope: Scope, node: fx.Node, length: int | fx.Node) -> fx.Node:
    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(graph, scope, target, *args, like=node, **kwargs)

    x, _, index, source = node.args
    assert isinstance(index, fx.Node)
    value, positions = node.meta["val"], index.meta["val"]
    place = make(aten.arange.default, length, dtype=positions.dtype, device=positions.device)
    for _ in range(value.dim() - 1 - _dim(node)):
        place = make(aten.unsqueeze.default, place, -1)
    here = make(aten.eq.Tensor, place, index)
    if node.target is aten.scatter_add.default:
        source = make(aten.add.Tensor, x, source)
    elif not isinstance(source, fx.Node):
        source = make(aten.full.default, [], source, dtype=value.dtype, device=value.device)
    return make(aten.where.self, here, source, x)
