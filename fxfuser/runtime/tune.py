"""Tile search: which of a kernel's tiles is fastest on the arguments that it gets, found once and remembered.

Enters: a kernel with its candidates, under max-autotune, and at the first call of each class of arguments the
arguments themselves.  Leaves: launch functions that run the fastest tile.  A class is the power of two above each
dynamic size and which pointers are multiples of 16 bytes.  Invariants: no result depends on a measurement that is
running, since outputs that share memory with an input are measured on scratch copies and all others are written
again by the launch that counts; nothing is measured during a capture; whatever fails costs a candidate, never a call;
the default wins unless another is clearly faster.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import threading
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Sequence

import torch

from fxfuser import observe
from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime import binary
from fxfuser.runtime.ahead import FirstCall, build_ahead
from fxfuser.runtime.build import Options, language_lock
from fxfuser.runtime.device_clock import Clock, CudaClock
from fxfuser.runtime.launcher import Cuda, Failed, Launch, cuda
from fxfuser.runtime.store import Store, store
from fxfuser.runtime.timing import Run

log = logging.getLogger("fxfuser")

MARGIN = 0.03  # another tile must be faster by this part of the default's time
HOPELESS = 1.3  # times the fastest, after the first few samples: measured no further
FIRST = 3  # samples of each candidate before the hopeless ones go
ROUNDS = 4  # in which the others take turns, so that a change of the clock rate meets all
MOST_SAMPLES = 28
BUDGET = 20_000.0  # microseconds that one candidate's samples may take, as long as there are ROUNDS of them

_TEMPLATE = """
def launch({params}):
    key = ({key})
    found = chosen.get(key)
    if found is None:
        found = first(key, ({params},))
    return found({params})
