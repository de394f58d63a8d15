"""The main loop of a matrix product: a step of k after the other, each a dot of what two emitters make of the factors.

    left = tl.load(..)                              whatever a factor is computed from, in the factor's own dtype
    accumulator_0 = tl.dot(left, right, accumulator_0)

Enters: the domain of a product, its dims, and what makes emitters that share the kernel's names and sizes.  Leaves: a
`MainLoop`, lines that stand before the loop, in it and behind it.  Past the end of k all factors are zeros, so that no
sum needs a mask.  Two dots that read neighbouring columns, or columns that lie apart, have one sum where they can (see
interleaved.py and apart.py); a vector is the first row or column of a tile of zeros.  Where k is sliced, a dot is one
of each slice, and the sums of the slices are added up behind the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import linear
from fxfuser.domain.points import Point, PointKind
from fxfuser.domain.products import rounds_to_tf32
from fxfuser.lowering.expressions import HALF
from fxfuser.lowering.gemm.apart import Apart, apart
from fxfuser.lowering.gemm.interleaved import Pair, interleaved
from fxfuser.lowering.gemm.schedule import GemmSchedule
from fxfuser.lowering.gemm.tile_emitter import TileEmitter
from fxfuser.lowering.pointers import pointers_to
from fxfuser.lowering.schedule import SLICES, Dim, Schedule, strides_of
from fxfuser.lowering.scope import Scope, Value
from fxfuser.lowering.vectors import step_lanes
from fxfuser.ops import MONOIDS, TRITON_NAMES, literal, row

ADD = MONOIDS["sum"]  # what the lines behind a loop may call


@dataclass(frozen=True, eq=False)
class MainLoop:
    """The lines before a main loop and of each step, what each dot is called, the sums with their shapes, and the lines
    that make the dots of the sums."""

    before: list[str]
    lines: list[str]
    names: dict[Point, str]
    sums: dict[str, str]
    after: list[str]


class Factors:
    """The factors of one kernel's products; `emitter` makes one that loads zeros past the end, over a schedule."""

    def __init__(self, domain: GemmDomain, plan: GemmSchedule, emitter: Callable[[Schedule], TileEmitter]) -> None:
        self.domain, self.plan, self.emitter = domain, plan, emitter
        self.left, self.right = emitter(plan.left), emitter(plan.right)

    def main_loop(self) -> MainLoop:
        """A sum for each dot."""
        names = {dot: f"accumulator_{i}" for i, dot in enumerate(self.domain.dots())}
        scopes = [_step(self.left), _step(self.right)]
        products = []
        for dot, name in names.items():
            left, right = _factor(self.left, dot.operands[0]), _factor(self.right, dot.operands[1])
            products.append(f"{name} = tl.dot({left}, {right}, {name}{_precision(dot)})")
        shape = f"[{SLICES}, MBLOCK, NBLOCK]" if self.plan.sliced else "[MBLOCK, NBLOCK]"
        return MainLoop([*self.left.top.lines, *self.right.top.lines],
                        [*scopes[0].lines, *scopes[1].lines, *products], names,
                        dict.fromkeys(names.values(), shape), self._alone(list(names.values())))

    def joined_loop(self) -> MainLoop | None:
        """One sum for two dots, where they can have one."""
        dots = self.domain.dots()
        pair = interleaved(dots, self.domain.columns)
        places = apart(dots, self.domain.inner)
        return self._wide_loop(pair) if pair is not None else None if places is None else self._two_places(places)

    def _alone(self, accumulators: list[str]) -> list[str]:
        """The slices' sums together; or the row or column that a vector gave a tile, whose others are zeros."""
        if self.plan.sliced:
            return [f"{name} = tl.reduce({name}, 0, {ADD.combine})" for name in accumulators]
        return [f"{name} = tl.reduce({name}, {dim.slot}, {ADD.combine}, keep_dims=True)"
                for dim in (self.plan.rows, self.plan.columns) if not dim.axes for name in accumulators]

    def _two_places(self, places: Apart) -> MainLoop:
        """One sum over two places of the right factor."""
        plan = self.plan
        columns = Dim("n_wide", (places.which, *plan.columns.axes), 1, True, named="2 * n", places=2)
        right = self._wide(columns)
        lane = f"tl.arange(0, {columns.block}).to(INDEX)"
        before = right.vectors.lines(
            columns, f"{lane} // NBLOCK * {right.sizes.text(plan.columns.size)} + n_start + {lane} % NBLOCK")
        split = "wide.reshape([MBLOCK, 2, NBLOCK]).permute([0, 2, 1])"
        return self._one_sum(places.dots, places.right, right, before, split)

    def _wide_loop(self, pair: Pair) -> MainLoop:
        """One sum of twice as many columns for both dots."""
        columns = Dim("n_wide", (*self.plan.columns.axes[:-1], pair.wide), 1, True, named="2 * n")
        right = self._wide(columns)
        before = right.vectors.lines(columns, f"2 * n_start + tl.arange(0, {columns.block}).to(INDEX)")
        return self._one_sum((pair.even, pair.odd), pair.right, right, before, "wide.reshape([MBLOCK, NBLOCK, 2])")

    def _wide(self, columns: Dim) -> TileEmitter:
        """The emitter of a right factor with twice as many columns."""
        blocks, plan = self.right.blocks, self.plan  # all emitters of a kernel have the same blocks
        blocks[columns.block] = 2 * blocks[plan.columns.block]
        return self.emitter(Schedule((plan.batch, plan.right_inner, columns)))

    def _one_sum(self, dots: tuple[Point, Point], factor: Point, right: TileEmitter, before: list[str], split: str,
                 ) -> MainLoop:
        """The loop of two dots whose right factors are one; `split` is the sum with the dots in its last dimension."""
        names = dict(zip(dots, ("accumulator_0", "accumulator_1")))
        scopes = [_step(self.left), _step(right)]
        factors = [_factor(self.left, dots[0].operands[0]), _factor(right, factor)]
        product = f"wide = tl.dot({', '.join(factors)}, wide{_precision(dots[0])})"
        return MainLoop([*before, *self.left.top.lines, *right.top.lines],
                        [*scopes[0].lines, *scopes[1].lines, product], names, {"wide": "[MBLOCK, 2 * NBLOCK]"},
                        [f"{', '.join(names.values())} = tl.split({split})", *self._alone(list(names.values()))])


