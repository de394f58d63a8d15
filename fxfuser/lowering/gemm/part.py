"""What one kernel of a matrix product is to compute, and what its text calls things.

Enters: a `GemmDomain` with its `Epilogue`.  Leaves: a `Part`, from which gemm_kernel makes a kernel; and the `Names`
and `Lanes` with which it writes the text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

import torch
from torch import fx

from fxfuser.domain.gemm import GemmDomain
from fxfuser.lowering.gemm.folded import Folded
from fxfuser.lowering.gemm.partials import Epilogue
from fxfuser.lowering.schedule import Dim


@dataclass(frozen=True, eq=False)
class Part:
    """What one kernel computes: a domain and its epilogue, the tensors that it may read, and what it is called after.

    `folded` results are no tensors: the kernel combines them from states that an earlier one left.
    """

    domain: GemmDomain
    epilogue: Epilogue
    inputs: tuple[fx.Node, ...]
    stem: str
    folded: Mapping[fx.Node, Folded] = field(default_factory=dict)

    def states(self) -> dict[int, torch.dtype]:
        """The buffers of states that it reads."""
        return {b: kind for f in self.folded.values() for b, kind in zip(f.partial.buffers, f.dtypes)}


@dataclass(frozen=True, eq=False)
class Names:
    """What a kernel calls its pointers: tensors read and written, and buffers of states that it reads."""

    inputs: dict[fx.Node, str]
    outputs: dict[fx.Node, str]
    states: dict[str, str]


@dataclass(frozen=True)
class Lanes:
    """How many lanes each block has, the dims whose last tile lies within, of which none is past the end, and whether
    descriptors may move tiles."""

    blocks: dict[str, int]
    overlapping: tuple[Dim, ...]
    described: bool
