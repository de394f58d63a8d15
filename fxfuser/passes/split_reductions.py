"""A long reduction with few results becomes two: partial results of chunks, then their reduction.

    s = aten.sum(a, [1])    # a: [4, 1048576]    ->    v = aten.view(a, [4, 256, 4096])
                                                       p = aten.sum(v, [2]);  s = aten.sum(p, [1])

One program per result would leave most of the device idle.  The first half fuses with what produces `a`, the second
with what reads `s`.  Where no number of chunks divides the length, the operand is padded with the monoid's identity,
which costs no memory: padding is a mask inside the kernel.  Partials of half types are float32.  argmax and argmin
keep the place of each chunk's winner and choose among the winners.

Left alone: short reductions, those whose results fill the device by themselves, and symbolic lengths, of which no
chunk length is a good one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping

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
    """Dimension `dim` of the operand becomes `chunks` x `length`, of which the last `padding` do not exist."""

    dim: int
    chunks: int
    length: int
    padding: int


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
    long = [d for d in dims if value.shape[d] >= FEWEST]
    if not long:
        return None
    dim = max(long, key=value.stride)  # chunks that lie far apart in memory
    kept = math.prod(s for d, s in enumerate(value.shape) if d not in dims)
    chunks = _chunks(value, dims, dim, kept)
    if chunks < FEWEST:
        return None
    chunks = _dividing(value.shape[dim], chunks)
    length = -(-value.shape[dim] // chunks)
    chunks = -(-value.shape[dim] // length)
    return Split(dim, chunks, length, chunks * length - value.shape[dim])


def _chunks(value: torch.Tensor, dims: tuple[int, ...], dim: int, kept: int) -> int:
    """How many chunks `dim` is worth; 1 where the reduction is best left alone."""
    size, whole = value.shape[dim], math.prod(value.shape[d] for d in dims)
    if kept == 0 or whole == 0:
        return 1
    along_rows = any(value.stride(d) == 1 and value.shape[d] > 1 for d in dims) or kept == 1
    if along_rows:
        if kept >= ENOUGH:
            return 1
        return min(max(FEWEST, -(-PROGRAMS // kept)), whole // ROW_CHUNK, size)
    if kept // COLUMNS >= ENOUGH:
        return 1
    return min(PROGRAMS, size // COLUMN_CHUNK)


def _dividing(size: int, wanted: int) -> int:
    """A number of chunks that divides `size`, at most a factor of two from `wanted`; else `wanted`."""
    for distance in range(wanted):
        for chunks in (wanted + distance, wanted - distance):
            if FEWEST <= chunks and wanted <= 2 * chunks <= 4 * wanted and size % chunks == 0:
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
    dims, keep = reduction_dims(node)
    # the chunk's own dimension comes after the chunks'
    return Plan(split, [d + (d >= split.dim) for d in dims], [d + (d > split.dim) for d in dims], keep)


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
    """`inner` are the dimensions that partials reduce, `outer` is counted where `inner` are kept as 1."""

    split: Split
    inner: list[int]
    outer: list[int]
    keep: bool

    @property
    def chunk_dim(self) -> int:
        """Where the chunks are in the partials, which keep no reduced dimension."""
        return self.split.dim - sum(d < self.split.dim for d in self.outer)


def finish(make: Make, partial: fx.Node, plan: Plan, second: Callable[[fx.Node, int], fx.Node]) -> fx.Node:
    """The reduction of the partials, in the shape that the node had."""
    total = second(partial, plan.chunk_dim)
    if not plan.keep:
        return total
    shape = list(total.meta["val"].shape)
    for dim in sorted(d - (d > plan.split.dim) for d in plan.outer):
        shape.insert(dim, 1)
    return make(aten.view.default, total, shape)


def _sum(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    partial = make(aten.sum.dim_IntList, chunked, plan.inner, dtype=wide)
    total = finish(make, partial, plan, lambda p, d: make(aten.sum.dim_IntList, p, [d], dtype=wide))
    if row(node.target).monoid.name == "mean":  # type: ignore[union-attr]
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        total = make(aten.div.Tensor, total, math.prod(value.shape[d] for d in reduction_dims(node)[0]))
    return total if wide == dtype else make(aten._to_copy.default, total, dtype=dtype)


def _prod(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
    dtype = node.meta["val"].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    partial = chunked
    for dim in sorted(plan.inner, reverse=True):
        partial = make(aten.prod.dim_int, partial, dim, False, dtype=wide)
    total = finish(make, partial, plan, lambda p, d: make(aten.prod.dim_int, p, d, False, dtype=wide))
    return total if wide == dtype else make(aten._to_copy.default, total, dtype=dtype)


def _extremum(target: Any) -> Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]:
    def rewrite(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
        partial = make(target, chunked, plan.inner)
        return finish(make, partial, plan, lambda p, d: make(target, p, [d]))
    return rewrite


def _truth(target: Any) -> Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]:
    def rewrite(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
        partial = chunked
        for dim in sorted(plan.inner, reverse=True):
            partial = make(target, partial, dim, False)
        return finish(make, partial, plan, lambda p, d: make(target, p, d, False))
    return rewrite


def _place(best: Any, where: Any) -> Callable[[Make, fx.Node, fx.Node, Plan], fx.Node]:
    """argmax and argmin: the winner of each chunk, then the place of the first winner among them."""
    def rewrite(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
        dim, device = plan.inner[0], node.meta["val"].device
        values, places = make(best, chunked, [dim], False), make(where, chunked, dim, False)
        chosen = make(where, values, plan.chunk_dim, True)
        shape = [1] * values.meta["val"].dim()
        shape[plan.chunk_dim] = plan.split.chunks
        number = make(aten.arange.start_step, 0, plan.split.chunks, 1, dtype=torch.int64, device=device,
                      pin_memory=False)
        number = make(aten.view.default, number, shape)
        places = make(aten.add.Tensor, places, make(aten.mul.Tensor, number, plan.split.length))
        mask = make(aten.eq.Tensor, number, chosen)
        zero = make(aten.full.default, [], 0, dtype=torch.int64, device=device, pin_memory=False)
        picked = make(aten.where.self, mask, places, zero)
        return finish(make, picked, plan, lambda p, d: make(aten.sum.dim_IntList, p, [d]))
    return rewrite


def _again(make: Make, node: fx.Node, chunked: fx.Node, plan: Plan) -> fx.Node:
    """Folding the results of chunks is folding the whole."""
    return finish(make, make(node.target, chunked, plan.inner), plan, lambda p, d: make(node.target, p, [d]))


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
