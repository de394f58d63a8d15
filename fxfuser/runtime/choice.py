"""Which of several ways to compute a segment runs: the library's product and kernels for the rest, or one of our
programs with one of its tiles.

Enters: `Alternatives`, whose routes all take the same arguments and write the same outputs.  Leaves: `OnCuda`, as
`executor.on_cuda` gives one for a kernel: what is to be built before the first call, and `bind(failed)`, the launch
function `launch(in0, ..., out0, ..., n0, ...) -> bool` in the order of `LoweredPrograms.inputs`, `.outputs`, `.sizes`.
Under `deterministic` the cost model decides.  Else the routes are measured at the first call of each class of
arguments and the times remembered on disk: a program wins unless it is slower than the library's route by more than
MARGIN; of programs that are as fast as the fastest but for NOISE, the one that needs least memory.  Max-autotune
measures all tiles of all programs, the other modes the first FEW of those that are not spare.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Sequence

from fxfuser.config import Config
from fxfuser.errors import VerificationError
from fxfuser.lowering.kernel import LoweredPrograms, Program
from fxfuser.runtime.build import Options
from fxfuser.runtime.device_clock import CudaClock
from fxfuser.runtime.executor import OnCuda
from fxfuser.runtime.programs import Arity, CudaProgram, cuda_program, tiles_of, with_tile
from fxfuser.runtime.search import ArgumentClass, Choice, Route, Search, Subject
from fxfuser.runtime.store import store
from fxfuser.runtime.tune import described

FEW = 3  # tiles of each program that are measured without max-autotune
NOISE = 0.02  # times that differ by less are equal: a second search may find them in the other order
LIBRARY = "library"
MARGIN = 0.01  # part of the library's time that a program may take beyond it: fused, results need less memory


@dataclass(frozen=True)
class Alternatives:
    """Routes to one segment's outputs.

    `lowered` holds the programs.  `library` has their calling convention: its launch function writes the outputs that
    it is given, and answers with what its `failed` answers where it could not; None where only programs may run.
    `sizes` are what n0, n1, ... are likely to be in the first call.  `prefer_fused` is the cost model's answer: the
    first program rather than the library's route.
    """

    segment: str  # its name, for records
    lowered: LoweredPrograms
    library: OnCuda | None
    device: int | None
    sizes: tuple[int, ...]
    prefer_fused: bool


def choose(alternatives: Alternatives, config: Config) -> OnCuda:
    """The route that runs, or the search for it."""
    a, library, measured = alternatives, alternatives.library, not config.deterministic
    if library is not None and not measured and not a.prefer_fused:
        return library
    most = None if config.max_autotune else FEW
    worth = [p for i, p in enumerate(a.lowered.programs) if i == 0 or config.max_autotune or not p.spare]
    tiles = [(p, t) for p in worth for t in tiles_of(p)[:most]][:None if measured else 1]
    options, kernels = Options(fp_fusion=config.numerics != "eager"), store(config.cache_dir, "kernels")
    programs = [cuda_program(with_tile(p, t), Arity.of(a.lowered), a.device, options, kernels) for p, t in tiles]
    if not measured or (library is None and len(programs) == 1):
        return OnCuda(programs[0].first_calls(a.sizes), programs[0].bind)
    search = _search(a, programs, config)
    return OnCuda(search.likely(a.sizes), partial(search.bind, segment=a.segment))


def winner(times: Sequence[float | None], scratch: Sequence[int], library: int | None) -> int:
    """The position that wins: a program, but the library's route where all need MARGIN more time or failed.

    Of programs within NOISE of the fastest it is the one with least `scratch`, bytes of each; of these, the fastest.
    """
    known = [(t, i) for i, t in enumerate(times) if t is not None and i != library]
    reference = None if library is None else times[library]
    if library is not None and reference is not None and (not known or min(known)[0] > reference * (1 + MARGIN)):
        return library
    if not known:
        return 0
    fastest, _ = min(known)
    return min((scratch[i], t, i) for t, i in known if t <= fastest * (1 + NOISE))[2]


def _search(a: Alternatives, programs: Sequence[CudaProgram], config: Config) -> Search:
    """The cost model's answer is the default."""
    routes = [Route(f"{p.program.name}: {p.program.launches[0].kernel.tile}", p.bind, p.first_calls, p.scratch_bytes)
              for p in programs]
    place = None
    if (library := a.library) is not None:
        place = 1 if a.prefer_fused else 0
        routes.insert(place, Route(LIBRARY, library.bind, lambda sizes, pointers: library.first_calls))
    if len({r.name for r in routes}) != len(routes):
        raise VerificationError("lowering", f"programs share a name: {', '.join(r.name for r in routes)}")
    first = programs[0]
    subject = Subject(first.kernels[0].kernel.name, first.arity.inputs, first.arity.outputs, len(a.sizes), first.empty,
                      _key(a.lowered.programs, first.options), "route")
    search = Search(subject, routes, partial(winner, library=place), CudaClock(first.device),
                    store(config.cache_dir, "tiles"))
    search.choices = _choices(subject.key, tuple(r.name for r in routes), first.device, config.cache_dir)
    return search


def _key(programs: Sequence[Program], options: Options) -> str:
    """All that times depend on beside the routes' names.  What programs compute is what the library's route does."""
    launches = [(described(x.kernel), x.pointers, x.sizes) for p in programs for x in p.launches]
    return json.dumps([launches, [asdict(s) for p in programs for s in p.scratch], asdict(options)], default=str)


@cache
def _choices(key: str, routes: tuple[str, ...], device: int, cache_dir: Path) -> dict[ArgumentClass, Choice]:
    """What equal segments have found."""
    return {}
