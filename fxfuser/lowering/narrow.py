"""Comparisons of a position with a number that a tensor holds, in the type of positions.

    arange(n)[None, :] == labels[:, None]        int64 in ATen; a tile of it costs two instructions an element, and as
                                                 int32, to which each label is brought once, it costs one

Legal where the position's bounds are known to be those of int32: a label outside of them equals none, as -1 does.  In
a loop, that over tiles included, the lanes of a step are compared with what is left of the label, since LLVM makes the
loop's counter, and all that is added to it, int64.
"""

from __future__ import annotations

from itertools import permutations
from typing import Sequence

import torch

from fxfuser.domain.index import Axis, Form, bounds
from fxfuser.domain.points import Point, PointKind
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.vectors import lanes

aten = torch.ops.aten

_SIGNS: dict[object, str] = {aten.eq.Tensor: "==", aten.ne.Tensor: "!="}
_LIMIT = 2 ** 31


def comparison(emitter: Emission, point: Point, guard: Guard) -> tuple[str, Point, Point] | None:
    """The text of a comparison with a position, the position and the other operand; None for any other point."""
    sign = _SIGNS.get(point.node.target) if point.node is not None else None
    if sign is None or len(point.operands) != 2:
        return None
    for position, other in (point.operands, point.operands[::-1]):
        if _compares(position, other):
            value, form = emitter.emit(other, guard), position.index[0]
            fits = f"({value.name} >= 0) & ({value.name} <= {_greatest(position)})"
            narrow = emitter.bind("narrow", f"tl.where({fits}, {value.name}, -1).to(tl.int32)", torch.int32, value.axes)
            for dim in emitter.schedule.dims_of(form.axes):
                start = emitter.start(dim)
                if start and len(dim.axes) == 1 and form == Form.axis(dim.axes[0]):
                    text = lanes(dim, emitter.schedule, emitter.block(dim))
                    lane = emitter.bind("lane", text, torch.int32, frozenset())
                    return f"{lane.name} {sign} {narrow.name} - {start}", position, other
            return f"({emitter.indices.form(form)}) {sign} {narrow.name}", position, other
    return None


def vanishes(point: Point, axes: Sequence[Axis]) -> bool:
    """Whether a point is 0 in lanes past the end of its only axis: it is where a number equals the place of no lane."""
    if point.node is None or point.node.target is not aten.where.self or len(point.operands) != 3 or len(axes) != 1:
        return False
    chosen, _, otherwise = point.operands
    if otherwise.kind is not PointKind.CONSTANT or otherwise.value != 0:
        return False
    if chosen.node is None or chosen.node.target is not aten.eq.Tensor:
        return False
    return any(p.index == (Form.axis(axes[0]),) and _compares(p, q) for p, q in permutations(chosen.operands))


def _compares(position: Point, other: Point) -> bool:
    """Whether a position meets a number that a tensor holds."""
    return _known(position) and other.dtype is torch.int64 and not position.deps <= other.deps and not _known(other)


def _greatest(position: Point) -> int:
    limits = bounds(position.index[0])
    assert limits is not None and isinstance(limits[1], int)
    return limits[1]


def _known(point: Point) -> bool:
    """Whether a point is a position that int32 holds, and that is no lookup."""
    if point.kind is not PointKind.IOTA or point.dtype is not torch.int64 or point.lookups:
        return False
    limits = bounds(point.index[0])
    return limits is not None and all(isinstance(b, int) and 0 <= b < _LIMIT for b in limits)
