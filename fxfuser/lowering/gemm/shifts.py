"""Which results follow from a logsumexp, whatever the maximum by which its exponentials were shifted.

    log(sum(exp(x - m))) + m              the same for every m
    y - m - log(s),  exp(y - m) / s       too, where s = sum(exp(x - m))
    m,  s,  log(s) + 2 * m                not

Enters: the maximum and the sums of a `Pair`, and stores.  Leaves: whether one number can stand for both in all that is
stored (`Packing`).  A value is judged by what becomes of it when d is added to m, and each s thereby divided by exp(d):
a multiple of d is added to it, or it is multiplied by a power of exp(d).  What is stored must be neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping

import torch

from fxfuser.domain.joint import where_finite
from fxfuser.domain.points import Point, PointKind, Store, points_of

aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Change:
    """`added` times d, or a factor of exp(`power` * d); at most one of the two is not 0."""

    added: float = 0.0
    power: float = 0.0


NONE = Change()


def follows_from_logsumexp(stores: Iterable[Store], maximum: Point, sums: Iterable[Point]) -> bool:
    """Whether no store tells by how much the exponentials were shifted."""
    found: dict[int, Change | None] = {id(s): Change(power=-1.0) for s in sums}
    found[id(maximum)] = Change(added=1.0)
    stores = tuple(stores)
    for point in points_of(stores):
        if id(point) not in found:
            found[id(point)] = _changed(point, found, maximum)
    return all(found[id(s.value)] == NONE for s in stores)


def _changed(point: Point, found: Mapping[int, Change | None], maximum: Point) -> Change | None:
    """What becomes of a point; None where that is no change of the two kinds."""
    changes = [found[id(p)] for p in point.inputs]
    if all(c == NONE for c in changes):
        return NONE
    if where_finite(point) is maximum:
        return found[id(maximum)]  # an infinite maximum is told by the logsumexp as well
    rule = _RULES.get(point.node.target) if point.kind is PointKind.OP and point.node is not None else None
    operands = [_operand(a, found) for a in point.args]
    known = [o for o in operands if o is not None]
    if rule is None or point.kwargs and rule is not _keep or len(known) < len(operands):
        return None
    return rule(point, *known) if len(known) == _ARITY[rule] else None


@dataclass(frozen=True)
class _Operand:
    """What becomes of an operand, and its value where that is a number."""

    change: Change
    number: float | None = None


def _operand(argument: Any, found: Mapping[int, Change | None]) -> _Operand | None:
    if isinstance(argument, Point):
        change = found[id(argument)]
        number = argument.value if argument.kind is PointKind.CONSTANT else None
        return None if change is None else _Operand(change, number)
    return _Operand(NONE, argument) if isinstance(argument, (bool, int, float)) else None


def _add(point: Point, left: _Operand, right: _Operand, sign: float = 1.0) -> Change | None:
    first, second = left.change, right.change
    if first.power != second.power:
        return None
    return first if first.power else Change(added=first.added + sign * second.added)


def _subtract(point: Point, left: _Operand, right: _Operand) -> Change | None:
    return _add(point, left, right, -1.0)


def _multiply(point: Point, left: _Operand, right: _Operand) -> Change | None:
    if not left.change.added and not right.change.added:
        return Change(power=left.change.power + right.change.power)
    moved, factor = (left, right.number) if left.change.added else (right, left.number)
    return None if factor is None else Change(added=moved.change.added * factor)


def _divide(point: Point, left: _Operand, right: _Operand) -> Change | None:
    if left.change.added and right.number:
        return Change(added=left.change.added / right.number)
    if left.change.added or right.change.added:
        return None
    return Change(power=left.change.power - right.change.power)


def _negate(point: Point, operand: _Operand) -> Change | None:
    return Change(-operand.change.added, operand.change.power)


def _exponential(point: Point, operand: _Operand) -> Change | None:
    return None if operand.change.power else Change(power=operand.change.added)


def _logarithm(point: Point, operand: _Operand) -> Change | None:
    return None if operand.change.added else Change(added=operand.change.power)


def _keep(point: Point, operand: _Operand) -> Change | None:
    """A cast that does not round."""
    return operand.change if point.dtype in FLOATS else None


def _choose(point: Point, condition: _Operand, left: _Operand, right: _Operand) -> Change | None:
    return left.change if left.change == right.change else None  # no rule gives a condition that changes


_Rule = Callable[..., Change | None]
_ARITY: Mapping[_Rule, int] = {_add: 2, _subtract: 2, _multiply: 2, _divide: 2, _negate: 1, _exponential: 1,
                               _logarithm: 1, _keep: 1, _choose: 3}
_RULES: Mapping[Any, _Rule] = {
    aten.add.Tensor: _add, aten.add.Scalar: _add, aten.sub.Tensor: _subtract, aten.sub.Scalar: _subtract,
    aten.mul.Tensor: _multiply, aten.mul.Scalar: _multiply, aten.div.Tensor: _divide, aten.div.Scalar: _divide,
    aten.neg.default: _negate, aten.exp.default: _exponential, aten.log.default: _logarithm,
    aten._to_copy.default: _keep, aten.where.self: _choose,
}
