"""The dims of a matrix product: which index vectors its factors, its tile and its epilogue have.

    left  [m, k]      right [k, n]      tile [m, n]

All tiles have two positions.  A step of the batch is one number, which shares the first with m.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.size import Size
from fxfuser.lowering.schedule import Dim, Schedule


@dataclass(frozen=True)
class GemmSchedule:
    """The dims of one product; `batch` has no axes where there is no batch."""

    batch: Dim
    rows: Dim
    columns: Dim
    left_inner: Dim
    right_inner: Dim

    @property
    def left(self) -> Schedule:
        return Schedule((self.batch, self.rows, self.left_inner))

    @property
    def right(self) -> Schedule:
        return Schedule((self.batch, self.right_inner, self.columns))

    @property
    def tile(self) -> Schedule:
        return Schedule((self.batch, self.rows, self.columns))

    @property
    def depth(self) -> Size:
        """Elements that each dot sums."""
        return self.left_inner.size


def gemm_schedule(domain: GemmDomain) -> GemmSchedule:
    """The dims of a kernel that computes `domain`."""
    return GemmSchedule(
        Dim("batch", domain.batch, 0, True, named=""),
        Dim("m", domain.rows, 0, True), Dim("n", domain.columns, 1, True),
        Dim("k_left", domain.inner, 1, False, True, named="k"), Dim("k_right", domain.inner, 0, False, True, named="k"))
