"""Three clocks, kept apart, because each answers another question and mixing them has misled before.

    call   wall time of calling the function, back to back: guards, launches and the gaps between them
    graph  device time of one replay of the call as a CUDA graph, after the L2 cache was overwritten
    busy   sum of the times of the call's kernels, from the profiler; counts them too

Enters: `runs`, functions without arguments, each of which does the same work on its own random inputs.  Leaves: a
`Measurement`, microseconds throughout.  Invariant: a clock that this machine or this work does not have is None,
never a stand-in for another clock.  Callers prepare and measure inside `stream()`, so that a backward graph, which
autograd runs on the stream of its forward, can be captured.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence

import torch

Run = Callable[[], object]

L2_FLUSH_BYTES = 256 << 20  # several times the largest L2
CALLS_PER_BURST = 10
PROFILED_CALLS = 5
MIN_ROUNDS, MAX_ROUNDS = 10, 300  # of runs that take turns
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Clock:
    """Samples of one clock, in microseconds, in the order in which they were taken."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(90th - 10th percentile) / median: differences smaller than this are noise."""
        return (quantile(self.samples, 0.9) - quantile(self.samples, 0.1)) / self.median

    def to_json(self) -> dict[str, object]:
        return {"median": round(self.median, 3), "spread": round(self.spread, 4),
                "samples": [round(s, 3) for s in self.samples]}


@dataclass(frozen=True)
class Busy:
    """Kernels of one call by name: (how many, microseconds), both per call."""

    kernels: Mapping[str, tuple[float, float]]

    @property
    def count(self) -> float:
        return sum(n for n, _ in self.kernels.values())

    @property
    def microseconds(self) -> float:
        return sum(us for _, us in self.kernels.values())


@dataclass(frozen=True)
class Measurement:
    """What was measured of one piece of work; `notes` says why a clock is missing."""

    call: Clock
    graph: Clock | None = None
    busy: Busy | None = None
    peak_bytes: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def device_us(self) -> float | None:
        """Device time to compare by: the graph clock only; None where the work could not be captured."""
        return None if self.graph is None else self.graph.median

    def to_json(self) -> dict[str, object]:
        busy = self.busy and {
            "microseconds": round(self.busy.microseconds, 3), "kernels": round(self.busy.count, 2),
            "by_name": {name: [round(n, 2), round(us, 3)] for name, (n, us) in self.busy.kernels.items()}}
        return {"call": self.call.to_json(), "graph": self.graph and self.graph.to_json(), "busy": busy,
                "peak_bytes": self.peak_bytes, "notes": list(self.notes)}


def quantile(samples: Iterable[float], q: float) -> float:
    """The q-quantile (0 <= q <= 1), linear between the two nearest samples."""
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; NaN for no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def kernels_of(trace: Mapping[str, Any], calls: int) -> Busy:
    """The device work in a Chrome trace of `calls` equal calls.

    Kernels, copies and fills count; annotations, which also lie on the device's time line, do not.
    """
    total: dict[str, tuple[float, float]] = {}
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in DEVICE_CATEGORIES:
            count, us = total.get(event["name"], (0.0, 0.0))
            total[event["name"]] = (count + 1 / calls, us + float(event["dur"]) / calls)
    return Busy(dict(sorted(total.items(), key=lambda item: -item[1][1])))


