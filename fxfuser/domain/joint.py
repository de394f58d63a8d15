"""Two reductions of a looped row, the second of which needs the first, in one loop.

    m = amax(x);  s = sum(exp(x - m))                        ->    softmax: a maximum and a sum scaled by it
    m = amax(x);  s = sum(exp(x - (m if finite else 0)))     ->    the same, for PyTorch's logsumexp
    m = mean(x);  s = sum((x - m) * (x - m))                 ->    moments: a mean and a sum of squared distances

Each alone needs the row, so a looped row would be read twice before anything can use both.  Folded together as
one monoid they need it once (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867; Welford, 1962).  A row
that is held in registers gains nothing and keeps its two folds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

import torch

from fxfuser.domain.index import Axis
from fxfuser.domain.points import Point, PointKind
from fxfuser.ops import Monoid, row
from fxfuser.ops.monoids import MOMENTS, SHIFTED_SOFTMAX, SOFTMAX

aten = torch.ops.aten
# half values stay fp32 between the ops, as they do anywhere inside a kernel
WIDE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Pair:
    """`first` and `second` are results 0 and 1 of `monoid` over the operands of `first`."""

    first: Point
    second: Point
    monoid: Monoid


def joint_folds(points: Iterable[Point], looped: Callable[[tuple[Axis, ...]], Any]) -> Iterator[Pair]:
    """Every pair over looped axes; each reduction is first in pairs of one monoid, second in one pair."""
    monoids: dict[int, Monoid] = {}
    for point in points:
        if not _folds(point, "sum") or not any(map(looped, point.axes)):
            continue
        for monoid, name, centre, shift in _KINDS:
            first = _first(point, name, centre, shift)
            if first is not None and monoids.setdefault(id(first), monoid) is monoid:
                yield Pair(first, point, monoid)


def _folds(point: Point, monoid: str) -> bool:
    found = row(point.node.target) if point.kind is PointKind.REDUCE and point.node is not None else None
    return found is not None and found.monoid is not None and found.monoid.name == monoid and point.dtype in WIDE


def _first(point: Point, monoid: str, centre: Callable[[Point], Any], shift: Callable[[Any], Any]) -> Point | None:
    """The reduction whose result all regions of the sum subtract from what it folds there."""
    found = {id(m): m for m in (_subtracted(point, i, monoid, centre, shift) for i in range(len(point.axes)))}
    first, *others = found.values()
    return None if others else first


def _subtracted(
    point: Point, region: int, monoid: str, centre: Callable[[Point], Any], shifted: Callable[[Any], Any]
) -> Point | None:
    difference = centre(point.operands[region])
    if not _is(difference, aten.sub.Tensor) or difference.dtype is not point.dtype:
        return None
    if len(difference.args) != 2 or difference.kwargs:
        return None
    value, shift = difference.args[0], shifted(difference.args[1])
    same = isinstance(shift, Point) and _folds(shift, monoid) and shift.axes == point.axes
    return shift if same and shift.dtype is point.dtype and _equal(shift.operands[region], value) else None


def _equal(left: Any, right: Any) -> bool:
    """Whether two points have one value although their nodes are two: cheap producers are repeated for each reader."""
    if not isinstance(left, Point) or not isinstance(right, Point):
        return type(left) is type(right) and bool(left == right)
    if left is right:
        return True
    if left.kind is not PointKind.OP or right.kind is not PointKind.OP or left.node is None or right.node is None:
        return False
    alike = left.node.target is right.node.target and left.dtype is right.dtype and left.dtype in WIDE
    return alike and left.kwargs == right.kwargs and len(left.args) == len(right.args) \
        and all(map(_equal, left.args, right.args))


def _itself(shift: Any) -> Any:
    return shift


def where_finite(shift: Any) -> Any:
    """The maximum of which a shift is 0 where it is infinite, as PyTorch's logsumexp has it."""
    if _is(shift, aten.masked_fill.Scalar) and len(shift.args) == 3:
        largest, infinite, zero = shift.args
    elif _is(shift, aten.where.self):
        infinite, zero, largest = shift.args
        zero = zero.value if isinstance(zero, Point) and zero.kind is PointKind.CONSTANT else None
    else:
        return None
    if zero != 0 or not _is(infinite, aten.eq.Scalar) or infinite.args[1] != math.inf:
        return None
    magnitude = infinite.args[0]
    return largest if _is(magnitude, aten.abs.default) and _equal(magnitude.args[0], largest) else None


def _exponent(point: Point) -> Any:
    """What is exponentiated."""
    return point.args[0] if _is(point, aten.exp.default) else None


def _root(point: Point) -> Any:
    """What is squared."""
    if _is(point, aten.mul.Tensor) and point.args[0] is point.args[1]:
        return point.args[0]
    return point.args[0] if _is(point, aten.pow.Tensor_Scalar) and point.args[1] == 2 else None


def _is(point: Any, target: object) -> bool:
    return isinstance(point, Point) and point.kind is PointKind.OP and point.node is not None \
        and point.node.target is target


# how a sum depends on the reduction before it: the joint monoid, the first's, what is summed, what it subtracts
_KINDS = ((SOFTMAX, "amax", _exponent, _itself), (SHIFTED_SOFTMAX, "amax", _exponent, where_finite),
          (MOMENTS, "mean", _root, _itself))
