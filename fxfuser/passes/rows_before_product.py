"""Rows that nobody wants are not multiplied: a slice of a product's rows becomes a product of sliced rows.

    p = aten.mm(x, w.T)             # [B * T, N]                     y = aten.slice(aten.view(x, [B, T, K]), 1, 0, -1)
    s = aten.slice(aten.view(p, [B, T, N]), 1, 0, -1)        ->      s = aten.mm(aten.view(y, [B * (T - 1), K]), w.T)

and in the gradient, where the rows left out are zeros:

    z = aten.view(aten.slice_scatter(zeros, g, 1, 0, -1), [B * T, N])      dy = aten.mm(g, w);  dw = aten.mm(g.T, y)
    dx = aten.mm(z, w);  dw = aten.mm(z.T, x);  db = aten.sum(z, [0])  ->  dx = aten.slice_scatter(zeros, dy, 1, 0, -1)
                                                                           db = aten.sum(g, [0])

Models that drop the last token's logits before the loss are written so; what is left has one shape from the product to
the loss, which `chunk_linear_cross_entropy` looks for.  Left alone: products that are read otherwise, and those whose
result is not larger than their operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxfuser.passes.aliasing import escaping
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import is_contiguous
from fxfuser.passes.rebuild import call
from fxfuser.passes.row_region import factors, is_product, transposes
from fxfuser.passes.row_values import lead_in, value_of
from fxfuser.passes.tangents import is_zero

aten = torch.ops.aten


@dataclass(frozen=True)
class Selection:
    """Rows of [*lead, width] that a slice along `dim` keeps: `start` to `stop` of its size."""

    lead: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return math.prod(self.kept)

    @property
    def kept(self) -> list[int]:
        return [self.stop - self.start if d == self.dim else n for d, n in enumerate(self.lead)]


@dataclass(frozen=True)
class Maker:
    graph: fx.Graph
    scope: Scope

    def call(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        return call(self.graph, self.scope, target, *args, like=like, **kwargs)

    def viewed(self, node: fx.Node, shape: list[int], like: fx.Node) -> fx.Node:
        if not is_contiguous(node.meta["val"]):
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format, like=like)
        same = list(node.meta["val"].shape) == shape
        return node if same else self.call(aten.view.default, node, shape, like=like)

    def selected(self, node: fx.Node, chosen: Selection, like: fx.Node) -> fx.Node:
        """The chosen rows of a matrix [M, K]."""
        width = node.meta["val"].shape[1]
        whole = self.viewed(node, [*chosen.lead, width], like)
        part = self.call(aten.slice.Tensor, whole, chosen.dim, chosen.start, chosen.stop, like=like)
        return self.viewed(part, [chosen.rows, width], like)


def rows_before_product(graph: fx.Graph, scope: Scope) -> int:
    make, outside = Maker(graph, scope), escaping(graph)
    changes = 0
    for node in [n for n in graph.nodes if n.target in (aten.slice.Tensor, aten.slice_scatter.default)]:
        if node.target is aten.slice.Tensor and node not in outside:
            changes += _forward(node, make)
        elif node.target is aten.slice_scatter.default and node not in outside:
            changes += _backward(node, make)
    return changes


def _forward(node: fx.Node, make: Maker) -> int:
    view = node.all_input_nodes[0]
    product = view.all_input_nodes[0] if view.target is aten.view.default else view
    if not is_product(product) or len(view.users) != 1 or len(product.users) != 1:
        return 0
    chosen = _selection(node, product.meta["val"].shape)
    bias, left, right = factors(product)
    if chosen is None or not _worth(product, left) or not make.scope.fuel.take():
        return 0
    with make.graph.inserting_before(product):
        rows = make.selected(left, chosen, product)
        new = make.call(product.target, *([] if bias is None else [bias]), rows, right, like=product)
        shaped = make.viewed(new, list(node.meta["val"].shape), node)
    node.replace_all_uses_with(shaped)
    for dead in dict.fromkeys((node, view, product)):
        make.graph.erase_node(dead)
    return 1


def _worth(product: fx.Node, left: fx.Node) -> bool:
    return bool(product.meta["val"].shape[1] >= left.meta["val"].shape[1])


def _selection(node: fx.Node, shape: Any) -> Selection | None:
    """The rows that a slice of [*lead, N] or a slice_scatter into it names, of the matrix [M, N]."""
    place = 1 if node.target is aten.slice.Tensor else 2
    whole = value_of(node.all_input_nodes[0])
    arguments: list[Any] = [*node.args[place:], *([0, None, None, 1][len(node.args) - place:])]
    if node.kwargs or whole is None or len(shape) != 2 or not all(isinstance(s, int) for s in shape):
        return None
    if not all(a is None or isinstance(a, int) for a in arguments):
        return None
    dim, start, stop, step = arguments
    lead = lead_in(whole.shape, shape[0])
    if lead is None or list(whole.shape[lead:]) != [shape[1]] or step != 1 or dim % whole.dim() >= lead:
        return None
    dim %= whole.dim()
    first, last, _ = slice(start, stop).indices(whole.shape[dim])
    return Selection(tuple(whole.shape[:lead]), dim, first, last) if first < last else None


def _backward(node: fx.Node, make: Maker) -> int:
    value, source = value_of(node), node.args[1]
    if value is None or not isinstance(source, fx.Node) or not is_zero(node.args[0]) or len(node.users) != 1:
        return 0
    flat = node if value.dim() == 2 else next(iter(node.users))
    if flat is not node and flat.target is not aten.view.default:
        return 0
    chosen = _selection(node, flat.meta["val"].shape)
    readers = [r for u in flat.users for r in (u.users if transposes(u) else (u,))]
    if chosen is None or not readers or not all(_reads(r, flat) for r in readers) or not make.scope.fuel.take():
        return 0
    with make.graph.inserting_after(source):
        rows = make.viewed(source, [chosen.rows, flat.meta["val"].shape[1]], node)
    for reader in readers:
        with make.graph.inserting_before(reader):
            new = _reader(reader, flat, rows, chosen, make)
        reader.replace_all_uses_with(new)
        make.graph.erase_node(reader)
    for dead in (*flat.users, flat, *(() if flat is node else (node,))):
        make.graph.erase_node(dead)
    return 1


def _reads(reader: fx.Node, flat: fx.Node) -> bool:
    """Whether what the reader makes of zero rows is known: products of matrices, and sums over rows."""
    if reader.target is aten.sum.dim_IntList:
        return reader.args[0] is flat and reader.args[1] == [0]
    if reader.target is not aten.mm.default or len(set(reader.args)) != 2:
        return False
    left, right = reader.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    across = transposes(left) and (left.all_input_nodes[0] is flat or right is flat)
    return (left is flat and right is not flat and not transposes(right)) or across


def _reader(reader: fx.Node, flat: fx.Node, rows: fx.Node, chosen: Selection, make: Maker) -> fx.Node:
    """What a reader of the scattered rows makes of the rows themselves."""
    if reader.target is aten.sum.dim_IntList:
        return make.call(reader.target, rows, *reader.args[1:], like=reader, **reader.kwargs)
    left, right = reader.args
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    if left is flat:
        part = make.call(aten.mm.default, rows, right, like=reader)
        width = part.meta["val"].shape[1]
        zeros = make.call(aten.full.default, [*chosen.lead, width], 0, dtype=part.meta["val"].dtype,
                          device=part.meta["val"].device, pin_memory=False, like=reader)
        parts = make.viewed(part, [*chosen.kept, width], reader)
        whole = make.call(aten.slice_scatter.default, zeros, parts, chosen.dim, chosen.start, chosen.stop, like=reader)
        return make.viewed(whole, list(reader.meta["val"].shape), reader)
    if right is flat:  # left is the transpose of the other factor
        other = make.selected(left.all_input_nodes[0], chosen, reader)
        return make.call(aten.mm.default, make.call(aten.permute.default, other, [1, 0], like=reader), rows,
                         like=reader)
    turned = make.call(aten.permute.default, rows, [1, 0], like=reader)
    return make.call(aten.mm.default, turned, make.selected(right, chosen, reader), like=reader)
