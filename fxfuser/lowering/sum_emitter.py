"""The emitter of a kernel that leaves the sums of products to another, in fp32: one part of each."""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.domain.points import Store
from fxfuser.domain.sums import place_in
from fxfuser.domain.tensors import shape_of
from fxfuser.lowering.dependent import LEAD
from fxfuser.lowering.emitter import Emitter
from fxfuser.lowering.pointers import pointers_to


@dataclass
class SumEmitter(Emitter):
    """Stores are of `scaled` points; their targets are buffers as large as the products, and contiguous."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.top.lines += LEAD

    def store(self, store: Store) -> None:
        total = self.emit(store.value.operands[0])
        place = place_in(shape_of(store.node), store.index)
        masks = self.mask(store.axes)
        arguments = [pointers_to(self, self.targets[store.node], place, store.axes), total.name,
                     *([" & ".join(masks)] if masks else [])]
        self.scope.covering(self.loops(store.axes)).lines.append(f"tl.store({', '.join(arguments)})")
