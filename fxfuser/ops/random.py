"""Rows of the prims that make random numbers; ATen's random ops become these (passes/random.py).

Their operands are a seed and an index; both are read as they are, and the result has the prim's own dtype.  The seeds
come from an ATen op, which takes them from the device's generator.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from fxfuser.ops.philox import BITS, NORMAL, PRIMS, UNIFORM
from fxfuser.ops.row import Kind, Operands, Promotion, Row

SEEDS: OpOverload = torch.ops.aten.randint.low_generator  # no program calls it without a generator: it is ours
COST = 16  # a hundred integer instructions


def _row(name: str) -> Row:
    def emit(ops: Operands) -> str:
        return f"{name}({ops.raw(0)}, {ops.raw(1)})"

    return Row(Kind.POINTWISE, emit, Promotion.NONE, cost=COST)


def random_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    rows = {prim: _row(prim._schema.name.partition("::")[2]) for prim in PRIMS}
    return {**rows, SEEDS: Row(Kind.EXTERN, reason="draws the seeds of a graph's random numbers")}


__all__ = ["BITS", "NORMAL", "SEEDS", "UNIFORM", "random_rows"]
