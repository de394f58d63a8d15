"""Which nodes share storage, and which may not be replaced by a node that shares another's.

Enters: an ATen graph.  Leaves: sets of nodes.  An op aliases where its schema says so, where it is known to return a
view although its schema hides it, or where a plan may let its result and its operand share storage.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from fxfuser.ops.products import WITH_ROOM

aten = torch.ops.aten

HIDDEN_VIEWS = frozenset({aten._unsafe_view.default, aten._reshape_alias.default})
HOSTS = frozenset({WITH_ROOM})  # results in whose storage a plan may make the operand
TABLE_NAMESPACES = frozenset({"aten", "prims", "fxfuser"})


def aliased(node: fx.Node) -> tuple[fx.Node, ...]:
    """The inputs with which this node's result may share storage."""
    if node.op != "call_function":
        return ()
    if node.target is operator.getitem:
        return (node.args[0],) if isinstance(node.args[0], fx.Node) else ()
    if not isinstance(node.target, OpOverload):
        return ()
    if node.target in HIDDEN_VIEWS or node.target in HOSTS:
        return tuple(node.all_input_nodes)[:1]
    names = [a.name for a in node.target._schema.arguments if a.alias_info is not None]
    given = dict(zip((a.name for a in node.target._schema.arguments), node.args)) | node.kwargs
    found: list[fx.Node] = []
    fx.map_arg(tuple(given.get(n) for n in names), found.append)
    return tuple(found)


def mutates(node: fx.Node) -> bool:
    """Whether the op writes to an argument."""
    return isinstance(node.target, OpOverload) and bool(node.target._schema.is_mutable)


def escaping(graph: fx.Graph) -> frozenset[fx.Node]:
    """Nodes whose storage the caller may see or an op writes to: those need a storage of their own."""
    pending: list[fx.Node] = list(graph.output_node().all_input_nodes)
    for node in graph.nodes:
        if mutates(node):
            pending.extend(node.all_input_nodes)
    found: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        pending.extend(aliased(node))
    return frozenset(found)


def root(node: fx.Node) -> fx.Node:
    """The node that owns the storage which `node` views (the first, where there are several)."""
    while sources := aliased(node):
        node = sources[0]
    return node


def shared_by_results(graph: fx.Graph) -> frozenset[fx.Node]:
    """The views through which results of the graph share memory with each other or with an input: each result that is a
    view, and all that it is a view of but the owner."""
    found: dict[fx.Node, list[list[fx.Node]]] = {}
    for node in graph.output_node().all_input_nodes:
        views = []
        while sources := aliased(node):
            views.append(node)
            node = sources[0]
        found.setdefault(node, []).append(views)
    return frozenset(n for owner, results in found.items() if len(results) > 1 or owner.op == "placeholder"
                     for views in results for n in views)


def is_random(node: fx.Node) -> bool:
    """Whether the op draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def is_pure(node: fx.Node) -> bool:
    """Whether the result depends on the arguments alone and nothing else happens: ATen, our prims, arithmetic."""
    if node.op != "call_function":
        return False
    target: Any = node.target
    if not isinstance(target, OpOverload):
        return target is operator.getitem or is_symbolic(node)
    if target.namespace not in TABLE_NAMESPACES or is_random(node):
        return False
    return not mutates(node) and bool(target._schema.returns)


def is_symbolic(node: fx.Node) -> bool:
    """Whether the node computes a size on the host: Python arithmetic on numbers, `torch.sym_max` and the like."""
    value = node.meta.get("val")
    return (node.op == "call_function" and not isinstance(node.target, (OpOverload, HigherOrderOperator))
            and isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)))
