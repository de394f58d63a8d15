"""Marks what the backward should compute again instead of reading it back.

    c = aten.cos(aten.mul(positions, frequencies))    # [S, 1] x [D] -> [S, D]
    h = aten.mul(aten.sub(x, mean), rsqrt)            # x: [S, D], mean and rsqrt: [S, 1]
                                                 ->   c, h and what they are made of carry MUST_RECOMPUTE

The cut between forward and backward weighs bytes saved against heuristics for what recomputation costs, and may save
a table of size S x D that follows from S + D numbers, or a normalised copy beside the tensor itself.  Marked are
- pointwise, layout, view and factory nodes that follow from inputs of at most a quarter of their own bytes through at
  most CHAIN such nodes, or from positions, labels or masks of no more bytes, which whoever passes them keeps (of more
  they are saved as the smaller copy, as eager does: the input may be written to before the backward), and
- pointwise nodes of one large operand, no larger than the result, and otherwise of rows or columns, whose readers in
  the backward are kernels: a library call would need them in memory all the same; and
- what matrix products of the backward read, where it follows so, cheaply, from a tensor that kernels of the backward
  read anyway: one of those writes it on its way, which takes less time than memory is worth (by their bytes, GPT-2's
  normalised operands are a tenth of all that its training holds, and their writing is about 0.4% of a step).
A node that the user's own checkpointing has marked is left alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxfuser.ops import Kind, kind_of, row, unsupported
from fxfuser.passes.aliasing import is_pure
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import bytes_of

RATIO = 4  # how many times its sources' bytes a node must have
TRANSCENDENTAL = 16  # cost of such an op in the op table
MARK = CheckpointPolicy.MUST_RECOMPUTE
SMALL = 16  # how many times smaller than the result the row and column operands are at least
CHAIN = 24  # nodes between the sources and the node
FUSED = frozenset({Kind.POINTWISE, Kind.LAYOUT, Kind.REDUCTION})
CHEAP = frozenset({Kind.POINTWISE, Kind.LAYOUT, Kind.VIEW, Kind.FACTORY})


@dataclass(frozen=True)
class Origin:
    """The inputs that a node follows from, and through how many nodes."""

    inputs: frozenset[fx.Node]
    steps: int


def recompute_from_less(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    origins: dict[fx.Node, Origin] = {}
    backward = _backward(graph)
    for node in graph.nodes:
        origin = _origin(node, origins)
        if origin is not None:
            origins[node] = origin
        if node.op != "call_function" or "recompute" in node.meta or node in backward:
            continue
        if origin is not None and _need_not_be_saved(node, origin) or _follows_from_one(node, backward):
            found = [node]
        else:
            found = _written_again(node, backward)
        if not found:
            continue
        if not scope.fuel.take():
            break
        for one in found:
            one.meta.setdefault("recompute", MARK)
        changes += 1
    return changes


def _backward(graph: fx.Graph) -> frozenset[fx.Node]:
    """The nodes that depend on a tangent."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_tangent(node) or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_tangent(node: fx.Node) -> bool:
    return node.op == "placeholder" and node.name.startswith("tangents")


def _follows_from_one(node: fx.Node, backward: frozenset[fx.Node]) -> bool:
    """The second rule of the module's text."""
    large = _large_operand(node)
    if large is None or bytes_of(large.meta["val"]) > bytes_of(node.meta["val"]) or len(node.all_input_nodes) < 2:
        return False
    readers = _readers(node, backward)
    return bool(readers) and all(_is_fused(r) for r in readers)


def _written_again(node: fx.Node, backward: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes of the third rule that end in `node`; none where it does not hold."""
    readers = _readers(node, backward)
    if not any(kind_of(r) is Kind.GEMM for r in readers) or not all(
            _is_fused(r) or kind_of(r) is Kind.GEMM for r in readers):
        return []
    chain: list[fx.Node] = []
    below: fx.Node | None = node
    while below is not None and (not chain or not any(_is_fused(r) for r in _readers(below, backward))):
        found = row(below.target)
        if found is None or found.cost >= TRANSCENDENTAL or below.meta.get("recompute", MARK) is not MARK:
            return []
        chain.append(below)
        below = _large_operand(below)
    return chain if below is not None and bytes_of(below.meta["val"]) >= bytes_of(node.meta["val"]) else []


def _large_operand(node: fx.Node) -> fx.Node | None:
    """Of a pointwise node the only operand of about its size, behind views."""
    if kind_of(node) is not Kind.POINTWISE or not is_pure(node) or unsupported(node) is not None:
        return None
    own = bytes_of(node.meta["val"])
    tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    large = [n for n in tensors if bytes_of(n.meta["val"]) * SMALL > own]
    if len(large) != 1:
        return None
    found = large[0]
    while kind_of(found) is Kind.VIEW and found.all_input_nodes:
        found = found.all_input_nodes[0]
    return found


def _is_fused(node: fx.Node) -> bool:
    return kind_of(node) in FUSED and unsupported(node) is None


def _readers(node: fx.Node, backward: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes of the backward that read this one, behind all views."""
    found: list[fx.Node] = []
    for user in node.users:
        if kind_of(user) is Kind.VIEW:
            found += _readers(user, backward)
        elif user in backward:
            found.append(user)
    return found


def _origin(node: fx.Node, origins: dict[fx.Node, Origin]) -> Origin | None:
    if node.op == "placeholder":
        return None if _is_tangent(node) else Origin(frozenset({node}), 0)
    if isinstance(node.meta.get("val"), (int, torch.SymInt)):
        return Origin(frozenset(), 0)
    if node.op != "call_function" or not is_pure(node):
        return None
    if kind_of(node) not in CHEAP and node.target is not operator.getitem:
        return None
    sources = [origins.get(n) for n in node.all_input_nodes]
    found = [s for s in sources if s is not None]
    if len(found) < len(sources):
        return None
    steps = 1 + sum(s.steps for s in found)
    return Origin(frozenset().union(*(s.inputs for s in found)), steps) if steps <= CHAIN else None


def _need_not_be_saved(node: fx.Node, origin: Origin) -> bool:
    """The first rule of the module's text."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    sources = [v for n in origin.inputs if isinstance(v := n.meta.get("val"), torch.Tensor)]
    counted = bool(sources) and not any(v.is_floating_point() or v.is_complex() for v in sources)
    return bytes_of(value) >= (1 if counted else RATIO) * sum(map(bytes_of, sources))
