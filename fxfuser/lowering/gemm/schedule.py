"""The dims of a matrix product: which index vectors its factors, its tile and its epilogue have.

    left  [m, k]      right [k, n]      tile [m, n]      epilogue [m, strip]

All tiles have two positions.  A step of the batch is one number, which shares the first with m.  The epilogue takes the
columns of a tile strip by strip: what it holds beside the accumulators, in registers and shared memory, is one strip.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.size import Size
from fxfuser.lowering.schedule import Dim, Schedule


@dataclass(frozen=True)
class GemmSchedule:
    """The dims of one product; `batch` has no axes where there is no batch, `strip` walks what `columns` does."""

    batch: Dim
    rows: Dim
    columns: Dim
    strip: Dim
    left_inner: Dim
    right_inner: Dim

    @property
    def left(self) -> Schedule:
        return Schedule((self.batch, self.rows, self.left_inner))

    @property
    def right(self) -> Schedule:
        return Schedule((self.batch, self.right_inner, self.columns))

    @property
    def epilogue(self) -> Schedule:
        return Schedule((self.batch, self.rows, self.strip))

    @property
    def depth(self) -> Size:
        """Elements that each dot sums."""
        return self.left_inner.size


def gemm_schedule(domain: GemmDomain) -> GemmSchedule:
    """The dims of a kernel that computes `domain`."""
    return GemmSchedule(
        Dim("batch", domain.batch, 0, True, named=""),
        Dim("m", domain.rows, 0, True), Dim("n", domain.columns, 1, True),
        Dim("strip", domain.columns, 1, True),
        Dim("k_left", domain.inner, 1, False, True, named="k"), Dim("k_right", domain.inner, 0, False, True, named="k"))
