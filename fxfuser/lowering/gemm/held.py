"""Reductions of a tile that is held as a whole: the states that each tile of a product leaves.

    if strip_start + STRIPBLOCK > 50304:
        softmax_0, softmax_1 = fold_softmax_1(tl.where(strip_mask, tile, -inf))
    else:
        softmax_0, softmax_1 = fold_softmax_1(tile)

A monoid that has `steps` folds a tile by these, one state after the other, instead of by its combine.  What a tile has
past the end of the matrix must not count; but to mask it takes an instruction for each element of every tile.  Where
the first step's identity in such elements is all that a fold must be told, a branch masks the tile.  It is a branch
between states: were it one between the tile and the masked tile, the assembler would make each instruction of the
tensor cores wait for the one before.

Enters: a unit, whose axes are those of a tile.  Leaves: its states.
"""

from __future__ import annotations

import torch

from fxfuser.domain.points import Point
from fxfuser.lowering.borders import narrowest
from fxfuser.lowering.expressions import HALF
from fxfuser.lowering.gemm.tile_emitter import TileEmitter
from fxfuser.lowering.reducer import Unit, accumulation_dtype
from fxfuser.lowering.schedule import product
from fxfuser.lowering.scope import Value
from fxfuser.ops import MONOIDS, TRITON_NAMES, Monoid, Step, literal
from fxfuser.ops.monoids import function


