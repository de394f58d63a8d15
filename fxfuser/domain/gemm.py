"""The domain of a matrix product and what is fused around it.

Enters: nodes, one of which is a GEMM, and the outputs among them.  Leaves: a `GemmDomain`, or a `Reject` that says what
stands in the way.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.domain.index import Axis
from fxfuser.domain.points import Domain


@dataclass(frozen=True, eq=False)
class GemmDomain(Domain):
    """A domain whose programs own tiles of a product: `rows` x `columns` for each step of `batch`.

    Each dot is evaluated at rows, columns and batch alone, its own axis is walked by the kernel's main loop.  Reductions
    of the epilogue run over all rows or all columns (or both); they become partial states per tile, which a finaliser
    combines, so nothing that depends on one is needed along the axes it reduces.
    """

    batch: tuple[Axis, ...] = ()
    rows: tuple[Axis, ...] = ()
    columns: tuple[Axis, ...] = ()
