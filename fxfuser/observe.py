"""A recorder of what was compiled, for `fxfuser dump`, `fxfuser explain`, the examples and the tests.

Enters: frozen records that the stages append while they work.  Leaves: a `Recording`, the records of each graph in
the order in which they were made.  Invariant: recording changes nothing that is compiled, and costs one list test
where nobody records.  Stages wrap each graph in `graph(...)`, so that their records need not say which it is:

    with observe.graph("forward", region=0, text=gm.graph):
        observe.record(PassRecord("canonicalise", 3, 0.4, before, after))

A recording sees all threads: autograd compiles a backward graph on a thread of its own.  This module is below the
compiler and knows none of its types; it holds a Segmentation as an opaque value that prints.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, TypeVar

KINDS = ("joint", "forward", "backward", "inference")


@dataclass(frozen=True)
class GraphRecord:
    """An ATen graph that begins to be compiled: which of KINDS, the number of its Dynamo region, its text."""

    kind: str
    region: int
    text: str

    @property
    def name(self) -> str:
        return f"region{self.region}.{self.kind}"


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.  `before` and `after` are graph texts, equal where `changes` is 0."""

    name: str
    changes: int
    milliseconds: float
    before: str = field(repr=False)
    after: str = field(repr=False)


@dataclass(frozen=True)
class SegmentationRecord:
    """What the segmenter returned; `segmentation` has `.segments` and `.boundaries`."""

    segmentation: Any


@dataclass(frozen=True)
class KernelRecord:
    """A generated kernel and the segment that it computes.

    `notes` are lowering's `Note`s, the side table of its text: which value is which node of this segment; `sizes`
    are what n0, n1, ... of the text stand for, expressions over the graph's size symbols; `blocks` are the elements of
    each block of the tile that runs where none was measured.
    """

    segment: str
    name: str
    source: str = field(repr=False)
    notes: tuple[Any, ...] = ()
    sizes: tuple[str, ...] = ()
    blocks: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class PlanRecord:
    """The generated Python module that runs the graph."""

    text: str = field(repr=False)


@dataclass(frozen=True)
class ExternRecord:
    """A node that runs as its ATen call, and why."""

    node: str
    op: str
    reason: str
    location: str = ""


@dataclass(frozen=True)
class FallbackRecord:
    """A segment that was to be a kernel but runs as ATen ops: the error's text and the runnable repro file."""

    segment: str
    error: str
    repro: str = ""


@dataclass(frozen=True)
class LossRecord:
    """What became of a linear layer whose cross entropy the graph computes: the node of its product, the plan (whole,
    chunks, recompute, columns or mixed), `size` of all `rows` at a time (of columns: columns; of mixed: those whose
    logits are kept), why no other, what stands in memory, with bytes, and the bytes of logits that are returned."""

    product: str
    location: str
    plan: str
    reason: str
    size: int
    rows: int
    buffers: tuple[tuple[str, int], ...]
    returned: int = 0


@dataclass(frozen=True)
class MaskRecord:
    """What became of a mask of attention, one of attention_masks.FATES."""

    fate: str
    location: str


@dataclass(frozen=True)
class CudaGraphRecord:
    """A plan whose calls are to be replays of CUDA graphs, or the reason why they are not."""

    plan: str
    refusal: str = ""


@dataclass(frozen=True)
class TuningRecord:
    """Which tile of a segment's kernel runs for a class of arguments, known since the first such call.

    `times` are microseconds of all that were measured, the default first, None where one could not run; `remembered`:
    an earlier process measured them.  `subject` is "route" where not only tiles were measured but, for a product and
    what is fused with it, the library's too: then `tile` is the name of what runs, `kernel` that of the first program's
    first.
    """

    segment: str
    kernel: str
    arguments: str
    tile: str
    times: tuple[tuple[str, float | None], ...]
    remembered: bool = False
    subject: str = "tile"


Record = (GraphRecord | PassRecord | SegmentationRecord | KernelRecord | PlanRecord | ExternRecord | FallbackRecord
          | CudaGraphRecord | TuningRecord | LossRecord | MaskRecord)
