"""A search: which of several routes to the same outputs is fastest on the arguments that it gets, found once and
remembered.

Enters: routes and, at the first call of each class of arguments, the arguments themselves.  Leaves: launch functions
that run the fastest route.  A class is the power of two above each dynamic size and which pointers are multiples of 16
bytes.  Invariants: no result depends on a measurement that is running, since outputs that share memory with an input
are measured on scratch copies and all others are written again by the launch that counts; nothing is measured during a
capture; whatever fails costs a route, never a call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import statistics
import threading
from dataclasses import asdict, dataclass
from typing import Any, Callable, Sequence

import torch

from fxfuser import observe
from fxfuser.runtime import binary
from fxfuser.runtime.ahead import FirstCall, build_ahead
from fxfuser.runtime.device_clock import Clock
from fxfuser.runtime.launcher import Failed, Launch
from fxfuser.runtime.store import Store
from fxfuser.runtime.timing import Run

log = logging.getLogger("fxfuser")

MARGIN = 0.03  # what is preferred wins, unless another is faster by this part of its time
HOPELESS = 1.3  # times the fastest, after the first few samples: measured no further
FIRST = 3  # samples of each route before the hopeless ones go
ROUNDS = 4  # at least, in which the others take turns, so that a change of the clock rate meets all
TURN = 1000.0  # microseconds of one route's samples in a round; longer ones heat the device for whoever comes next
MOST_SAMPLES = 28
BUDGET = 20_000.0  # microseconds that one route's samples may take, as long as there are ROUNDS of them

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
class Route:
    """One way to the outputs.  `name` tells it from the others, in records too.

    `first_calls(sizes, pointers)`: the kernels that a call launches; pointers that are not given are aligned.
    `scratch(sizes)`: bytes that a call holds beside its arguments.
    """

    name: str
    bind: Callable[[Failed], Launch]
    first_calls: Callable[[tuple[int, ...], tuple[int, ...] | None], Sequence[FirstCall]]
    scratch: Callable[[tuple[int, ...]], int] = lambda sizes: 0


@dataclass(frozen=True)
class Subject:
    """What is computed: its arguments, and `key`, all that the routes' times depend on beside their names."""

    name: str  # the kernel's or program's
    inputs: int
    outputs: int
    sizes: int
    empty: Callable[..., bool]  # of n0, n1, ...: whether a call has nothing to compute
    key: str
    kind: str = "tile"  # what the routes differ in, in words


@dataclass(frozen=True)
class Choice:
    """The route that runs; (route, microseconds) of all that were measured, None where one could not run."""

    route: str
    times: tuple[tuple[str, float | None], ...]
    remembered: bool = False  # of an earlier process

    def encode(self) -> bytes:
        return json.dumps({"route": self.route, "times": self.times}).encode()

    @staticmethod
    def decode(data: bytes, routes: Sequence[str]) -> Choice | None:
        """The choice among these routes; None for anything that `encode` did not make of them."""
        known = {r: r for r in routes}
        try:
            found = json.loads(data)
            times = tuple((known[r], None if us is None else float(us)) for r, us in found["times"])
            return Choice(known[found["route"]], times, remembered=True)
        except (ValueError, KeyError, TypeError):
            return None


