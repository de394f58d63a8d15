"""What the segmenter knows of each node before it groups any.

Enters: an ATen graph.  Leaves: `Facts`.  Every call node has a role; KERNEL, EXTERN and HOST nodes are the
vertices of the quotient graph, numbered in graph order, and the edges between them are data that flows
(through views and sizes, which are no vertices) and the order of effects.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Collection, Iterable, Mapping

import torch
from torch import fx

from fxfuser import ops
from fxfuser.domain import views
from fxfuser.domain.tensors import is_tensor
from fxfuser.ops import HALF_MARK, REFUSED, SCATTER_INTO, UPDATE_MARK, Kind
from fxfuser.segmenter.effects import effectful, order_edges, storages
from fxfuser.segmenter.sizing import Sizing

LOWERED = frozenset({Kind.POINTWISE, Kind.LAYOUT, Kind.FACTORY, Kind.REDUCTION, Kind.SCAN, Kind.GATHER, Kind.SCATTER})


class Role(Enum):
    """What becomes of a node."""

    INPUT = "input"  # placeholder or attribute
    KERNEL = "kernel"  # a compute node that a kernel can hold
    EXTERN = "extern"  # a compute node that runs as its ATen call
    HOST = "host"  # a size or an opaque view that the plan computes between two segments
    SEEN = "seen"  # a view that kernels see through, a result of a several-output call, a size known at entry
    OUTPUT = "output"


@dataclass(frozen=True)
class Read:
    """A tensor operand: `source` is materialised or in the group, `via` the view of it that the node names."""

    source: fx.Node
    via: fx.Node


@dataclass(frozen=True, eq=False)
class Facts:
    """`reasons` says why each EXTERN node is one; `readers` lists the KERNEL vertices that read a source;
    `exported` are the KERNEL nodes whose value an extern call, the host or the graph's output reads;
    `transparent` the views, results of splitting views included, that kernels see through; `halves` says of which
    split reduction a vertex is a half, and whether it is the first; `updates` are the vertices whose results are
    written over what others have read before; `storage` maps each node to the one whose storage it aliases, in a graph
    that scatters values into tensors."""

    roles: Mapping[fx.Node, Role]
    reasons: Mapping[fx.Node, str]
    vertices: tuple[fx.Node, ...]
    number: Mapping[fx.Node, int]
    edges: tuple[tuple[int, int], ...]
    reads: Mapping[fx.Node, tuple[Read, ...]]
    readers: Mapping[fx.Node, tuple[int, ...]]
    exported: frozenset[fx.Node]
    transparent: frozenset[fx.Node]
    sizing: Sizing
    halves: Mapping[int, tuple[str, bool]]
    updates: frozenset[int]
    storage: Mapping[fx.Node, fx.Node]


def not_lowered(node: fx.Node) -> str | None:
    """Why a compute node runs as its ATen call; None where a kernel can hold it."""
    reason = ops.unsupported(node)
    if reason is not None:
        return reason
    kind = ops.kind_of(node)
    if kind not in LOWERED:
        return f"{node.target} is {kind.value if kind else 'unknown'}: not a pointwise, layout or reduction op"
    if effectful(node):
        return f"{node.target} has a side effect"
    if not is_tensor(node):
        return f"{node.target} returns no single tensor"
    device = node.meta["val"].device
    if device.type not in ("cuda", "cpu"):
        return f"device {device} is not one that Triton serves"
    return None


def gather_facts(graph: fx.Graph, barred: Mapping[fx.Node, str]) -> Facts:
    """The facts of a graph.  `barred` nodes are EXTERN for the given reason."""
    roles: dict[fx.Node, Role] = {}
    reasons: dict[fx.Node, str] = {}
    origins: dict[fx.Node, tuple[fx.Node, ...]] = {}  # the vertices on which a node's value stands
    edges: list[tuple[fx.Node, fx.Node]] = []
    for node in graph.nodes:
        below = tuple(dict.fromkeys(o for n in node.all_input_nodes for o in origins[n]))
        role, reason = _role(node, roles, bool(below), barred)
        roles[node] = role
        if reason:
            reasons[node] = reason
        vertex = role in (Role.KERNEL, Role.EXTERN, Role.HOST)
        if vertex:
            edges.extend((o, node) for o in below)
        origins[node] = (node,) if vertex else below
    edges.extend((a, b) for a, b in order_edges(graph.nodes) if {roles[a], roles[b]}.isdisjoint({Role.SEEN}))
    vertices = tuple(n for n in graph.nodes if roles[n] in (Role.KERNEL, Role.EXTERN, Role.HOST))
    number = {n: i for i, n in enumerate(vertices)}
    reads = {n: _reads(n) for n in vertices if roles[n] is not Role.HOST}
    readers = _readers(vertices, number, roles, reads)
    unread = (n for n in vertices if roles[n] is Role.KERNEL and n not in readers)  # written all the same
    return Facts(
        roles, reasons, vertices, number, tuple(dict.fromkeys((number[a], number[b]) for a, b in edges)), reads,
        readers, _exported(graph.nodes, roles).union(unread), _transparent(graph.nodes, roles), Sizing(graph.nodes),
        {number[n]: n.meta[HALF_MARK] for n in vertices if HALF_MARK in n.meta},
        frozenset(number[n] for n in vertices if UPDATE_MARK in n.meta),
        storages(graph.nodes) if any(n.target is SCATTER_INTO for n in vertices) else {})


def _transparent(nodes: Iterable[fx.Node], roles: Mapping[fx.Node, Role]) -> frozenset[fx.Node]:
    splits = (n for n in nodes if ops.is_view(n) and not is_tensor(n))
    return frozenset(n for n in nodes if roles[n] is Role.SEEN and views.transparent(n)).union(splits)


def _role(
    node: fx.Node, roles: Mapping[fx.Node, Role], stands_on_vertex: bool, barred: Mapping[fx.Node, str],
) -> tuple[Role, str]:
    if node.op == "output":
        return Role.OUTPUT, ""
    if node.op in ("placeholder", "get_attr"):
        return Role.INPUT, ""
    part = node.op == "call_function" and node.target is operator.getitem
    if ops.is_view(node) or part and ops.is_view(node.all_input_nodes[0]):
        opaque = is_tensor(node) and not views.transparent(node) and stands_on_vertex
        return (Role.HOST if opaque else Role.SEEN), ""
    if part:
        return Role.SEEN, ""
    if _is_size(node):
        return (Role.HOST if stands_on_vertex else Role.SEEN), ""
    if ops.is_write_back(node):
        return (Role.HOST if stands_on_vertex else Role.SEEN), ""
    reason = barred.get(node) or not_lowered(node)
    if reason is None:
        return Role.KERNEL, ""
    return Role.EXTERN, "; ".join([reason, *([node.meta[REFUSED]] if REFUSED in node.meta else [])])


def _is_size(node: fx.Node) -> bool:
    """Whether a node computes a number on the host from numbers or from a tensor's sizes."""
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.startswith("aten::sym_"):
        return True
    value = node.meta.get("val")
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)) \
        and not any(is_tensor(n) for n in node.all_input_nodes)


