"""A product whose result leaves the graph as float32 is written as float32, or added to what accumulates it.

    y = aten.mm(a, b)                       # bf16
    z = aten._to_copy(y, dtype=float32)     ->      z = fxfuser.add_product(None, a, b, float32)

    z = aten.add(total, y)                  # total: an input of float32
    aten.copy_(total, z)                    ->      z = fxfuser.add_product(total, a, b, float32)

Views between the two, such as the transposes that a linear layer's gradient comes with, then are of the float32 result.
So gradients of parameters that autocast has rounded are neither written nor read in their half type, nor rounded: the
library sums in float32 and writes that (`aten.mm.dtype`), or adds it in its own epilogue to a total that the program
mutates (`aten.addmm.dtype`).  Left alone: products with other readers, and casts that a kernel reads, since half the
bytes lie between such a kernel and the product, and the cast costs it nothing.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops import Kind, is_write_back, kind_of
from fxfuser.ops.products import ADD_PRODUCT
from fxfuser.passes.casts import is_plain_cast
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_shape
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
    return changes + _accumulate(graph, scope)


def _accumulate(graph: fx.Graph, scope: Scope) -> int:
    """The second rewriting of the module's text."""
    changes = 0
    for update in list(graph.nodes):
        sum_ = update.args[1] if is_write_back(update) else None
        found = _summand(sum_, update) if isinstance(sum_, fx.Node) else None
        if found is None:
            continue
        if not scope.fuel.take():
            break
        assert isinstance(sum_, fx.Node)
        product, transposed, alpha = found
        with graph.inserting_before(sum_):
            factors = list(product.args)
            if transposed:
                factors = [call(graph, scope, aten.permute.default, f, [1, 0], like=sum_) for f in reversed(factors)]
            new = call(graph, scope, ADD_PRODUCT, update.args[0], *factors, torch.float32, alpha, like=sum_)
        replace(sum_, new, graph, scope)
        changes += 1
    return changes


def _summand(sum_: fx.Node, update: fx.Node) -> tuple[fx.Node, bool, float] | None:
    """The product that is added to the input which `update` writes, whether transposed, and the number by which it is
    multiplied; None for all other sums."""
    total = update.args[0]
    if sum_.target is not aten.add.Tensor or total not in sum_.args or not isinstance(total, fx.Node):
        return None
    if total.meta["val"].dtype is not torch.float32 or set(total.users) != {sum_, update}:
        return None
    term = sum_.args[1] if sum_.args[0] is total else sum_.args[0]
    if term is total or (sum_.args[0] is not total and sum_.kwargs.get("alpha", 1) != 1):
        return None
    transposed, alpha = False, sum_.kwargs.get("alpha", 1)
    while isinstance(term, fx.Node) and len(term.users) == 1 and (
            is_plain_cast(term) or term.target is aten.permute.default or _is_scaled(term)):
        transposed ^= term.target is aten.permute.default and list(term.args[1]) == [1, 0]  # type: ignore[arg-type]
        alpha = alpha * term.args[1] if _is_scaled(term) else alpha  # type: ignore[operator]
        term = term.args[0]
    if not isinstance(term, fx.Node) or term.target is not aten.mm.default or len(term.users) != 1:
        return None
    if not isinstance(alpha, (int, float)):
        return None
    same = same_shape(sum_.meta["val"], total.meta["val"]) and sum_.meta["val"].dtype is torch.float32
    return (term, transposed, alpha) if same and term.meta["val"].dtype in HALVES else None


def _is_scaled(node: fx.Node) -> bool:
    return node.target is aten.mul.Tensor and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], float)


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
    """Whether a node is one view of the numbers of one tensor, its first argument; a split is several."""
    if node.op != "call_function" or kind_of(node) is not Kind.VIEW or len(node.all_input_nodes) != 1:
        return False
    source = node.all_input_nodes[0]
    value = node.meta["val"]
    return node.args[:1] == (source,) and isinstance(value, torch.Tensor) and value.dtype is source.meta["val"].dtype