class Search:
    """Routes on one device; the first is the default.

    `pick(times, scratch)` is the position of the one that wins, of times as `compare` returns them and bytes of scratch
    memory.  `choices` may be shared by searches with equal subjects and routes.
    """

    def __init__(self, subject: Subject, routes: Sequence[Route],
                 pick: Callable[[Sequence[float | None], Sequence[int]], int], clock: Clock,
                 records: Store | None = None) -> None:
        self.subject, self.routes, self.pick = subject, tuple(routes), pick
        self.clock, self.records = clock, records
        self.choices: dict[ArgumentClass, Choice] = {}
        self._by_name = {r.name: r for r in routes}
        self._code = compile(_source(subject), f"<fxfuser search {subject.name}>", "exec")

    def likely(self, sizes: tuple[int, ...]) -> tuple[FirstCall, ...]:
        """What a first call with these sizes, whose pointers will be aligned, launches: all where it searches."""
        kind = ArgumentClass.of((), sizes)
        found = self.choices.get(kind) or self._recall(kind)
        routes = self.routes if found is None else (self._by_name[found.route],)
        return tuple(call for route in routes for call in route.first_calls(sizes, None))

    def bind(self, failed: Failed, segment: str) -> Launch:
        """The launch function, as `Cuda.bind` makes it; choices are recorded for the graph that is being compiled."""
        launches: dict[str, Launch] = {}
        chosen: dict[Any, Launch] = {}
        record = observe.recorder()

        def launch_of(route: Route) -> Launch:
            return launches.get(route.name) or launches.setdefault(route.name, route.bind(failed))

        def first(key: Any, arguments: tuple[Any, ...]) -> Launch:
            kind, sizes = self._class(arguments)
            choice = None if self.subject.empty(*sizes) else self.choice(kind, arguments)
            if choice is None:
                return launch_of(self.routes[0])
            if key not in chosen:
                record(observe.TuningRecord(segment, self.subject.name, str(kind), choice.route, choice.times,
                                            choice.remembered, self.subject.kind))
            return chosen.setdefault(key, launch_of(self._by_name[choice.route]))

        scope: dict[str, Any] = {"chosen": chosen, "first": first}
        exec(self._code, scope)
        launch: Launch = scope["launch"]
        return launch

    def choice(self, kind: ArgumentClass, arguments: tuple[Any, ...]) -> Choice | None:
        """The choice for this class: known, of an earlier process, or measured now; None during a capture."""
        found = self.choices.get(kind)
        if found is None and self.clock.capturing():
            return self._recall(kind)
        if found is None:
            with _searching:  # two searches at a time would measure each other
                found = self.choices.get(kind) or self._recall(kind) or self._measure(kind, arguments)
                self.choices[kind] = found
        return found

    def _class(self, arguments: tuple[Any, ...]) -> tuple[ArgumentClass, tuple[int, ...]]:
        pointers, sizes = self._split(arguments)
        return ArgumentClass.of([p.data_ptr() for p in pointers], sizes), sizes

    def _split(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        count = len(arguments) - self.subject.sizes
        return arguments[:count], arguments[count:]

    def _measure(self, kind: ArgumentClass, arguments: tuple[Any, ...]) -> Choice:
        names = [r.name for r in self.routes]
        try:
            pointers, sizes = self._split(arguments)
            addresses = tuple(p.data_ptr() for p in pointers)
            build_ahead(call for route in self.routes for call in route.first_calls(sizes, addresses))
            inputs = self.subject.inputs
            outputs = [_apart(out, pointers[:inputs]) for out in pointers[inputs:]]
            apart = (*pointers[:inputs], *outputs, *sizes)
            times = compare(self.clock, [_run(route, apart) for route in self.routes])
        except Exception as error:
            log.warning("%s runs with its default %s: %s: %s", self.subject.name, self.subject.kind,
                        type(error).__name__, error)
            return Choice(names[0], ())
        winner = self.pick(times, [route.scratch(sizes) for route in self.routes])
        found = Choice(names[winner], tuple(zip(names, times)))
        if self.records is not None and any(t is not None for t in times):
            self.records.put(self._key(kind), found.encode())
        return found

    def _recall(self, kind: ArgumentClass) -> Choice | None:
        """The choice of an earlier process."""
        data = self.records.get(self._key(kind)) if self.records is not None else None
        return None if data is None else Choice.decode(data, list(self._by_name))

    def _key(self, kind: ArgumentClass) -> str:
        """All that the times depend on."""
        text = json.dumps([binary.installation(), self.clock.name(), self.subject.key, list(self._by_name),
                           asdict(kind)], sort_keys=True)
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
        for i, time in zip(hopeful, _in_turns(clock, [runs[i] for i in hopeful], max(fastest, 1.0))):
            times[i] = time
    return times


def _in_turns(clock: Clock, runs: Sequence[Run], fastest: float) -> list[float]:
    """Median microseconds of runs that take turns, every other round backwards.

    Each is compared with the first in the same round.  The clock rate follows the power that the last milliseconds
    took: medians of their own have been 6% apart for the same kernel beside other ones (H200, 1.2 ms).
    """
    each = max(1, min(MOST_SAMPLES // ROUNDS, int(TURN / fastest)))
    pairs = max(ROUNDS, int(min(MOST_SAMPLES, BUDGET / fastest)) // each) // 2
    rounds: list[dict[int, float]] = []
    for number in range(2 * pairs):
        order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
        rounds.append({i: statistics.median(clock.samples(runs[i], each)) for i in order})
    first = statistics.median(r[0] for r in rounds)
    return [first * statistics.median(r[i] / r[0] for r in rounds) for i in range(len(runs))]


def _run(route: Route, arguments: tuple[Any, ...]) -> Run:
    def refuse(error: Exception) -> bool:
        raise error

    launch: Launch | None = None

    def run() -> None:
        nonlocal launch
        launch = launch or route.bind(refuse)
        if not launch(*arguments):
            raise RuntimeError(f"{route.name} did not run")

    return run


def _apart(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output itself, or where an input lies in the same memory a tensor like it, as far from an aligned address."""
    own = output.untyped_storage().data_ptr()
    if all(own != i.untyped_storage().data_ptr() for i in inputs):
        return output
    offset = output.data_ptr() % 16 // output.itemsize
    extent = 1 + sum((n - 1) * s for n, s in zip(output.shape, output.stride()))
    flat = torch.empty(max(extent, 0) + offset, dtype=output.dtype, device=output.device)
    return flat.as_strided(output.shape, output.stride(), offset)


def _source(subject: Subject) -> str:
    pointers = [f"in{i}" for i in range(subject.inputs)] + [f"out{i}" for i in range(subject.outputs)]
    sizes = [f"n{i}" for i in range(subject.sizes)]
    addresses = [f"{p}.data_ptr()" for p in pointers]
    misaligned = "".join(f"{a} & 15 != 0, " for a in addresses)
    key = [*(f"({n} - 1).bit_length()" for n in sizes), f"({' | '.join(addresses)}) & 15 and ({misaligned})"]
    return _TEMPLATE.format(params=", ".join([*pointers, *sizes]), key=", ".join(key))


def _after_fork() -> None:
    """A forked child does not have the thread that held the lock."""
    global _searching
    _searching = threading.Lock()


_searching = threading.Lock()
os.register_at_fork(after_in_child=_after_fork)
