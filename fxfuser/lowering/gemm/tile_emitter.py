"""The emitter of a kernel whose tiles descriptors can move."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxfuser.domain.index import linear
from fxfuser.domain.points import Point, Store
from fxfuser.lowering.emitter import Emitter
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.gemm.descriptors import Descriptors
from fxfuser.lowering.schedule import Dim, strides_of


@dataclass
class TileEmitter(Emitter):
    """Loads and stores of whole tiles go through `descriptors` where DESCRIPTORS is true at the call.

    `dims`: batch, the first and the second dim of the tile.  A `padded` emitter loads zeros past the end, as factors of
    a product must be.  Bools are no elements that a descriptor knows.
    """

    dims: tuple[Dim, ...] = ()
    descriptors: Descriptors = field(default_factory=lambda: Descriptors(Sizes()))
    padded: bool = False

    def read_text(self, point: Point, pointer: str, masks: list[str], plain: bool) -> str:
        arguments = [pointer, *([" & ".join(masks)] if masks else []), *(["0"] if masks and self.padded else [])]
        usual = f"tl.load({', '.join(arguments)})"
        assert point.node is not None
        offset = linear(point.index, strides_of(point.node))
        if not plain or point.dtype is torch.bool:
            return usual
        moved = self.descriptors.load(self.pointers[point.node], offset, self.dims, point.dtype.itemsize)
        return usual if moved is None else f"({moved} if DESCRIPTORS else {usual})"

    def write_lines(self, store: Store, value: str, line: str) -> list[str]:
        dtype: torch.dtype = store.node.meta["val"].dtype
        if dtype is torch.bool or not self.schedule.dims_of(store.value.deps) >= self.schedule.dims_of(store.axes):
            return [line]
        offset = linear(store.index, strides_of(store.node))
        moved = self.descriptors.store(self.targets[store.node], offset, self.dims, dtype.itemsize, value)
        return [line] if moved is None else ["if DESCRIPTORS:", f"    {moved}", "else:", f"    {line}"]
