"""Two dots at neighbouring columns as one: the halves of a gate that lie interleaved.

    h = x @ w.T;  silu(h[:, ::2]) * h[:, 1::2]    dots at columns 2 * j and 2 * j + 1

As two products each would read its own half of w and multiply narrow tiles.  As one, over w = 2 * j + {0, 1}, the main
loop is that of a plain product, and the pair of each j is in one thread: tensor cores leave neighbouring columns there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

from fxfuser.domain.index import Axis, Form, Index
from fxfuser.domain.points import Point, PointKind


@dataclass(frozen=True, eq=False)
class Pair:
    """Dots `even` and `odd`; `right` is the factor of both, a load at the axis `wide` in place of their last column."""

    even: Point
    odd: Point
    right: Point
    wide: Axis


def interleaved(dots: Sequence[Point], columns: tuple[Axis, ...]) -> Pair | None:
    """The two dots as a pair, if that is what they are."""
    if len(dots) != 2 or not columns:
        return None
    even, odd = dots
    if even.index[-1].constant == 1:
        even, odd = odd, even
    same = even.node is odd.node and even.index[:-1] == odd.index[:-1] and even.operands[0] is odd.operands[0]
    if not same or even.index[-1] + 1 != odd.index[-1] or even.index[-1].constant != 0:
        return None
    loads = [dot.operands[1] for dot in (even, odd)]
    if any(p.kind is not PointKind.LOAD or p.lookups for p in loads):
        return None
    axis = columns[-1]
    wide = Axis(f"{axis.name}w", axis.size * 2)
    index, shifted = _widened(loads[0].index, axis, wide), _shifted(loads[0].index, axis)
    if index is None or shifted != loads[1].index:
        return None
    deps = loads[0].deps - {axis} | {wide}
    return Pair(even, odd, replace(loads[0], index=index, deps=deps), wide)


def _widened(index: Index, axis: Axis, wide: Axis) -> Index | None:
    """The index with axis = wide / 2; None where that is no whole number of steps."""
    found = []
    for form in index:
        step = form.coefficient(axis)
        if not isinstance(step, int) or step % 2 or axis in form.axes and not form.affine:
            return None
        rest = Form(tuple((a, k) for a, k in form.terms if a != axis), form.constant)
        found.append(rest + Form.axis(wide).scale(step // 2) if step else rest)
    return tuple(found)


def _shifted(index: Index, axis: Axis) -> Index:
    """The index half a step of the axis further on."""
    steps = [form.coefficient(axis) for form in index]
    return tuple(f + s // 2 if isinstance(s, int) else f for f, s in zip(index, steps))
