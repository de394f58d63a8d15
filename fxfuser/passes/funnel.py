"""The one way in which a pass runs: named, timed, recorded, verified, and stopped when the fuel is out.

Enters: an ATen GraphModule whose nodes carry meta["val"], and passes, `name(graph, scope) -> changes`.  Leaves: the
same module, rewritten in place.  Invariant, checked after each pass that changed something: the graph lints, every
call node that has a value has its meta, and the graph's outputs keep their number, dtypes, shapes and strides.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser import observe
from fxfuser.errors import Site, VerificationError
from fxfuser.fuel import Fuel
from fxfuser.passes.layout import same_layout


@dataclass(frozen=True)
class Scope:
    """What a pass may ask of the world.

    `fake` enters the graph's fake mode, where a call on meta values returns one; `trace(function, values)` returns
    the ATen ops of a call on them, whole ops taken apart.  Unless `strict`, an op whose trace fails stays whole.
    """

    fuel: Fuel
    fake: Callable[[], AbstractContextManager[Any]]
    trace: Callable[[Callable[..., Any], Sequence[Any]], fx.GraphModule]
    strict: bool = True
    linear_cross_entropy: str = "auto"  # one of config.LOSSES
    wide_products: bool = True  # whether products may be written as float32 without being rounded first
    defer_normalisation: bool = False
    reassociates: bool = True  # whether what a library's kernel sums may be summed in another order
    unrounded: bool = True  # whether half products that kernels read as float32 may be so from the start


Pass = Callable[[fx.Graph, Scope], int]


def run(module: fx.GraphModule, passes: Sequence[Pass], scope: Scope) -> int:
    """Runs `passes` in order over the module's graph; returns the number of changes.

    Raises VerificationError where a pass leaves a graph that breaks the invariant.
    """
    graph = module.graph
    expected = _outputs(graph)
    total = 0
    after = str(graph) if observe.active() else ""
    for one in passes:
        scope.fuel.stage = one.__name__
        start = time.perf_counter()
        changes = one(graph, scope)
        milliseconds = 1000 * (time.perf_counter() - start)
        if changes:
            _verify(one.__name__, graph, expected)
        if observe.active():
            # a text takes longer than most passes: one that nothing has changed is not rendered again
            before, after = after, str(graph) if changes or not after else after
            observe.record(observe.PassRecord(one.__name__, changes, milliseconds, before, after))
        total += changes
    if total:
        module.recompile()
    return total


def _outputs(graph: fx.Graph) -> tuple[Any, ...]:
    """The meta values of the graph's outputs; None where an output is no node."""
    found: list[Any] = []
    fx.map_arg(graph.output_node().args, lambda n: found.append(n.meta.get("val")))
    return tuple(found)


def _verify(name: str, graph: fx.Graph, expected: tuple[Any, ...]) -> None:
    try:
        graph.lint()
    except RuntimeError as error:
        raise VerificationError(name, f"the graph does not lint: {error}") from error
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and not _returns_nothing(node):
            raise VerificationError(name, "a node has no meta value", Site.of(node))
    now = _outputs(graph)
    if len(now) != len(expected):
        raise VerificationError(name, f"{len(now)} outputs where there were {len(expected)}")
    for i, (value, old) in enumerate(zip(now, expected)):
        tensors = isinstance(value, torch.Tensor), isinstance(old, torch.Tensor)
        if tensors[0] is not tensors[1] or (all(tensors) and not same_layout(value, old)):
            raise VerificationError(name, f"output {i} is {_describe(value)}, was {_describe(old)}")


def _returns_nothing(node: fx.Node) -> bool:
    """Whether the op is called for its effect, as an assertion is."""
    return isinstance(node.target, OpOverload) and not node.target._schema.returns


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
    return f"{value.dtype}{tuple(value.shape)} with strides {strides}"