def _step(emitter: TileEmitter) -> Scope:
    """The scope of one step of k, with its indices."""
    inner = next(d for d in emitter.dims if d.looped)
    emitter.scope = Scope(inner, emitter.top)
    emitter.scope.lines += emitter.vectors.lines(inner, f"k_start + {step_lanes(inner, emitter.schedule)}")
    return emitter.scope


def _factor(emitter: TileEmitter, point: Point) -> str:
    """A tile of a factor in the factor's own dtype, zeros past the end of k."""
    whole = frozenset(a for d in emitter.dims for a in d.axes)
    if point.kind is PointKind.LOAD and not point.lookups and point.node is not None:
        offset = linear(point.index, strides_of(point.node))
        pointer = pointers_to(emitter, emitter.pointers[point.node], offset, whole)
        text = emitter.read_text(point, pointer, emitter.mask(whole), ())
        return _widened(emitter, emitter.bind("factor", text, point.dtype, whole))
    value = emitter.emit(_before_rounding(point))
    inner = emitter.dims[1] if emitter.dims[1].looped else emitter.dims[2]
    text = value.name
    if not emitter.schedule.dims_of(whole) <= emitter.schedule.dims_of(value.axes):
        text = f"tl.broadcast_to({text}, {emitter.tile(whole)})"
    if emitter.vectors.masked(inner):
        text = f"tl.where({inner.name}_mask, {text}, {literal(0, value.dtype)})"
    if point.dtype in HALF:
        text = f"({text}).to({TRITON_NAMES[point.dtype]})"
    return _widened(emitter, emitter.bind("factor", text, point.dtype, whole))


def _widened(emitter: TileEmitter, factor: Value) -> str:
    """The factor; a vector as the first row or column of a tile of zeros."""
    outer = emitter.dims[2] if emitter.dims[1].looped else emitter.dims[1]
    if outer.axes:
        return factor.name
    place = "[:, None]" if outer.slot == 0 else "[None, :]"
    shape = ", ".join(d.block for d in emitter.dims[1:])
    text = f"tl.where(tl.arange(0, {outer.block}){place} == 0, tl.broadcast_to({factor.name}, [{shape}])," \
           f" {literal(0, factor.dtype)})"
    return emitter.bind("factor", text, factor.dtype, factor.axes).name


def _before_rounding(point: Point) -> Point:
    """What a cast to a half rounds: a factor is converted to its dtype anyway, which rounds once."""
    found = row(point.node.target) if point.kind is PointKind.OP and point.node is not None else None
    if found is None or not found.rounds or point.dtype not in HALF or len(point.operands) != 1:
        return point
    return point.operands[0] if point.operands[0].dtype is torch.float32 else point


def _precision(dot: Point) -> str:
    """How a product of fp32 rounds its factors: as PyTorch is told to."""
    if dot.operands[0].dtype != torch.float32:
        return ""
    return ', input_precision="tf32"' if rounds_to_tf32() else ', input_precision="ieee"'
