"""A long reduction with few results becomes two: partial results of chunks, then their reduction.

    s = aten.sum(a, [1])    # a: [4, 1048576]    ->    v = aten.view(a, [4, 256, 4096])
                                                       p = aten.sum(v, [2]);  s = aten.sum(p, [1])
    s = aten.sum(a, [0, 1, 2])                   ->    v = aten.view(a, [8, 16, 4, 256, 64])
        # a: [8, 16, 1024, 64], in any order           p = aten.sum(v, [3]);  s = aten.sum(p, [0, 1, 2])

One program per result would leave most of the device idle.  The first half fuses with what produces `a`, the second
with what reads `s`.  Where no number of chunks divides the length, the operand is padded with the monoid's identity,
which costs no memory: padding is a mask inside the kernel.  Partials of half types are float32.  argmax and argmin
keep the place of each chunk's winner and choose among the winners.  Where rows lie side by side, chunks are cut from
the dimensions that lie farthest apart in memory: each is then one piece of it, and has dimensions in common with what
else is computed of the same elements, so that one kernel does both.

Left alone: short reductions, those whose results fill the device by themselves, and symbolic lengths, of which no
chunk length is a good one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Sequence

import torch
from torch import fx

from fxfuser.ops import HALF_MARK, Kind, Monoid, kind_of, reduction_dims, row, unsupported
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import Make, replace_each

aten = torch.ops.aten

PROGRAMS = 528  # four on each of an H200's 132 multiprocessors
ENOUGH = 264  # so many results fill the device without help
FEWEST = 16  # chunks; what reduces 8 or fewer is unrolled into its reader, which would undo the split
ROW_CHUNK = 4096  # least elements of a chunk along the contiguous dimension
COLUMN_CHUNK = 32  # least rows of a chunk whose results lie side by side in memory
COLUMNS = 64  # results that one program computes then

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Split:
    """Dimension `dim` of the operand becomes `chunks` x `length`, of which the last `padding` do not exist; of the
    dimensions `whole` each place is a chunk."""

    dim: int
    chunks: int
    length: int
    padding: int = 0
    whole: tuple[int, ...] = ()


def split_reductions(graph: fx.Graph, scope: Scope) -> int:
    return replace_each(graph, scope, split_of, _rewritten)


def split_of(node: fx.Node) -> Split | None:
    """How a reduction is cut; None where it is best left whole."""
    if kind_of(node) is not Kind.REDUCTION or unsupported(node) is not None:
        return None
    found = row(node.target)
    operand = node.args[0]
    if found is None or found.monoid is None or not isinstance(operand, fx.Node):
        return None
    if _rewrite_of(node, found.monoid) is None:
        return None
    value, (dims, _) = operand.meta["val"], reduction_dims(node)
    if not all(isinstance(s, int) for s in value.shape) or not dims:
        return None
    if found.monoid.name in ("amax", "amin") and value.dtype == torch.bool:
        return None
    if found.monoid.indexed and len(dims) != 1:
        return None
    kept, length = (math.prod(s for d, s in enumerate(value.shape) if (d in dims) is mine) for mine in (False, True))
    if kept == 0 or length == 0:
        return None
    if any(value.stride(d) == 1 and value.shape[d] > 1 for d in dims) or kept == 1:
        return _of_rows(value, dims, kept, length)
    return _of_columns(value, dims, min(PROGRAMS, length // COLUMN_CHUNK)) if kept // COLUMNS < ENOUGH else None


def _of_rows(value: torch.Tensor, dims: tuple[int, ...], kept: int, length: int) -> Split | None:
    """Chunks of a reduction along contiguous elements."""
    dim = max((d for d in dims if value.shape[d] >= FEWEST), key=value.stride, default=None)
    if dim is None or kept >= ENOUGH:
        return None
    chunks = min(max(FEWEST, -(-PROGRAMS // kept)), length // ROW_CHUNK, value.shape[dim])
    return _cut(value.shape[dim], chunks, dim) if chunks >= FEWEST else None


def _of_columns(value: torch.Tensor, dims: tuple[int, ...], wanted: int) -> Split | None:
    """About as many chunks as are wanted of a reduction whose results lie side by side."""
    if wanted < FEWEST:
        return None
    whole, count = list[int](), 1
    for dim in sorted((d for d in dims if value.shape[d] > 1), key=value.stride, reverse=True):
        size = value.shape[dim]
        if count * size <= wanted:
            whole.append(dim)
            count *= size
            continue
        if wanted // count > 1:
            return _cut(size, wanted // count, dim, tuple(whole), -(-FEWEST // count))
        break
    # the next dimension is too long to be a chunk's number, and chunks are enough or too few without it
    return None if count < FEWEST else Split(whole[-1], value.shape[whole[-1]], 1, whole=tuple(whole[:-1]))


def _cut(size: int, wanted: int, dim: int, whole: tuple[int, ...] = (), fewest: int = FEWEST) -> Split:
    """About `wanted` chunks of a dimension of `size`."""
    chunks = _dividing(size, wanted, fewest)
    length = -(-size // chunks)
    chunks = -(-size // length)
    return Split(dim, chunks, length, chunks * length - size, whole)


def _dividing(size: int, wanted: int, fewest: int) -> int:
    """A number of chunks that divides `size`, at most a factor of two from `wanted`; else `wanted`."""
    for distance in range(wanted):
        for chunks in (wanted + distance, wanted - distance):
            if fewest <= chunks and wanted <= 2 * chunks <= 4 * wanted and size % chunks == 0:
                return chunks
    return wanted


def _rewritten(new: Make, node: fx.Node, split: Split) -> fx.Node:
    made: list[fx.Node] = []

    def make(*args: Any, **kwargs: Any) -> fx.Node:
        made.append(new(*args, **kwargs))
        return made[-1]

    found, operand = row(node.target), node.args[0]
    assert found is not None and found.monoid is not None and isinstance(operand, fx.Node)
    chunked = chunked_operand(make, operand, split, found.monoid)
    rewrite = _rewrite_of(node, found.monoid)
    assert rewrite is not None
    plan = plan_of(node, split)
    result = rewrite(make, node, chunked, plan)
    mark_halves(made, chunked, plan, node.name)
    return result


def mark_halves(made: Iterable[fx.Node], chunked: fx.Node, plan: Plan, name: str) -> None:
    """Tells the segmenter which reductions are halves of one split: in one kernel they would undo it."""
    last = chunked.meta["val"].dim() - len(plan.inner)  # dimensions of what the second half folds
    for node in made:
        operand = node.args[0] if kind_of(node) is Kind.REDUCTION else None
        if isinstance(operand, fx.Node):
            node.meta[HALF_MARK] = (name, operand.meta["val"].dim() > last)


def plan_of(node: fx.Node, split: Split) -> Plan:
    """Which dimensions the two halves of a reduction fold."""
    # the chunk's own dimension comes after the chunks'
    dims = sorted(d + (d >= split.dim) for d in reduction_dims(node)[0] if d not in split.whole)
    left = [d for d in range(node.args[0].meta["val"].dim() + 1) if d not in dims]  # type: ignore[union-attr]
    counted = sorted((split.dim, *(d + (d > split.dim) for d in split.whole)))
    return Plan(split, dims, [left.index(d) for d in counted], list(node.meta["val"].shape))


def chunked_operand(make: Make, operand: fx.Node, split: Split, monoid: Monoid) -> fx.Node:
    """The operand with its dimension split in two."""
    value = operand.meta["val"]
    if split.padding:
        after = [0, 0] * (value.dim() - 1 - split.dim) + [0, split.padding]
        operand = make(aten.constant_pad_nd.default, operand, after, monoid.identity(value.dtype)[0])
    shape = list(value.shape)
    shape[split.dim:split.dim + 1] = [split.chunks, split.length]
    return make(aten.view.default, operand, shape)


@dataclass(frozen=True)
class Plan:
    """`inner` are the dimensions that partials reduce, `chunks` those of the partials, which keep none of them, that
    count chunks; `shape` is the result's."""

    split: Split
    inner: list[int]
    chunks: list[int]
    shape: list[int]


