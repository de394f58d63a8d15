"""The quotient graph: disjoint groups of vertices and the acyclic graph between them.

Enters: a DAG over vertices 0 .. n-1, numbered in a topological order.  Leaves: the same vertices in fewer
groups.  Invariants: the graph between groups is acyclic, and `label` is a topological order of it.

Merging two groups makes a cycle exactly when a path through a third joins them.  As in Pearce and Kelly's
dynamic topological sort (A Dynamic Topological Sort Algorithm for Directed Acyclic Graphs, JEA 2006), only
groups whose label lies between the two can be on such a path, and only those have to move.  The search runs
from both ends at once and stops when either side is exhausted, so a merge costs the smaller side; labels are
integers with gaps between them, so that side can move without renumbering the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator

GAP = 1 << 128  # between fresh labels; a place that is used again and again halves it each time
END = -1


@dataclass(frozen=True)
class Clearance:
    """Proof that no path through a third group joins `first` to `last`, and which groups a merge must move."""

    first: int
    last: int
    forward: bool  # `moved` are the descendants of `first` (else the ancestors of `last`) between the two
    moved: tuple[int, ...]


class Quotient:
    """Union-find over the vertices, adjacency and labels over the groups.  A group is named by its root vertex."""

    def __init__(self, count: int, edges: Iterable[tuple[int, int]]) -> None:
        self._parent = list(range(count))
        self.succs: list[set[int]] = [set() for _ in range(count)]
        self.preds: list[set[int]] = [set() for _ in range(count)]
        self.label = [i * GAP for i in range(count)]
        self._next = [i + 1 for i in range(count)]
        self._prev = [i - 1 for i in range(count)]  # the first one's is END
        if count:
            self._next[-1] = END
        for tail, head in edges:
            assert tail < head, "vertices must be numbered in topological order"
            self.succs[tail].add(head)
            self.preds[head].add(tail)

    def find(self, vertex: int) -> int:
        """The group that holds `vertex`."""
        parent = self._parent
        while parent[vertex] != vertex:
            parent[vertex] = parent[parent[vertex]]
            vertex = parent[vertex]
        return vertex

    def roots(self) -> Iterator[int]:
        """Every group, by the number of its root."""
        return (v for v, p in enumerate(self._parent) if v == p)

    def linked(self, a: int, b: int) -> bool:
        """Whether an edge joins the two groups."""
        return b in self.succs[a] or a in self.succs[b]

    def clearance(self, a: int, b: int) -> Clearance | None:
        """Whether groups `a` and `b` may merge; None where another path joins them."""
        first, last = (a, b) if self.label[a] < self.label[b] else (b, a)
        low, high = self.label[first], self.label[last]
        label, succs, preds = self.label, self.succs, self.preds
        below = {s for s in succs[first] if label[s] < high}
        above = {p for p in preds[last] if label[p] > low}
        if not below.isdisjoint(above):
            return None
        ahead, behind = list(below), list(above)
        while ahead and behind:
            for s in succs[ahead.pop()]:
                if label[s] < high and s not in below:
                    if s in above:
                        return None
                    below.add(s)
                    ahead.append(s)
            for p in preds[behind.pop()]:
                if label[p] > low and p not in above:
                    if p in below:
                        return None
                    above.add(p)
                    behind.append(p)
        moved = above if not behind else below
        return Clearance(first, last, moved is below, tuple(sorted(moved, key=label.__getitem__)))

    def path(self, first: int, last: int) -> tuple[int, ...]:
        """The groups on one path from `first` to `last` through at least one other; empty where there is none."""
        came: dict[int, int] = {}
        pending = [s for s in sorted(self.succs[first]) if s != last]
        came.update(dict.fromkeys(pending, first))
        while pending:
            group = pending.pop(0)
            if last in self.succs[group]:
                steps = [group]
                while came[steps[-1]] != first:
                    steps.append(came[steps[-1]])
                return tuple(reversed(steps))
            for s in sorted(self.succs[group]):
                if s not in came and self.label[s] < self.label[last]:
                    came[s] = group
                    pending.append(s)
        return ()

    def merge(self, clear: Clearance) -> int:
        """Join the two groups of a clearance that was obtained from the present state; returns the new root."""
        first, last = clear.first, clear.last
        kept, gone = (first, last) if self._degree(first) >= self._degree(last) else (last, first)
        place = last if clear.forward else first
        for group in clear.moved:
            self._unlink(group)
        if clear.forward:
            self._insert(clear.moved, place, self._next[place])
        else:
            self._insert(clear.moved, self._prev[place], place)
        self._unlink(first if place == last else last)
        self._replace(place, kept)
        self._join(kept, gone)
        return kept

    def order(self) -> list[int]:
        """The groups by label."""
        return sorted(self.roots(), key=self.label.__getitem__)

    def _degree(self, group: int) -> int:
        return len(self.succs[group]) + len(self.preds[group])

    def _join(self, kept: int, gone: int) -> None:
        succs, preds = self.succs, self.preds
        self._parent[gone] = kept
        for s in succs[gone]:
            preds[s].discard(gone)
            preds[s].add(kept)
        for p in preds[gone]:
            succs[p].discard(gone)
            succs[p].add(kept)
        succs[kept] |= succs[gone]
        preds[kept] |= preds[gone]
        succs[gone], preds[gone] = set(), set()
        succs[kept] -= {kept, gone}
        preds[kept] -= {kept, gone}

    def _unlink(self, group: int) -> None:
        before, after = self._prev[group], self._next[group]
        if before != END:
            self._next[before] = after
        if after != END:
            self._prev[after] = before

    def _replace(self, place: int, group: int) -> None:
        """Give `group`, which is in no list, the place and label of `place`."""
        if place == group:
            return
        before, after = self._prev[place], self._next[place]
        self._prev[group], self._next[group] = before, after
        self.label[group] = self.label[place]
        if before != END:
            self._next[before] = group
        if after != END:
            self._prev[after] = group

    def _insert(self, groups: tuple[int, ...], before: int, after: int) -> None:
        """Put `groups`, in this order, between two neighbours of the list."""
        if not groups:
            return
        chain = [before, *groups, after]
        for left, right in zip(chain, chain[1:]):
            if left != END:
                self._next[left] = right
            if right != END:
                self._prev[right] = left
        step = GAP
        if before != END and after != END:
            step = (self.label[after] - self.label[before]) // (len(groups) + 1)
        if step == 0:
            self._relabel(groups[0])
            return
        start = self.label[before] if before != END else self.label[after] - (len(groups) + 1) * GAP
        for i, group in enumerate(groups, 1):
            self.label[group] = start + i * step

    def _relabel(self, group: int) -> None:
        while self._prev[group] != END:
            group = self._prev[group]
        position = 0
        while group != END:
            self.label[group] = position
            position += GAP
            group = self._next[group]
