"""What a kernel reads in several of its loops, and what the cache is told about it.

A row that no program holds is read by a loop that folds it and again by the loop that writes what follows: the second
time it should come from the cache.  So the first reading asks for its lines to stay, the last gives them up, and what
the last loop writes does not drive out rows that other programs are about to read again.  (12288 rows of 50304 bf16 on
an H200, cross entropy with its gradient: 842 us, 900 without these hints; 8192 rows of 32000: 331 and 376.)

Enters: what each stage's loops read.  Leaves: the policy of each load and store, as an argument in the source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping

from fxfuser.domain.points import Point, PointKind, Store
from fxfuser.lowering.emission import Emission

KEEP, RELEASE = 'eviction_policy="evict_last"', 'eviction_policy="evict_first"'


@dataclass(frozen=True)
class Rereads:
    """`last`: the last stage that reads a load, by its id, where several do; `stores` that are written beside such."""

    last: Mapping[int, int] = field(default_factory=dict)
    stores: frozenset[Store] = frozenset()

    def policy(self, point: Point, stage: int) -> str:
        """What a load says in the loops of a stage; nothing where no other stage reads it."""
        if id(point) not in self.last:
            return ""
        return KEEP if stage < self.last[id(point)] else RELEASE

    def store_policy(self, store: Store) -> str:
        return RELEASE if store in self.stores else ""


def rereads(emitter: Emission, folded: Iterable[tuple[Point, int]], stored: Iterable[tuple[Store, int]]) -> Rereads:
    """What the loops of several stages read; `folded` and `stored` are what each stage's loops compute."""
    stages: dict[int, set[int]] = {}
    beside: dict[Store, list[int]] = {}
    for value, stage in folded:
        for load in _loads(emitter, value):
            stages.setdefault(load, set()).add(stage)
    for store, stage in stored:
        beside[store] = _loads(emitter, store.value)
        for load in beside[store]:
            stages.setdefault(load, set()).add(stage)
    last = {load: max(found) for load, found in stages.items() if len(found) > 1}
    return Rereads(last, frozenset(s for s, loads in beside.items() if any(load in last for load in loads)))


def _loads(emitter: Emission, value: Point) -> list[int]:
    """The loads along loops from which a value follows, without those of earlier loops."""
    found: dict[int, None] = {}
    pending, seen = [value], {id(value)}
    while pending:
        point = pending.pop()
        if point.kind is PointKind.LOAD and emitter.loops(point.deps):
            found[id(point)] = None
        known = point.kind is PointKind.REDUCE and any(emitter.loops(axes) for axes in point.axes)
        for operand in () if known else point.inputs:
            if id(operand) not in seen:
                seen.add(id(operand))
                pending.append(operand)
    return list(found)
