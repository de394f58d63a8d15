"""The dims of a matrix product: which index vectors its factors, its tile and its epilogue have.

    left  [m, k]      right [k, n]      tile [m, n]      epilogue [m, strip]

All tiles have two positions.  A step of the batch is one number, which shares the first with m.  The epilogue takes the
columns of a tile strip by strip: what it holds beside the accumulators, in registers and shared memory, is one strip.

Where each step of k is cut into slices, one for each warp, the factors have one position more, in front:

    left  [slice, m, k]      right [slice, k, n]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.size import Size
from fxfuser.lowering.schedule import Dim, Schedule


@dataclass(frozen=True)
class GemmSchedule:
    """The dims of one product; `batch` has no axes where there is no batch, `strip` walks what `columns` does; `sliced`
    is whether factors have slices of k."""

    batch: Dim
    rows: Dim
    columns: Dim
    strip: Dim
    left_inner: Dim
    right_inner: Dim
    sliced: bool = False

    @property
    def left(self) -> Schedule:
        return Schedule((self.of_factor(self.batch), self.of_factor(self.rows), self.left_inner))

    @property
    def right(self) -> Schedule:
        return Schedule((self.of_factor(self.batch), self.right_inner, self.of_factor(self.columns)))

    def of_factor(self, dim: Dim) -> Dim:
        """A dim of the tile as factors have it: one slot further on where the first is that of slices."""
        if not self.sliced:
            return dim
        named = dim.name if dim.named is None else dim.named
        return replace(dim, name=f"{dim.name}_factor", slot=dim.slot + 1, named=named)

    @property
    def epilogue(self) -> Schedule:
        return Schedule((self.batch, self.rows, self.strip))

    @property
    def depth(self) -> Size:
        """Elements that each dot sums."""
        return self.left_inner.size


def gemm_schedule(domain: GemmDomain, sliced: bool = False) -> GemmSchedule:
    """The dims of a kernel that computes `domain`."""
    left, right = (Dim(name, domain.inner, slot + sliced, False, True, named="k", slices=0 if sliced else None)
                   for name, slot in (("k_left", 1), ("k_right", 0)))
    return GemmSchedule(
        Dim("batch", domain.batch, 0, True, named=""),
        Dim("m", domain.rows, 0, True), Dim("n", domain.columns, 1, True),
        Dim("strip", domain.columns, 1, True), left, right, sliced)
