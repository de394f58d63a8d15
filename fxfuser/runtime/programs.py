"""A program, several launches that compute a segment together, ready to run on CUDA or in the interpreter.

Enters: a Program and how many tensors it takes.  Leaves: what the launcher and the interpreter make of one kernel,
`bind(failed)` -> `launch(in0, ..., out0, ..., n0, ...) -> bool`: specialised Python that allocates the scratch
buffers and calls each kernel's launch function.  Invariants: a buffer that is not kept lives for one call; one that is
kept holds zeros between launches and is used by one launch at a time (see `counters`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Callable, Iterable, Sequence

import torch

from fxfuser.errors import VerificationError
from fxfuser.lowering.kernel import LoweredPrograms, Place, Program, Scratch, Tile
from fxfuser.runtime import launcher
from fxfuser.runtime.ahead import FirstCall
from fxfuser.runtime.build import Options, language_lock
from fxfuser.runtime.counters import ALIGNMENT, Counters, counters_on
from fxfuser.runtime.interpret import PROCESSORS, interpreted, launching
from fxfuser.runtime.launcher import MOST_SHAPES, Failed, Launch
from fxfuser.runtime.store import Store

# what stands in braces is filled in, see `CudaProgram._source`
_TEMPLATE = """
def launch({params}):
{device_check}{sizes}    try:
{scratch}    except Exception as error:
        return failed(error)
    return {calls}
"""

_DYNAMIC = """\
    {names}, = shapes.get({key}) or new_shape({key})
"""

_KEPT = """\
        key = (stream({device}), {sizes})
        {names}, = captured({sizes}) if capturing() else kept.get(key) or new_kept(key)
"""


@dataclass(frozen=True)
class Arity:
    """How many tensors all programs of a segment take."""

    inputs: int
    outputs: int

    @staticmethod
    def of(lowered: LoweredPrograms) -> Arity:
        return Arity(len(lowered.inputs), len(lowered.outputs))


@dataclass(frozen=True)
class Shape:
    """What a program's sizes decide: elements of each scratch buffer, sizes of each launch."""

    scratch: tuple[int, ...]
    launches: tuple[tuple[int, ...], ...]


def with_tile(program: Program, tile: Tile) -> Program:
    """The program with another tile, on which all its launches and buffers depend."""
    first, *others = program.launches
    return replace(program, launches=(
        replace(first, kernel=replace(first.kernel, tile=tile)), *(other.behind(tile) for other in others)))


def tiles_of(program: Program) -> tuple[Tile, ...]:
    """The program's tile, then the others that are worth measuring."""
    kernel = program.launches[0].kernel
    return tuple(dict.fromkeys((kernel.tile, *kernel.candidates)))


class _Shapes:
    """A program's expressions on a device with so many multiprocessors."""

    def __init__(self, program: Program, processors: Callable[[], int]) -> None:
        self._counts = [len(launch.sizes) for launch in program.launches]
        self._scratch = len(program.scratch)
        expressions = [*(s.size for s in program.scratch), *(n for launch in program.launches for n in launch.sizes)]
        count = processors() if any("PROCESSORS" in e for e in expressions) else 1
        self.flat = launcher.size_function(program.sizes, program.launches[0].kernel.tile, count, expressions)

    def of(self, sizes: Sequence[int]) -> Shape:
        values = self.flat(*sizes)
        launches, start = [], self._scratch
        for count in self._counts:
            launches.append(values[start:start + count])
            start += count
        return Shape(values[:self._scratch], tuple(launches))