class Held:
    """The reductions of one kernel's tiles.  `functions` are the sources of those that its lines call."""

    def __init__(self, emitter: TileEmitter) -> None:
        self.emitter, self.reducer = emitter, emitter.reducer
        self.functions: dict[str, str] = {}

    def states(self, point: Point) -> list[Value]:
        """The states of a tile's part of a reduction."""
        unit = Unit(point, (), 0, (), 0)
        reducer = self.reducer
        monoid, dtype = reducer.monoid(unit.point), accumulation_dtype(unit.point)
        sums = self._column_sums(unit, monoid) if monoid.adds and dtype is torch.float32 else None
        if sums is not None:
            return [sums]
        if not monoid.steps:
            return reducer.reduced(unit, reducer.lifted(unit))
        if monoid.absorbs and (branched := self._branched(unit, monoid)) is not None:
            return branched
        coarse = unit.operand.dtype in HALF and any(s.exceeds for s in monoid.steps)
        element = reducer.first_step(unit, monoid) if monoid.absorbs else reducer.lifted(unit, as_is=coarse)[0]
        states: list[Value] = []
        for step, kind, identity in zip(monoid.steps, monoid.dtypes(dtype), monoid.identity(dtype)):
            part, value, folded = MONOIDS[step.monoid], element, kind
            if step.lift != "{x}":
                value, folded = self._step(unit, step, element, states, kind)
                if not monoid.absorbs:
                    value = reducer.padded(unit, value, part.identity(folded)[0], folded, element.axes)
            found = reducer.folded(unit, [value], part)[0]
            text = step.settle.format(found.name, identity=literal(identity, kind))
            found = found if text == found.name else self.emitter.bind("settled", text, kind, found.axes)
            states.append(self.emitter.rounded(Value(found.name, kind, found.axes, False), unit.operand.dtype)
                          if coarse and kind is torch.float32 else found)
        return self._settled(monoid, states)

    def _branched(self, unit: Unit, monoid: Monoid) -> list[Value] | None:
        """The states, by a branch for the tiles at the border; None where no tile is at one."""
        emitter, element = self.emitter, self.reducer.element(unit)
        border = emitter.border(unit.axes)
        if border is None or not emitter.schedule.dims_of(unit.axes) <= emitter.schedule.dims_of(element.axes):
            return None
        first = MONOIDS[monoid.steps[0].monoid].identity(element.dtype)[0]
        masked = f"tl.where({' & '.join(emitter.mask(unit.axes))}, {element.name}, {literal(first, element.dtype)})"
        name = self._function(unit, monoid, element.dtype)
        names = emitter.fresh(monoid.name, monoid.states)
        inside, outside = (f"{', '.join(names)} = {name}({text})" for text in (element.name, masked))
        lines = [f"if {border.crossed}:", f"    {outside}", "else:", f"    {inside}"]
        if border.divided:
            lines = [f"if {border.divided}:", f"    {inside}", "else:", *(f"    {line}" for line in lines)]
        emitter.top.lines += lines
        kept = element.axes - frozenset(unit.axes)
        return [Value(n, kind, kept) for n, kind in zip(names, monoid.dtypes(element.dtype))]

    def _function(self, unit: Unit, monoid: Monoid, dtype: torch.dtype) -> str:
        """The name of the function that folds a tile by the monoid's steps."""
        slots = sorted((d.slot for d in self.emitter.schedule.dims_of(unit.axes) if d.block != "1"), reverse=True)
        name, states, lines = "_".join(["fold", monoid.name, *map(str, slots)]), list[str](), list[str]()
        for step, kind, identity in zip(monoid.steps, monoid.dtypes(dtype), monoid.identity(dtype)):
            text = step.lift.format(*states, x="tile")
            for slot in slots:
                text = f"tl.reduce({text}, {slot}, {MONOIDS[step.monoid].combine}, keep_dims=True)"
            states.append(f"state_{len(states)}")
            lines.append(f"{states[-1]} = {step.settle.format(text, identity=literal(identity, kind))}")
        self.functions[name] = function(name, "tile", *lines, f"return {', '.join(states)}")
        return name

    def _settled(self, monoid: Monoid, found: list[Value]) -> list[Value]:
        """The states of what a monoid's steps have found."""
        names = [v.name for v in found]
        texts = [text.format(*names) for text in monoid.settled] or names
        return [v if text == v.name else self.emitter.bind("settled", text, v.dtype, frozenset().union(
            *(u.axes for u in found))) for text, v in zip(texts, found)]

    def _column_sums(self, unit: Unit, monoid: Monoid) -> Value | None:
        """The sums over a tile's rows by tensor cores, where its elements are halves; None where that is not so."""
        emitter, point = self.emitter, narrowest(unit.operand)
        dims = emitter.schedule.dims_of(unit.axes)
        if point.dtype not in HALF or [d.slot for d in dims] != [0] or monoid.lift != ("{x}",):
            return None
        value = emitter.emit(point, unit.guard)
        axes = value.axes - frozenset(unit.axes)
        whole = emitter.schedule.dims_of(value.axes)
        if not value.rounded or {d.slot for d in whole} != {0, 1}:
            return None
        text = emitter.existing(unit.axes, emitter.half(value, point.dtype), "0.0")
        return emitter.bind(monoid.name, f"column_sums({text})", torch.float32, axes)

    def _step(self, unit: Unit, step: Step, element: Value, states: list[Value], kind: torch.dtype,
              ) -> tuple[Value, torch.dtype]:
        """What one pass over a held tile folds, and its dtype: that of the state, int32 for positions that fit."""
        emitter, names = self.emitter, [v.name for v in states]
        if "{at}" not in step.lift:
            return emitter.bind("lifted", step.lift.format(*names, x=element.name), kind, element.axes), kind
        count = product(a.size for a in unit.axes)
        at = self.reducer.position(unit)
        if isinstance(count, int) and count < 2**31:
            kind = torch.int32
            at = emitter.bind("at", f"{at.name}.to(tl.int32)", kind, at.axes)
        read = unit.operand.dtype
        reaches = (step.exceeds if read.is_floating_point else step.equals).format(
            *names, x=element.name, dtype=TRITON_NAMES[read])
        text = step.lift.format(*names, x=element.name, at=at.name, reaches=reaches,
                                none=literal(torch.iinfo(kind).max, kind))
        return emitter.bind("lifted", text, kind, element.axes | at.axes), kind
