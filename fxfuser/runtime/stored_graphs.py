"""What passes and the cut make of a graph, kept for later processes: the graphs that are compiled in its place.

Enters: a graph of AOTAutograd's, what else passes and the cut read, and, once, the graphs that they made of it.
Leaves: equal graphs over this process's own values (graph_lines.py says how), so that no pass runs and nothing is cut
again.
Invariants: an entry is used only for a graph of equal text and marks, under equal settings and versions; it holds no
tensor and no line of the user's files; whatever is wrong with it costs time alone.

Who measures out fuel or records what is compiled has every pass run.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import fx

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.fuel import Fuel, counted
from fxfuser.ops import blocks_of
from fxfuser.runtime.graph_lines import PLAIN, REGION, SILENT, Source, numbers, read, written
from fxfuser.runtime.graph_text import Untold, graph_text, known
from fxfuser.runtime.store import Store, store
from fxfuser.runtime.stored_segments import settings, surroundings
from fxfuser.runtime.values import UNWRITABLE

log = logging.getLogger("fxfuser")

KIND = "graphs"  # of the store

Fake = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Origin:
    """A graph before anything changes it.  `key` is "" where nothing is kept of it."""

    source: Source
    facts: frozenset[str]  # what was known of sizes
    folder: Store
    key: str = ""

    def load(self, fake: Fake, count: int) -> tuple[fx.Graph, ...] | None:
        """The `count` graphs that an earlier compilation made of an equal one."""
        data = self.folder.get(self.key) if self.key else None
        if data is None:
            return None
        try:
            with fake():
                return read(self.source, data, count)
        except Exception as error:  # pickle raises whatever it likes; the entry is written again
            log.info("cached graphs %s are not used: %s: %s", self.key, type(error).__name__, error)
            return None

    def keep(self, graphs: Sequence[fx.Graph]) -> None:
        """Leaves the graphs to later compilations, unless they rest on what became known of sizes meanwhile."""
        if not self.key or self.facts != _facts(self.source):
            return
        try:
            self.folder.put(self.key, written(self.source, graphs))
        except UNWRITABLE as error:
            log.info("graphs are not cached: %s", error)


def origin(graph: fx.Graph, config: Config, fuel: Fuel, others: Sequence[object]) -> Origin:
    """The graph as it is now; `others` is a JSON value of all that else decides what becomes of it."""
    source = Source.of(graph)
    unkept = Origin(source, _facts(source), store(config.cache_dir, KIND))
    if observe.active() or counted(fuel):
        return unkept
    try:
        parts = [graph_text(graph), _marks(source.nodes), settings(config), surroundings(graph), *others]
    except Untold as reason:
        log.info("graphs are not cached: %s", reason)
        return unkept
    return replace(unkept, key=hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest())


def _marks(nodes: Sequence[fx.Node]) -> list[str]:
    """What nodes say beside what they compute: where they belong and whether they may be recomputed."""
    regions = {n.meta[REGION] for n in nodes if REGION in n.meta}
    rank = {region: place for place, region in enumerate(sorted(regions))}  # the process counts them
    return [_marks_of(node, rank) for node in nodes]


def _marks_of(node: fx.Node, rank: Mapping[int, int]) -> str:
    told = {k: v for k, v in node.meta.items() if k not in SILENT and k != "custom"}
    noted = node.meta.get("custom") or {}
    # blocks are numbered by the process, and in the graph's text by their first node
    told.update({f"custom {k}": v for k, v in noted.items() if k not in blocks_of(node)})
    if REGION in told:
        told[REGION] = rank[told[REGION]]
    for key, value in told.items():
        if type(value) not in (*PLAIN, float) and not isinstance(value, Enum):
            raise Untold(f"{node.name} is marked with a {type(value).__name__} as {key}")
    return " ".join(f"{key}={value!r}" for key, value in sorted(told.items()))


def _facts(source: Source) -> frozenset[str]:
    """All that is known of sizes."""
    environments = {id(n.node.shape_env): n.node.shape_env for n in numbers(source.metas)}
    return frozenset(fact for environment in environments.values() for fact in known(environment))
