"""What of a group is there more than once.

Enters: the nodes of a group and those it writes.  Leaves: its `Essence`, one of each kind of its parts, and how often
each is there.  Parts are what no data connects: they share neither an edge nor a tensor that they read.  Copies of a
part are laid out as the first is, so the essence has the axes and roles of the whole: the twelve equal sums over rows
of a model's backward are resolved as one while they grow together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Mapping, Sequence

from torch import fx

from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.structural_hash import Signatures


@dataclass(frozen=True, eq=False)
class Essence:
    """`nodes` and `outputs` in the group's order; `copies` of each of the nodes, and of the tensors that they read,
    are in the group."""

    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    copies: Mapping[fx.Node, int]


def essence(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], facts: Facts, signatures: Signatures
) -> Essence:
    """The first of each kind of part."""
    kinds: dict[Hashable, list[Sequence[fx.Node]]] = {}
    parts = _parts(nodes, facts)
    if len(parts) > 1:
        written = frozenset(outputs)
        for part in parts:
            kinds.setdefault(signatures.shape(part, (n for n in part if n in written)).key, []).append(part)
    if len(kinds) == len(parts) or not kinds:
        return Essence(tuple(nodes), tuple(outputs), {})
    copies: dict[fx.Node, int] = {}
    kept: set[fx.Node] = set()
    for alike in kinds.values():
        kept.update(alike[0])
        for node in alike[0]:
            copies.update(dict.fromkeys((node, *(r.source for r in facts.reads[node])), len(alike)))
    return Essence(tuple(n for n in nodes if n in kept), tuple(n for n in outputs if n in kept), copies)


def _parts(nodes: Sequence[fx.Node], facts: Facts) -> Sequence[Sequence[fx.Node]]:
    """The nodes in sets that no data connects, each in the group's order, the one with the first node first."""
    parent: dict[fx.Node, fx.Node] = {}

    def find(node: fx.Node) -> fx.Node:
        while (above := parent.setdefault(node, node)) is not node:
            parent[node] = parent[above]
            node = above
        return node

    for node in nodes:
        for read in facts.reads[node]:
            parent[find(read.source)] = find(node)
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(find(node), []).append(node)
    return list(found.values())
