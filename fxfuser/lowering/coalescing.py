"""How many neighbouring elements one thread takes, so that what a warp asks for at once lies close together.

    a store of bf16 wants 8 neighbours in a thread: 16 bytes at once.  With them the threads of a warp ask a tensor that
    is read at stride 2 for 2 bytes each, 32 bytes apart: 8 cache lines for a request, where one element a thread is one

A kernel that reads each element once does not notice, as memory takes longer; one that reads overlapping windows does
(max_pool2d, 3 x 3 at stride 2, 1 GB of bf16 on an H200: 1388 us with 8 neighbours, of which memory needs 310).  Fewer
neighbours share less of the arithmetic of indices, so that a kernel with many operations may be better off with lines.

Enters: a domain and its one program dim.  Leaves: a power of two, the largest that costs as little as any.  Costs are
cycles of a multiprocessor for 32 elements: of memory, of the cache and of its schedulers, which work side by side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Mapping

from torch import fx

from fxfuser.domain.index import Atom, Axis, Form, Lookup, Quotient, linear
from fxfuser.domain.points import Domain, PointKind
from fxfuser.domain.size import Size, from_torch, hint
from fxfuser.lowering.candidates import WARP
from fxfuser.lowering.schedule import Dim, product, strides_of
from fxfuser.ops import memory_of

LINE, SECTOR, WIDEST = 128, 32, 16  # bytes: of a cache line, of what memory moves at least, of one thread's access
MOST = 8  # elements of one thread
# What a multiprocessor of an H200 does in a cycle: bytes from memory (4.3 TB/s, 132 of them, 1.75 GHz), lines looked up
# (as measured, see above), instructions issued
BANDWIDTH, LOOKUPS, ISSUED = 18, 4 / 3, 4
# Instructions of a point and element, those of an axis' coordinate, which neighbours share
POINT, AXIS = 2, 12
SLACK = 1.1  # what costs less than this more is as good


@dataclass(frozen=True)
class _Access:
    """One load or store: its tensor and the offset there."""

    node: fx.Node
    offset: Form

    @property
    def bytes(self) -> int:
        return int(self.node.meta["val"].dtype.itemsize)


def elements(domain: Domain, dim: Dim, hints: Mapping[str, int]) -> int:
    """Elements of one thread: MOST, or fewer where the cache is the bottleneck."""
    found = _accesses(domain)
    vector = max(1, WIDEST // min((a.bytes for a in found), default=WIDEST))  # what stores ask Triton for
    if all(_width(a.offset, dim, vector) == vector for a in found):
        return MOST
    warps, work = _Warps(dim, hints), _operations(domain)
    memory = warps.memory(found)
    costs: dict[int, float] = {}
    for taken in (8, 4, 2, 1):
        arithmetic = POINT * work + AXIS * (len(dim.axes) - 1) / taken
        costs[taken] = max(memory, warps.lines(found, min(taken, vector)) / LOOKUPS, arithmetic / ISSUED)
    return next(taken for taken, cost in costs.items() if cost <= SLACK * min(costs.values()))


def _operations(domain: Domain) -> int:
    """How often a kernel does something with an element; a fold does with each of its operands."""
    return sum(max(1, len(p.operands)) if p.kind is PointKind.REDUCE else 1 for p in domain.points())


def _accesses(domain: Domain) -> tuple[_Access, ...]:
    """Loads and stores, each offset once; what is read at a loaded position may lie anywhere."""
    stored = (_Access(memory_of(s.node), s.offset) for s in domain.stores)
    loaded = (_Access(p.node, linear(p.index, strides_of(p.node))) for p in domain.points()
              if p.kind is PointKind.LOAD and p.node is not None)
    found = dict.fromkeys((*stored, *loaded))
    return tuple(a for a in found if not a.offset.lookups)


def _width(offset: Form, dim: Dim, most: int) -> int:
    """How many of `most` neighbouring elements one access covers: side by side and aligned, or all the same one."""
    fast = dim.axes[-1]
    steps = [fast.size] if len(dim.axes) > 1 else []
    if fast in offset.axes:
        if offset.coefficient(fast) != 1 or not offset.affine:
            return 1
        steps += [offset.constant, *(k for atom, k in offset.terms if atom != fast)]
    return math.gcd(most, *(s for s in steps if isinstance(s, int)))


@dataclass(frozen=True)
class _Warps:
    """What the warps of a kernel over one dim ask for."""

    dim: Dim
    hints: Mapping[str, int]

    def memory(self, found: tuple[_Access, ...]) -> float:
        """Cycles that memory takes: each tensor once, of one that is read in a few places those."""
        elements, moved = max(1, self._size(product(a.size for a in self.dim.axes))), 0.0
        for node in {a.node: None for a in found}:
            asked = [a for a in found if a.node is node]
            whole = asked[0].bytes * self._size(product(from_torch(s) for s in node.meta["val"].shape))
            moved += min(whole * WARP / elements, SECTOR * WARP * len(asked))
        return moved / BANDWIDTH

    def lines(self, found: tuple[_Access, ...], taken: int) -> float:
        """Lines looked up for 32 elements where each thread has `taken` neighbouring ones."""
        return sum(self._lines(a, taken) for a in found) / taken

    def _lines(self, access: _Access, taken: int) -> int:
        """Lines that one warp looks up, over all requests for its 32 * `taken` elements."""
        width = _width(access.offset, self.dim, min(taken, max(1, WIDEST // access.bytes)))
        middle = self._size(product(a.size for a in self.dim.axes)) // 2
        first = middle - middle % (WARP * taken)
        starts = (self._offset(access.offset, first + lane * taken) * access.bytes for lane in range(WARP))
        touched = {line for at in starts for line in (at // LINE, (at + width * access.bytes - 1) // LINE)}
        return len(touched) * (taken // width)

    def _offset(self, form: Form, place: int) -> int:
        """The value of a form at one place of the dim."""
        where: dict[Atom, int] = {}
        for axis in reversed(self.dim.axes):
            place, where[axis] = divmod(place, max(1, self._size(axis.size)))
        return self._value(form, where)

    def _value(self, form: Form, where: Mapping[Atom, int]) -> int:
        total = self._size(form.constant)
        for atom, coefficient in form.terms:
            total += self._size(coefficient) * self._atom(atom, where)
        return total

    def _atom(self, atom: Atom, where: Mapping[Atom, int]) -> int:
        if isinstance(atom, (Axis, Lookup)):
            return where.get(atom, 0)
        inner, divisor = self._value(atom.form, where), max(1, self._size(atom.divisor))
        return inner // divisor if isinstance(atom, Quotient) else inner % divisor

    def _size(self, size: Size) -> int:
        return size if isinstance(size, int) else hint(size, self.hints)
