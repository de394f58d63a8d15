"""How fast this machine's devices are, as `fxfuser calibrate` measured them: what merges are priced with.

Enters: a graph and the configuration, or rates to keep.  Leaves: the `DeviceRates` of the graph's first CUDA device
where they are known, else the defaults.  Under `deterministic` no measurement counts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import fx

from fxfuser.config import Config
from fxfuser.runtime.device_clock import CudaClock
from fxfuser.runtime.store import store
from fxfuser.segmenter.cost import DeviceRates

VERSION = 1  # of what the rates mean
NAMES = tuple(f.name for f in fields(DeviceRates))


def rates_for(graph: fx.Graph, config: Config) -> DeviceRates:
    """What the segmenter prices this graph's merges with."""
    device = None if config.deterministic else _first_cuda(graph)
    if device is None or not torch.cuda.is_available():
        return DeviceRates()
    return known_rates(CudaClock(device.index).name(), config.cache_dir) or DeviceRates()


def known_rates(name: str, cache_dir: Path) -> DeviceRates | None:
    """The rates that were kept for a device of this name; None where there are none that make sense."""
    payload = store(cache_dir, "rates").get(_key(name))
    if payload is None:
        return None
    try:
        found = json.loads(payload)
        rates = DeviceRates(**{n: type(getattr(DeviceRates(), n))(found[n]) for n in NAMES})
    except (ValueError, KeyError, TypeError):
        return None
    return rates if all(value > 0 for value in asdict(rates).values()) else None


def keep_rates(name: str, rates: DeviceRates, cache_dir: Path) -> bool:
    """Keeps them for all later compilations of this user; False where the cache directory cannot be written."""
    return store(cache_dir, "rates").put(_key(name), json.dumps(asdict(rates)).encode())


def _key(name: str) -> str:
    return hashlib.sha256(f"rates {VERSION} {name}".encode()).hexdigest()[:32]


def _first_cuda(graph: fx.Graph) -> torch.device | None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda":
            return value.device
    return None
