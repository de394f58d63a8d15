"""Loads and stores of neighbouring elements as vectors of one thread.

    x[4i], x[4i + 1], x[4i + 2], x[4i + 3]      ->      even, odd = tl.split(tl.reshape(tl.load(x + 4i + 0..3), ..)), ..
    y[2i] = a;  y[2i + 1] = b                   ->      tl.store(y + 2i + 0..1, tl.join(a, b))

Where one thread loads or stores places that differ by constants (see unrolling.py), those that lie side by side and
begin at a multiple of their number are one access of up to 16 bytes instead of several, each of which would ask for
few bytes of many cache lines.  The parts of a vector are registers of the thread that has loaded it.

Enters: the stores of a domain whose kernel has one vector of indices.  Leaves: which accesses are vectors, and text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator, Sequence

from torch import fx

from fxfuser.domain.index import Atom, Form, linear
from fxfuser.domain.points import Point, PointKind, Store
from fxfuser.domain.size import Size
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard, concerning, guarded
from fxfuser.lowering.pointers import pointers_to
from fxfuser.lowering.schedule import strides_of

WIDEST = 16  # bytes of one access
Terms = tuple[tuple[Atom, Size], ...]


@dataclass(frozen=True)
class Vector:
    """Places `start`, `start` + 1, ... of a tensor, `width` of them, behind an offset that is a multiple of `width`."""

    start: int
    width: int


def vectors(places: Iterable[int], terms: Terms, widest: int) -> tuple[Vector, ...]:
    """Aligned runs of places, the widest first; what is left stays by itself."""
    left, found = set(places), list[Vector]()
    width = widest
    while width > 1:
        if all(isinstance(k, int) and k % width == 0 for _, k in terms):
            for start in sorted(left):
                run = range(start, start + width)
                if start % width == 0 and left.issuperset(run):
                    left.difference_update(run)
                    found.append(Vector(start, width))
        width //= 2
    return tuple(found)


class Neighbours:
    """The vectors of one kernel."""

    def __init__(self, emitter: Emission, stores: Sequence[Store]) -> None:
        self.emitter = emitter
        asked: dict[tuple[fx.Node, Terms, Guard], set[int]] = {}
        for node, offset, guard in _loads(stores):
            if isinstance(offset.constant, int) and offset.axes:
                asked.setdefault((node, offset.terms, guard), set()).add(offset.constant)
        self.loads = {key: vectors(places, key[1], _widest(key[0])) for key, places in asked.items()}
        self.parts: dict[str, list[str]] = {}

    def part(self, point: Point, offset: Form, guard: Guard, arguments: Sequence[str]) -> str | None:
        """The part of a vector that is a load, as source; None where it is in none.

        `arguments` of the load: a mask, and what is held where that fails.
        """
        place = offset.constant
        if point.node is None or not isinstance(place, int):
            return None
        found = self.loads.get((point.node, offset.terms, guard), ())
        vector = next((v for v in found if v.start <= place < v.start + v.width), None)
        if vector is None:
            return None
        emitter, start = self.emitter, Form(offset.terms, vector.start)
        pointers = self._pointers(pointers_to(emitter, emitter.pointers[point.node], start, offset.axes), vector.width)
        mask = [f"({arguments[0]})[:, None]", *arguments[1:]] if arguments else []
        whole = emitter.bind("vector", f"tl.load({', '.join([pointers, *mask])})", point.dtype, offset.axes)
        if whole.name not in self.parts:
            self.parts[whole.name] = self._split(whole.name, vector.width)
        return self.parts[whole.name][place - vector.start]

    def write(self, stores: Sequence[Store]) -> Iterator[Store]:
        """Stores runs of neighbours, each when its first is due; leaves those that stand alone."""
        runs = self._runs(stores)
        for store in stores:
            run = runs.get(store, ())
            if not run:
                yield store
            elif store is run[0]:
                self._write(run)

    def _runs(self, stores: Sequence[Store]) -> dict[Store, tuple[Store, ...]]:
        """The stores that are one access, by each of them."""
        places: dict[tuple[fx.Node, Terms], dict[int, Store]] = {}
        for store in stores:
            offset = store.offset
            if isinstance(offset.constant, int) and not offset.lookups:
                places.setdefault((store.node, offset.terms), {})[offset.constant] = store
        found: dict[Store, tuple[Store, ...]] = {}
        for (node, terms), beside in places.items():
            for vector in vectors(beside, terms, _widest(node)):
                run = tuple(beside[vector.start + i] for i in range(vector.width))
                found.update(dict.fromkeys(run, run))
        return found

    def _write(self, run: Sequence[Store]) -> None:
        emitter, axes = self.emitter, run[0].axes
        values = [f"tl.broadcast_to({emitter.stored(store)[0]}, {emitter.tile(axes)})" for store in run]
        pointers = self._pointers(emitter.target(run[0], axes), len(run))
        masks = " & ".join(emitter.mask(axes))
        arguments = [pointers, self._join(values), *([f"({masks})[:, None]"] if masks else [])]
        emitter.top.lines.append(f"tl.store({', '.join(arguments)})")

    def _pointers(self, first: str, width: int) -> str:
        return f"({first})[:, None] + tl.arange(0, {width})[None, :]"

    def _split(self, whole: str, width: int) -> list[str]:
        """Names of the parts of a vector: those of its even places and those of its odd ones, split further."""
        halves, lines = self.emitter.fresh("part", 2), self.emitter.top.lines
        block = self.emitter.schedule.program[0].block
        paired = whole if width == 2 else f"tl.reshape({whole}, [{block}, {width // 2}, 2])"
        lines.append(f"{', '.join(halves)} = tl.split({paired})")
        if width == 2:
            return halves
        even, odd = (self._split(half, width // 2) for half in halves)
        return [name for pair in zip(even, odd) for name in pair]

    def _join(self, values: Sequence[str]) -> str:
        if len(values) == 2:
            return f"tl.join({', '.join(values)})"
        block = self.emitter.schedule.program[0].block
        return f"tl.reshape(tl.join({self._join(values[::2])}, {self._join(values[1::2])}), [{block}, {len(values)}])"


def _widest(node: fx.Node) -> int:
    """Elements of one access."""
    return max(1, WIDEST // int(node.meta["val"].dtype.itemsize))


def _loads(stores: Iterable[Store]) -> Iterator[tuple[fx.Node, Form, Guard]]:
    """Every load under each guard under which it is read, as a tensor and an offset; none at looked-up places."""
    pending: list[tuple[Point, Guard]] = [(store.value, ()) for store in stores]
    seen = set[tuple[int, Guard]]()
    while pending:
        point, guard = pending.pop()
        guard = concerning(guard, point.deps) if point.kind is PointKind.REDUCE else guard
        if (id(point), guard) in seen:
            continue
        seen.add((id(point), guard))
        if point.kind is PointKind.LOAD and point.node is not None and not point.lookups:
            yield point.node, linear(point.index, strides_of(point.node)), guard
        pending += guarded(point, guard)
