"""What of a joint graph depends on the tangents, and whether it does so linearly and through one number.

A gradient that is linear in a scalar t equals t * (the gradient for t = 1): it can be computed before t is known.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import fx

from fxfuser.ops import Kind, kind_of

aten = torch.ops.aten

_UNARY = frozenset({aten.neg.default, aten._to_copy.default, aten.clone.default, aten.constant_pad_nd.default,
                    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.cat.default})
_ONE_SIDE = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.mm.default, aten.bmm.default})
_FIRST = frozenset({
    aten.div.Tensor, aten.div.Scalar, aten.tanh_backward.default, aten.sigmoid_backward.default,
    aten.gelu_backward.default, aten.threshold_backward.default, aten.silu_backward.default,
    aten.hardtanh_backward.default, aten.elu_backward.default,
})
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


def dependents(graph: fx.Graph) -> frozenset[fx.Node]:
    """The tangents and all that depends on one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or node.op == "call_function" and any(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def is_zero(argument: Any) -> bool:
    """Whether an argument is the number 0 or a tensor filled with it."""
    if not isinstance(argument, fx.Node):
        return not isinstance(argument, bool) and argument == 0
    if argument.target is aten.full.default:
        return is_zero(argument.args[1])
    if argument.target in (aten.scalar_tensor.default, aten.expand.default):
        return is_zero(argument.args[0])
    return argument.target is aten.zeros.default


def is_linear(node: fx.Node, depends: frozenset[fx.Node]) -> bool:
    """Whether a node that depends on a tangent is linear in the operands that do."""
    operands = [n for n in node.all_input_nodes if n in depends]
    target = node.target
    if kind_of(node) is Kind.VIEW:
        return True
    if target is aten.constant_pad_nd.default:
        return len(node.args) < 3 or is_zero(node.args[2])
    if target in _UNARY:
        return len(operands) == len(node.all_input_nodes)
    if target in _ONE_SIDE:
        return sum(a in depends for a in node.args) == 1
    if target in _FIRST:
        return operands == [node.args[0]] and node.args[1] is not node.args[0]
    if target in _SUMS:
        return all(a in depends or is_zero(a) for a in node.args[:2])
    if target is aten.where.self:
        return node.args[0] not in depends and all(a in depends or is_zero(a) for a in node.args[1:])
    if target is aten.masked_fill.Scalar:
        return operands == [node.args[0]] and is_zero(node.args[2])
    if target is aten.slice_scatter.default:
        return all(a in depends or is_zero(a) for a in node.args[:2])
    return False


def between(entries: Iterable[fx.Node], depends: frozenset[fx.Node], stop: fx.Node | None = None) -> set[fx.Node]:
    """The nodes that depend on a tangent and lead to the entries, which are among them; not beyond `stop`."""
    found: set[fx.Node] = set()
    stack = list(entries)
    while stack:
        node = stack.pop()
        if node in depends and node not in found:
            found.add(node)
            if node is not stop:
                stack.extend(node.all_input_nodes)
    return found


def one_number(entries: Iterable[fx.Node], depends: frozenset[fx.Node], graph: fx.Graph) -> fx.Node | None:
    """The first scalar through which all of the entries depend on tangents, linearly; None where there is none."""
    entries = list(entries)
    above = between(entries, depends)
    for node in graph.nodes:
        value = node.meta.get("val")
        if node not in above or not isinstance(value, torch.Tensor) or value.dim() or not value.is_floating_point():
            continue
        below = between(entries, depends, node)
        free = any(n.op == "placeholder" and n is not node for n in below)
        if not free and all(n is node or is_linear(n, depends) for n in below):
            return node  # type: ignore[no-any-return]
    return None
