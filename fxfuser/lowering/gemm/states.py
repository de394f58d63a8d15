"""The states of reductions that each tile of a product leaves: the text that folds and stores them.

Enters: an emitter whose accumulators are set, and `Partial`s.  Leaves: lines around the strips in which an epilogue
takes a tile's columns.  What is reduced over columns has one state per tile, whatever its strips: these are folded one
after the other.  What keeps the columns is stored strip by strip.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis
from fxfuser.lowering.expressions import full
from fxfuser.lowering.gemm.partials import Partial
from fxfuser.lowering.gemm.tile_emitter import TileEmitter
from fxfuser.lowering.reducer import Unit, accumulation_dtype


@dataclass
class TileStates:
    """`before` and `behind` all strips; lines of each strip go to the emitter.  `first`: the number of the pointer to
    buffer 0 among the kernel's outputs."""

    emitter: TileEmitter
    domain: GemmDomain
    first: int
    before: list[str] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)

    def leave(self, partial: Partial) -> None:
        """Folds the tile's part of a reduction and stores its states."""
        emitter, lines = self.emitter, self.emitter.top.lines
        names = [v.name for v in emitter.reducer.held(Unit(partial.reduction, (), 0, (), 0))]
        if partial.over & frozenset(self.domain.columns):
            monoid, kinds = partial.monoid, partial.dtypes
            totals, shape = emitter.fresh("total", monoid.states), emitter.tile(partial.kept)
            identity = monoid.identity(accumulation_dtype(partial.reduction))
            self.before += [f"{t} = {full(x, kind, shape)}" for t, x, kind in zip(totals, identity, kinds)]
            lines.append(f"{', '.join(totals)} = {monoid.combine}({', '.join(totals + names)})")
            names, lines = totals, self.behind
        kept = frozenset(partial.kept)
        masks = emitter.mask(kept)
        for buffer, name in zip(partial.buffers, names):
            pointer = emitter.pointer(f"out{self.first + buffer}", partial.place, kept)
            place = f"{pointer} + {self._tile(partial.over)} * {emitter.sizes.text(partial.width)}"
            lines.append(f"tl.store({', '.join([place, name, *([' & '.join(masks)] if masks else [])])})")

    def _tile(self, over: frozenset[Axis]) -> str:
        """The number of the tile among those along the reduced axes."""
        text, domain = "", self.domain
        for axes, number, count in ((domain.batch, "batch_start", ""), (domain.rows, "row_tile", "row_tiles"),
                                    (domain.columns, "column_tile", "column_tiles")):
            if over & frozenset(axes):
                text = f"({text} * {count} + {number})" if text else number
        return text
