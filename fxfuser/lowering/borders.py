"""A tensor in a border of one number: what is outside is loaded as that number.

    tl.where(inside, tl.load(x, inside), -inf)        ->        tl.load(x, inside, -inf)

The select costs an instruction, and it stands between ops that could be done in the tensor's own dtype: without it the
compiler takes the maximum of a window of bf16 three elements at a time, 23% fewer instructions in all (max_pool2d,
3 x 3, built for sm_90: 56 for each result, 73 with selects).
"""

from __future__ import annotations

import torch

from fxfuser.domain.points import Point, PointKind
from fxfuser.lowering.expressions import HALF
from fxfuser.ops import literal

_DTYPES = (*HALF, torch.float32, torch.int32, torch.int64)  # a literal of these is a plain number


def border(point: Point) -> tuple[Point, str] | None:
    """The load that a select shows where its condition holds, and the number that stands elsewhere; else None."""
    if len(point.operands) != 2 or point.operands[1].kind is not PointKind.CONSTANT:
        return None
    load, around = narrowest(point.operands[0]), point.operands[1].value
    if load.kind is not PointKind.LOAD or load.dtype not in _DTYPES or not _holds(load.dtype, around):
        return None
    return load, literal(around, torch.float32 if load.dtype in HALF else load.dtype)


def narrowest(point: Point) -> Point:
    """What a point is a wider copy of, if it is one."""
    while point.kind is PointKind.OP and point.node is not None and len(point.operands) == 1 and \
            point.node.target is torch.ops.aten._to_copy.default and point.operands[0].dtype in HALF:
        point = point.operands[0]
    return point


def _holds(dtype: torch.dtype, number: bool | int | float) -> bool:
    """Whether a dtype has exactly this number."""
    if not dtype.is_floating_point:
        return isinstance(number, int) and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max
    return bool(torch.tensor(number, dtype=dtype).item() == number)
