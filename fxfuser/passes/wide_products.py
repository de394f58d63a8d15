"""A product whose result leaves the graph as float32 is written as float32.

    y = aten.mm(a, b)                       # bf16
    z = aten._to_copy(y, dtype=float32)     ->      z = fxfuser.add_product(None, a, b, float32)

So gradients of parameters that autocast has rounded are neither written nor read in their half type, nor rounded: the
library sums in float32 and writes that (`aten.mm.dtype`).  Left alone: products with other readers, and casts that a
kernel reads, since half the bytes lie between such a kernel and the product, and the cast costs it nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops.products import ADD_PRODUCT
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import call, replace

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


def products_in_float32(graph: fx.Graph, scope: Scope) -> int:
    if not scope.wide_products:
        return 0
    changes = 0
    for cast in list(graph.nodes):
        product = _product_of(cast)
        if product is None:
            continue
        if not scope.fuel.take():
            break
        with graph.inserting_before(cast):
            new = call(graph, scope, ADD_PRODUCT, None, *product.args, torch.float32, like=cast)
        replace(cast, new, graph, scope)
        graph.erase_node(product)
        changes += 1
    return changes


def _product_of(cast: fx.Node) -> fx.Node | None:
    """The product that nothing but this cast reads, where the cast only leaves the graph."""
    if cast.target is not aten._to_copy.default or dict(cast.kwargs) != {"dtype": torch.float32}:
        return None
    product = cast.args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mm.default or len(product.users) != 1:
        return None
    leaves = all(user.op == "output" for user in cast.users)
    return product if leaves and product.meta["val"].dtype in HALVES else None
