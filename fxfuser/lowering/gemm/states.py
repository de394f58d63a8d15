"""The states of reductions that each tile of a product leaves: the text that folds and stores them.

Enters: an emitter whose accumulators are set, and `Partial`s.  Leaves: lines of the strips in which an epilogue takes a
tile's columns, and behind them.  What is reduced over columns has one state per tile, whatever its strips: these are
folded one after the other, and packed when all are.  What keeps the columns is stored strip by strip.
"""

from __future__ import annotations

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis
from fxfuser.lowering.gemm.held import Held
from fxfuser.lowering.gemm.partials import Partial
from fxfuser.lowering.gemm.tile_emitter import TileEmitter
from fxfuser.lowering.pointers import pointers_to


class TileStates:
    """Lines of each strip go to the emitter; those `behind` all strips are here, as are the sources of the `functions`
    that lines call.  `first`: the number of the pointer to buffer 0 among the kernel's outputs."""

    def __init__(self, emitter: TileEmitter, domain: GemmDomain, first: int) -> None:
        self.emitter, self.domain, self.first = emitter, domain, first
        self.held = Held(emitter)
        self.behind: list[str] = []

    @property
    def functions(self) -> dict[str, str]:
        return self.held.functions

    def leave(self, partial: Partial) -> None:
        """Folds the tile's part of a reduction and stores its states."""
        emitter, lines = self.emitter, self.emitter.top.lines
        names = [v.name for v in self.held.states(partial.reduction)]
        if partial.over & frozenset(self.domain.columns):
            names, lines = self._totals(names, partial), self.behind
        if partial.packing is not None:
            lines.append(f"packed_{partial.buffers[0]} = {partial.packing.pack.format(*names)}")
            names = [f"packed_{partial.buffers[0]}"]
        kept = frozenset(partial.kept)
        masks = emitter.mask(kept)
        for buffer, name in zip(partial.buffers, names):
            pointer = pointers_to(emitter, f"out{self.first + buffer}", partial.place, kept)
            place = f"{pointer} + {self._tile(partial.over)} * {emitter.sizes.text(partial.width)}"
            lines.append(f"tl.store({', '.join([place, name, *([' & '.join(masks)] if masks else [])])})")

    def _totals(self, names: list[str], partial: Partial) -> list[str]:
        """The states of all strips so far."""
        totals = self.emitter.fresh("total", partial.monoid.states)
        found, states = ", ".join(totals), ", ".join(names)
        self.emitter.top.lines += [
            "if number == 0:", f"    {found} = {states}",
            "else:", f"    {found} = {partial.monoid.combine}({found}, {states})"]
        return totals

    def _tile(self, over: frozenset[Axis]) -> str:
        """The number of the tile among those along the reduced axes."""
        text, domain = "", self.domain
        for axes, number, count in ((domain.batch, "batch_start", ""), (domain.rows, "row_tile", "row_tiles"),
                                    (domain.columns, "column_tile", "column_tiles")):
            if over & frozenset(axes):
                text = f"({text} * {count} + {number})" if text else number
        return text