"""


@dataclass(frozen=True)
class ArgumentClass:
    """`buckets[i]`: the exponent of the power of two at or above size i; `misaligned`: positions of pointers."""

    buckets: tuple[int, ...]
    misaligned: tuple[int, ...]

    @staticmethod
    def of(pointers: Sequence[int], sizes: Sequence[int]) -> ArgumentClass:
        return ArgumentClass(tuple((n - 1).bit_length() for n in sizes),
                             tuple(i for i, p in enumerate(pointers) if p % 16))

    def __str__(self) -> str:
        sizes = [f"n{i} <= {1 << b}" for i, b in enumerate(self.buckets)]
        return ", ".join([*sizes, *(f"pointer {i} not aligned" for i in self.misaligned)])


@dataclass(frozen=True)
class Choice:
    """The tile that runs; (tile, microseconds) of all that were measured, None where one could not run."""

    tile: Tile
    times: tuple[tuple[Tile, float | None], ...]
    remembered: bool = False  # of an earlier process

    def encode(self) -> bytes:
        return json.dumps({"tile": asdict(self.tile), "times": [[asdict(t), us] for t, us in self.times]}).encode()

    @staticmethod
    def decode(data: bytes, tiles: Sequence[Tile]) -> Choice | None:
        """The choice among these tiles; None for anything that `encode` did not make of them."""
        known = {json.dumps(asdict(t)): t for t in tiles}
        try:
            found = json.loads(data)
            times = tuple((known[json.dumps(t)], None if us is None else float(us)) for t, us in found["times"])
            return Choice(known[json.dumps(found["tile"])], times, remembered=True)
        except (ValueError, KeyError, TypeError):
            return None


class Tuned:
    """A kernel and its candidates on one device; `kernels` are the same kernel with each tile, the default first."""

    def __init__(self, kernels: Sequence[Cuda], clock: Clock, records: Store | None = None) -> None:
        self.kernels, self.clock, self.records = tuple(kernels), clock, records
        self._by_tile = {k.kernel.tile: k for k in kernels}
        self._choices: dict[ArgumentClass, Choice] = {}
        self._code = compile(_source(self.default.kernel), f"<fxfuser tuned {self.default.kernel.name}>", "exec")

    @property
    def default(self) -> Cuda:
        return self.kernels[0]

    def likely(self, sizes: tuple[int, ...]) -> tuple[Cuda, ...]:
        """What a first call with these sizes, whose pointers will be aligned, launches: all where it searches."""
        kind = ArgumentClass.of((), sizes)
        found = self._choices.get(kind) or self._recall(kind)
        return self.kernels if found is None else (self._by_tile[found.tile],)

    def bind(self, failed: Failed, segment: str) -> Launch:
        """The launch function, as `Cuda.bind` makes it; choices are recorded for the graph that is being compiled."""
        launches: dict[Tile, Launch] = {}
        chosen: dict[Any, Launch] = {}
        record = observe.recorder()

        def launch_of(kernel: Cuda) -> Launch:
            return launches.setdefault(kernel.kernel.tile, kernel.bind(failed))

        def first(key: Any, arguments: tuple[Any, ...]) -> Launch:
            kind, sizes = self._class(arguments)
            if self.default.shape(sizes)[0] == 0:  # nothing runs
                return launch_of(self.default)
            choice = self.choice(kind, arguments)
            if choice is None:
                return launch_of(self.default)
            if key not in chosen:
                record(_record(segment, self.default.kernel.name, kind, choice))
            return chosen.setdefault(key, launch_of(self._by_tile[choice.tile]))

        scope: dict[str, Any] = {"chosen": chosen, "first": first}
        exec(self._code, scope)
        launch: Launch = scope["launch"]
        return launch

    def choice(self, kind: ArgumentClass, arguments: tuple[Any, ...]) -> Choice | None:
        """The choice for this class: known, of an earlier process, or measured now; None during a capture."""
        found = self._choices.get(kind)
        if found is None and self.clock.capturing():
            return self._recall(kind)
        if found is None:
            with _searching:  # two searches at a time would measure each other
                found = self._choices.get(kind) or self._recall(kind) or self._search(kind, arguments)
                self._choices[kind] = found
        return found

    def _class(self, arguments: tuple[Any, ...]) -> tuple[ArgumentClass, tuple[int, ...]]:
        pointers, sizes = self._split(arguments)
        return ArgumentClass.of([p.data_ptr() for p in pointers], sizes), sizes

    def _split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        count = len(arguments) - self.default.kernel.sizes
        return arguments[:count], arguments[count:]

    def _search(self, kind: ArgumentClass, arguments: tuple[Any, ...]) -> Choice:
        tiles = [k.kernel.tile for k in self.kernels]
        try:
            pointers, sizes = self._split(arguments)
            addresses = tuple(p.data_ptr() for p in pointers)
            build_ahead(FirstCall(k, sizes, addresses) for k in self.kernels)
            inputs = len(self.default.kernel.inputs)
            outputs = [_apart(out, pointers[:inputs]) for out in pointers[inputs:]]
            apart = (*pointers[:inputs], *outputs, *sizes)
            times = compare(self.clock, [_run(k, apart) for k in self.kernels])
        except Exception as error:
            log.warning("kernel %s runs with its default tile: %s: %s", self.default.kernel.name,
                        type(error).__name__, error)
            return Choice(tiles[0], ())
        found = Choice(tiles[best(times)], tuple(zip(tiles, times)))
        if self.records is not None and any(t is not None for t in times):
            self.records.put(self._key(kind), found.encode())
        return found

    def _recall(self, kind: ArgumentClass) -> Choice | None:
        """The choice of an earlier process."""
        data = self.records.get(self._key(kind)) if self.records is not None else None
        return None if data is None else Choice.decode(data, list(self._by_tile))

    def _key(self, kind: ArgumentClass) -> str:
        """All that the times depend on."""
        kernel, options = self.default.kernel, self.default.options
        tiles = [asdict(k.kernel.tile) for k in self.kernels]
        text = json.dumps([binary.installation(), self.clock.name(), kernel.source, kernel.grid, tiles,
                           asdict(options), asdict(kind)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def compare(clock: Clock, runs: Sequence[Run]) -> list[float | None]:
    """Median microseconds of each run, None of those that fail; the first is measured even if it seems hopeless."""
    samples: dict[int, list[float]] = {}
    for i, run in enumerate(runs):
        try:
            clock.samples(run, 1)  # loads it
            samples[i] = clock.samples(run, FIRST)
        except Exception as error:  # too many registers, too much shared memory, a fault of the compiler
            log.info("candidate %d is dropped: %s: %s", i, type(error).__name__, error)
    times: list[float | None] = [statistics.median(samples[i]) if i in samples else None for i in range(len(runs))]
    fastest = min((t for t in times if t is not None), default=0.0)
    hopeful = [i for i, t in enumerate(times) if t is not None and (i == 0 or t <= HOPELESS * fastest)]
    if len(hopeful) > 1:
        count = max(1, int(min(MOST_SAMPLES, BUDGET / max(fastest, 1.0))) // ROUNDS)
        for _ in range(ROUNDS):
            for i in hopeful:
                samples[i] += clock.samples(runs[i], count)
        for i in hopeful:
            times[i] = statistics.median(samples[i][FIRST:])
    return times


def best(times: Sequence[float | None]) -> int:
    """The position that wins: the first, unless it failed or another is faster by MARGIN."""
    known = [(t, i) for i, t in enumerate(times) if t is not None]
    if not known:
        return 0
    fastest, winner = min(known)
    return 0 if times[0] is not None and fastest >= times[0] * (1 - MARGIN) else winner


def _run(kernel: Cuda, arguments: tuple[Any, ...]) -> Run:
    def refuse(error: Exception) -> bool:
        raise error

    launch = kernel.bind(refuse)
    return lambda: launch(*arguments)


def _apart(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output itself, or where an input lies in the same memory a tensor like it, as far from an aligned address."""
    own = output.untyped_storage().data_ptr()
    if all(own != i.untyped_storage().data_ptr() for i in inputs):
        return output
    offset = output.data_ptr() % 16 // output.itemsize
    extent = 1 + sum((n - 1) * s for n, s in zip(output.shape, output.stride()))
    flat = torch.empty(max(extent, 0) + offset, dtype=output.dtype, device=output.device)
    return flat.as_strided(output.shape, output.stride(), offset)


