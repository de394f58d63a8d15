"""Two long reductions, the second of which needs the first, become pairs of chunks, each read once.

    m = aten.amax(a, [1], True)                 v = aten.view(a, [4, 256, 4096])
    s = aten.sum(exp(a - m), [1])       ->      p = aten.amax(v, [2], True);  q = aten.sum(exp(v - p), [2])
                                                m = aten.amax(p, [1]);        s = aten.sum(q * exp(p - m), [1])

    m = aten.mean(a, [1], True)                 p = aten.mean(v, [2], True);  q = aten.sum((v - p) ** 2, [2])
    s = aten.sum((a - m) * (a - m), [1]) ->     m = aten.mean(p, [1]);        s = aten.sum(q + 4096 * (p - m) ** 2, [1])

split_reductions alone would read `a` for the partial maxima and, once these are one, again for the partial sums.  The
kernel of p and q folds both in one loop (domain/joint.py), and so a row that is spread over programs is read once for
its statistics.  The formulas are those by which parts are joined there: Milakov and Gimelshein, 2018; Chan, Golub and
LeVeque, 1979.

What is subtracted may be made of m by pointwise ops, as logsumexp does where m is infinite.  Chunks of -inf alone have
no distance to their maximum; they add what exp(p - m) says.  Left alone: what split_reductions leaves alone, half
types, and means of chunks of unequal length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxfuser.ops import MONOIDS, Kind, kind_of, reduction_dims, row
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import Make, call, replace
from fxfuser.passes.split_reductions import Plan, Split, chunked_operand, finish, mark_halves, plan_of, split_of

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)  # nothing is rounded between the ops
FAR = 16  # ops between a maximum and what is subtracted


@dataclass(frozen=True)
class Pair:
    """`second` sums a function of `operand` - `shift`, where `shift` is made of `first`, a reduction of `operand`."""

    first: fx.Node
    second: fx.Node
    operand: fx.Node
    shift: fx.Node
    split: Split


def split_pairs(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    for node in list(graph.nodes):
        pair = _scaled_sum(node) or _squared_distances(node)
        if pair is None:
            continue
        if not scope.fuel.take():
            break
        _rewrite(graph, scope, pair)
        changes += 1
    return changes


# ---------------------------------------------------------------- what is a pair


def _scaled_sum(node: fx.Node) -> Pair | None:
    exponent = _summed(node)
    if exponent is None or exponent.target is not aten.exp.default:
        return None
    difference = _difference(exponent.args[0])
    return None if difference is None else _pair(node, *difference, "amax")


def _squared_distances(node: fx.Node) -> Pair | None:
    square = _summed(node)
    if square is None or not _is_square(square):
        return None
    difference = _difference(square.args[0])
    pair = None if difference is None else _pair(node, *difference, "mean")
    return pair if pair is not None and pair.first is pair.shift and not pair.split.padding else None


def _summed(node: fx.Node) -> fx.Node | None:
    """What a sum folds, where it does not convert it."""
    operand = node.args[0] if _monoid(node) == "sum" else None
    if not isinstance(operand, fx.Node) or operand.meta["val"].dtype not in WIDE:
        return None
    return operand if operand.meta["val"].dtype is node.meta["val"].dtype else None


def _is_square(node: fx.Node) -> bool:
    if node.target is aten.mul.Tensor:
        return node.args[0] is node.args[1]
    return node.target is aten.pow.Tensor_Scalar and bool(node.args[1] == 2)


def _difference(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """What is subtracted from what."""
    if not isinstance(node, fx.Node) or node.target is not aten.sub.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    return left, right


def _pair(second: fx.Node, operand: fx.Node, shift: fx.Node, monoid: str) -> Pair | None:
    dims, _ = reduction_dims(second)
    value = operand.meta["val"]
    kept = [1 if d in dims else s for d, s in enumerate(value.shape)]
    if value.dtype is not second.meta["val"].dtype or list(shift.meta["val"].shape) != kept:
        return None
    first = _behind(shift, monoid, operand, dims)
    split = split_of(first) if first is not None else None
    return Pair(first, second, operand, shift, split) if first is not None and split is not None else None


def _behind(shift: fx.Node, monoid: str, operand: fx.Node, dims: tuple[int, ...]) -> fx.Node | None:
    """The reduction of `operand` that pointwise ops make `shift` of."""
    seen = [shift]
    for node in seen:  # which grows
        if _monoid(node) == monoid and node.args[0] is operand and reduction_dims(node)[0] == dims:
            return node
        if len(seen) < FAR and kind_of(node) in (Kind.POINTWISE, Kind.VIEW):
            seen += [n for n in node.all_input_nodes if n not in seen]
    return None


def _monoid(node: fx.Node) -> str:
    found = row(node.target) if kind_of(node) is Kind.REDUCTION else None
    return found.monoid.name if found is not None and found.monoid is not None else ""


# ---------------------------------------------------------------- what it becomes


def _rewrite(graph: fx.Graph, scope: Scope, pair: Pair) -> None:
    made: list[fx.Node] = []

    def maker(like: fx.Node) -> Make:
        def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
            made.append(call(graph, scope, target, *args, like=like, **kwargs))
            return made[-1]
        return make

    plan = plan_of(pair.first, pair.split)
    extremal = _monoid(pair.first) == "amax"
    fold = aten.amax.default if extremal else aten.mean.dim
    with graph.inserting_before(pair.first):
        make = maker(pair.first)
        chunked = chunked_operand(make, pair.operand, pair.split, MONOIDS["amax"])
        partial = make(fold, chunked, plan.inner, True)
        short = make(aten.squeeze.dims, partial, plan.inner)
        whole = finish(make, short, plan, lambda p, dims: make(fold, p, dims))
    shift = whole if pair.shift is pair.first else pair.shift
    replace(pair.first, whole, graph, scope)
    with graph.inserting_before(pair.second):
        make = maker(pair.second)
        shape = list(short.meta["val"].shape)
        for dim in plan.chunks:
            shape[dim] = 1
        shift = make(aten.view.default, shift, shape)
        distance = make(aten.sub.Tensor, chunked, partial)
        plan = plan_of(pair.second, pair.split)
        join = _joined_sums if extremal else _joined_squares
        joined = join(make, distance, make(aten.sub.Tensor, short, shift), short, plan)
        total = finish(make, joined, plan, lambda p, dims: make(aten.sum.dim_IntList, p, dims))
    mark_halves(made, chunked, plan, pair.second.name)
    replace(pair.second, total, graph, scope)


def _joined_sums(make: Make, distance: fx.Node, apart: fx.Node, short: fx.Node, plan: Plan) -> fx.Node:
    """exp(p - m) times the partial sum, which means nothing where the maximum is infinite."""
    partial = make(aten.sum.dim_IntList, make(aten.exp.default, distance), plan.inner)
    infinite = make(aten.eq.Scalar, make(aten.abs.default, short), math.inf)
    finite = make(aten.masked_fill.Scalar, partial, infinite, 1.0)
    return make(aten.mul.Tensor, finite, make(aten.exp.default, apart))


def _joined_squares(make: Make, distance: fx.Node, apart: fx.Node, short: fx.Node, plan: Plan) -> fx.Node:
    """The squared distances from the whole mean: each element's from its chunk's, and the chunk's from the whole."""
    partial = make(aten.sum.dim_IntList, make(aten.mul.Tensor, distance, distance), plan.inner)
    count = math.prod(distance.meta["val"].shape[d] for d in plan.inner)
    between = make(aten.mul.Tensor, make(aten.mul.Tensor, apart, apart), count)
    return make(aten.add.Tensor, partial, between)
