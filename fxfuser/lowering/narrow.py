"""Comparisons of a position with a number that a tensor holds, in the type of positions.

    arange(n)[None, :] == labels[:, None]        int64 in ATen; a tile of it costs two instructions an element, and as
                                                 int32, to which each label is brought once, it costs one

Legal where the position's bounds are known to be those of int32: a label outside of them equals none, as -1 does.
"""

from __future__ import annotations

import torch

from fxfuser.domain.index import bounds
from fxfuser.domain.points import Point, PointKind
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard

aten = torch.ops.aten

_SIGNS: dict[object, str] = {aten.eq.Tensor: "==", aten.ne.Tensor: "!="}
_LIMIT = 2 ** 31


def comparison(emitter: Emission, point: Point, guard: Guard) -> tuple[str, Point, Point] | None:
    """The text of a comparison with a position, the position and the other operand; None for any other point."""
    sign = _SIGNS.get(point.node.target) if point.node is not None else None
    if sign is None or len(point.operands) != 2:
        return None
    for position, other in (point.operands, point.operands[::-1]):
        if _known(position) and other.dtype is torch.int64 and not position.deps <= other.deps and not _known(other):
            value = emitter.emit(other, guard)
            fits = f"({value.name} >= 0) & ({value.name} < {_LIMIT})"
            narrow = emitter.bind("narrow", f"tl.where({fits}, {value.name}, -1).to(tl.int32)", torch.int32, value.axes)
            return f"({emitter.indices.form(position.index[0])}) {sign} {narrow.name}", position, other
    return None


def _known(point: Point) -> bool:
    """Whether a point is a position that int32 holds, and that is no lookup."""
    if point.kind is not PointKind.IOTA or point.dtype is not torch.int64 or point.lookups:
        return False
    limits = bounds(point.index[0])
    return limits is not None and all(isinstance(b, int) and 0 <= b < _LIMIT for b in limits)
