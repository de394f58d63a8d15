"""Folds arithmetic whose result is known exactly.

    b = aten.mul(a, 1)                     e = aten.full([4, 8], 2.0, dtype=float16)
    c = aten.full([8], 2.0)          ->    f = aten.add(a, e)
    d = aten._to_copy(c, dtype=float16)
    e = aten.expand(d, [4, 8])
    f = aten.add(b, e)

Exact means every bit, -0.0 and nan included: x * 1, x / 1, x - 0 and x ** 1 are x; x + 0 is x for integers only, as
-0.0 + 0 and -0.0 - -0.0 are 0.0.  The dtype must not change, and a result that reaches the caller keeps its storage.
`full_like` is a `full` too, so that it does not seem to read a tensor.  Whatever is made of one is dense, as a kernel
never writes twice to one place; a constant that reaches the caller and repeats its elements stays a view.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Callable, Mapping

import torch
from torch import fx

from fxfuser.passes.aliasing import escaping, root
from fxfuser.passes.casts import is_plain_cast
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_layout
from fxfuser.passes.rebuild import call, forward, replace
from fxfuser.passes.sizes import Sizes, as_arguments, size_inputs

aten = torch.ops.aten


def _floating(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


# op -> whether `x op c` is x, for the tensor x and the number c
IDENTITIES: Mapping[Any, Callable[[torch.Tensor, Any], bool]] = {
    aten.mul.Tensor: lambda x, c: c == 1,
    aten.mul.Scalar: lambda x, c: c == 1,
    aten.div.Tensor: lambda x, c: c == 1,
    aten.div.Scalar: lambda x, c: c == 1,
    aten.sub.Tensor: lambda x, c: c == 0 and math.copysign(1, c) > 0,
    aten.sub.Scalar: lambda x, c: c == 0 and math.copysign(1, c) > 0,
    aten.add.Tensor: lambda x, c: c == 0 and not _floating(x),
    aten.add.Scalar: lambda x, c: c == 0 and not _floating(x),
    aten.pow.Tensor_Scalar: lambda x, c: c == 1,
}
# a constant seen through these is the same constant in another shape
SHAPES = frozenset({
    aten.expand.default, aten.view.default, aten._unsafe_view.default, aten.permute.default, aten.unsqueeze.default,
    aten.squeeze.dims, aten.clone.default,
})


def fold_constants(graph: fx.Graph, scope: Scope) -> int:
    outside = escaping(graph)
    sizes = size_inputs(graph)
    changes = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.users:
            continue
        escapes = node in outside
        rewrite = _constant(node, sizes, escapes) or (None if escapes else _identity(node) or _number(node))
        if rewrite is None:
            continue
        if not scope.fuel.take():
            break
        rewrite(graph, scope)
        changes += 1
    return changes


Rewrite = Callable[[fx.Graph, Scope], None]


def _identity(node: fx.Node) -> Rewrite | None:
    rule = IDENTITIES.get(node.target)
    if rule is None or len(node.args) < 2 or node.kwargs:
        return None
    source, number = node.args[0], node.args[1]
    if not isinstance(source, fx.Node) or isinstance(number, (fx.Node, bool)) or not isinstance(number, (int, float)):
        return None
    value = source.meta["val"]
    if not isinstance(value, torch.Tensor) or not same_layout(value, node.meta["val"]) or not rule(value, number):
        return None
    if root(source).op in ("placeholder", "get_attr"):
        return None  # the caller may update an input before the backward reads it
    return lambda graph, scope: forward(node, source, graph)


def _constant(node: fx.Node, sizes: Sizes, escapes: bool) -> Rewrite | None:
    """A cast or a view of a `full`, and a `full_like`, is a `full`: none of them reads a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    number = _fill_of(node)
    shape = as_arguments(value.shape, sizes)
    repeats = any(type(s) is int and s == 0 for s in value.stride())  # a size that the run tells is not asked
    if number is None or shape is None or (repeats and escapes):
        return None

    def rewrite(graph: fx.Graph, scope: Scope) -> None:
        with graph.inserting_before(node):
            new = call(graph, scope, aten.full.default, shape, number, like=node,
                       dtype=value.dtype, device=value.device, pin_memory=False)
        (forward(node, new, graph) if repeats else replace(node, new, graph, scope))
    return rewrite


def _fill_of(node: fx.Node) -> bool | int | float | None:
    """The number that every element of the node is known to have; None for a plain `full`, which stays as it is."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.full_like.default:
        return _number_or_none(node.args[1])
    if source.target is not aten.full.default or not (node.target in SHAPES or is_plain_cast(node)):
        return None
    number = _number_or_none(source.args[1])
    if number is None:
        return None
    filled: bool | int | float = torch.tensor(number, dtype=source.meta["val"].dtype).to(node.meta["val"].dtype).item()
    return filled


def _number_or_none(value: Any) -> bool | int | float | None:
    return value if isinstance(value, (bool, int, float)) else None


NUMBERS = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg})


def _number(node: fx.Node) -> Rewrite | None:
    """Python arithmetic whose result is a plain integer."""
    value = node.meta.get("val")
    if node.target not in NUMBERS or type(value) is not int:
        return None

    def rewrite(graph: fx.Graph, scope: Scope) -> None:
        for user in list(node.users):
            user.args = fx.map_arg(user.args, lambda n: value if n is node else n)
            user.kwargs = fx.map_arg(user.kwargs, lambda n: value if n is node else n)
        graph.erase_node(node)
    return rewrite
