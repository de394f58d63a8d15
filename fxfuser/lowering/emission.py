"""What the parts of the emitter ask of it: names, scopes, masks, and the value of a point.

The emitter walks points and hands reductions, scans and op rows to a part each; the parts ask back for values and
lines.  This is the whole of that conversation, so that each part can be read, and tested, without the emitter.
"""

from __future__ import annotations

from typing import Iterable, Mapping, Protocol

import torch
from torch import fx

from fxfuser.domain.index import Axis
from fxfuser.domain.points import Condition, Domain, Point, Store
from fxfuser.lowering.expressions import Indices, Sizes
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.schedule import Dim, Schedule
from fxfuser.lowering.scope import Scope, Value


class Emission(Protocol):
    """The emission of one kernel, as its parts see it."""

    domain: Domain
    schedule: Schedule
    pointers: dict[fx.Node, str]  # tensors read, and the parameter that points to each
    targets: dict[fx.Node, str]  # tensors written
    buffers: Mapping[str, str]  # of partial states and of parts, and the parameter that points to each
    precise: bool  # numerics="eager"
    sizes: Sizes
    indices: Indices
    top: Scope  # the kernel's own lines
    scope: Scope  # where lines go now: `top`, or the innermost open loop
    read: set[int]  # ids of the points that some other point reads
    results: dict[tuple[int, Guard], Value]  # what loops have computed, by point and guard
    borders: dict[tuple[int, Guard], str]  # by load and guard: what a select wants where the guard does not hold
    filled: dict[str, tuple[str, frozenset[str]]]  # what values that were loaded hold where which masks fail

    def emit(self, point: Point, guard: Guard = ()) -> Value:
        """The value of a point, read where `guard` holds."""

    def share(self, point: Point, guard: Guard, others: Iterable[Guard]) -> None:
        """Lets the value that a point has where `guard` holds be its value under stricter guards too."""

    def bind(self, stem: str, text: str, dtype: torch.dtype, axes: frozenset[Axis], rounded: bool = True) -> Value:
        """The value of `text`, defined in the outermost scope that has its axes; equal text is one value."""

    def fresh(self, stem: str, count: int) -> list[str]:
        """Names that no other value has."""

    def full(self, value: bool | int | float, dtype: torch.dtype) -> str:
        """A tile of one element, as source."""

    def define(self, line: str) -> None:
        """Writes a line before all loops that are still to come, once."""

    def block(self, dim: Dim) -> str:
        """The lanes of a dim where lines are written now, as source."""

    def tile(self, axes: Iterable[Axis], blocks: Mapping[Dim, str] | None = None) -> str:
        """The shape of a tile over these axes, as source."""

    def mask(self, axes: Iterable[Axis], guard: Guard = ()) -> list[str]:
        """The conditions under which lanes over these axes exist and the guard holds."""

    def condition(self, condition: Condition, holds: bool, guard: Guard = ()) -> str:
        """A named predicate that is evaluated where `guard` holds."""

    def existing(self, axes: Iterable[Axis], text: str, absent: str) -> str:
        """`text` in lanes that exist over these axes, `absent` in others."""

    def loops(self, axes: Iterable[Axis]) -> frozenset[Dim]:
        """The serial loops on which these axes depend."""

    def start(self, dim: Dim) -> str:
        """The name of where a step of a loop begins in a dim; nothing where no loop walks the dim."""

    def ordered(self, dims: frozenset[Dim]) -> tuple[Dim, ...]:
        """These dims, outermost first."""

    def converted(self, value: Value, aten: torch.dtype, target: torch.dtype) -> Value:
        """A value of ATen dtype `aten` as one of `target`, both as kernels hold them."""

    def rounded(self, value: Value, dtype: torch.dtype) -> Value:
        """The value rounded to a half dtype and held as fp32 again."""

    def half(self, value: Value, dtype: torch.dtype) -> str:
        """The value as a tile of a half dtype, as source."""

    def stored(self, store: Store) -> tuple[str, frozenset[Axis]]:
        """A value as its tensor holds it, as source, and the axes on which it depends."""

    def target(self, store: Store, axes: frozenset[Axis]) -> str:
        """Where a value over `axes` is stored, as a tile of pointers."""

    def note(self, value: Value, point: Point) -> None:
        """Remembers which node of the model the value is."""
