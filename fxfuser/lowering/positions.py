"""Positions that tensors hold, as those of a gather: where they are emitted, and what is not read at others.

Enters: the lookups that a point's forms name.  Leaves: names by which the forms are written, and the conditions under
which positions are places in their dimensions.  Eager refuses positions outside of them; so does the interpreter, and
a kernel that is built with TRITON_DEBUG=1.
"""

from __future__ import annotations

from typing import Iterable

import torch

from fxfuser.domain.index import Axis, Lookup, axes_of
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard, before, guard_axes
from fxfuser.lowering.scope import Value

OUTSIDE = "a position is outside of its dimension"


class Positions:
    """The lookups of one kernel; `points` are what has their values."""

    def __init__(self, emitter: Emission) -> None:
        self.emitter = emitter
        self.points = {name: value for point in emitter.domain.points() for name, value in point.lookups}

    def look_up(self, names: Iterable[Lookup], guard: Guard) -> frozenset[Axis]:
        """Emits positions, so that forms may name them; the axes on which they depend."""
        axes: frozenset[Axis] = frozenset()
        for name in names:
            at = self._position(name, before(guard, name))
            self._refuse_outside(name, before(guard, name))
            place = self.emitter.bind("at", f"{at.name}.to(INDEX)", torch.int64, at.axes)
            self.emitter.indices.lookups[name] = place.name
            axes = axes | at.axes
        return axes

    def in_range(self, names: Iterable[Lookup], guard: Guard) -> list[str]:
        """The conditions under which positions are places in their dimensions: nothing is read at any other."""
        return [self._inside(name, before(guard, name)).name for name in names]

    def _position(self, name: Lookup, guard: Guard) -> Value:
        """A position as its tensor holds it, negative ones counted from the end."""
        emitter = self.emitter
        value = emitter.emit(self.points[name], guard)
        axes = value.axes | axes_of(name.index)
        text = f"tl.where({value.name} < 0, {value.name} + {emitter.sizes.text(name.size)}, {value.name})" \
            if name.wraps else value.name
        if not emitter.schedule.dims_of(axes) <= emitter.schedule.dims_of(value.axes):
            text = f"tl.broadcast_to({text}, {emitter.tile(axes)})"
        return value if text == value.name else emitter.bind("position", text, value.dtype, axes)

    def _inside(self, name: Lookup, guard: Guard) -> Value:
        at = self._position(name, guard)
        text = f"({at.name} >= 0) & ({at.name} < {self.emitter.sizes.text(name.size)})"
        return self.emitter.bind("inside", text, torch.bool, at.axes)

    def _refuse_outside(self, name: Lookup, guard: Guard) -> None:
        emitter, inside = self.emitter, self._inside(name, guard)
        masks = emitter.mask(inside.axes, guard)
        line = f"tl.device_assert({', '.join([inside.name, repr(OUTSIDE), *([' & '.join(masks)] if masks else [])])})"
        scope = emitter.scope.covering(emitter.loops(inside.axes | guard_axes(guard)))
        if line not in scope.lines:
            scope.lines.append(line)