def finish(make: Make, partial: fx.Node, plan: Plan, second: Callable[[fx.Node, list[int]], fx.Node]) -> fx.Node:
    """The reduction of the partials, in the shape that the node had."""
    total = second(partial, plan.chunks)
    return total if list(total.meta["val"].shape) == plan.shape else make(aten.view.default, total, plan.shape)


def _one_by_one(make: Make, target: Any, operand: fx.Node, dims: Sequence[int], **kwargs: Any) -> fx.Node:
    """A reduction by an op that takes one dimension."""
    for dim in sorted(dims, reverse=True):
        operand = make(target, operand, dim, False, **kwargs)
    return operand


def _sum(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    partial = make(aten.sum.dim_IntList, chunked, plan.inner, dtype=wide)
    total = finish(make, partial, plan, lambda p, dims: make(aten.sum.dim_IntList, p, dims, dtype=wide))
    if row(node.target).monoid.name == "mean":  # type: ignore[union-attr]
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        total = make(aten.div.Tensor, total, math.prod(value.shape[d] for d in reduction_dims(node)[0]))
    return total if wide == dtype else make(aten._to_copy.default, total, dtype=dtype)


def _prod(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    partial = _one_by_one(make, aten.prod.dim_int, chunked, plan.inner, dtype=wide)
    total = finish(make, partial, plan, lambda p, dims: _one_by_one(make, aten.prod.dim_int, p, dims, dtype=wide))
    return total if wide == dtype else make(aten._to_copy.default, total, dtype=dtype)


def _extremum(target: Any) -> Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]:
    def rewrite(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
        partial = make(target, chunked, plan.inner)
        return finish(make, partial, plan, lambda p, dims: make(target, p, dims))
    return rewrite


def _truth(target: Any) -> Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]:
    def rewrite(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
        partial = _one_by_one(make, target, chunked, plan.inner)
        return finish(make, partial, plan, lambda p, dims: _one_by_one(make, target, p, dims))
    return rewrite


def _place(best: Any, where: Any) -> Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]:
    """argmax and argmin: the winner of each chunk, then the place of the first winner among them."""
    def rewrite(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
        (dim,), (chunk,), device = plan.inner, plan.chunks, node.meta["val"].device
        values, places = make(best, chunked, [dim], False), make(where, chunked, dim, False)
        chosen = make(where, values, chunk, True)
        shape = [1] * values.meta["val"].dim()
        shape[chunk] = plan.split.chunks
        number = make(aten.arange.start_step, 0, plan.split.chunks, 1, dtype=torch.int64, device=device,
                      pin_memory=False)
        number = make(aten.view.default, number, shape)
        places = make(aten.add.Tensor, places, make(aten.mul.Tensor, number, plan.split.length))
        mask = make(aten.eq.Tensor, number, chosen)
        zero = make(aten.full.default, [], 0, dtype=torch.int64, device=device, pin_memory=False)
        picked = make(aten.where.self, mask, places, zero)
        return finish(make, picked, plan, lambda p, dims: make(aten.sum.dim_IntList, p, dims))
    return rewrite


def _again(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
    """Folding the results of chunks is folding the whole."""
    return finish(make, make(node.target, chunked, plan.inner), plan, lambda p, dims: make(node.target, p, dims))


Rewrite = Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]
_REWRITES: Mapping[str, Rewrite] = {
    "sum": _sum, "mean": _sum, "prod": _prod,
    "amax": _extremum(aten.amax.default), "amin": _extremum(aten.amin.default),
    "any": _truth(aten.any.dim), "all": _truth(aten.all.dim),
    "argmax": _place(aten.amax.default, aten.argmax.default), "argmin": _place(aten.amin.default, aten.argmin.default),
}


def _rewrite_of(node: fx.Node, monoid: Monoid) -> Rewrite | None:
    """How a reduction becomes two; None where its op has no form for that."""
    known = _REWRITES.get(monoid.name)
    return known or (_again if monoid.splits and monoid.lift == ("{x}",) else None)
