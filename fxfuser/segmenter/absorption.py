"""Absorption: products take whole groups beside them into their kernels, most saved time first, or most saved bytes
where time is not asked for.

Enters: the groups that have grown along edges, before siblings merge: what shares nothing with a product should not
stand in its way.  Leaves: the anchors with what they absorbed, which the groups lose; the quotient has been merged
accordingly.  Every absorption takes one of the fuel.  One pass over a heap is enough for the reason that holds for
growth: what may be absorbed depends on two sides and the paths between them, and whenever an anchor grows, all that is
beside it is put on the heap again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import partial
from typing import Callable, Iterator, Mapping, Sequence

from fxfuser.domain.products import matrix_product
from fxfuser.fuel import Fuel
from fxfuser.ops import Kind, kind_of
from fxfuser.segmenter.anchor_rules import Proposal, first_reject, product
from fxfuser.segmenter.anchors import Anchor, GemmDomains, Surroundings, feeds
from fxfuser.segmenter.facts import Facts, Role
from fxfuser.segmenter.group import Group
from fxfuser.segmenter.rules import Context

REQUESTED, EPILOGUE, PROLOGUE = -1, 0, 1
# phase, -gain, the first product, roots of groups and of further anchors, the anchor's version
Entry = tuple[int, float, int, tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True, eq=False)
class Partition:
    """The final groups and the anchors of a graph, each by its root."""

    groups: Mapping[int, Group]
    anchors: Mapping[int, Anchor]
    around: Surroundings

    @property
    def context(self) -> Context:
        return self.around.context


def anchored(facts: Facts) -> Iterator[int]:
    """The vertices of products that no reason but their kind makes ATen calls."""
    return (v for v, node in enumerate(facts.vertices)
            if facts.roles[node] is Role.EXTERN and kind_of(node) is Kind.GEMM and matrix_product(node) is not None)


class Absorption:
    """The products of one graph while they absorb what pays; `mode` is the option `gemm`.  Takes from `groups`."""

    def __init__(self, groups: dict[int, Group], context: Context, mode: str, fuel: Fuel) -> None:
        self._groups, self._fuel = groups, fuel
        self._around = Surroundings(context, mode, GemmDomains(context.facts))
        self._anchors = {v: Anchor(v, (v,)) for v in anchored(context.facts)}
        self._version = dict.fromkeys(self._anchors, 0)  # by first product, which an anchor keeps
        self._heap: list[Entry] = []
        self.partition = Partition(groups, self._anchors, self._around)

    def readers(self) -> None:
        """Absorb what reads the products, before siblings merge."""
        self._run((self._push_readers,))

    def makers(self) -> None:
        """Absorb what only one product reads, after siblings have merged: small casts of weights and biases that share
        a launch with others cost little where they are."""
        self._run((self._push_makers, self._push_readers))

    def chains(self) -> None:
        """Join products that need another's rows with it, after both have absorbed what they can."""
        self._run((self._push_chains,))

    def _run(self, pushes: Sequence[Callable[[Anchor], None]]) -> None:
        if self._around.mode == "library":
            return
        for push in pushes:
            for anchor in tuple(self._anchors.values()):
                push(anchor)
        while self._heap:
            _, _, first, groups, others, version = heapq.heappop(self._heap)
            if self._version.get(first) != version or not self._groups.keys() >= set(groups):
                continue
            proposal = self._proposal(first, groups, others)
            if proposal is not None and first_reject(proposal) is None and self._fuel.take(partial(_sides, proposal)):
                made = self._merge(proposal)
                for push in pushes:
                    push(made)

    def _proposal(self, first: int, groups: tuple[int, ...], others: tuple[int, ...]) -> Proposal | None:
        """None where one of the further anchors has changed."""
        anchors = [self._anchor_of(first), *(self._anchor_of(v) for v in others)]
        if any(a.products[0] != v for a, v in zip(anchors, (first, *others))):
            return None
        return Proposal(tuple(anchors), tuple(self._groups[g] for g in groups), self._around)

    def _anchor_of(self, vertex: int) -> Anchor:
        return self._anchors[self._around.context.quotient.find(vertex)]

    def _push_readers(self, anchor: Anchor) -> None:
        quotient = self._around.context.quotient
        for root in sorted(quotient.succs[anchor.root]):
            group = self._groups.get(root)
            if group is None:
                continue
            self._push(EPILOGUE, anchor, (root,))
            if group.reduces:  # a long reduction comes in two steps, neither of which a tile can hold without the other
                for reader in sorted(quotient.succs[root]):
                    if reader in self._groups and self._groups[reader].reduces:
                        self._push(EPILOGUE, anchor, (root, reader))
            others = tuple(sorted(
                self._anchors[p].products[0] for p in quotient.preds[root] if p in self._anchors and p != anchor.root))
            if others:
                self._push(EPILOGUE, anchor, (root,), others)

    def _push_makers(self, anchor: Anchor) -> None:
        quotient, facts = self._around.context.quotient, self._around.context.facts
        for root in sorted(quotient.preds[anchor.root]):
            group = self._groups.get(root)
            if group is not None and quotient.succs[root] == {anchor.root}:
                self._push(PROLOGUE if feeds(group, anchor, facts) else EPILOGUE, anchor, (root,))

    def _push_chains(self, anchor: Anchor) -> None:
        """A product behind rows that the anchor reduces, with what lies between or with nothing."""
        quotient = self._around.context.quotient
        for root in sorted(quotient.succs[anchor.root]):
            if root in self._anchors and any(g.reduces for g in anchor.groups):
                self._push(EPILOGUE, anchor, (), (self._anchors[root].products[0],))
            elif root in self._groups and self._groups[root].reduces:
                for second in sorted(quotient.succs[root]):
                    if second in self._anchors and second != anchor.root:
                        self._push(EPILOGUE, anchor, (root,), (self._anchors[second].products[0],))

    def _push(self, phase: int, anchor: Anchor, groups: tuple[int, ...], others: tuple[int, ...] = ()) -> None:
        first = anchor.products[0]
        proposal = self._proposal(first, groups, others)
        assert proposal is not None, "its neighbours are those of now"
        if product(proposal) is not None:  # what it would take cannot be told
            return
        gain = proposal.saved_bytes if self._around.mode == "fused" else proposal.apart - proposal.together
        if proposal.requested:
            phase = REQUESTED
        heapq.heappush(self._heap, (phase, -gain, first, groups, others, self._version[first]))

    def _merge(self, proposal: Proposal) -> Anchor:
        quotient = self._around.context.quotient
        for group in proposal.groups:
            del self._groups[group.root]
        for anchor in proposal.anchors:
            del self._anchors[anchor.root]
            self._version[anchor.products[0]] += 1
        root, *rest = proposal.roots
        for part in rest:
            clearance = quotient.clearance(root, part)
            assert clearance is not None, "the order rule holds"
            root = quotient.merge(clearance)
        whole = proposal.whole
        made = self._anchors[root] = Anchor(root, whole.products, whole.groups)
        return made


def _sides(proposal: Proposal) -> str:
    """The parts of an absorption, a line of node names each."""
    vertices = proposal.facts.vertices
    parts = [*(a.members for a in proposal.anchors), *(g.members for g in proposal.groups)]
    return "\n".join(", ".join(vertices[m].name for m in members) for members in parts)
