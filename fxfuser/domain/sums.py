"""Matrix products in kernels that have no tiles of one: where the sum over k comes from.

Enters: stores whose points hold dots.  Leaves: the same with each dot as a `scaled` point, what the node makes of the
sum, over one of two leaves.

    Sums.LEFT     parts: an earlier kernel has left parts of the sum in memory, and the walk needed none of its factors
    Sums.ONE      the same, of which there is one
    Sums.LOOPED   reduce over k of times(left, right): this kernel reads the factors and sums by itself

A product of a matrix and a vector is a sum of the second kind: no factor has an element that two results share but the
vector, so there is nothing to gain by tiles.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Mapping, Sequence

import torch
from torch import fx

from fxfuser.domain.index import Form, axes_of
from fxfuser.domain.points import Point, PointKind, Store, over, points_of
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.domain.tensors import shape_of

_ONE: Size = 1
COUNT = Symbol("parts", 1)  # how many parts an earlier kernel has left of each sum, known at the call


class Sums(Enum):
    """Where the sums of products come from."""

    LEFT = "left"
    ONE = "one"
    LOOPED = "looped"


def place_in(shape: Sequence[Size], index: Sequence[Form]) -> Form:
    """The place of an element in a contiguous buffer of this shape."""
    place, stride = Form(), _ONE
    for form, size in zip(reversed(index), reversed(shape)):
        place, stride = place + form.scale(stride), stride * size
    return place


def elements(shape: Sequence[Size]) -> Size:
    """How many elements a tensor of this shape has."""
    total: Size = 1
    for size in shape:
        total = total * size
    return total


def summed(stores: tuple[Store, ...], sums: Sums) -> tuple[Store, ...]:
    """The stores over sums of this kind."""
    moved: dict[int, Point] = {}
    for point in points_of(stores):
        now = over(point, moved)
        moved[id(point)] = _scaled(now, sums) if point.kind is PointKind.DOT else now
    return tuple(replace(s, value=moved[id(s.value)]) for s in stores)


def buffer_of(point: Point) -> fx.Node:
    """The product of which a `parts` point reads a sum."""
    assert point.kind is PointKind.PARTS and point.node is not None
    return point.node


def _scaled(dot: Point, sums: Sums) -> Point:
    looped = sums is Sums.LOOPED
    leaf = _looped(dot) if looped else _left(dot, 1 if sums is Sums.ONE else Poly((((COUNT,), 1),)))
    added = dot.operands[2 if looped else 1:]
    deps = leaf.deps.union(*(p.deps for p in added))
    return replace(dot, kind=PointKind.SCALED, operands=(leaf, *added), axes=(), deps=deps)


def _left(dot: Point, count: Size) -> Point:
    """`operands[0]` of a dot whose factors are not needed is its place in a buffer."""
    assert dot.node is not None
    place = dot.operands[0].index
    return Point(PointKind.PARTS, torch.float32, dot.node, place,
                 args=(elements(shape_of(dot.node)), count), deps=axes_of(place))


def _looped(dot: Point) -> Point:
    left, right = dot.operands[:2]
    times = Point(PointKind.TIMES, torch.float32, dot.node, operands=(left, right), deps=left.deps | right.deps)
    return Point(PointKind.REDUCE, torch.float32, dot.node, dot.index, operands=(times,), axes=dot.axes,
                 deps=times.deps.difference(*dot.axes))


def parts_read(points: Sequence[Point]) -> Mapping[fx.Node, None]:
    """The products of which an earlier kernel must have left sums, in the order in which they are read."""
    return dict.fromkeys(buffer_of(p) for p in points if p.kind is PointKind.PARTS)
