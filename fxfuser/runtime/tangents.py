"""Tangents of outputs that are views with gaps, such as v of a packed projection [S, q | k | v], or expanded.

AOTAutograd expects a tangent with the strides of its output and copies any other.  What computes a tangent makes a
dense tensor, as attention's backward does, so that such a view would cost a copy, with gaps, in every step.

    tangents_3: [1, 32, S, 96], strides (9216 * S, 96, 9216, 1)  ->  strides (3072 * S, 96, 3072, 1)

Of an expanded output, whose elements share places, it would have to copy the tangent to where it does not fit (until
torch 2.12 it tries); such a tangent is expected in row-major order.

Enters: a backward graph, before its passes.  Leaves: `Dense` strides for such tangents, in their order of dimensions,
which the caller tells AOTAutograd and then applies to the graph.  A view that is legal with gaps is legal without:
dimensions that could be merged lay side by side.  Invariant: whatever AOTAutograd hands the backward, the kernels see
the strides that they were made for.
"""

from __future__ import annotations

import math
import operator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.passes.aliasing import TABLE_NAMESPACES, aliased
from fxfuser.runtime.strides import strided

TANGENT = "tangents_"  # AOTAutograd's name of the tangent of the first output, without the number


@dataclass(frozen=True)
class Dense:
    """The tangent at input `position` of the backward, the `number`-th (from 0) of all, and the strides it gets."""

    node: fx.Node
    position: int
    number: int
    stride: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.node.meta["val"].shape)


def with_gaps(graph: fx.Graph) -> list[Dense]:
    """The tangents that are expected with gaps and need not be, of a graph that does not ask for places in memory; and
    all that are expected where elements share places, which no tangent can have."""
    bound = any(n.target is torch.ops.aten.as_strided.default for n in graph.nodes)
    found = []
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if not node.name.startswith(TANGENT) or not isinstance(value, torch.Tensor):
            continue
        dense, must = _dense(value), is_expanded(value.shape, value.stride())
        if dense is not None and (must or not bound and not _read_by_others(node)):
            found.append(Dense(node, position, int(node.name.removeprefix(TANGENT)) - 1, dense))
    return found


def _read_by_others(tangent: fx.Node) -> bool:
    """Whether an op of somebody else reads the tangent or a view of it: what it is told besides may be strides."""
    pending = [tangent]
    while pending:
        node = pending.pop()
        if any(map(_is_others, node.users)):
            return True
        pending.extend(user for user in node.users if node in aliased(user))
    return False


def _is_others(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not isinstance(node.target, OpOverload) or node.target.namespace not in TABLE_NAMESPACES


def _dense(value: torch.Tensor) -> tuple[int, ...] | None:
    """The strides without gaps; None where there are none, or where sizes are symbolic."""
    if value.layout is not torch.strided or not all(isinstance(n, int) for n in (*value.shape, *value.stride())):
        return None
    if is_expanded(value.shape, value.stride()):
        return row_major(value.shape)
    order = sorted(range(value.dim()), key=lambda d: (value.stride(d), value.shape[d], -d))
    strides, expected, reach = [0] * value.dim(), 1, 1
    for d in order:
        if value.shape[d] > 1 and value.stride(d) < reach:
            return None
        strides[d] = expected
        expected *= value.shape[d]
        reach = (value.shape[d] - 1) * value.stride(d) + reach
    return tuple(strides) if 1 < expected < reach else None


def is_expanded(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether elements along a dimension share one place."""
    return any(isinstance(n, int) and isinstance(s, int) and n > 1 and s == 0 for n, s in zip(size, stride))


def row_major(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(max(n, 1) for n in size[d + 1:]) for d in range(len(size)))


def apply(graph: fx.Graph, tangents: Sequence[Dense], fake: Callable[[], AbstractContextManager[Any]]) -> None:
    """Gives the tangents their new strides, and their views those that follow."""
    moved: set[fx.Node] = set()
    with fake():
        for tangent in tangents:
            value = tangent.node.meta["val"]
            dense = torch.empty_strided(tangent.size, tangent.stride, dtype=value.dtype, device=value.device)
            tangent.node.meta = {**tangent.node.meta, "val": dense}
            moved.add(tangent.node)
        for node in graph.nodes:
            if moved.intersection(aliased(node)):
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta = {**node.meta, "val": node.target(*args, **kwargs)}
                moved.add(node)


def restrided(function: Callable[[list[Any]], Any], tangents: Sequence[Dense]) -> Callable[[list[Any]], Any]:
    """The function of a list of inputs, which sees these tangents with these strides.

    A plan does so for what its kernels read, not for views of it that ATen makes.  The first call needs it: AOTAutograd
    has made its copy with gaps before the backward is compiled.
    """
    expected: Mapping[int, tuple[tuple[int, ...], tuple[int, ...]]] = {t.position: (t.size, t.stride) for t in tangents}

    def call(args: list[Any]) -> Any:
        for position, (size, stride) in expected.items():
            args[position] = strided(args[position], size, stride)
        return function(args)

    return call
