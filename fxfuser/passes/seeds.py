"""Numbers in the place of a tangent, so that gradients can be computed before it is known.

    d = aten.div(tangent, count)        ->        s = aten.full([], 1.0);  d' = aten.div(s, count)

Enters: the leaves of a region that depend on a tangent, and the scalar through which they do.  Leaves: the same leaves
for the seed instead of that scalar, and the factor, scalar / seed, that the backward multiplies by.  The seed is 1, but
for float16 gradients a power of two that brings the largest leaf to 2^8: a softmax of 1e-7 would underflow otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

import torch
from torch import fx

from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import call
from fxfuser.passes.row_values import Writer
from fxfuser.passes.tangents import between

aten = torch.ops.aten
TARGET = 8.0  # log2 of the largest leaf for float16
LARGEST = 14.0  # log2 of the largest seed that a float16 scalar holds


@dataclass(frozen=True)
class Seed:
    """`leaves` maps leaves to their values for the seed `number`, None: 1, instead of the scalar `tangent`."""

    tangent: fx.Node
    leaves: Mapping[fx.Node, fx.Node]
    number: fx.Node | None = None

    def factor(self, graph: fx.Graph, scope: Scope, like: fx.Node) -> fx.Node:
        if self.number is None:
            return self.tangent
        return call(graph, scope, aten.div.Tensor, self.tangent, self.number, like=like)


def seeded(
    entries: Sequence[fx.Node], depends: frozenset[fx.Node], tangent: fx.Node, half: bool, write: Writer
) -> Seed:
    """The entries for a seed instead of `tangent`; `half`: the gradients are float16."""
    value = tangent.meta["val"]
    one = write.call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device, pin_memory=False, like=tangent)
    leaves = _again(entries, depends, tangent, one, write)
    if not half:
        return Seed(tangent, leaves)
    number = _scale(list(leaves.values()), value.dtype, tangent, write)
    return Seed(tangent, _again(entries, depends, tangent, number, write), number)


def _again(
    entries: Sequence[fx.Node], depends: frozenset[fx.Node], tangent: fx.Node, seed: fx.Node, write: Writer
) -> dict[fx.Node, fx.Node]:
    copies: dict[fx.Node, fx.Node] = {tangent: seed}
    above = between(entries, depends, tangent)
    for node in [n for n in write.graph.nodes if n in above and n is not tangent]:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: copies.get(n, n))
        copies[node] = write.call(node.target, *args, like=node, **kwargs)
    return {n: copies[n] for n in entries}


def _scale(leaves: Sequence[fx.Node], dtype: torch.dtype, like: fx.Node, write: Writer) -> fx.Node:
    """2 ** (TARGET - floor(log2(largest leaf))), where that is a number; else 1."""
    sizes = []
    for leaf in leaves:
        size = write.call(aten.abs.default, leaf, like=like)
        dims = list(range(size.meta["val"].dim()))
        sizes.append(write.call(aten.amax.default, size, dims, like=like) if dims else size)
    largest = sizes[0]
    for size in sizes[1:]:
        largest = write.call(aten.maximum.default, largest, size, like=like)
    exponent = write.call(aten.floor.default, write.call(aten.log2.default, largest, like=like), like=like)
    power = write.call(aten.sub.Tensor, write.call(aten.neg.default, exponent, like=like), -TARGET, like=like)
    power = write.call(aten.clamp.default, power, -LARGEST, LARGEST, like=like)
    known = write.call(aten.abs.default, exponent, like=like)
    finite = write.call(aten.lt.Scalar, known, float("inf"), like=like)
    zero = write.call(aten.full.default, [], 0.0, dtype=power.meta["val"].dtype, device=power.meta["val"].device,
                      pin_memory=False, like=like)
    power = write.call(aten.where.self, finite, power, zero, like=like)
    scale = write.call(aten.exp2.default, power, like=like)
    if scale.meta["val"].dtype is not dtype:
        scale = write.call(aten._to_copy.default, scale, dtype=dtype, like=like)
    return scale
