"""An ATen graph of fixed sizes as bytes, and back: what a later process compiles without tracing it again.

Enters: a GraphModule whose nodes carry meta["val"], after the passes.  Leaves: bytes, from which `decode` makes an
equal graph, names and places in the model included.  Invariant: what cannot be written so that it means the same in
another process is refused (`Unstorable`): sizes that change, tensors that the graph holds, Python functions of others.
"""

from __future__ import annotations

import builtins
import math
import operator
import pickle
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.errors import FxfuserError
from fxfuser.runtime.in_place import OWNED

KEPT = ("stack_trace", "custom", OWNED)  # of a node's meta, beside its value
MODULES = {"operator": operator, "math": math, "builtins": builtins}
PLAIN = (type(None), bool, int, float, complex, str, EllipsisType, torch.dtype, torch.device, torch.layout,
         torch.memory_format)


class Unstorable(FxfuserError):
    """Why a graph is not stored."""


@dataclass(frozen=True)
class Ref:
    """The node at this position of the graph."""

    place: int


@dataclass(frozen=True)
class Layout:
    """A tensor's value as the graph knows it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def encode(module: fx.GraphModule, fake: type[torch.Tensor]) -> bytes:
    """`fake` is the class of the graph's values.  Raises Unstorable."""
    place: dict[fx.Node, Ref] = {}
    nodes = []
    for node in module.graph.nodes:
        meta = {name: _plain(node.meta[name], place) for name in KEPT if name in node.meta}
        if "val" in node.meta:
            meta["val"] = _value(node.meta["val"], fake)
        nodes.append((node.op, node.name, _target(node), _plain(node.args, place), _plain(node.kwargs, place), meta))
        place[node] = Ref(len(place))
    return pickle.dumps((nodes, module.meta.get("results")), protocol=5)


def decode(data: bytes, fake: Callable[[], AbstractContextManager[Any]]) -> fx.GraphModule:
    """The graph that was encoded; `fake` enters the mode of its values."""
    nodes, results = pickle.loads(data)
    graph, made = fx.Graph(), list[fx.Node]()
    alike: dict[Layout, torch.Tensor] = {}  # a fake tensor takes as long as a node

    def linked(value: Any) -> Any:
        if isinstance(value, Ref):
            return made[value.place]
        if isinstance(value, (list, tuple)):
            return type(value)(map(linked, value))
        if isinstance(value, slice):
            return slice(linked(value.start), linked(value.stop), linked(value.step))
        return {k: linked(v) for k, v in value.items()} if isinstance(value, dict) else value

    with fake():
        for op, name, target, args, kwargs, meta in nodes:
            node = graph.create_node(op, _found(target), linked(args), linked(kwargs), name)
            node.meta = {**meta, "val": _tensors(meta["val"], alike)} if "val" in meta else dict(meta)
            made.append(node)
    module = fx.GraphModule({}, graph)
    module.meta["results"] = results
    return module


def _plain(value: Any, place: Mapping[fx.Node, Ref]) -> Any:
    """The value with nodes replaced by their places, in Python's own containers."""
    if isinstance(value, fx.Node):
        return place[value]
    if type(value) in PLAIN:
        return value
    if isinstance(value, tuple) and type(value).__name__ in ("tuple", "immutable_tuple", "Size"):
        return tuple(_plain(v, place) for v in value)
    if isinstance(value, list):
        return [_plain(v, place) for v in value]
    if isinstance(value, slice):
        return slice(*(_plain(v, place) for v in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {_plain(k, place): _plain(v, place) for k, v in value.items()}
    raise Unstorable(f"a {type(value).__name__} is no constant")


def _value(value: Any, fake: type[torch.Tensor]) -> Any:
    """What a node computes: Layouts for its tensors."""
    if isinstance(value, (list, tuple)):
        parts = [_value(v, fake) for v in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if not isinstance(value, torch.Tensor):
        return _plain(value, {})
    if type(value) is not fake or value.layout is not torch.strided or value.is_nested:
        raise Unstorable(f"a {type(value).__name__} of layout {value.layout}")
    if value.is_neg() or value.is_conj():
        raise Unstorable("a tensor that is negated or conjugated lazily")
    shape, stride = tuple(value.shape), tuple(value.stride())
    if any(type(n) is not int for n in (*shape, *stride)):
        raise Unstorable("a size changes from call to call")
    return Layout(shape, stride, value.dtype, value.device)


def _tensors(value: Any, alike: dict[Layout, torch.Tensor]) -> Any:
    """A tensor for each Layout, one for all that are equal."""
    if isinstance(value, Layout):
        if value not in alike:
            alike[value] = torch.empty_strided(
                value.shape, value.stride, dtype=value.dtype, device=value.device)
        return alike[value]
    return type(value)(_tensors(v, alike) for v in value) if isinstance(value, (list, tuple)) else value


def _target(node: fx.Node) -> Any:
    """What a node calls, by name."""
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        return str(target)
    if node.op != "call_function":
        raise Unstorable(f"the graph has a {node.op}")
    found: tuple[str, ...]
    if isinstance(target, OpOverload):
        space, _, name = target._schema.name.partition("::")
        found = ("torch.ops", space, name, target._schema.overload_name or "default")
    else:
        module = getattr(target, "__module__", "").lstrip("_")  # operator's functions say _operator
        found = (module, getattr(target, "__name__", ""))
    if _lookup(found) is not target:
        raise Unstorable(f"{target} is not found by its name")
    return found


def _found(target: Any) -> Any:
    return target if isinstance(target, str) else _lookup(target)


def _lookup(path: Sequence[str]) -> Any:
    """The function of this name; None where there is none."""
    found: Any = torch.ops if path[0] == "torch.ops" else MODULES.get(path[0])
    for name in path[1:]:
        found = getattr(found, name, None)
    return found