R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class GraphTrace:
    """All that was recorded about one graph."""

    graph: GraphRecord
    records: list[Record] = field(default_factory=list)

    def of(self, kind: type[R]) -> tuple[R, ...]:
        """The records of one class, in order."""
        return tuple(r for r in self.records if isinstance(r, kind))

    @property
    def name(self) -> str:
        return self.graph.name

    @property
    def passes(self) -> tuple[PassRecord, ...]:
        return self.of(PassRecord)

    @property
    def segmentation(self) -> Any | None:
        """The graph's Segmentation; None for a joint graph, which is cut before it is segmented."""
        found = self.of(SegmentationRecord)
        return found[-1].segmentation if found else None

    @property
    def kernels(self) -> tuple[KernelRecord, ...]:
        return self.of(KernelRecord)

    @property
    def plan(self) -> str:
        return "\n".join(r.text for r in self.of(PlanRecord))

    @property
    def externs(self) -> tuple[ExternRecord, ...]:
        return self.of(ExternRecord)

    @property
    def tunings(self) -> tuple[TuningRecord, ...]:
        return self.of(TuningRecord)

    @property
    def losses(self) -> tuple[LossRecord, ...]:
        return self.of(LossRecord)

    @property
    def masks(self) -> tuple[MaskRecord, ...]:
        return self.of(MaskRecord)

    @property
    def fallbacks(self) -> tuple[FallbackRecord, ...]:
        return self.of(FallbackRecord)

    def write(self, directory: Path) -> None:
        """Writes the graph's text, what each pass made of it, kernels and plan to the folder `directory / name`."""
        folder = directory / self.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _files(self).items():
            (folder / name).write_text(text)


@dataclass(frozen=True)
class Recording:
    """What `recording()` yields; it fills while its context is open and can be read at any time."""

    graphs: list[GraphTrace] = field(default_factory=list)

    @property
    def segmentations(self) -> tuple[tuple[str, Any], ...]:
        """(graph name, Segmentation) for each graph that was segmented."""
        return tuple((t.name, t.segmentation) for t in self.graphs if t.segmentation is not None)

    def write(self, directory: Path) -> None:
        """Writes every graph's files under `directory`, as FXFUSER_DUMP does."""
        for trace in self.graphs:
            trace.write(directory)


_active: tuple[Recording, ...] = ()  # replaced as a whole, so that a reader on another thread needs no lock
_traces: ContextVar[tuple[GraphTrace, ...]] = ContextVar("fxfuser_traces", default=())
_regions = itertools.count()


def next_region() -> int:
    """A number for a Dynamo region that begins to be compiled; its forward and backward graphs share it."""
    return next(_regions)


def active() -> bool:
    """Whether anybody records: stages ask before they render a text that only a record needs."""
    return bool(_active or _traces.get())


@contextmanager
def recording() -> Iterator[Recording]:
    """Records all that is compiled in this process, on any thread, while the context is open."""
    global _active
    mine = Recording()
    _active = (*_active, mine)
    try:
        yield mine
    finally:
        _active = tuple(r for r in _active if r is not mine)


@contextmanager
def graph(kind: str, region: int, text: object = "", dump_dir: Path | None = None) -> Iterator[None]:
    """Records made inside, on this thread, belong to this graph; where `dump_dir` is given they are written there.

    `kind` is one of KINDS; `text` is anything that prints as the graph, printed only if somebody records.
    """
    assert kind in KINDS, kind
    owners = _active
    head = GraphRecord(kind, region, str(text) if owners or dump_dir else "")
    traces = [GraphTrace(head) for _ in owners]
    for owner, trace in zip(owners, traces):
        owner.graphs.append(trace)
    dumped = GraphTrace(head)
    token = _traces.set((*traces, dumped) if dump_dir else tuple(traces))
    try:
        yield
    finally:
        _traces.reset(token)
        if dump_dir:  # after an error too: that is when it is wanted most
            dumped.write(dump_dir)


def record(entry: Record) -> None:
    """Appends `entry` to the graph that is being compiled on this thread; without one it is dropped."""
    recorder()(entry)


def recorder() -> Callable[[Record], None]:
    """`record` for what only a call of this graph will tell, when it is no longer being compiled."""
    traces = _traces.get()

    def append(entry: Record) -> None:
        for trace in traces:
            trace.records.append(entry)

    return append


def _files(trace: GraphTrace) -> dict[str, str]:
    texts = {"graph.txt": trace.graph.text}
    for number, run in enumerate(trace.passes):
        if run.changes:
            texts[f"pass{number:02d}.{run.name}.txt"] = run.after
    if trace.segmentation is not None:
        texts["segments.txt"] = str(trace.segmentation)
    for kernel in trace.kernels:
        texts[f"{kernel.segment}.{kernel.name}.py"] = kernel.source
    if trace.plan:
        texts["plan.py"] = trace.plan
    return texts
