"""Marks what the backward should compute again because its sources are much smaller than itself.

    c = aten.cos(aten.mul(positions, frequencies))    # [S, 1] x [D] -> [S, D]
                                                 ->   c and the product carry recompute = MUST_RECOMPUTE

The cut between forward and backward weighs bytes saved against heuristics for what recomputation costs, and may save
a table of size S x D that follows from S + D numbers.  Marked are pointwise, layout, view and factory nodes that
follow from inputs of at most a quarter of their own bytes through at most CHAIN such nodes; a node that the user's
own checkpointing has marked is left alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxfuser.ops import Kind, kind_of
from fxfuser.passes.aliasing import is_pure
from fxfuser.passes.funnel import Scope

RATIO = 4  # how many times its sources' bytes a node must have
CHAIN = 24  # nodes between the sources and the node
CHEAP = frozenset({Kind.POINTWISE, Kind.LAYOUT, Kind.VIEW, Kind.FACTORY})


@dataclass(frozen=True)
class Origin:
    """The inputs that a node follows from, and through how many nodes."""

    inputs: frozenset[fx.Node]
    steps: int


def recompute_from_less(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    origins: dict[fx.Node, Origin] = {}
    for node in graph.nodes:
        origin = _origin(node, origins)
        if origin is None:
            continue
        origins[node] = origin
        if node.op != "call_function" or "recompute" in node.meta or not _is_larger(node, origin):
            continue
        if not scope.fuel.take():
            break
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        changes += 1
    return changes


def _origin(node: fx.Node, origins: dict[fx.Node, Origin]) -> Origin | None:
    if node.op == "placeholder":
        return None if node.name.startswith("tangents") else Origin(frozenset({node}), 0)
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


def _is_larger(node: fx.Node, origin: Origin) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    needed = sum(_bytes(n.meta["val"]) for n in origin.inputs if isinstance(n.meta.get("val"), torch.Tensor))
    return _bytes(value) >= RATIO * needed


def _bytes(value: torch.Tensor) -> int:
    """The bytes of the elements, symbolic sizes by their hints, without a guard."""
    total = value.dtype.itemsize
    for size in value.shape:
        known = size if isinstance(size, int) else size.node.hint
        total *= 1 if known is None else int(known)
    return total
