"""Growth: groups merge, most saved time first, until no rule-abiding merge with gain is left.

Enters: a Context and fuel, of which every merge takes one.  Leaves: the final groups; the quotient has been
merged accordingly.  Why one pass over a heap reaches a fixed point: whether two groups may merge, and what it
gains, depends on those two groups and on the paths between them; a path goes only when a group on it joins one
of the two, and then all candidates of the new group are put on the heap.
"""

from __future__ import annotations

import heapq
from typing import Iterator

from fxfuser.fuel import Fuel
from fxfuser.segmenter.cost import transfer_time
from fxfuser.segmenter.facts import Role
from fxfuser.segmenter.group import Group, atom, saved_bytes
from fxfuser.segmenter.rules import NEAR, Candidate, Context, first_reject

VERTICAL, SIBLING = 0, 1
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

    def run(self) -> dict[int, Group]:
        """Merge until nothing is left to merge; the final groups by root."""
        for root in self.groups:
            for other in self._context.quotient.succs[root]:
                self._push(VERTICAL, root, other)
        self._drain(siblings=False)
        for root in tuple(self.groups):
            self._push_siblings(root, later_only=True)
        self._drain(siblings=True)
        return self.groups

    def _drain(self, siblings: bool) -> None:
        while self._heap:
            _, _, a, b, version_a, version_b = heapq.heappop(self._heap)
            if self._version[a] != version_a or self._version[b] != version_b:
                continue
            root = self._try(a, b)
            if root is None:
                continue
            quotient = self._context.quotient
            for other in sorted(quotient.succs[root] | quotient.preds[root]):
                self._push(VERTICAL, root, other)
            if siblings:
                self._push_siblings(root, later_only=False)

    def _try(self, a: int, b: int) -> int | None:
        quotient = self._context.quotient
        if quotient.label[a] > quotient.label[b]:
            a, b = b, a
        candidate = Candidate(self.groups[a], self.groups[b], self._context)
        if first_reject(candidate) is not None or not self._fuel.take(lambda: _sides(candidate)):
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
