"""A generated kernel: canonical Triton text and all that is needed to launch it.

The text names nothing of the model (pointers are in0, in1, out0; sizes n0, n1; values are called after
their op), so equal segments of different layers share one kernel; `notes` carries the model's names beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


@dataclass(frozen=True)
class Kernel:
    """`source` is a whole Python module whose one `@triton.jit` function is `name`.

    Parameters in order: one pointer per `inputs`, one per `outputs`, one integer n0, n1, ... per `sizes`,
    then the constexprs INDEX (tl.int32 or tl.int64, the type of offsets) and those that `tile` names.
    `grid` and `extent` are Python expressions over n0, n1, ..., the block names and cdiv: the number of
    programs (1-D) and the largest element offset that the kernel computes, which decides INDEX.
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
