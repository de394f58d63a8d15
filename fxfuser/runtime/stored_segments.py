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
import pickle
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.points import Domain, Point
from fxfuser.domain.products import rounds_to_tf32
from fxfuser.fuel import Fuel, counted
from fxfuser.lowering.kernel import Kernel
from fxfuser.lowering.lower import size_hints
from fxfuser.runtime import binary
from fxfuser.runtime.graph_text import Untold, graph_text
from fxfuser.runtime.lower_segments import AnyLowered, LoweredGemm
from fxfuser.runtime.store import Store, store
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind

log = logging.getLogger("fxfuser")

KIND = "segments"  # of the store
ELSEWHERE = ("cache_dir", "dump_dir", "fuel")  # options that change nothing of what is kept
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
CLASSES = {"torch": ("device", "Size"), "builtins": ("frozenset", "set", "slice", "complex"),
           "torch.fx.immutable_collections": ("immutable_list", "immutable_dict")}

Compiled = tuple[Segmentation, Mapping[int, AnyLowered]]


class Unstorable(Exception):
    """A value means nothing in another process."""


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
            segments, lowered = _Reader(data, tuple(self.graph.nodes)).load()
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
        except (Unstorable, pickle.PicklingError, TypeError, RecursionError) as error:
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
    parts = [text, _settings(config), asdict(rates), size_hints(graph), _surroundings(graph)]
    return replace(unkept, key=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())


def _settings(config: Config) -> dict[str, object]:
    told = ((f.name, vars(config)[f.name]) for f in fields(config) if f.name not in ELSEWHERE)
    return {name: value.value if isinstance(value, Enum) else value for name, value in told}


def _surroundings(graph: fx.Graph) -> list[object]:
    """What of this process and its devices segments and kernels depend on."""
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
    _Writer(file, graph).dump((tuple(points.values()), segmentation.segments, dict(lowered)))
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


class _Writer(pickle.Pickler):
    """Nodes by their place in the graph, ops by name; values without what they remember of themselves."""

    def __init__(self, file: io.BytesIO, graph: fx.Graph) -> None:
        super().__init__(file, protocol=5)
        self._place = {node: place for place, node in enumerate(graph.nodes)}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._place[value]
        if isinstance(value, OpOverload):
            return (value.namespace, value._schema.name.partition("::")[2], value._overloadname)
        return str(value) if isinstance(value, CONSTANTS) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise Unstorable(f"a {type(value).__name__} belongs to this process")
        if isinstance(value, Enum):  # some versions of Python would store a call of getattr
            return _member, (type(value), value.name)
        if isinstance(value, type) or not is_dataclass(value) or type(value).__module__.split(".")[0] != "fxfuser":
            return NotImplemented
        # a hash that a value has remembered is of this process
        held = {f.name: vars(value)[f.name] for f in fields(value)}
        if isinstance(value, Kernel):  # its notes name lines of the user's files
            held["notes"] = ()
        return _made, (type(value), held)


def _member(kind: type[Enum], name: str) -> Enum:
    return kind[name]


def _made(kind: type[Any], held: Mapping[str, Any]) -> Any:
    value = object.__new__(kind)
    vars(value).update(held)
    return value


class _Reader(pickle.Unpickler):
    """Makes nothing but values of fxfuser, plain containers, ops that exist and nodes of this graph."""

    def __init__(self, data: bytes, nodes: tuple[fx.Node, ...]) -> None:
        super().__init__(io.BytesIO(data))
        self._nodes = nodes

    def load(self) -> tuple[tuple[Segment, ...], Mapping[int, AnyLowered]]:
        _, segments, lowered = super().load()
        return segments, lowered

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, int):
            return self._nodes[name]
        if isinstance(name, str):
            found = vars(torch)[name.removeprefix("torch.")]
            assert isinstance(found, CONSTANTS), name
            return found
        space, op, overload = name
        return getattr(getattr(getattr(torch.ops, space), op), overload)

    def find_class(self, module: str, name: str) -> Any:
        if name in CLASSES.get(module, ()) or module == __name__ and name in (_made.__name__, _member.__name__):
            return super().find_class(module, name)
        found = super().find_class(module, name) if module.startswith("fxfuser.") else None
        if not isinstance(found, type) or found.__module__ != module or not (
                is_dataclass(found) or issubclass(found, Enum)):
            raise pickle.UnpicklingError(f"{module}.{name} is no value of fxfuser")
        return found
