"""A product whose result leaves the graph as float32 is written as float32.

    y = aten.mm(a, b)                       # bf16
    z = aten._to_copy(y, dtype=float32)     ->      z = fxfuser.add_product(None, a, b, float32)

Views between the two, such as the transposes that a linear layer's gradient comes with, then are of the float32 result.
So gradients of parameters that autocast has rounded are neither written nor read in their half type, nor rounded: the
library sums in float32 and writes that (`aten.mm.dtype`).  Left alone: products with other readers, and casts that a
kernel reads, since half the bytes lie between such a kernel and the product, and the cast costs it nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops import Kind, kind_of
from fxfuser.ops.products import ADD_PRODUCT
from fxfuser.passes.casts import is_plain_cast
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import call, replace

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


def products_in_float32(graph: fx.Graph, scope: Scope) -> int:
    if not scope.wide_products:
        return 0
    changes = 0
    for cast in list(graph.nodes):
        product, views = _product_of(cast)
        if product is None:
            continue
        if not scope.fuel.take():
            break
        with graph.inserting_before(cast):
            new = call(graph, scope, ADD_PRODUCT, None, *product.args, torch.float32, like=cast)
            for view in reversed(views):
                new = call(graph, scope, view.target, new, *view.args[1:], like=cast, **view.kwargs)
        replace(cast, new, graph, scope)
        for node in (*views, product):
            graph.erase_node(node)
        changes += 1
    return changes


def _product_of(cast: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The product of which this cast alone reads views, the last first, where the cast only leaves the graph."""
    views: list[fx.Node] = []
    if not is_plain_cast(cast) or cast.meta["val"].dtype is not torch.float32 or not _leaves(cast):
        return None, views
    product = cast.args[0]
    while isinstance(product, fx.Node) and _is_view(product) and len(product.users) == 1:
        views.append(product)
        product = product.args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mm.default or len(product.users) != 1:
        return None, views
    return (product if product.meta["val"].dtype in HALVES else None), views


def _leaves(node: fx.Node) -> bool:
    """Whether nothing but the graph's caller reads a value or views of it."""
    return all(user.op == "output" or _is_view(user) and _leaves(user) for user in node.users)


def _is_view(node: fx.Node) -> bool:
    """Whether a node is a view of the numbers of one tensor, its first argument."""
    if node.op != "call_function" or kind_of(node) is not Kind.VIEW or len(node.all_input_nodes) != 1:
        return False
    source = node.all_input_nodes[0]
    return node.args[:1] == (source,) and node.meta["val"].dtype is source.meta["val"].dtype
