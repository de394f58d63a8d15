"""Domains of groups, resolved at most once for each distinct structure.

Enters: members and outputs of a group.  Leaves: a `Verdict`: whether the group has a domain, and what of it
the rules ask.  Two groups of equal structure (see structural_hash.shape_key) have equal verdicts, so the layers of
a model share them; a `Domain` names nodes and is resolved for each final group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Protocol, Sequence

from torch import fx

from fxfuser import ops
from fxfuser.domain.points import Domain, PointKind, Reject
from fxfuser.domain.resolve import resolve
from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.group import Group
from fxfuser.segmenter.structural_hash import Signatures


class Resolve(Protocol):
    """The domain stage's entry."""

    def __call__(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Domain | Reject: ...


@dataclass(frozen=True)
class Verdict:
    """`points` pieces of work that are independent; `work` weighted operations, recomputation included."""

    reject: Reject | None
    points: int = 1
    work: float = 0.0


class Domains:
    """The verdicts of one segmentation."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._signatures = Signatures(facts)
        self._verdicts: dict[Hashable, Verdict] = {}
        self._domains: dict[tuple[tuple[int, ...], tuple[fx.Node, ...]], Domain | Reject] = {}

    def verdict(self, group: Group) -> Verdict:
        """What resolving `group` says; resolves only a structure that is new."""
        nodes = self._nodes(group)
        key = self._signatures.key(nodes, group.outputs)
        known = self._verdicts.get(key)
        if known is None:
            known = self._verdicts[key] = self._judge(self.domain(group))
        return known

    def domain(self, group: Group) -> Domain | Reject:
        """The group's domain."""
        key = (group.members, group.outputs)
        known = self._domains.get(key)
        if known is None:
            known = self._domains[key] = resolve(self._nodes(group), group.outputs)
        return known

    def _nodes(self, group: Group) -> tuple[fx.Node, ...]:
        return tuple(self._facts.vertices[m] for m in group.members)

    def _judge(self, domain: Domain | Reject) -> Verdict:
        if isinstance(domain, Reject):
            return Verdict(domain)
        number = self._facts.sizing.number
        points = 1
        for axis in domain.program:
            points *= number(axis.size)
        program = frozenset(domain.program)
        work = 0.0
        for point in domain.points():
            if point.node is None or point.kind not in (PointKind.OP, PointKind.REDUCE):
                continue
            evaluated = 1
            for axis in point.deps.union(program, *point.axes):
                evaluated *= number(axis.size)
            row = ops.row(point.node.target)
            work += evaluated * (row.cost if row else 1)
        return Verdict(None, max(1, points), work)
