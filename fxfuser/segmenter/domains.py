"""Domains of groups, resolved at most once for each distinct structure.

Enters: members and outputs of a group.  Leaves: a `Verdict`: whether the group has a domain, and what of it
the rules ask.  Two groups of equal structure (see structural_hash.Shape) are resolved once: the layers of a
model share one domain but for the names of their nodes.  For a verdict, what repeats within a group is resolved
once too (see repeats.Essence), but never for the domain that a segment carries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Iterable, Mapping, Sequence

from torch import fx

from fxfuser import ops
from fxfuser.domain.index import Axis, linear
from fxfuser.domain.points import FOLDS, Domain, Point, PointKind, Reject
from fxfuser.domain.resolve import resolve
from fxfuser.domain.tensors import strides_of
from fxfuser.segmenter.cost import CONTIGUOUS
from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.group import Group
from fxfuser.segmenter.repeats import essence
from fxfuser.segmenter.structural_hash import Shape, Signatures
from fxfuser.segmenter.transplant import transplant

_NO_COPIES: Mapping[fx.Node, int] = {}

SECTOR_WASTE = 8  # a 32-byte sector for each fp32 element


@dataclass(frozen=True)
class Verdict:
    """`programs` points along the program axes, in which `points` pieces of work are independent; `work`
    weighted operations, recomputation included."""

    reject: Reject | None
    programs: int = 1
    points: int = 1
    work: float = 0.0


class Domains:
    """The domains of one segmentation's groups.  Of a group that holds one of the `exact` vertices all is resolved."""

    def __init__(self, facts: Facts, exact: frozenset[int] = frozenset()) -> None:
        self._facts = facts
        self._exact = exact
        self._signatures = Signatures(facts)
        self._verdicts: dict[Hashable, Verdict] = {}
        self._resolved: dict[Hashable, tuple[Shape, Domain | Reject]] = {}
        self._domains: dict[tuple[tuple[int, ...], tuple[fx.Node, ...]], Domain | Reject] = {}

    def verdict(self, group: Group) -> Verdict:
        """What the rules ask of the group's domain."""
        nodes, outputs, copies = self._nodes(group), group.outputs, _NO_COPIES
        if self._exact.isdisjoint(group.members):
            part = essence(nodes, outputs, self._facts, self._signatures)
            nodes, outputs, copies = part.nodes, part.outputs, part.copies
        shape = self._signatures.shape(nodes, outputs)
        counts = tuple(copies.get(n, 1) for n in shape.nodes) if copies else ()
        known = self._verdicts.get((shape.key, counts))
        if known is None:
            same, domain = self._resolve(nodes, outputs, shape)
            known = self._verdicts[shape.key, counts] = self._judge(domain, dict(zip(same.nodes, counts)))
        return known

    def domain(self, group: Group) -> Domain | Reject:
        """The group's domain: that of an equal group with this group's nodes, or else resolved."""
        place = (group.members, group.outputs)
        known = self._domains.get(place)
        if known is None:
            nodes = self._nodes(group)
            mine = self._signatures.shape(nodes, group.outputs)
            shape, known = self._resolve(nodes, group.outputs, mine)
            if isinstance(known, Domain) and shape.nodes != mine.nodes:
                known = transplant(known, dict(zip(shape.nodes, mine.nodes)))
            self._domains[place] = known
        return known

    def _resolve(
        self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], shape: Shape
    ) -> tuple[Shape, Domain | Reject]:
        known = self._resolved.get(shape.key)
        if known is None:
            known = self._resolved[shape.key] = (shape, resolve(nodes, outputs))
        return known

    def _nodes(self, group: Group) -> tuple[fx.Node, ...]:
        return tuple(self._facts.vertices[m] for m in group.members)

    def _judge(self, domain: Domain | Reject, copies: Mapping[fx.Node, int]) -> Verdict:
        if isinstance(domain, Reject):
            return Verdict(domain)
        sizing = self._facts.sizing
        points = domain.points()
        program = frozenset(domain.program)
        work = 0.0
        for point in points:
            if point.node is None or point.kind not in (PointKind.OP, *FOLDS):
                continue
            evaluated = sizing.product(axis.size for axis in point.deps.union(program, *point.axes))
            row = ops.row(point.node.target)
            work += evaluated * (row.cost if row else 1) * copies.get(point.node, 1)
        programs = sizing.product(axis.size for axis in domain.program)
        independent = programs
        if any(axis not in program for axis in domain.axes):  # else one axis is all there is, and any run will do
            independent //= self._run(points, program, copies)
        return Verdict(None, programs, max(1, independent), work)

    def _run(self, points: Iterable[Point], program: frozenset[Axis], copies: Mapping[fx.Node, int]) -> int:
        """Neighbouring elements that a program must take, where a good part of the bytes is contiguous along a
        program axis: taken one by one, each of those elements would cost a sector of memory."""
        sizing = self._facts.sizing
        weight: dict[Axis | None, int] = {}
        for node, axis in {p.node: self._contiguous(p) for p in points if p.kind is PointKind.LOAD}.items():
            if node is not None:
                weight[axis] = weight.get(axis, 0) + sizing.bytes(node) * copies.get(node, 1)
        along = {a: n for a, n in weight.items() if a is not None and a in program}
        if SECTOR_WASTE * sum(along.values()) < sum(weight.values()) or not along:
            return 1
        most = max(along, key=along.__getitem__)
        return min(CONTIGUOUS, max(1, sizing.number(most.size)))

    def _contiguous(self, point: Point) -> Axis | None:
        """The axis along which a load's neighbours in memory lie."""
        assert point.node is not None
        offset = linear(point.index, strides_of(point.node))
        return next((a for a, k in offset.terms if k == 1 and isinstance(a, Axis)), None)
