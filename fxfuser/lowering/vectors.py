"""Index vectors: the lines that give each dim of a kernel its indices, its mask and its axes' coordinates.

A program dim starts at the program's block, a held dim at 0, a looped dim where its loop is.  A vector lies in its
dim's slot of the tile; a dim that flattens several axes decodes their coordinates by div and mod.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping

from fxfuser.domain.index import Axis
from fxfuser.domain.size import Size
from fxfuser.lowering.expressions import Indices, Sizes
from fxfuser.lowering.schedule import SLICES, Dim, Schedule


@dataclass(frozen=True)
class Walk:
    """One part of the way along a dim, as source: from `first` to `last` by steps of `block` lanes."""

    first: str
    last: str
    block: str
    masked: bool  # whether some lane of some step lies past the end


@dataclass
class Vectors:
    """The index vectors of one kernel; `blocks` is the largest block of each dim that any of its tiles has.

    `walks` says how loops go where lines are written now; those that it does not name walk their dim in one.
    """

    schedule: Schedule
    indices: Indices
    blocks: dict[str, int]
    walks: Mapping[Dim, Walk] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return self.indices.sizes

    def programs(self) -> list[str]:
        """The program dims: one, or two of which the last runs faster."""
        dims = self.schedule.program
        if len(dims) == 1:
            return self.lines(dims[0], f"tl.program_id(0).to(INDEX) * {dims[0].block} + {_range(dims[0])}")
        y, x = dims
        tiles = f"(({self.sizes.text(x.size)} + {x.block} - 1) // {x.block})"
        return ["pid = tl.program_id(0).to(INDEX)",
                *self.lines(y, f"pid // {tiles} * {y.block} + {_range(y)}"),
                *self.lines(x, f"pid % {tiles} * {x.block} + {_range(x)}")]

    def held(self, dim: Dim) -> list[str]:
        """A dim that one tile covers; in the type of offsets, of which its strides may need all bits."""
        return self.lines(dim, f"{_range(dim)}.to(INDEX)")

    def loop(self, dim: Dim, stages: str = "") -> str:
        """The head of the serial loop over a dim; `stages`, where given: how many iterations are under way at once."""
        walk = self.walks.get(dim) or Walk("0", self.sizes.text(dim.size), dim.block, True)
        steps = f"{walk.first}, {walk.last}, {walk.block}"
        return f"for {_counter(dim)} in {f'tl.range({steps}, num_stages={stages})' if stages else f'range({steps})'}:"

    def step(self, dim: Dim) -> list[str]:
        """The first lines of that loop's body."""
        start = f"{dim.name}_start"
        lines = self.lines(dim, f"{start} + tl.arange(0, {self.block(dim)}).to(INDEX)")
        if not dim.descending:
            return lines
        last = f"({self.sizes.text(dim.size)} - 1) // {dim.block} * {dim.block}"
        return [f"{start} = {last} - {_counter(dim)}", *lines]

    def block(self, dim: Dim) -> str:
        """The lanes of a dim's vector, as source."""
        return self.walks[dim].block if dim in self.walks else dim.block

    def masked(self, dim: Dim) -> bool:
        """Whether some lane of some tile lies past the end of the dim."""
        size = dim.size
        if dim in self.walks and not self.walks[dim].masked:
            return False
        return not (isinstance(size, int) and size > 0 and size % self.blocks[dim.block] == 0)

    def masks(self, axes: Iterable[Axis]) -> list[str]:
        """The masks of the dims that carry these axes."""
        dims = self.schedule.dims_of(axes)
        return [f"{d.name}_mask" for d in self.schedule.dims if d in dims and self.masked(d) and d.axes]

    def tile(self, axes: Iterable[Axis], blocks: Mapping[Dim, str] | None = None) -> str:
        """The shape of a tile over these axes, as source; `blocks` stand for those of dims."""
        shape = ["1"] * self.schedule.rank
        for dim in self.schedule.dims_of(axes):
            if dim.block != "1":
                shape[dim.slot] = (blocks or {}).get(dim) or self.block(dim)
            if dim.slices is not None:
                shape[dim.slices], shape[dim.slot] = SLICES, f"{dim.block} // {SLICES}"
        return f"[{', '.join(shape)}]"

    def lines(self, dim: Dim, text: str) -> list[str]:
        """The indices of a dim that are `text`, its mask and its axes' coordinates."""
        place = _placed(dim.slot, self.schedule) if dim.slices is None else ""  # what is cut has two places
        lines = [f"{dim.name} = ({text}){place}" if place else f"{dim.name} = {text}"]
        if self.masked(dim):
            lines.append(f"{dim.name}_mask = {dim.name} < {self.sizes.text(dim.size)}")
        if len(dim.axes) < 2:
            return lines
        inner: Size = 1
        for axis in reversed(dim.axes):
            text = dim.name if inner == 1 else f"{dim.name} // {self.sizes.text(inner)}"
            if axis is not dim.axes[0]:
                text = f"{text if inner == 1 else f'({text})'} % {self.sizes.text(axis.size)}"
            lines.append(f"{self.indices.names[axis]} = {text}")
            inner = inner * axis.size
        return lines


def axis_names(schedule: Schedule) -> dict[Axis, str]:
    """What each axis is called: its dim's name, with a position where the dim flattens several."""
    names: dict[Axis, str] = {}
    for dim in schedule.dims:
        for i, axis in enumerate(dim.axes):
            names[axis] = dim.name if len(dim.axes) == 1 else f"{dim.name}_{i}"
    return names


def lanes(dim: Dim, schedule: Schedule, block: str) -> str:
    """The numbers of so many lanes of a dim, in its slot of the tile, as int32."""
    return f"tl.arange(0, {block}){_placed(dim.slot, schedule)}"


def step_lanes(dim: Dim, schedule: Schedule) -> str:
    """The lanes of one step of a loop over a dim, in the type of offsets; of one that is cut, all slices."""
    if dim.slices is None:
        return f"{_range(dim)}.to(INDEX)"
    within = f"{dim.block} // {SLICES}"
    first = f"tl.arange(0, {SLICES}){_placed(dim.slices, schedule)} * ({within})"
    return f"({first} + tl.arange(0, {within}){_placed(dim.slot, schedule)}).to(INDEX)"


def _placed(place: int, schedule: Schedule) -> str:
    """What puts a vector into a slot."""
    places = [":" if slot == place else "None" for slot in range(schedule.rank)]
    return f"[{', '.join(places)}]" if len(places) > 1 else ""


def _range(dim: Dim) -> str:
    return f"tl.arange(0, {dim.block})"


def _counter(dim: Dim) -> str:
    return f"{dim.name}_done" if dim.descending else f"{dim.name}_start"
