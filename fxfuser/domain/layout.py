"""Layout nodes as regions: which element of which operand a node shows, and where.

Enters: a LAYOUT node and an index.  Leaves: a tuple of regions, each a condition on the index and an operand
at its own index, or a number; the first region whose condition holds gives the element, the last has none.
A clone or a flip is one region; a concatenation or a pad several.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence, Union

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.domain.index import TURNS, Form, Index, Piece, Splits, divide, linear
from fxfuser.domain.points import Bound, Condition
from fxfuser.domain.size import Size, from_torch, nonneg
from fxfuser.domain.tensors import is_negative, shape_of, size_argument
from fxfuser.domain.views import COPIES, base_of, position, slice_start
from fxfuser.ops import argument

aten, prims = torch.ops.aten, torch.ops.prims
sym_max: Callable[[Any, Any], Any] = torch.sym_max

Number = Union[int, float, bool, fx.Node]


@dataclass(frozen=True)
class Region:
    """`source` at `index` where every bound of `condition` holds; a number has no index."""

    source: fx.Node | Number
    index: Index = ()
    condition: Condition = ()


Regions = tuple[Region, ...]
LayoutMap = Callable[[fx.Node, Index, Splits], Regions]


def layout_regions(node: fx.Node, index: Index, splits: Splits) -> Regions | None:
    """The regions of a LAYOUT node at an index; None where the node has no map."""
    assert isinstance(node.target, OpOverload)
    found = _MAPS.get(node.target)
    if found is not None:
        return found(node, index, splits)
    copy = COPIES.get(node.target)
    return None if copy is None else (Region(base_of(node), copy(node, index, splits)),)


def _at(index: Index, dim: int, form: Form) -> Index:
    return index[:dim] + (form,) + index[dim + 1:]


def _without(index: Index, dim: int) -> Index:
    return index[:dim] + index[dim + 1:]


def _same(node: fx.Node, index: Index, splits: Splits) -> Regions:
    return (Region(base_of(node), index),)


def _flip(node: fx.Node, index: Index, splits: Splits) -> Regions:
    shape, dims = shape_of(node), {d % max(len(index), 1) for d in argument(node, 1)}
    flipped = (form.scale(-1) + (size - 1) if d in dims and size != 1 else form
               for d, (form, size) in enumerate(zip(index, shape)))
    return (Region(base_of(node), tuple(flipped)),)


def _roll(node: fx.Node, index: Index, splits: Splits) -> Regions:
    shape, shifts, dims = shape_of(node), argument(node, 1), argument(node, 2, [])
    value = node.meta["val"]
    if dims or not index:
        out = list(index)
        for dim, shift in zip(dims, shifts):
            dim = dim % max(len(index), 1)
            out[dim] = _rolled(out[dim], shift, value.shape[dim])
        return (Region(base_of(node), tuple(out)),)
    if 0 in shape:
        return (Region(base_of(node), index),)
    strides: list[Size] = []
    total: Size = 1
    for size in reversed(shape):
        strides.append(total)
        total = total * size
    rest = _rolled(linear(index, reversed(strides)), shifts[0], value.numel())
    digits = [Form()] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        rest, digits[d] = divide(rest, shape[d], splits)
    digits[0] = rest
    return (Region(base_of(node), tuple(digits)),)


def _rolled(form: Form, shift: object, extent: int | torch.SymInt) -> Form:
    """The position, `shift` places before `form`, in a dimension of `extent` elements whose ends are joined."""
    known, size = size_argument(shift), from_torch(extent)
    if isinstance(known, int) and (isinstance(size, int) or nonneg(size * TURNS[-1] - known)):
        return divide(form - (known % size if isinstance(size, int) and size else known), size)[1]
    # counted forwards the form is never negative, which `divide` asks for; the host knows the shift
    value = shift.meta["val"] if isinstance(shift, fx.Node) else shift
    assert isinstance(value, (int, torch.SymInt)), shift
    return divide(form + from_torch(-value % sym_max(extent, 1)), size)[1]


def _rot90(node: fx.Node, index: Index, splits: Splits) -> Regions:
    times, dims = argument(node, 1, 1) % 4, argument(node, 2, [0, 1])
    first, second = dims[0] % len(index), dims[1] % len(index)
    shape, out = shape_of(base_of(node)), list(index)
    if times % 2:
        out[first], out[second] = out[second], out[first]
    for dim, turned in ((first, times in (2, 3)), (second, times in (1, 2))):
        if turned and shape[dim] != 1:
            out[dim] = out[dim].scale(-1) + (shape[dim] - 1)
    return (Region(base_of(node), tuple(out)),)


def _repeat(node: fx.Node, index: Index, splits: Splits) -> Regions:
    shape = shape_of(base_of(node))
    inner = index[len(index) - len(shape):]
    return (Region(base_of(node), tuple(divide(form, size, splits)[1] for form, size in zip(inner, shape))),)


def _cat(node: fx.Node, index: Index, splits: Splits) -> Regions:
    tensors: Sequence[fx.Node] = argument(node, 0)
    dim = argument(node, 1, 0) % max(len(index), 1)
    parts = [t for t in tensors if len(shape_of(t)) == len(index)]  # cat admits any number of empty vectors besides
    parts = [t for t in parts if shape_of(t)[dim] != 0] or parts[:1]
    start: Size = 0
    regions = []
    for tensor in parts:
        size = shape_of(tensor)[dim]
        regions.append(Region(tensor, _at(index, dim, Piece.of(index[dim] - start, size)),
                              (Bound(index[dim], None, start + size),)))
        start = start + size
    return (*regions[:-1], Region(regions[-1].source, regions[-1].index))


def _stack(node: fx.Node, index: Index, splits: Splits) -> Regions:
    tensors: Sequence[fx.Node] = argument(node, 0)
    dim = argument(node, 1, 0) % len(index)
    rest = _without(index, dim)
    conditions = [(Bound(index[dim], None, i + 1),) for i in range(len(tensors) - 1)]
    return tuple(Region(t, rest, c) for t, c in zip(tensors, [*conditions, ()]))


def _pad(node: fx.Node, index: Index, splits: Splits) -> Regions:
    base = base_of(node)
    shape, pads = shape_of(base), argument(node, 1)
    out, condition = list(index), []
    for i in range(len(pads) // 2):
        dim = len(index) - 1 - i
        low, high = size_argument(pads[2 * i]), size_argument(pads[2 * i + 1])
        below = None if nonneg(-low) else low
        above = None if nonneg(-high) else low + shape[dim]
        if below is not None or above is not None:
            condition.append(Bound(index[dim], below, above))
        out[dim] = Piece.of(index[dim] - low, shape[dim]) if nonneg(low) and nonneg(high) else index[dim] - low
    return Region(base, tuple(out), tuple(condition)), Region(argument(node, 2, 0))


def _slice_scatter(node: fx.Node, index: Index, splits: Splits) -> Regions:
    part = argument(node, 1)
    dim = (argument(node, 2) or 0) % len(index)
    start = slice_start(node)
    if start is None:
        return ()
    return (_scattered(index, dim, part, start, size_argument(argument(node, 5, 1)), splits),
            Region(base_of(node), index))


def _scattered(index: Index, dim: int, part: fx.Node, start: Size, step: Size, splits: Splits) -> Region:
    """The region that a strided slice covers, showing `part`: first the residue, then the border."""
    count, form = shape_of(part)[dim], index[dim]
    if step == 1:
        return Region(part, _at(index, dim, Piece.of(form - start, count)), (Bound(form, start, start + count),))
    above, below = divide(form - start + start * step, step, splits)  # shifted: never negative
    above = above - start
    condition = (Bound(below, 0, 1), Bound(above, 0, count))
    return Region(part, _at(index, dim, Piece.of(above, count)), condition)


def _slice_backward(node: fx.Node, index: Index, splits: Splits) -> Regions:
    part, dim = base_of(node), argument(node, 2) % len(index)
    start, step = size_argument(argument(node, 3)), size_argument(argument(node, 5))
    size = shape_of(node)[dim]
    negative = is_negative(argument(node, 3))
    start = start + size if negative else start
    if negative is None or isinstance(start, int) and start < 0:
        return ()
    if isinstance(start, int) and isinstance(size, int):
        start = min(start, size)
    return _scattered(index, dim, part, start, step, splits), Region(0)


def _select_scatter(node: fx.Node, index: Index, splits: Splits) -> Regions:
    dim = argument(node, 2) % len(index)
    return _selected(node, index, dim, argument(node, 1), argument(node, 3)), Region(base_of(node), index)


def _select_backward(node: fx.Node, index: Index, splits: Splits) -> Regions:
    dim = argument(node, 2) % len(index)
    return _selected(node, index, dim, base_of(node), argument(node, 3)), Region(0)


def _selected(node: fx.Node, index: Index, dim: int, part: fx.Node, at: object) -> Region:
    where = position(at, node.meta["val"].shape[dim])
    return Region(part, _without(index, dim), (Bound(index[dim], where, where + 1),))


def _diagonal_scatter(node: fx.Node, index: Index, splits: Splits) -> Regions:
    rank, part = len(index), argument(node, 1)
    offset, first, second = argument(node, 2, 0), argument(node, 3, 0) % rank, argument(node, 4, 1) % rank
    along = Piece.of(index[first] - max(0, -offset), shape_of(part)[-1])
    rest = tuple(form for d, form in enumerate(index) if d not in (first, second))
    condition = (Bound(index[second] - index[first], offset, offset + 1),)
    return Region(part, rest + (along,), condition), Region(base_of(node), index)


def _triangle(node: fx.Node, index: Index, splits: Splits) -> Regions:
    diagonal = size_argument(argument(node, 1, 0))
    form, lower = index[-1] - index[-2], node.target is aten.tril.default
    bound = Bound(form, None, diagonal + 1) if lower else Bound(form, diagonal, None)
    return Region(base_of(node), index, (bound,)), Region(0)


_MAPS: Mapping[OpOverload, LayoutMap] = {
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten.lift_fresh_copy.default: _same,
    prims.clone.default: _same,
    aten.flip.default: _flip,
    prims.rev.default: _flip,
    aten.roll.default: _roll,
    aten.repeat.default: _repeat,
    aten.rot90.default: _rot90,
    aten.cat.default: _cat,
    prims.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
}
