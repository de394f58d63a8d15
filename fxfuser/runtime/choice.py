"""Which of several ways to compute a segment runs: the library's product and kernels for the rest, or one of our
programs with one of its tiles.

Enters: `Alternatives`, whose routes all take the same arguments and write the same outputs.  Leaves: `OnCuda`, as
`executor.on_cuda` gives one for a kernel: what is to be built before the first call, and `bind(failed)`, the launch
function `launch(in0, ..., out0, ..., n0, ...) -> bool` in the order of `LoweredPrograms.inputs`, `.outputs`, `.sizes`.
Under `deterministic` the cost model decides.  Else the routes are measured at the first call of each class of
arguments and the times remembered on disk: a program wins unless it is slower than the library's route by more than
MARGIN.  Max-autotune measures all tiles of a program, the other modes the first FEW.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxfuser.config import Config
from fxfuser.lowering.kernel import LoweredPrograms
from fxfuser.runtime.executor import OnCuda

FEW = 3  # tiles of each program that are measured without max-autotune


@dataclass(frozen=True)
class Alternatives:
    """Routes to one segment's outputs.

    `lowered` holds the programs.  `library` has the calling convention of the programs: its launch function writes the
    outputs that it is given, and answers with what its `failed` answers where it could not; None where only programs may run.  `sizes` are what n0,
    n1, ... are likely to be in the first call.  `prefer_fused` is the cost model's answer: the first program rather
    than the library's route.
    """

    segment: str  # its name, for records
    lowered: LoweredPrograms
    library: OnCuda | None
    device: int | None
    sizes: tuple[int, ...]
    prefer_fused: bool


def choose(alternatives: Alternatives, config: Config) -> OnCuda:
    """The route that runs, or the search for it."""
    raise NotImplementedError("the routes are not measured yet")
