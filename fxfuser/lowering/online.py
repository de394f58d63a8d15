"""Online softmax: a row's maximum and the sum of exponentials that it shifts, in one loop.

    m = amax(x);  s = sum(exp(x - m))

Each alone needs the row, so a looped row would be read twice before anything can use both.  Folded together as
one monoid of two states, a maximum and a sum scaled by it, they need it once (Milakov and Gimelshein, 2018,
https://arxiv.org/abs/1805.02867).  A row that is held in registers gains nothing and keeps its two folds.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Iterator

import torch

from fxfuser.domain.index import Axis
from fxfuser.domain.points import Point, PointKind
from fxfuser.ops import row

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)  # no rounding happens between the ops


def scaled_sums(
    points: Iterable[Point], looped: Callable[[tuple[Axis, ...]], Any]
) -> Iterator[tuple[Point, Point]]:
    """Each sum of exponentials over looped axes with the maximum that shifts them."""
    for point in points:
        if _folds(point, "sum") and any(map(looped, point.axes)):
            shifts = {id(m): m for m in (_shift(point, region) for region in range(len(point.axes)))}
            shift, *others = shifts.values()
            if shift is not None and not others:
                yield point, shift


def _folds(point: Point, monoid: str) -> bool:
    found = row(point.node.target) if point.kind is PointKind.REDUCE and point.node is not None else None
    return found is not None and found.monoid == monoid and point.dtype in WIDE


def _shift(point: Point, region: int) -> Point | None:
    """The maximum over the same region of what is exponentiated there."""
    exponential = point.operands[region]
    if not _is(exponential, aten.exp.default) or exponential.dtype is not point.dtype:
        return None
    difference = exponential.args[0]
    if not _is(difference, aten.sub.Tensor) or difference.dtype is not point.dtype:
        return None
    if len(difference.args) != 2 or difference.kwargs:
        return None
    value, shift = difference.args
    same = isinstance(shift, Point) and _folds(shift, "amax") and shift.axes == point.axes
    return shift if same and shift.operands[region] is value and shift.dtype is point.dtype else None


def _is(point: Any, target: object) -> bool:
    return isinstance(point, Point) and point.kind is PointKind.OP and point.node is not None \
        and point.node.target is target
