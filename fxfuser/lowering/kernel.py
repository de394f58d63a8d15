"""A generated kernel: canonical Triton text and all that is needed to launch it.

The text names nothing of the model (pointers are in0, in1, out0; sizes n0, n1; values are called after
their op), so equal segments of different layers share one kernel; `notes` carries the model's names beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch

STATES = "STATES"  # the block of a kernel that combines states which another has left


@dataclass(frozen=True)
class Tile:
    """One choice of block sizes: the kernel's constexpr arguments by name, and Triton's launch options."""

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 1

    def __str__(self) -> str:
        blocks = "".join(f"{name}={size}, " for name, size in self.blocks)
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        return f"{blocks}{self.num_warps} {'warp' if self.num_warps == 1 else 'warps'}{stages}"


@dataclass(frozen=True)
class Note:
    """One line of the side table: this value of the kernel text is that node of the model."""

    value: str  # name in the kernel text
    node: str  # FX node name
    op: str
    location: str = ""  # the user's file and line


class Dependence(Enum):
    """How a kernel that leaves parts, or reads them, is launched (see dependent.py)."""

    ALONE = "alone"
    LEADS = "leads"  # it lets the next kernel start early
    FOLLOWS = "follows"  # it may start early and waits for the kernel before it


@dataclass(frozen=True)
class Kernel:
    """`source` is a whole Python module whose one `@triton.jit` function is `name`.

    Parameters in order: one pointer per `inputs`, one per `outputs`, one integer n0, n1, ... per `sizes`,
    then the constexprs INDEX (tl.int32 or tl.int64, the type of offsets) and those that `tile` names.
    `grid` and `extent` are Python expressions over n0, n1, ..., the block names and cdiv: the number of
    programs (1-D) and the largest element offset that the kernel computes, which decides INDEX.  A persistent
    kernel's grid also names PROCESSORS, the multiprocessors of the device.

    A kernel that can load through tensor descriptors has one more constexpr after INDEX, DESCRIPTORS: true where
    the pointers at the positions `aligned` are multiples of 16 bytes and the sizes at the positions `divisible` of 16
    elements.  None: it has no such parameter.

    A kernel that leaves parts to another, or reads them, has one more constexpr behind all others, DEPENDENT: true
    where it is launched as one of a dependent pair, which `dependence` says, on a device that can.  None: it has no
    such parameter.
    """

    name: str
    source: str
    inputs: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    sizes: int
    grid: str
    extent: str
    tile: Tile
    candidates: tuple[Tile, ...] = ()  # other tiles worth measuring
    notes: tuple[Note, ...] = ()
    aligned: tuple[int, ...] | None = None
    divisible: tuple[int, ...] = ()
    dependence: Dependence | None = None


@dataclass(frozen=True)
class Lowered:
    """A segment's kernel and how its arguments bind to the segment's tensors and sizes.

    `inputs[i]` is the position in Segment.inputs of the tensor that in<i> points to, `outputs` alike;
    `sizes` are Python expressions over the graph's size symbols.
    """

    kernel: Kernel
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[str, ...]


@dataclass(frozen=True)
class Scratch:
    """A buffer that the launches of one program share: `size` elements, a Python expression over the program's n0,
    n1, ..., cdiv and the block names of the first launch's tile.

    A `kept` one holds zeros before and after every call (arrival counters), so it is made once per device and stream.
    """

    dtype: torch.dtype
    size: str
    kept: bool = False


class Place(Enum):
    """Where a pointer of a launch points to."""

    INPUT = "in"
    OUTPUT = "out"
    SCRATCH = "scratch"


@dataclass(frozen=True)
class Cut:
    """How a tile cuts an extent: into blocks."""

    extent: int
    block: str

    def count(self, tile: Tile) -> int:
        """All blocks; past the end may lie a part of the last."""
        return -(-self.extent // dict(tile.blocks)[self.block])


@dataclass(frozen=True)
class Launch:
    """One kernel of a program: what each of its pointers (inputs, then outputs) and each of its sizes is.

    `sizes` are expressions of the kind that `Scratch.size` is.  `states`, where given, says how many states of a row
    the first launch leaves, one of each tile: the kernel's block STATES is the power of two at or above that number.
    """

    kernel: Kernel
    pointers: tuple[tuple[Place, int], ...]
    sizes: tuple[str, ...]
    states: Cut | None = None

    def behind(self, tile: Tile) -> Launch:
        """The launch in a program whose first one has this tile."""
        if self.states is None:
            return self
        blocks = dict(self.kernel.tile.blocks) | {STATES: 1 << (self.states.count(tile) - 1).bit_length()}
        return replace(self, kernel=replace(self.kernel, tile=replace(self.kernel.tile, blocks=tuple(blocks.items()))))


@dataclass(frozen=True)
class Program:
    """Launches that compute a segment together, in order.

    The tile of the first, `launches[0].kernel.tile`, rules: its candidates are other tiles for the whole program, and
    scratch buffers and later launches follow from it.  A `spare` program is not expected to be the fastest: only a
    search of everything measures it.
    """

    name: str
    launches: tuple[Launch, ...]
    scratch: tuple[Scratch, ...]
    sizes: int
    spare: bool = False


@dataclass(frozen=True)
class LoweredPrograms:
    """A GEMM segment's own kernels: programs that each compute all of it, and how their arguments bind (see `Lowered`).

    The first program with its first tile is what the cost model prefers among them.
    """

    programs: tuple[Program, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[str, ...]