def _reads(node: fx.Node) -> tuple[Read, ...]:
    operands = node.all_input_nodes[node.target is SCATTER_INTO:]  # it reads nothing of what it stores in
    return tuple(Read(views.source(n), n) for n in operands if is_tensor(n))


def _readers(
    vertices: Iterable[fx.Node], number: Mapping[fx.Node, int], roles: Mapping[fx.Node, Role],
    reads: Mapping[fx.Node, tuple[Read, ...]],
) -> Mapping[fx.Node, tuple[int, ...]]:
    found: dict[fx.Node, dict[int, None]] = {}
    for node in vertices:
        if roles[node] is Role.KERNEL:
            for read in reads[node]:
                found.setdefault(read.source, {})[number[node]] = None
    return {source: tuple(users) for source, users in found.items()}


def _exported(nodes: Iterable[fx.Node], roles: Mapping[fx.Node, Role]) -> frozenset[fx.Node]:
    """The KERNEL nodes that must be written because something other than a kernel reads them."""
    found: set[fx.Node] = set()
    for node in nodes:
        if roles[node] in (Role.EXTERN, Role.HOST, Role.OUTPUT):
            found.update(_materialised(node.all_input_nodes, roles))
    return frozenset(found)


def _materialised(operands: Collection[fx.Node], roles: Mapping[fx.Node, Role]) -> Iterable[fx.Node]:
    pending: list[Any] = list(operands)
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if roles[node] is Role.KERNEL:
            yield node
        elif roles[node] is Role.SEEN and node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
