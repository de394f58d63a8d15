"""Growth: groups merge, most saved time first, until no rule-abiding merge with gain is left.

Enters: a Context and fuel, of which every merge takes one.  Leaves: the final groups; the quotient has been
merged accordingly.  What `fxfuser.fuse()` asks for comes first, and only has to be legal.  Why one pass over a heap
reaches a fixed point: whether two groups may merge, and what it gains, depends on those two groups and on the paths
between them; a path goes only when a group on it joins one of the two, and then all candidates of the new group are
put on the heap.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Collection, Iterator, Sequence

from fxfuser.fuel import Fuel
from fxfuser.segmenter.cost import transfer_time
from fxfuser.segmenter.facts import Role
from fxfuser.segmenter.group import Group, atom, saved_bytes
from fxfuser.segmenter.requests import blocks
from fxfuser.segmenter.rules import LEGAL, NEAR, RULES, Candidate, Context, Rule, first_reject

REQUESTED, VERTICAL, SIBLING = -1, 0, 1
Entry = tuple[int, float, int, int, int, int]  # phase, -gain, roots, versions; heap order, so deterministic


class Growth:
    """The groups of one segmentation while they grow."""

    def __init__(self, context: Context, fuel: Fuel) -> None:
        self._context = context
        self._fuel = fuel
        facts = context.facts
        self.groups: dict[int, Group] = {
            v: atom(v, facts) for v, node in enumerate(facts.vertices) if facts.roles[node] is Role.KERNEL}
        self._version = [0] * len(facts.vertices)
        self._heap: list[Entry] = []

    def along_edges(self) -> None:
        """What `fxfuser.fuse()` asks for, then merges of a group with one that reads from it."""
        for block in blocks(self._context.facts):
            self._grant(block.kernels, siblings=False)
            self._grant(block.kernels, siblings=True)
        for root in self.groups:
            for other in self._context.quotient.succs[root]:
                self._push(VERTICAL, root, other)
        self._drain(siblings=False)

    def around(self, products: Collection[int]) -> None:
        """Merges of groups that read one product, which they would else read each for itself."""
        quotient = self._context.quotient
        for product in products:
            readers = sorted(quotient.succs[product])
            for a, b in itertools.combinations(readers, 2):
                self._push(SIBLING, a, b)
        for root in self._merges(RULES):
            for other in sorted(quotient.succs[root] | quotient.preds[root]):
                self._push(VERTICAL, root, other)
                for beside in sorted(quotient.succs[other] - {root}) if other in products else ():
                    self._push(SIBLING, root, beside)

    def beside(self) -> None:
        """Merges of siblings, until nothing is left to merge."""
        for root in tuple(self.groups):
            self._push_siblings(root, later_only=True)
        self._drain(siblings=True)

    def _drain(self, siblings: bool) -> None:
        quotient = self._context.quotient
        for root in self._merges(RULES):
            for other in sorted(quotient.succs[root] | quotient.preds[root]):
                self._push(VERTICAL, root, other)
            if siblings:
                self._push_siblings(root, later_only=False)

    def _merges(self, rules: Sequence[Rule]) -> Iterator[int]:
        """The root of each merge, whose candidates the caller puts on the heap before the next."""
        while self._heap:
            _, _, a, b, version_a, version_b = heapq.heappop(self._heap)
            if self._version[a] != version_a or self._version[b] != version_b:
                continue
            root = self._try(a, b, rules)
            if root is not None:
                yield root

    def _grant(self, members: Sequence[int], siblings: bool) -> None:
        """Merges the groups of these vertices with each other, whether it pays or not."""
        for root in self._roots(members):
            self._push_inside(root, members, siblings, later_only=True)
        for root in self._merges(LEGAL):
            self._push_inside(root, members, siblings, later_only=False)

    def _roots(self, members: Sequence[int]) -> list[int]:
        """The groups of these vertices in the quotient's order."""
        quotient = self._context.quotient
        return sorted({quotient.find(m) for m in members}, key=quotient.label.__getitem__)

    def _push_inside(self, root: int, members: Sequence[int], siblings: bool, later_only: bool) -> None:
        """Put a group's merges on the heap: along its edges, or with its neighbours in the quotient's order."""
        quotient, roots = self._context.quotient, self._roots(members)
        place = roots.index(root)
        near = roots[0 if later_only or not siblings else max(0, place - NEAR):place + NEAR + 1]
        linked = quotient.succs[root] if later_only else quotient.succs[root] | quotient.preds[root]
        for other in near if siblings else sorted(linked.intersection(roots)):
            if other != root and (not later_only or quotient.label[other] > quotient.label[root]):
                self._push(REQUESTED, root, other)

    def _try(self, a: int, b: int, rules: Sequence[Rule]) -> int | None:
        quotient = self._context.quotient
        if quotient.label[a] > quotient.label[b]:
            a, b = b, a
        candidate = Candidate(self.groups[a], self.groups[b], self._context)
        if first_reject(candidate, rules) is not None or not self._fuel.take(lambda: _sides(candidate)):
            return None
        clearance = candidate.clearance
        assert clearance is not None, "the order rule holds"
        group = candidate.merged
        root = quotient.merge(clearance)
        for old in (a, b):
            del self.groups[old]
            self._version[old] += 1
        self.groups[root] = group.rooted(root)
        return root

    def _push(self, phase: int, a: int, b: int) -> None:
        left, right = self.groups.get(a), self.groups.get(b)
        if left is None or right is None or left.device != right.device:
            return
        context = self._context
        saved = saved_bytes(left, right, context.facts, context.quotient)
        gain = transfer_time(context.rates, saved) + context.rates.launch
        first, second = min(a, b), max(a, b)
        heapq.heappush(
            self._heap, (phase, -gain, first, second, self._version[first], self._version[second]))

    def _push_siblings(self, root: int, later_only: bool) -> None:
        quotient = self._context.quotient
        linked = quotient.succs[root] | quotient.preds[root]
        for other in self._neighbourhood(root, later_only):
            if other not in linked and other in self.groups:
                self._push(SIBLING, root, other)

    def _neighbourhood(self, root: int, later_only: bool) -> Iterator[int]:
        """The groups with a member at most NEAR vertices from one of this group's."""
        find, count = self._context.quotient.find, len(self._version)
        seen = {root}
        start = 0
        for member in self.groups[root].members:
            start = max(start, member - NEAR)
            stop = min(count, member + NEAR + 1)
            for vertex in range(start, stop):
                other = find(vertex)
                if other not in seen:
                    seen.add(other)
                    if not later_only or other > root:
                        yield other
            start = max(start, stop)


def _sides(candidate: Candidate) -> str:
    """The two groups of a merge, a line of node names each."""
    vertices = candidate.context.facts.vertices
    sides = [", ".join(vertices[m].name for m in group.members) for group in (candidate.a, candidate.b)]
    return "\n".join(sides)
