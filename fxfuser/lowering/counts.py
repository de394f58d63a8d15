"""Counts of a loop: states of a fold that are one number for all lanes, where each lane has an element in every step.

    mean, count, squares = combine_moments(mean, count, squares, x, 1.0, 0)        with `count` no tile but a number

What follows from a count alone, above all the weight of an element, 1 / count, is then computed once a step and not
for each element.  (Batch norm's statistics of bf16, built for sm_90: 9 instructions an element and 64 registers; with
tiles of counts 22 and 80.)  When the loop has ended a count becomes a tile, as lanes are then folded.
"""

from __future__ import annotations

from typing import Iterable

import torch

from fxfuser.domain.index import Axis
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.groups import Folded
from fxfuser.lowering.scope import Value
from fxfuser.ops import Monoid, literal

SHAPE = "[]"  # of a number


def shared(emitter: Emission, unit: Folded, monoid: Monoid) -> tuple[int, ...]:
    """Which states of a unit's loop are numbers."""
    if not unit.loops or emitter.mask(unit.axes):
        return ()
    return tuple(i for i in monoid.counts if "{" not in monoid.lift[i])


def lifted(monoid: Monoid, state: int, dtype: torch.dtype) -> Value:
    """What each element adds to a count."""
    return Value(literal(float(monoid.lift[state]), dtype), dtype, frozenset())


def spread(emitter: Emission, count: Value, axes: Iterable[Axis]) -> Value:
    """A count as a tile over `axes`, behind the loop."""
    axes = frozenset(axes)
    name, = emitter.fresh("count", 1)
    emitter.scope.lines.append(f"{name} = tl.broadcast_to({count.name}, {emitter.tile(axes)})")
    return Value(name, count.dtype, axes)
