"""Exponentials of distances from a row's maximum, and quotients by their sum, without steps that no such row shows.

    exp(x - m)                 ->    tl.exp2((x - m) * log2(e))       three instructions less than tl.exp, which keeps
                                                                      denormal results: a sum of at least 1 has none
    exp(x - m) / s             ->    exp(x - m) * (1 / s)             one instead of three, which scale what is divided
                                                                      in case that the divisor is very large or small

The sum is no less than 1 and no more than the number of elements, or it is NaN, so that its reciprocal, which is
computed once for a row, loses nothing.  (12288 rows of 50304 bf16, built for sm_90: 13 instructions for each element of
the loop that writes, 8 with these.)
"""

from __future__ import annotations

import math
from typing import Iterable

import torch

from fxfuser.domain.joint import Pair, joint_folds
from fxfuser.domain.points import Point
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.operands import NodeOperands
from fxfuser.ops.monoids import SOFTMAX

aten = torch.ops.aten
_LOG2_E = math.log2(math.e)


class Softmaxes:
    """The rows of one kernel that are softmaxes, held as a whole or walked by loops."""

    def __init__(self, emitter: Emission, points: Iterable[Point]) -> None:
        pairs: list[Pair] = [] if emitter.precise else [
            pair for pair in joint_folds(points, bool) if pair.monoid is SOFTMAX]
        self.emitter = emitter
        self.sums = {id(pair.second) for pair in pairs}
        self.exponentials = {id(operand) for pair in pairs for operand in pair.second.operands}

    def text(self, point: Point, operands: NodeOperands, guard: Guard) -> str | None:
        """The source of such an exponential or quotient; None for any other point."""
        if operands.dtype != torch.float32:
            return None
        if id(point) in self.exponentials:
            return f"tl.exp2({operands.text(0)} * {_LOG2_E!r})"
        if point.node is None or point.node.target is not aten.div.Tensor or len(point.operands) != 2:
            return None
        dividend, total = point.operands
        dims = self.emitter.schedule.dims_of
        if id(total) not in self.sums or not dims(total.deps) < dims(dividend.deps):
            return None
        axes = self.emitter.emit(total, guard).axes
        text = operands.text(0)
        return f"{text} * {self.emitter.bind('inverse', f'1.0 / {operands.text(1)}', torch.float32, axes).name}"
