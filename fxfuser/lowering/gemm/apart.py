"""Two dots at columns that lie apart as one: the halves of a gate that lie one after the other.

    h = x @ w.T;  silu(h[:, :F]) * h[:, F:]    dots at columns j and F + j

With an accumulator each, two dots of one step of k wait for each other: assemblers let the tensor cores go on by
themselves only within one chain.  As one dot over [2, j], whose factor one copy brings from both places, the main loop
is that of a plain product, and the two elements of each j are in one thread: columns of a tile that lie half a tile
apart are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Sequence

from fxfuser.domain.index import Axis, Form, linear
from fxfuser.domain.points import Point, PointKind
from fxfuser.domain.size import hint
from fxfuser.lowering.schedule import strides_of


@dataclass(frozen=True, eq=False)
class Apart:
    """`dots` by their places; `right` is the factor of both, a load at the axis `which` too, that counts them."""

    dots: tuple[Point, Point]
    right: Point
    which: Axis


def apart(dots: Sequence[Point], inner: tuple[Axis, ...]) -> Apart | None:
    """The two dots as one over two places of the right factor, along whose memory they sum; None where they are not."""
    if len(dots) != 2 or len(inner) != 1:
        return None
    first, second = dots
    if first.node is not second.node or first.index[:-1] != second.index[:-1] or \
            first.operands[0] is not second.operands[0]:
        return None
    loads = [dot.operands[1] for dot in dots]
    if any(p.kind is not PointKind.LOAD or p.lookups or p.node is None for p in loads) or loads[0].node is None:
        return None
    strides = strides_of(loads[0].node)
    steps = [after - before for before, after in zip(loads[0].index, loads[1].index)]
    if any(step.terms for step in steps) or linear(loads[0].index, strides).coefficient(inner[0]) != 1:
        return None
    distance = hint(linear(tuple(steps), strides).constant, {})
    if distance < 0:
        return apart((second, first), inner)
    which = Axis("which", 2)
    index = tuple(form + Form.axis(which).scale(step.constant) for form, step in zip(loads[0].index, steps))
    right = replace(loads[0], index=index, deps=loads[0].deps | {which})
    return Apart((first, second), right, which) if distance else None