class CudaProgram:
    """A program on one device."""

    def __init__(self, program: Program, arity: Arity, device: int, options: Options, store: Store | None = None,
                 ) -> None:
        self.program, self.arity, self.device, self.options = program, arity, device, options
        self.kernels = tuple(launcher.cuda(launch.kernel, device, options, store) for launch in program.launches)
        self._shapes = _Shapes(program, lambda: launcher.processors_of(device))
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._kept: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}
        self._code = compile(self._source(), f"<fxfuser launch {program.name}>", "exec")

    def bind(self, failed: Failed) -> Launch:
        """The launch function; a failure to allocate, build or launch goes to `failed`, whose answer is returned."""
        device = _device(self.device)
        scope: dict[str, Any] = {
            "shapes": self._known, "new_shape": self._new_shape, "kept": self._kept, "new_kept": self._new_kept,
            "captured": self._captured, "capturing": _capturing, "on_device": torch.cuda.device, "failed": failed,
            "empty": torch.empty, "device": device, **launcher.device_calls(),
            **{f"dtype{i}": s.dtype for i, s in enumerate(self.program.scratch)},
            **{f"launch{i}": kernel.bind(failed) for i, kernel in enumerate(self.kernels)}}
        exec(self._code, scope)
        launch: Launch = scope["launch"]
        return launch

    def first_calls(self, sizes: Sequence[int], pointers: Sequence[int] | None = None) -> tuple[FirstCall, ...]:
        """What a first call with these sizes launches; unless given, all pointers are aligned, as scratch always is."""
        found = []
        for kernel, launch, numbers in zip(self.kernels, self.program.launches, self._shapes.of(sizes).launches):
            given = None if pointers is None else tuple(
                0 if place is Place.SCRATCH else pointers[self._position(place, i)] for place, i in launch.pointers)
            found.append(FirstCall(kernel, numbers, given))
        return tuple(found)

    def scratch_bytes(self, sizes: Sequence[int]) -> int:
        """Bytes of the buffers of a call with these sizes."""
        counts = self._shapes.of(sizes).scratch
        return sum(n * scratch.dtype.itemsize for n, scratch in zip(counts, self.program.scratch))

    def empty(self, *sizes: int) -> bool:
        """Whether a call with these sizes launches nothing."""
        return all(k.shape(n)[0] == 0 for k, n in zip(self.kernels, self._shapes.of(sizes).launches))

    def _position(self, place: Place, index: int) -> int:
        return index if place is Place.INPUT else self.arity.inputs + index

    def _new_shape(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if len(self._known) >= MOST_SHAPES:
            self._known.clear()
        return self._known.setdefault(sizes, self._shapes.flat(*sizes))

    def _new_kept(self, key: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """The kept buffers for launches on the current stream; `key` is the stream and the buffers' sizes."""
        if len(self._kept) >= MOST_SHAPES:
            self._kept.clear()
        stream, *sizes = key
        made = _split(self._kept_scratch(), sizes, lambda size: self._counters().on_stream(stream, size))
        return self._kept.setdefault(key, made)

    def _captured(self, *sizes: int) -> tuple[torch.Tensor, ...]:
        return _split(self._kept_scratch(), sizes, self._counters().captured)

    def _kept_scratch(self) -> list[Scratch]:
        return [s for s in self.program.scratch if s.kept]

    def _counters(self) -> Counters:
        return counters_on(_device(self.device))

    def _source(self) -> str:
        program, sizes = self.program, [f"n{i}" for i in range(self.program.sizes)]
        tensors = [*(f"in{i}" for i in range(self.arity.inputs)), *(f"out{i}" for i in range(self.arity.outputs))]
        names = [*(f"s{i}" for i in range(len(program.scratch))),
                 *(f"l{i}_{j}" for i, launch in enumerate(program.launches) for j in range(len(launch.sizes)))]
        values = dict(zip(names, names if sizes else map(str, self._shapes.flat())))
        key, params = f"({''.join(f'{n}, ' for n in sizes)})", ", ".join([*tensors, *sizes])
        calls = []
        for i, launch in enumerate(program.launches):
            pointers = [f"{place.value}{j}" for place, j in launch.pointers]
            numbers = [values[f"l{i}_{j}"] for j in range(len(launch.sizes))]
            calls.append(f"launch{i}({', '.join([*pointers, *numbers])})")
        return _TEMPLATE.format(
            params=params, device_check=launcher.device_check(self.device, params),
            sizes=_DYNAMIC.format(names=", ".join(names), key=key) if sizes and names else "",
            scratch=self._scratch_source(values), calls=" and ".join(calls))

    def _scratch_source(self, values: dict[str, str]) -> str:
        lines = "".join(f"        scratch{i} = empty({values[f's{i}']}, dtype=dtype{i}, device=device)\n"
                        for i, s in enumerate(self.program.scratch) if not s.kept)
        kept = [i for i, s in enumerate(self.program.scratch) if s.kept]
        if kept:
            lines += _KEPT.format(device=self.device, sizes=", ".join(values[f"s{i}"] for i in kept),
                                  names=", ".join(f"scratch{i}" for i in kept))
        return lines or "        pass\n"


class InterpretedProgram:
    """A program in the interpreter; scratch is poisoned, and counters must be zero again."""

    def __init__(self, program: Program, arity: Arity) -> None:
        self.program, self.arity = program, arity
        self._kernels = [interpreted(launch.kernel) for launch in program.launches]
        self._shapes = _Shapes(program, lambda: PROCESSORS)

    def bind(self, failed: Failed) -> Launch:
        return launching(self.run, failed)

    def run(self, arguments: Sequence[Any]) -> None:
        """Raises what `Interpreted.run` raises, and VerificationError where a counter is left behind."""
        inputs, rest = arguments[:self.arity.inputs], arguments[self.arity.inputs:]
        shape = self._shapes.of([int(n) for n in rest[self.arity.outputs:]])
        scratch = [_poisoned(s, size) for s, size in zip(self.program.scratch, shape.scratch)]
        tensors = {Place.INPUT: inputs, Place.OUTPUT: rest[:self.arity.outputs], Place.SCRATCH: scratch}
        for kernel, launch, sizes in zip(self._kernels, self.program.launches, shape.launches):
            kernel.run([*(tensors[place][i] for place, i in launch.pointers), *sizes])
        for spec, buffer in zip(self.program.scratch, scratch):
            if spec.kept and buffer.any():
                raise VerificationError("lowering", f"{self.program.name} leaves counters that are not zero")


def _poisoned(scratch: Scratch, size: int) -> torch.Tensor:
    """NaN or -1, unless it is kept."""
    fill = 0 if scratch.kept else 0xFF
    return torch.full((size * scratch.dtype.itemsize,), fill, dtype=torch.uint8).view(scratch.dtype)


def _split(kept: Iterable[Scratch], sizes: Sequence[int], take: Callable[[int], torch.Tensor],
           ) -> tuple[torch.Tensor, ...]:
    """Buffers side by side in memory that `take` gives for a number of bytes."""
    places, end = [], 0
    for scratch, size in zip(kept, sizes):
        places.append((end, end + size * scratch.dtype.itemsize, scratch.dtype))
        end = -(-places[-1][1] // ALIGNMENT) * ALIGNMENT
    memory = take(end)
    return tuple(memory[start:stop].view(dtype) for start, stop, dtype in places)


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


def _capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


@cache
def _cuda_program(program: Program, arity: Arity, device: int, options: Options, store: Store | None) -> CudaProgram:
    return CudaProgram(program, arity, device, options, store)


def cuda_program(program: Program, arity: Arity, device: int | None, options: Options = Options(),
                 store: Store | None = None) -> CudaProgram:
    """The program on this device (None: the current one), one for all segments that have it."""
    plain = replace(program, launches=tuple(
        replace(launch, kernel=replace(launch.kernel, notes=(), candidates=())) for launch in program.launches))
    with language_lock:
        return _cuda_program(plain, arity, torch.cuda.current_device() if device is None else device, options, store)
