"""What of an epilogue a tile can do itself, and what waits for all tiles.

Enters: a `GemmDomain`.  Leaves: an `Epilogue`: stores that the GEMM's kernel makes; for each reduction a `Partial`,
the states that each tile leaves; and for each set of kept axes a `Finish`, the domain of the kernel that combines them
and computes what depends on the results.

    logsumexp(x @ w.T)    partial: (maximum, scaled sum) at [tile of columns, m]
                          finish:  program m; a loop over the tiles; store log(sum) + maximum
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable

import torch

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis, Form
from fxfuser.domain.joint import Pair
from fxfuser.domain.points import Domain, Point, PointKind, Store, needed_by, over, points_of
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.lowering.gemm.shifts import follows_from_logsumexp
from fxfuser.lowering.reducer import accumulation_dtype, monoid_of
from fxfuser.lowering.schedule import product
from fxfuser.ops import Monoid, Packing


@dataclass(frozen=True, eq=False)
class Partial:
    """The states of `reduction` over each tile's part of `over`, at [tiles, kept]; one number for all, if `packing`."""

    reduction: Point
    monoid: Monoid
    over: frozenset[Axis]
    kept: tuple[Axis, ...]
    buffers: tuple[int, ...]  # numbers among the program's scratch buffers, one per state or one for all
    packing: Packing | None = None

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """What the buffers hold."""
        return self.monoid.dtypes(accumulation_dtype(self.reduction))[:len(self.buffers)]

    @property
    def place(self) -> Form:
        """The place of a state among those of one tile."""
        form = Form()
        total: Size = 1
        for axis in reversed(self.kept):
            form = form + Form.axis(axis).scale(total)
            total = total * axis.size
        return form

    @property
    def width(self) -> Size:
        """States of one tile."""
        return product(a.size for a in self.kept)


@dataclass(frozen=True, eq=False)
class Finish:
    """The kernel that combines partial states: its domain, joint folds, and which tiles each `tiles` symbol counts."""

    domain: Domain
    pairs: tuple[Pair, ...]
    partials: tuple[Partial, ...]
    tiles: dict[Symbol, frozenset[Axis]]


@dataclass(frozen=True, eq=False)
class Epilogue:
    """An epilogue by who computes what; where tiles do nothing, `readers` programs of another kernel do all of it."""

    stores: tuple[Store, ...] = ()
    partials: tuple[Partial, ...] = ()
    finishes: tuple[Finish, ...] = ()
    readers: int = 0


def split_epilogue(domain: GemmDomain) -> Epilogue:
    """The parts of a domain's epilogue, in the order of its stores."""
    pairs = {id(p.second): p for p in domain.pairs()}
    waiting = [s for s in domain.stores if any(p.kind is PointKind.REDUCE for p in needed_by(s.value))]
    own = tuple(s for s in domain.stores if s not in waiting)
    partials: dict[int, Partial] = {}
    count = 0
    for point in points_of(waiting):
        if point.kind is PointKind.REDUCE and id(point) not in pairs:
            joint = [p for p in pairs.values() if p.first is point]
            monoid = joint[0].monoid if joint else monoid_of(point)
            packs = joint and monoid.packing is not None and \
                follows_from_logsumexp(waiting, point, [p.second for p in joint])
            packing = monoid.packing if packs else None
            over = frozenset(point.axes[0])
            kept = tuple(a for a in domain.program if a not in over)
            buffers = tuple(range(count, count + (monoid.states if packing is None else 1)))
            partials[id(point)] = Partial(point, monoid, over, kept, buffers, packing)
            count += len(buffers)
    by_axes: dict[frozenset[Axis], list[Store]] = {}
    for store in waiting:
        by_axes.setdefault(store.axes | store.value.deps, []).append(store)
    finishes = tuple(_finish(stores, partials, pairs) for stores in by_axes.values())
    return Epilogue(own, tuple(partials.values()), finishes)


def pointer_name(buffer: int) -> str:
    """What a finishing kernel calls a buffer until it numbers its pointers."""
    return f"partial{buffer}"


def _finish(stores: list[Store], partials: dict[int, Partial], pairs: dict[int, Pair]) -> Finish:
    moved: dict[int, Point] = {}
    used: dict[int, Partial] = {}
    symbols: dict[frozenset[Axis], Axis] = {}
    joint: list[Pair] = []
    for point in points_of(stores):
        partial = partials.get(id(point))
        pair = pairs.get(id(point))
        if partial is not None:
            used[id(point)] = partial
            axis = symbols.get(partial.over)
            if axis is None:
                symbol = Symbol(f"tiles{len(symbols)}", 1)
                axis = symbols[partial.over] = Axis(f"t{len(symbols)}", Poly((((symbol,), 1),)), True)
            moved[id(point)] = _combining(point, partial, axis)
        elif pair is not None:
            first = moved[id(pair.first)]
            moved[id(point)] = replace(point, operands=first.operands, axes=first.axes)
            joint.append(Pair(first, moved[id(point)], pair.monoid))
        else:
            moved[id(point)] = over(point, moved)
    made = tuple(replace(s, value=moved[id(s.value)]) for s in stores)
    kept = _kept(stores, used.values())
    axes = (*kept, *symbols.values())
    tiles = {symbol: over for over, axis in symbols.items() if isinstance(axis.size, Poly)
             for monomial, _ in axis.size.terms for symbol in monomial}
    domain = Domain(made, kept, axes, frozenset(symbols.values()))
    return Finish(domain, tuple(joint), tuple(used.values()), tiles)


def _kept(stores: Iterable[Store], partials: Iterable[Partial]) -> tuple[Axis, ...]:
    found: dict[Axis, None] = {}
    for partial in partials:
        found.update(dict.fromkeys(partial.kept))
    for store in stores:
        found.update(dict.fromkeys(sorted(store.axes, key=lambda a: a.name)))
    return tuple(found)


def _combining(point: Point, partial: Partial, axis: Axis) -> Point:
    """The reduction as a fold of the states that tiles left."""
    place = Form.axis(axis).scale(partial.width) + partial.place
    count = product(a.size for a in partial.over)
    states = Point(PointKind.PARTIAL, point.operands[0].dtype, point.node, (place,), (count,),
                   value=tuple(map(pointer_name, partial.buffers)), deps=frozenset((axis, *partial.kept)))
    return replace(point, operands=(states,), axes=((axis,),))
