"""What the compiler made of a graph, kept for later processes: its segments and their kernels.

Enters: a graph after the passes, what else segments and kernels depend on, and, once, what became of them.  Leaves: the
same Segmentation and kernels over this process's own nodes, so that nothing is segmented, resolved or lowered again.
Invariants: an entry is used only for a graph of equal text, under equal settings, rates and versions; it holds no
tensor, no line of the user's files and nothing that a call passes; whatever is wrong with it costs time alone.

Who measures out fuel or records what is compiled gets every stage anew, boundaries and notes included.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Mapping

import torch
from torch import fx

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.points import Domain, Point
from fxfuser.domain.products import rounds_to_tf32
from fxfuser.fuel import Fuel, counted
from fxfuser.lowering.lower import size_hints
from fxfuser.runtime import binary
from fxfuser.runtime.graph_text import Untold, graph_text
from fxfuser.runtime.lower_segments import AnyLowered, LoweredGemm
from fxfuser.runtime.store import Store, store
from fxfuser.runtime.values import UNWRITABLE, Reader, Writer
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind

log = logging.getLogger("fxfuser")

KIND = "segments"  # of the store
ELSEWHERE = ("cache_dir", "dump_dir", "fuel")  # options that change nothing of what is kept

Compiled = tuple[Segmentation, Mapping[int, AnyLowered]]


@dataclass(frozen=True)
class Entry:
    """The place of one graph; `key` is "" where nothing is kept of it."""

    graph: fx.Graph
    config: Config
    rates: DeviceRates
    key: str = ""

    def load(self) -> Compiled | None:
        """What an earlier compilation made of an equal graph."""
        data = self._store.get(self.key) if self.key else None
        if data is None:
            return None
        try:
            _, segments, lowered = Reader(data, tuple(self.graph.nodes)).load()
        except Exception as error:  # pickle raises whatever it likes; the entry is written again
            log.info("cached segments %s are not used: %s: %s", self.key, type(error).__name__, error)
            return None
        return Segmentation(segments, (), (), self.rates, self.config.products), lowered

    def keep(self, segmentation: Segmentation, lowered: Mapping[int, AnyLowered]) -> None:
        """Leaves this to later compilations, unless something was not lowered: they shall say so again."""
        if not self.key or not all(_settled(s, lowered.get(s.index), self.config) for s in segmentation.segments):
            return
        try:
            self._store.put(self.key, _written(self.graph, segmentation, lowered))
        except UNWRITABLE as error:
            log.info("segments are not cached: %s", error)

    @property
    def _store(self) -> Store:
        return store(self.config.cache_dir, KIND)


def entry(graph: fx.Graph, config: Config, rates: DeviceRates, fuel: Fuel | None) -> Entry:
    """The place of this graph among what is kept."""
    unkept = Entry(graph, config, rates)
    if observe.active() or (fuel is not None and counted(fuel)):
        return unkept
    try:
        text = graph_text(graph)
    except Untold as reason:
        log.info("segments are not cached: %s", reason)
        return unkept
    parts = [text, settings(config), asdict(rates), size_hints(graph), surroundings(graph)]
    return replace(unkept, key=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())


def settings(config: Config) -> dict[str, object]:
    """The options that change what is compiled, as a JSON value."""
    told = ((f.name, vars(config)[f.name]) for f in fields(config) if f.name not in ELSEWHERE)
    return {name: value.value if isinstance(value, Enum) else value for name, value in told}


def surroundings(graph: fx.Graph) -> list[object]:
    """What of this process and its devices graphs, segments and kernels depend on, as a JSON value."""
    values = (n.meta.get("val") for n in graph.nodes)
    devices = {v.device for v in values if isinstance(v, torch.Tensor) and v.device.type == "cuda"}
    return [binary.installation(), sys.version, rounds_to_tf32(), str(torch.get_default_dtype()),
            sorted(map(_described, devices))]


def _described(device: torch.device) -> str:
    if not torch.cuda.is_available():  # values can be on a device that is not there
        return f"{device}"
    found = torch.cuda.get_device_properties(device)
    return f"{device} {found.name} {found.major}.{found.minor} {found.multi_processor_count} {found.total_memory}"


def _settled(segment: Segment, low: AnyLowered, config: Config) -> bool:
    """Whether a segment has all kernels that it should have."""
    if segment.kind is SegmentKind.EXTERN:
        return True
    if not isinstance(low, LoweredGemm):
        return low is not None
    unwanted = config.deterministic and not segment.fused
    return None not in low.parts.values() and (low.programs is not None or unwanted)


# ---------------------------------------------------------------- bytes


def _written(graph: fx.Graph, segmentation: Segmentation, lowered: Mapping[int, AnyLowered]) -> bytes:
    """Points come first and operands before users, so that no value is nested as deep as a graph is long."""
    file = io.BytesIO()
    points = {id(p): p for s in segmentation.segments for p in _points(s)}
    places = {node: place for place, node in enumerate(graph.nodes)}
    Writer(file, places).dump((tuple(points.values()), segmentation.segments, dict(lowered)))
    return file.getvalue()


def _points(segment: Segment) -> Iterator[Point]:
    domains = [segment.domain, *(part.domain for way in segment.alternatives for part in way)]
    for domain in domains:
        yield from _within(domain)


def _within(domain: Domain | None) -> Iterator[Point]:
    """The points of a domain and of those of other kernels that it holds."""
    if domain is None:
        return
    yield from domain.points()
    if isinstance(domain, GemmDomain):
        parts = () if domain.parts is None else (domain.parts.head, domain.parts.rest)
        for other in (domain.tail, domain.rowwise, *parts):
            yield from _within(other)
