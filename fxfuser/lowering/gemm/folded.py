"""Results of reductions that the kernel behind a product combines itself, from the states that the tiles left.

Enters: the `GemmDomain` of a product with that of a second one as its tail, and the first's epilogue.  Leaves: for each
result that the tail reads a `Folded`; none at all unless the states of each row are few and a finishing kernel would do
nothing else.  Each program of the second kernel combines the handful of states of its rows, so no kernel stands between
the two products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Mapping

import torch
from torch import fx

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis, linear
from fxfuser.domain.points import Point, PointKind, Store
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.lowering.gemm.partials import Epilogue, Partial
from fxfuser.lowering.kernel import Cut, Kernel
from fxfuser.lowering.schedule import product, strides_of
from fxfuser.ops import Monoid

MOST = 24  # numbers of a row, of all its states, that a program combines beside its tile
SCRATCH = 128  # bytes of a row, of its states or its strip, that are on their way from one layout to the other at once


@dataclass(frozen=True, eq=False)
class Folded:
    """Result number `output` of states at [tiles, rows]: `reduction` reduces them, `partial` says where they lie.

    `tiles` counts those that a row has, and `cut` is what they follow from: how the first kernel's tiles cut the extent
    that is reduced; None where that is dynamic.
    """

    reduction: Point
    partial: Partial
    output: int
    tiles: Symbol
    cut: Cut | None

    @property
    def monoid(self) -> Monoid:
        return self.partial.monoid

    @property
    def count(self) -> Size:
        """How many states a row has."""
        return Poly((((self.tiles,), 1),))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return self.partial.dtypes


def folded_results(head: GemmDomain, epilogue: Epilogue, elsewhere: frozenset[fx.Node]) -> dict[fx.Node, Folded]:
    """The results that the tail combines itself; `elsewhere` are those that something else reads, too."""
    if not isinstance(head.tail, GemmDomain):
        return {}
    found: dict[fx.Node, Folded] = {}
    partials = {id(p.reduction): p for p in epilogue.partials}
    firsts = {id(p.second): p.first for p in head.pairs()}
    for store in head.stores:
        if store in epilogue.stores:
            continue
        first = firsts.get(id(store.value))
        partial = partials.get(id(first or store.value))
        if partial is None or store.node in elsewhere or not _serves(store, partial, head) or \
                not _along_one_side(store.node, head.tail):
            return {}
        columns, extent = partial.over == frozenset(head.columns), product(a.size for a in partial.over)
        found[store.node] = Folded(
            _combining(store.value, partial), partial, 1 if first else store.value.output,
            Symbol("column_tiles" if columns else "row_tiles", 1),
            Cut(extent, "NBLOCK" if columns else "MBLOCK") if isinstance(extent, int) else None)
    return found


def few_states(folded: Mapping[fx.Node, Folded], kernel: Kernel) -> Kernel | None:
    """The first kernel with those of its tiles that leave few states; None where its default does not."""
    cuts = {one.cut for one in folded.values()}
    if len(cuts) != 1 or (cut := next(iter(cuts))) is None:
        return None
    tiles = [t for t in (kernel.tile, *kernel.candidates) if cut.count(t) <= most_states(folded.values())]
    return replace(kernel, candidates=tuple(tiles[1:])) if tiles[:1] == [kernel.tile] else None


def most_states(folded: Iterable[Folded]) -> int:
    """How many states of a row there may be, a power of two."""
    numbers = len({buffer for one in folded for buffer in one.partial.buffers})
    return 1 << ((MOST // numbers).bit_length() - 1)


def _serves(store: Store, partial: Partial, head: GemmDomain) -> bool:
    """Whether an element of the tensor that is stored has the number of its states."""
    whole = partial.over in (frozenset(head.columns), frozenset(head.rows))
    return whole and linear(store.index, strides_of(store.node)) == partial.place


def _along_one_side(node: fx.Node, tail: GemmDomain) -> bool:
    """Whether the tail reads the result for its rows alone, or for its columns alone."""
    for point in tail.points():
        if point.kind is PointKind.LOAD and point.node is node:
            axes = linear(point.index, strides_of(node)).axes - frozenset(tail.batch)
            if point.lookups or not (axes <= frozenset(tail.rows) or axes <= frozenset(tail.columns)):
                return False
    return True


def _combining(point: Point, partial: Partial) -> Point:
    """The reduction as one of the states that tiles left, which only says of how many elements they are."""
    count = product(a.size for a in partial.over)
    states = Point(PointKind.PARTIAL, point.operands[0].dtype, point.node, args=(count,), deps=frozenset(partial.kept))
    axes: tuple[tuple[Axis, ...], ...] = ((),)
    return replace(point, operands=(states,), axes=axes)
