"""Reductions inside a kernel: over a tile held in registers, or accumulated over a serial loop.

A `Unit` is one region of one reduction under one guard.  A unit without loops is reduced where it stands; a
unit with loops keeps an accumulator tile per state, combines into it in each iteration and is reduced when
the loop has ended.  The states of all regions are then combined and finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

import torch

from fxfuser.domain.index import Axis
from fxfuser.domain.joint import Pair
from fxfuser.domain.points import Point, PointKind
from fxfuser.domain.size import Size
from fxfuser.lowering import counts, groups
from fxfuser.lowering.borders import narrowest
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.expressions import full
from fxfuser.lowering.guard import Guard, guard_axes
from fxfuser.lowering.narrow import vanishes
from fxfuser.lowering.pointers import pointers_to
from fxfuser.lowering.schedule import Dim, product
from fxfuser.lowering.scope import Value
from fxfuser.ops import (
    MONOIDS,
    TRITON_NAMES,
    Folds,
    Kind,
    Monoid,
    kernel_dtype,
    kind_of,
    literal,
    reduction_dims,
    reduction_dtype,
    row,
)


@dataclass(frozen=True, eq=False)
class Unit:
    """Region `region` of reduction `point`, read under `guard`; known once the loops of `stage` have ended."""

    point: Point
    guard: Guard
    region: int
    loops: tuple[Dim, ...]
    stage: int

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.point.axes[self.region]

    @property
    def operand(self) -> Point:
        return self.point.operands[self.region]


class Reducer:
    """The reductions of one kernel."""

    def __init__(self, emitter: Emission, pairs: Iterable[Pair]) -> None:
        self.emitter = emitter
        self.accumulators: dict[Unit, list[str]] = {}
        self.states: dict[tuple[int, Guard], dict[int, list[Value]]] = {}
        self.grouped: set[Unit] = set()  # what loops fold by groups of lanes
        self.joint: dict[int, list[Pair]] = {}  # by the reduction in whose loop others are folded
        for pair in pairs:
            self.joint.setdefault(id(pair.first), []).append(pair)

    def combines(self) -> dict[str, str]:
        """The sources of the functions that fold."""
        used = [self.monoid(point) for point in self.emitter.domain.folds()]
        used += [pair.monoid for pairs in self.joint.values() for pair in pairs]  # the first may have no other reader
        used += [MONOIDS[step.monoid] for monoid in used for step in monoid.steps]
        return {monoid.combine: monoid.source for monoid in used}

    def fills(self, units: Iterable[Unit]) -> dict[int, str]:
        """What loads, by id, are to hold in lanes that do not exist, so that their folds need not put it there."""
        found: dict[int, str] = {}
        for unit in units:
            load, monoid = narrowest(unit.operand), self.monoid(unit.point)
            if load.kind is PointKind.LOAD and not unit.guard and load.dtype.is_floating_point:
                first = MONOIDS[monoid.steps[0].monoid] if monoid.steps else monoid
                found.setdefault(id(load), literal(first.identity(load.dtype)[0], torch.float32))
        return found

    def group(self, units: Sequence[Unit]) -> None:
        """Decides which of the units of one loop it folds by groups of lanes."""
        fitting = [(u, self.monoid(u.point)) for u in units  # states that an earlier kernel left are folded as they are
                   if u.operand.kind is not PointKind.PARTIAL and groups.fits(self.emitter, u)]
        if any(monoid.absorbs for _, monoid in fitting):
            self.grouped.update(u for u, monoid in fitting if groups.serves(monoid))

    def begin(self, unit: Unit) -> None:
        """Before the loop: accumulators that hold the identity."""
        emitter, monoid, dtype = self.emitter, self.monoid(unit.point), accumulation_dtype(unit.point)
        axes = (*self._kept(unit), *unit.axes)
        shape = groups.begin(emitter, unit, axes) if unit in self.grouped else emitter.tile(axes)
        names = emitter.fresh("accumulator", monoid.states)
        shared = self._shared(unit)
        for i, (name, identity, state) in enumerate(zip(names, monoid.identity(dtype), monoid.dtypes(dtype))):
            emitter.top.lines.append(f"{name} = {full(identity, state, counts.SHAPE if i in shared else shape)}")
        self.accumulators[unit] = names

    def accumulate(self, unit: Unit) -> None:
        """Inside the loop: combine the lifted operand into the accumulators."""
        names, monoid = self.accumulators[unit], self.monoid(unit.point)
        if unit in self.grouped:
            lifted = groups.states(self.emitter, unit, monoid, self.first_step(unit, monoid))
        else:
            lifted = [v.name for v in self.lifted(unit)]
        self.emitter.scope.lines.append(f"{', '.join(names)} = {monoid.combine}({', '.join(names + lifted)})")

    def spread(self, unit: Unit) -> None:
        """Between two parts of a loop: the second may leave out lanes, so that each counts for itself."""
        kinds = self.monoid(unit.point).dtypes(accumulation_dtype(unit.point))
        axes, names = self._kept(unit) | frozenset(unit.axes), self.accumulators[unit]
        for i in self._shared(unit):
            names[i] = counts.spread(self.emitter, Value(names[i], kinds[i], axes), axes).name

    def end(self, unit: Unit) -> None:
        """After the loop: reduce the accumulators; finish the reduction if this was its last region."""
        monoid, dtype = self.monoid(unit.point), accumulation_dtype(unit.point)
        axes = self._kept(unit) | frozenset(unit.axes)
        values = [Value(n, d, axes) for n, d in zip(self.accumulators[unit], monoid.dtypes(dtype))]
        for i in self._shared(unit):
            values[i] = counts.spread(self.emitter, values[i], axes)
        done = self.states.setdefault((id(unit.point), unit.guard), {})
        done[unit.region] = self.reduced(unit, values)
        looped = [i for i, axes in enumerate(unit.point.axes) if self.emitter.loops(axes)]
        if all(i in done for i in looped):
            self._keep(unit.point, unit.guard)

    def _keep(self, point: Point, guard: Guard) -> None:
        """The result of a looped reduction, and of the sums that were folded with it."""
        results, states = self.emitter.results, self._total(point, guard)
        results[id(point), guard] = self.result(point, self.monoid(point), states, point.output)
        for pair in self.joint.get(id(point), ()):
            results[id(pair.second), guard] = self.result(pair.second, pair.monoid, states, 1)

    def monoid(self, point: Point) -> Monoid:
        """How this kernel folds a reduction."""
        pairs = self.joint.get(id(point))
        return pairs[0].monoid if pairs else monoid_of(point)

    def inline(self, point: Point, guard: Guard) -> Value:
        """A reduction none of whose regions is looped."""
        return self.result(point, self.monoid(point), self._total(point, guard), point.output)

    def _total(self, point: Point, guard: Guard) -> list[Value]:
        """The states of all regions together."""
        emitter, monoid, dtype = self.emitter, self.monoid(point), accumulation_dtype(point)
        done = self.states.get((id(point), guard), {})
        total: list[Value] | None = None
        for i in range(len(point.operands)):
            states = done.get(i) or self._region(point, guard, i)
            total = states if total is None else self._combined(monoid, total, states)
        if total is None:
            total = [emitter.bind("identity", emitter.full(x, d), d, frozenset())
                     for x, d in zip(monoid.identity(dtype), monoid.dtypes(dtype))]
        return total

    def result(self, point: Point, monoid: Monoid, total: list[Value], output: int) -> Value:
        """Result number `output` of a monoid, as the value of `point`."""
        emitter, dtype = self.emitter, accumulation_dtype(point)
        finish = monoid.finish[output]
        count = self._count(point, dtype) if "{count}" in finish else ""
        text = finish.format(*(v.name for v in total), count=count)
        axes = frozenset().union(*(v.axes for v in total))
        finished = monoid.result_dtype(output, dtype)
        value = Value(text, finished, axes)
        if text not in (v.name for v in total):
            value = emitter.bind(monoid.name, text, finished, axes)
        emitter.note(value, point)
        value = emitter.converted(value, point.dtype, kernel_dtype(point.dtype))
        value = Value(value.name, value.dtype, value.axes, point.dtype not in (torch.float16, torch.bfloat16))
        if id(point) in emitter.read and (emitter.precise or point.node in emitter.targets):
            value = emitter.rounded(value, point.dtype)
        return value

    def _count(self, point: Point, dtype: torch.dtype) -> str:
        """The number of reduced elements, an atom of the accumulation dtype."""
        total: Size = 0
        for operand, axes in zip(point.operands, point.axes):
            total = total + (operand.args[0] if operand.kind is PointKind.PARTIAL else product(a.size for a in axes))
        if isinstance(total, int):
            return literal(total, dtype)
        return f"({literal(0, torch.int64)} + {self.emitter.sizes.text(total)}).to({TRITON_NAMES[dtype]})"

    def _region(self, point: Point, guard: Guard, i: int) -> list[Value]:
        unit = Unit(point, guard, i, (), 0)
        return self.reduced(unit, self.lifted(unit))

    def _kept(self, unit: Unit) -> frozenset[Axis]:
        """Axes of the operand that the reduction keeps, and those of its guard."""
        return (unit.operand.deps | guard_axes(unit.guard)) - frozenset(unit.axes)

    def lifted(self, unit: Unit, as_is: bool = False) -> list[Value]:
        """The operand's states, the identity in lanes that do not exist; `as_is`: not rounded first."""
        monoid, dtype = self.monoid(unit.point), accumulation_dtype(unit.point)
        if unit.operand.kind is PointKind.PARTIAL:
            return self._partials(unit, monoid, dtype)
        value, kinds = self.element(unit, as_is), monoid.dtypes(dtype)
        shared = self._shared(unit)
        states = [counts.lifted(monoid, i, kind) if i in shared else self._state(unit, text, value, kind)
                  for i, (text, kind) in enumerate(zip(monoid.lift, kinds))]
        axes = frozenset().union(*(v.axes for v in states))
        return [v if i in shared else self.padded(unit, v, x, d, axes)
                for i, (v, x, d) in enumerate(zip(states, monoid.identity(dtype), kinds))]

    def _shared(self, unit: Unit) -> tuple[int, ...]:
        """The states that are one number for all lanes of a loop."""
        plain = unit not in self.grouped and unit.operand.kind is not PointKind.PARTIAL
        return counts.shared(self.emitter, unit, self.monoid(unit.point)) if plain else ()

    def first_step(self, unit: Unit, monoid: Monoid) -> Value:
        """The element, in lanes that do not exist what its first step holds for nothing."""
        value, first = self.element(unit), MONOIDS[monoid.steps[0].monoid] if monoid.steps else monoid
        return self.padded(unit, value, first.identity(value.dtype)[0], value.dtype, value.axes)

    def _operand(self, unit: Unit) -> Value:
        """The operand itself, beside which states may stand that are something else in lanes that do not exist."""
        return self.emitter.emit(unit.operand, unit.guard)

    def element(self, unit: Unit, as_is: bool = False) -> Value:
        emitter, monoid, dtype = self.emitter, self.monoid(unit.point), accumulation_dtype(unit.point)
        value = emitter.emit(unit.operand, unit.guard)
        found = row(unit.point.node.target) if unit.point.node is not None else None
        if found is not None and (found.rounded or monoid.indexed) and not as_is:
            value = emitter.rounded(value, unit.operand.dtype)
        if monoid.folds is Folds.TRUTH:
            value = emitter.converted(value, unit.operand.dtype, torch.bool)
        return emitter.converted(value, unit.operand.dtype, monoid.dtypes(dtype)[0])

    def _partials(self, unit: Unit, monoid: Monoid, dtype: torch.dtype) -> list[Value]:
        """States that an earlier kernel left, the identity past the last."""
        point, kinds, identities = unit.operand, monoid.dtypes(dtype), monoid.identity(dtype)
        if len(point.value) == monoid.states:
            return [self._left(point, *state) for state in zip(point.value, kinds, identities)]
        assert monoid.packing is not None
        number = self._left(point, point.value[0], kinds[0], monoid.packing.nothing)
        return [self.emitter.bind("unpacked", text.format(number.name, identity=literal(x, kind)), kind, number.axes)
                for text, kind, x in zip(monoid.packing.unpack, kinds, identities)]

    def _left(self, point: Point, pointer: str, kind: torch.dtype, absent: bool | int | float) -> Value:
        """What an earlier kernel left in one buffer."""
        emitter = self.emitter
        masks = emitter.mask(point.deps)
        at = pointers_to(emitter, emitter.buffers[pointer], point.index[0], point.deps)
        text = f"tl.load({at}, {' & '.join(masks)}, {literal(absent, kind)})" if masks else f"tl.load({at})"
        return emitter.bind("state", text, kind, point.deps)

    def _state(self, unit: Unit, text: str, value: Value, dtype: torch.dtype) -> Value:
        """One state of an element."""
        emitter = self.emitter
        if text == "{x}":
            return emitter.converted(value, value.dtype, dtype)
        if "{" not in text:
            return emitter.bind("one", emitter.full(float(text) if dtype.is_floating_point else int(text), dtype),
                                dtype, frozenset())
        at = self.position(unit) if "{at}" in text else value
        if text == "{at}":
            return at
        return emitter.bind("lifted", text.format(x=value.name, at=at.name), dtype, value.axes | at.axes)

    def padded(self, unit: Unit, value: Value, identity: bool | int | float, dtype: torch.dtype,
                beside: frozenset[Axis]) -> Value:
        """A state over the reduced axes and those of the states `beside` it: a fold takes tiles of one shape."""
        emitter = self.emitter
        # a guarded-off lane is never selected; only lanes past the end of a reduced dim must be neutral
        masks = emitter.mask(unit.axes)
        axes = value.axes | beside | frozenset(unit.axes)
        covered = emitter.schedule.dims_of(axes) <= emitter.schedule.dims_of(value.axes)
        absent = literal(identity, dtype)
        filled, where = emitter.filled.get(value.name, ("", frozenset()))
        zero = identity == 0 and value.name == self._operand(unit).name and vanishes(unit.operand, unit.axes)
        if zero or filled == absent and where >= set(masks):
            masks = []
        if covered and not masks:
            return value
        text = value.name if covered else f"tl.broadcast_to({value.name}, {emitter.tile(axes)})"
        if masks:
            text = emitter.existing(unit.axes, text, absent)
        return emitter.bind("padded", text, dtype, axes)

    def position(self, unit: Unit) -> Value:
        """The place of each lane among the reduced elements, regions one after the other."""
        emitter = self.emitter
        if unit.point.kind is PointKind.SCAN:
            return self._place(unit.point)
        start: Size = 0
        for axes in unit.point.axes[:unit.region]:
            start = start + product(a.size for a in axes)
        parts: list[str] = []
        inner: Size = 1
        for axis in reversed(unit.axes):
            name = emitter.indices.names[axis]
            parts.append(name if inner == 1 else f"{name} * {emitter.sizes.text(inner)}")
            inner = inner * axis.size
        if not parts:
            text = emitter.full(start, torch.int64) if isinstance(start, int) else \
                f"{emitter.full(0, torch.int64)} + {emitter.sizes.text(start)}"
            return emitter.bind("at", text, torch.int64, frozenset())
        parts += [] if start == 0 else [emitter.sizes.text(start)]
        return emitter.bind("at", f"({' + '.join(reversed(parts))}).to(tl.int64)", torch.int64, frozenset(unit.axes))

    def _place(self, point: Point) -> Value:
        """The place of each lane in the dimension that is scanned."""
        emitter = self.emitter
        assert point.node is not None
        dims, _ = reduction_dims(point.node)
        if not point.axes[0]:
            return emitter.bind("at", emitter.full(0, torch.int64), torch.int64, frozenset())
        form = point.index[dims[0]]
        return emitter.bind("at", f"({emitter.indices.form(form)}).to(tl.int64)", torch.int64, form.axes)

    def reduced(self, unit: Unit, states: list[Value]) -> list[Value]:
        """Fold the tile along every slot of the reduced axes."""
        return self.folded(unit, states, self.monoid(unit.point))

    def folded(self, unit: Unit, states: list[Value], monoid: Monoid) -> list[Value]:
        """Fold the tile along every slot of the reduced axes, by a monoid that may not be the unit's."""
        emitter = self.emitter
        for dim in sorted(emitter.schedule.dims_of(unit.axes), key=lambda d: d.slot, reverse=True):
            axes = frozenset().union(*(v.axes for v in states)) - frozenset(dim.axes)
            if dim.block == "1":  # a program has but one step of it
                states = [Value(v.name, v.dtype, axes, v.rounded) for v in states]
                continue
            operand = ", ".join(v.name for v in states)
            operand = operand if len(states) == 1 else f"({operand})"
            text = f"tl.reduce({operand}, {dim.slot}, {monoid.combine}, keep_dims=True)"
            if len(states) == 1:
                states = [emitter.bind(monoid.name, text, states[0].dtype, axes)]
                continue
            names = emitter.fresh(monoid.name, len(states))
            emitter.scope.covering(emitter.loops(axes)).lines.append(f"{', '.join(names)} = {text}")
            states = [Value(n, v.dtype, axes) for n, v in zip(names, states)]
        return states

    def _combined(self, monoid: Monoid, left: list[Value], right: list[Value]) -> list[Value]:
        emitter = self.emitter
        axes = frozenset().union(*(v.axes for v in left + right))
        text = f"{monoid.combine}({', '.join(v.name for v in left + right)})"
        if len(left) == 1:
            return [emitter.bind("combined", text, left[0].dtype, axes)]
        names = emitter.fresh("combined", len(left))
        emitter.scope.covering(emitter.loops(axes)).lines.append(f"{', '.join(names)} = {text}")
        return [Value(n, v.dtype, axes) for n, v in zip(names, left)]


def monoid_of(point: Point) -> Monoid:
    """The monoid of a reduction; a product adds up."""
    assert point.node is not None
    if kind_of(point.node) is Kind.GEMM:
        return MONOIDS["sum"]
    found = row(point.node.target)
    assert found is not None and found.monoid is not None, point.node
    return found.monoid


def accumulation_dtype(point: Point) -> torch.dtype:
    """The dtype of the first state; bool folds as int32, a product as fp32."""
    assert point.node is not None
    if kind_of(point.node) is Kind.GEMM:
        return torch.float32
    found = row(point.node.target)
    assert found is not None, point.node
    dtype = reduction_dtype(point.node, found)
    return torch.int32 if dtype == torch.bool else kernel_dtype(dtype)