@contextmanager
def stream(device: torch.device) -> Iterator[None]:
    """A side stream on a GPU (nothing can be captured on the default one); nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.synchronize(device)


def measure(runs: Sequence[Run], device: torch.device, seconds: float = 0.2) -> Measurement:
    """All clocks of `runs`, about `seconds` for each clock.  The runs must have been warmed up and compiled."""
    for run in runs:
        run()
    if device.type != "cuda":
        return Measurement(call_clock(runs, device, seconds), notes=("no device clocks on " + device.type,))
    notes: list[str] = []
    try:
        graph = graph_clock(runs[0], device, seconds)
    except RuntimeError as error:  # work that synchronises or reads back cannot be captured
        graph = None
        notes.append(f"graph: {str(error).splitlines()[0]}")
        torch.cuda.synchronize(device)
    return Measurement(call_clock(runs, device, seconds), graph, busy_clock(runs, device),
                       peak_bytes(runs[0], device), tuple(notes))


def call_clock(runs: Sequence[Run], device: torch.device, seconds: float) -> Clock:
    """Wall time per call in bursts that take the runs in turn; the device is idle before and after each burst."""
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < 3 or time.perf_counter() < deadline:
        _synchronize(device)
        start = time.perf_counter()
        for i in range(CALLS_PER_BURST):
            runs[i % len(runs)]()
        _synchronize(device)
        samples.append((time.perf_counter() - start) * 1e6 / CALLS_PER_BURST)
    return Clock(tuple(samples))


def graph_clock(run: Run, device: torch.device, seconds: float) -> Clock:
    """Device time of one replay of `run`, between events; before each, L2 is filled with what it does not read.

    It is filled by reading: lines that a fill had written would be written back at the expense of what is measured.
    The filling kernel keeps the device busy while the host enqueues the replay, so no launch gap is measured.
    Raises RuntimeError where `run` cannot be captured.
    """
    graph, kept = _captured(run, device)
    flush = torch.ones(L2_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    for _ in range(3):
        flush.sum()
        graph.replay()
    torch.cuda.synchronize(device)
    first = _replays(graph, flush, device, 3)
    each = max(statistics.median(first) * 1e-6 + 1e-4, 1e-5)
    samples = _replays(graph, flush, device, max(10, min(300, int(seconds / each))))
    del kept
    return Clock(tuple(samples))


def interleaved(runs: Sequence[Run], device: torch.device, seconds: float) -> list[Clock | RuntimeError]:
    """The graph clocks of runs that take turns, so that a drift of the clock rate meets all; about `seconds` in all.

    The i-th samples of all clocks were taken in one round, every other round backwards: compare by `ratio`.  Where a
    run cannot be captured its error stands for its clock.
    """
    found: list[tuple[torch.cuda.CUDAGraph, object] | RuntimeError] = []
    for run in runs:
        try:
            found.append(_captured(run, device))
        except RuntimeError as error:
            found.append(error)
            torch.cuda.synchronize(device)
    graphs = [pair[0] for pair in found if not isinstance(pair, RuntimeError)]
    flush = torch.ones(L2_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    _rounds(graphs, flush, device, 2)
    start = time.perf_counter()
    _rounds(graphs, flush, device, 3)
    each = max((time.perf_counter() - start) / 3, 1e-5)
    samples = iter(_rounds(graphs, flush, device, max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / each)))))
    return [pair if isinstance(pair, RuntimeError) else Clock(tuple(next(samples))) for pair in found]


def _rounds(graphs: Sequence[torch.cuda.CUDAGraph], flush: torch.Tensor, device: torch.device, count: int,
            ) -> list[list[float]]:
    """Microseconds of each graph in each of `count` rounds."""
    samples: list[list[float]] = [[] for _ in graphs]
    for number in range(count):
        marks = {}
        order = range(len(graphs))
        for i in order if number % 2 == 0 else reversed(order):
            marks[i] = event(), event()
            flush.sum()
            marks[i][0].record()
            graphs[i].replay()
            marks[i][1].record()
        torch.cuda.synchronize(device)
        for i, (start, end) in marks.items():
            samples[i].append(start.elapsed_time(end) * 1e3)
    return samples


def ratio(clock: Clock, reference: Clock) -> float:
    """How many times the reference's time: the median over the rounds of one `interleaved` call."""
    return statistics.median(a / b for a, b in zip(clock.samples, reference.samples))


def _captured(run: Run, device: torch.device) -> tuple[torch.cuda.CUDAGraph, object]:
    """The run as a graph, and what it returned, whose memory the graph writes.  Raises RuntimeError where it cannot."""
    graph = torch.cuda.CUDAGraph()
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(device)):
            return graph, run()
    except RuntimeError:
        # 2.11 leaves the generator in its capturing state, in which it refuses to draw
        generator.graphsafe_set_state(before)
        raise


def _replays(graph: torch.cuda.CUDAGraph, flush: torch.Tensor, device: torch.device, count: int) -> list[float]:
    pairs = [(event(), event()) for _ in range(count)]
    for start, end in pairs:
        flush.sum()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def event() -> torch.cuda.Event:
    """One that notes the time on the device."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def busy_clock(runs: Sequence[Run], device: torch.device) -> Busy:
    """Kernel times and counts per call, from PROFILED_CALLS calls that take the runs in turn."""
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for i in range(PROFILED_CALLS):
            runs[i % len(runs)]()
        torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return kernels_of(json.loads(path.read_text()), PROFILED_CALLS)


def peak_bytes(run: Run, device: torch.device) -> int:
    """Device memory that one call holds at most, beyond what was held before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    kept = run()
    torch.cuda.synchronize(device)
    del kept
    return torch.cuda.max_memory_allocated(device) - before


def copy_clock(nbytes: int, device: torch.device, seconds: float = 0.1) -> Clock:
    """The ceiling: the graph clock (on a CPU the call clock) of a copy that moves `nbytes`, read and written together.

    Random data: zeros move faster than anything real.  Odd sizes are rounded up to whole pages of 1 MB, which the
    library copies faster, and the time is scaled back.  May be called on the default stream too.
    """
    page = 1 << 19
    wanted = max(nbytes // 4, 1)  # half of the bytes, two bytes an element
    elements = wanted if wanted < 8 * page else -(-wanted // page) * page
    with stream(device):
        source = torch.randn(elements, device=device, dtype=torch.bfloat16)
        target = torch.empty_like(source)

        def run() -> torch.Tensor:
            return target.copy_(source)

        run()
        clock = graph_clock(run, device, seconds) if device.type == "cuda" else call_clock([run], device, seconds)
    return Clock(tuple(sample * wanted / elements for sample in clock.samples))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
