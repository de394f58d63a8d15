"""The order that side effects demand, as extra edges of the graph.

Enters: the nodes of an ATen graph.  Leaves: pairs (earlier, later) of nodes that no schedule may exchange.
Two kinds of order exist: all nodes with an effect (mutation, random numbers, collectives, higher-order ops,
asserts) keep theirs, and a node that writes a tensor stays between the readers before and after it, through
whichever views of the same storage they read.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, Iterable, Iterator, Mapping

import torch
from torch import fx

from fxfuser.ops import SCATTER_INTO, UPDATE_MARK, is_view, is_write_back

COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})


def effectful(node: fx.Node) -> bool:
    """Whether it could be seen that a node runs twice, not at all, or at another time."""
    return node.op == "call_module" or (node.op == "call_function" and _target_effect(node.target))


@lru_cache(maxsize=4096)
def _target_effect(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    if target is SCATTER_INTO:
        return False  # what it writes to orders it, and nobody sees it before it is read
    if target._schema.is_mutable or target.namespace in COLLECTIVES:
        return True
    if torch.Tag.nondeterministic_seeded in target.tags:
        return True
    return not target._schema.returns  # an assert: all that it does is its effect


def storages(nodes: Iterable[fx.Node]) -> Mapping[fx.Node, fx.Node]:
    """For each node the one whose storage it aliases, as far as views and aliasing results tell."""
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        base = node.all_input_nodes[0] if node.op == "call_function" and node.all_input_nodes else None
        part = base is not None and node.target is operator.getitem and root[base] is not base
        aliases = part or is_view(node) or _returns_alias(node.target)
        root[node] = root[base] if base is not None and aliases else node
    return root


@lru_cache(maxsize=4096)
def _returns_alias(target: Any) -> bool:
    """Whether an op returns its first argument or a view of it (copy_ returns self)."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns, arguments = target._schema.returns, target._schema.arguments
    return bool(returns) and bool(arguments) and returns[0].alias_info is not None \
        and arguments[0].alias_info is not None


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The operands that a node writes, by its schema, and the inputs that its result will be written over."""
    target = node.target
    if UPDATE_MARK in node.meta:
        yield from (u.all_input_nodes[0] for u in node.users if is_write_back(u))
    if isinstance(target, torch._ops.HigherOrderOperator) and "mutation" in str(target):
        yield from node.all_input_nodes
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return
    for i, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        found: list[fx.Node] = []
        fx.node.map_arg(value, found.append)
        yield from found


def order_edges(nodes: Iterable[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of call nodes that must keep their order.  Views are in none: they run when they are read."""
    nodes = list(nodes)
    root = storages(nodes)
    edges: list[tuple[fx.Node, fx.Node]] = []
    previous: fx.Node | None = None
    writer: dict[fx.Node, fx.Node] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_view(node) or node.target is operator.getitem:
            continue
        if effectful(node):
            if previous is not None:
                edges.append((previous, node))
            previous = node
        for base in dict.fromkeys(root[n] for n in node.all_input_nodes):
            if base in writer:
                edges.append((writer[base], node))
            readers.setdefault(base, []).append(node)
        for base in dict.fromkeys(root[n] for n in written(node)):
            edges.extend((reader, node) for reader in readers[base] if reader is not node)
            writer[base] = node
            readers[base] = [node]
    return edges
