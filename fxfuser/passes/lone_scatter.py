"""A scatter of one element into each row is a comparison of its position with the place.

    y = aten.scatter_add(x, 1, i, v)    # x: [N, C]; i, v: [N, 1]    ->    p = aten.arange(C);  w = aten.add(x, v)
                                                                           h = aten.eq(p, i);   y = aten.where(h, w, x)

also scatter with a source (`w` is `v`) or a number.  The gradient of a gather of one element per row, as of the
log-probability of a label, arrives here: it then is pointwise and joins what reads it.  Left alone: several elements
per row, rows without an element, a symbolic row length that the graph has no size for.  Eager refuses a position out
of range; here it changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import known_equal
from fxfuser.passes.rebuild import Make, replace_each
from fxfuser.passes.sizes import Sizes, size_inputs

aten = torch.ops.aten
SCATTERS = frozenset({aten.scatter_add.default, aten.scatter.src, aten.scatter.value})


@dataclass(frozen=True)
class Scattered:
    """The dimension along which a node scatters, and its length, as a node where it is known at run time only."""

    dim: int
    length: int | fx.Node


def compare_instead_of_lone_scatter(graph: fx.Graph, scope: Scope) -> int:
    sizes = size_inputs(graph)

    def lone(node: fx.Node) -> Scattered | None:
        return _scattered(node, sizes) if node.target in SCATTERS and _applies(node) else None

    return replace_each(graph, scope, lone, _rewritten)


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


def _scattered(node: fx.Node, sizes: Sizes) -> Scattered | None:
    """None where no input tells the length."""
    dim = _dim(node)
    size = node.meta["val"].shape[dim]
    length = size if isinstance(size, int) else sizes.get(str(size))
    return None if length is None else Scattered(dim, length)


def _rewritten(make: Make, node: fx.Node, scattered: Scattered) -> fx.Node:
    x, _, index, source = node.args
    assert isinstance(index, fx.Node)
    value, positions = node.meta["val"], index.meta["val"]
    place = make(aten.arange.default, scattered.length, dtype=positions.dtype, device=positions.device)
    for _ in range(value.dim() - 1 - scattered.dim):
        place = make(aten.unsqueeze.default, place, -1)
    here = make(aten.eq.Tensor, place, index)
    if node.target is aten.scatter_add.default:
        source = make(aten.add.Tensor, x, source)
    elif not isinstance(source, fx.Node):
        source = make(aten.full.default, [], source, dtype=value.dtype, device=value.device)
    return make(aten.where.self, here, source, x)