def _record(segment: str, name: str, kind: ArgumentClass, choice: Choice) -> observe.TuningRecord:
    return observe.TuningRecord(segment, name, str(kind), str(choice.tile),
                                tuple((str(t), us) for t, us in choice.times), choice.remembered)


def _source(kernel: Kernel) -> str:
    pointers = [f"in{i}" for i in range(len(kernel.inputs))] + [f"out{i}" for i in range(len(kernel.outputs))]
    sizes = [f"n{i}" for i in range(kernel.sizes)]
    addresses = [f"{p}.data_ptr()" for p in pointers]
    misaligned = "".join(f"{a} & 15 != 0, " for a in addresses)
    key = [*(f"({n} - 1).bit_length()" for n in sizes), f"({' | '.join(addresses)}) & 15 and ({misaligned})"]
    return _TEMPLATE.format(params=", ".join([*pointers, *sizes]), key=", ".join(key))


@cache
def _tuned(kernel: Kernel, device: int | None, options: Options, cache_dir: Path) -> Tuned:
    kernels = store(cache_dir, "kernels")
    found = [cuda(replace(kernel, tile=tile), device, options, kernels) for tile in (kernel.tile, *kernel.candidates)]
    return Tuned(found, CudaClock(device), store(cache_dir, "tiles"))


def tuned(kernel: Kernel, device: int | None, options: Options, cache_dir: Path) -> Tuned:
    """The kernel with all its tiles on this device, one for all segments that have it."""
    with language_lock:
        return _tuned(replace(kernel, notes=()), device, options, cache_dir)


def _after_fork() -> None:
    """A forked child does not have the thread that held the lock."""
    global _searching
    _searching = threading.Lock()


_searching = threading.Lock()
os.register_at_fork(after_in_child=_after_fork)
