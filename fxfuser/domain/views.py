"""Views as index maps: from an index of the view to the index of its base.

Enters: a view node of the graph and an index over its dimensions.  Leaves: the index of the same element in
the tensor it views.  Every map is exact for any shape; what does not factor into axes becomes quotients and
remainders (`index.divide`).  Views that reinterpret storage (as_strided, a change of dtype, complex pairs)
are not among them: they are made on the host and read like inputs.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.domain.index import Axis, Form, Index, Splits, divide, linear
from fxfuser.domain.size import Size, from_torch, nonneg
from fxfuser.domain.tensors import dtype_of, is_negative, is_tensor, shape_of, size_argument
from fxfuser.ops import argument

aten = torch.ops.aten
sym_max: Callable[[Any, Any], Any] = torch.sym_max

ViewMap = Callable[[fx.Node, Index, "Splits | None"], Index]


def transparent(node: fx.Node) -> bool:
    """Whether kernels see through this node: a view with an index map."""
    if node.op != "call_function" or not is_tensor(node):
        return False
    if node.target is operator.getitem:
        parent = node.args[0]
        return isinstance(parent, fx.Node) and parent.target in _PARTS and is_tensor(base_of(node))
    if node.target not in _MAPS:
        return False
    base = base_of(node)
    if not is_tensor(base) or dtype_of(base) != dtype_of(node):
        return False
    return node.target is not aten.slice.Tensor or slice_start(node) is not None


def base_of(node: fx.Node) -> fx.Node:
    """The tensor that a view node views."""
    base = node.args[0]
    assert isinstance(base, fx.Node)
    if node.target is operator.getitem:
        base = base.args[0]
        assert isinstance(base, fx.Node)
    return base


def source(node: fx.Node) -> fx.Node:
    """The node whose elements `node` shows: the first that is no transparent view."""
    while transparent(node):
        node = base_of(node)
    return node


def address(node: fx.Node) -> tuple[fx.Node, int]:
    """Where a tensor begins: the node whose elements it shows, and how many of its elements lie before; itself where
    that number varies."""
    base = source(node)
    first, own = (n.meta["val"].storage_offset() for n in (base, node))
    return (base, own - first) if isinstance(first, int) and isinstance(own, int) else (node, 0)


def map_view(node: fx.Node, index: Index, splits: Splits | None = None) -> Index:
    """The index in `base_of(node)` of the element at `index` of the transparent view `node`."""
    if node.target is operator.getitem:
        return _part(node, index)
    assert isinstance(node.target, OpOverload)
    return _MAPS[node.target](node, index, splits)


def reshape(index: Index, shape: tuple[Size, ...], base: tuple[Size, ...], splits: Splits | None) -> Index:
    """The index in a tensor of shape `base` of the element at `index` of its view with shape `shape`."""
    head = 0
    while head < min(len(shape), len(base)) and shape[head] == base[head]:
        head += 1
    tail = 0
    while tail < min(len(shape), len(base)) - head and shape[-1 - tail] == base[-1 - tail]:
        tail += 1
    inner = index[head:len(index) - tail]
    middle, wanted = _digits(inner, _described(inner), shape[head:len(shape) - tail], base[head:len(base) - tail])
    if splits is not None:
        for axis, sizes in wanted:
            known = splits.setdefault(axis, [])
            known.extend(s for s in sizes if s not in known)
    return index[:head] + middle + index[len(index) - tail:]


def _described(index: Index) -> tuple[tuple[Axis, Size, bool], ...]:
    """The axes of an index with what their equality does not compare."""
    return tuple((axis, axis.size, axis.reduced) for form in index for axis in form.axes)


@lru_cache(maxsize=4096)
def _digits(index: Index, axes: tuple[tuple[Axis, Size, bool], ...], shape: tuple[Size, ...], base: tuple[Size, ...],
            ) -> tuple[Index, tuple[tuple[Axis, tuple[Size, ...]], ...]]:
    """The index in `base`, and at which sizes axes would have to be split for it to factor.

    The walks of a graph's groups ask the same again and again: every layer has the same views.
    """
    if not base:
        return (), ()
    splits = Splits()
    strides: list[Size] = []
    stride: Size = 1
    for size in reversed(shape):
        strides.append(stride)
        stride = stride * size
    rest = linear(index, reversed(strides))
    last = next((i for i, size in enumerate(base) if size != 1), 0)
    digits = [Form()] * len(base)
    for i in range(len(base) - 1, last, -1):
        if base[i] != 1:
            rest, digits[i] = divide(rest, base[i], splits)
    digits[last] = rest
    return tuple(digits), tuple((axis, tuple(sizes)) for axis, sizes in splits.items())


def slice_start(node: fx.Node) -> Size | None:
    """Where a slice (or slice_scatter's region) starts, as a position in its base; None where that is unknown.

    A negative start of a symbolic size counts from the end and is clamped at zero; the sizes tell which holds.
    """
    scatter = node.target is aten.slice_scatter.default
    base, position = base_of(node), 2 if scatter else 1
    dim, start, end, step = (argument(node, position + i) for i in range(4))
    dim = (dim or 0) % len(shape_of(base))
    size = shape_of(base)[dim]
    part = argument(node, 1) if scatter else node
    assert isinstance(part, fx.Node)
    count, first = shape_of(part)[dim], 0 if start is None else size_argument(start)
    if isinstance(first, int) and isinstance(size, int):
        return min(max(first + size if first < 0 else first, 0), size)
    if nonneg(first):
        return first
    if not isinstance(first, int):  # torch.compile has put a guard on the sign of a number that it knows
        negative = is_negative(start)
        return None if negative is None else first + size if negative else first
    if nonneg(size + first):
        return size + first
    if step not in (None, 1):
        return None
    last = None if end is None else size_argument(end)
    if last is None or last == size or isinstance(last, int) and last >= 2**62:
        return size - count
    return size + first if count == last - first else None


def _part(node: fx.Node, index: Index) -> Index:
    parent, item = node.args
    assert isinstance(parent, fx.Node) and isinstance(item, int)
    rank = len(shape_of(base_of(node)))
    if parent.target is aten.unbind.int:
        dim, item = argument(parent, 1, 0) % rank, item % shape_length(parent)
        return index[:dim] + (Form((), item),) + index[dim:]
    dim, sections = argument(parent, 2, 0) % rank, argument(parent, 1)
    item = item % shape_length(parent)
    start: Size = 0
    if isinstance(sections, (list, tuple)):
        for section in sections[:item]:
            start = start + size_argument(section)
    else:
        start = size_argument(sections) * item
    return index[:dim] + (index[dim] + start,) + index[dim + 1:]


def shape_length(parent: fx.Node) -> int:
    """How many tensors a node returns."""
    return len(parent.meta["val"])


def _same(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    return index


def _view(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    return reshape(index, shape_of(node), shape_of(base_of(node)), splits)


def _permute(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    out = [Form()] * len(index)
    dims: Sequence[Any] = argument(node, 1)
    for form, dim in zip(index, dims):
        out[dim % len(index)] = form
    return tuple(out)


def _transpose(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    return swapped(index, argument(node, 1), argument(node, 2))


def _t(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    return index if len(index) < 2 else (index[1], index[0])


def swapped(index: Index, first: int, second: int) -> Index:
    """The index with two dimensions exchanged."""
    if not index:
        return index
    out = list(index)
    first, second = first % len(index), second % len(index)
    out[first], out[second] = out[second], out[first]
    return tuple(out)


def _expand(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    return broadcast(index, shape_of(base_of(node)))


def broadcast(index: Index, shape: Sequence[Size]) -> Index:
    """The index in an operand of this shape, aligned at the last dimension, size 1 read at 0."""
    index = index[len(index) - len(shape):]
    return tuple(Form() if size == 1 else form for form, size in zip(index, shape))


def _slice(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    dim, step = (argument(node, 1) or 0) % len(index), argument(node, 4, 1)
    start = slice_start(node)
    assert start is not None
    form = index[dim].scale(size_argument(step)) + start
    return index[:dim] + (form,) + index[dim + 1:]


def _select(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    shape = shape_of(base_of(node))
    dim = argument(node, 1) % len(shape)
    return index[:dim] + (Form((), position(argument(node, 2), base_of(node).meta["val"].shape[dim])),) + index[dim:]


def position(at: object, extent: int | torch.SymInt) -> Size:
    """An index argument, negative from the end, as a position in a dimension of this size."""
    where, negative = size_argument(at), is_negative(at)
    if negative is None:  # the host knows
        value = at.meta["val"] if isinstance(at, fx.Node) else at
        return from_torch(value % sym_max(extent, 1))
    return where + from_torch(extent) if negative else where


def _squeeze(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    shape = shape_of(base_of(node))
    every = node.target in (aten.squeeze.default, aten.squeeze_copy.default)
    dims = range(len(shape)) if every else argument(node, 1)
    named = {d % max(len(shape), 1) for d in ([dims] if isinstance(dims, int) else dims)}
    kept = iter(index)
    return tuple(Form() if d in named and size == 1 else next(kept) for d, size in enumerate(shape))


def _unsqueeze(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    dim = argument(node, 1) % len(index)
    return index[:dim] + index[dim + 1:]


def _diagonal(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    rank = len(index) + 1
    offset, first, second = argument(node, 1, 0), argument(node, 2, 0) % rank, argument(node, 3, 1) % rank
    along, rest = index[-1], iter(index[:-1])
    at = {first: along + max(0, -offset), second: along + max(0, offset)}
    return tuple(at[d] if d in at else next(rest) for d in range(rank))


def _unfold(node: fx.Node, index: Index, splits: Splits | None) -> Index:
    rank = len(index) - 1
    if rank == 0:
        return ()
    dim, step = argument(node, 1) % rank, size_argument(argument(node, 3))
    out = list(index[:-1])
    out[dim] = out[dim].scale(step) + index[-1]
    return tuple(out)


_PARTS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.unsafe_split.Tensor,
                    aten.unsafe_split_with_sizes.default})

_MAPS: Mapping[OpOverload, ViewMap] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.lift_fresh.default: _same,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._reshape_alias.default: _view,
    aten.reshape.default: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.expand.default: _expand,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.diagonal.default: _diagonal,
    aten.unfold.default: _unfold,
}

# the same maps for the ops that copy what they view
COPIES: Mapping[OpOverload, ViewMap] = {
    aten.alias_copy.default: _same,
    aten.detach_copy.default: _same,
    aten.view_copy.default: _view,
    aten._reshape_copy.default: _view,
    aten.permute_copy.default: _permute,
    aten.transpose_copy.int: _transpose,
    aten.t_copy.default: _t,
    aten.expand_copy.default: _expand,
    aten.select_copy.int: _select,
    aten.slice_copy.Tensor: _slice,
    aten.squeeze_copy.default: _squeeze,
    aten.squeeze_copy.dim: _squeeze,
    aten.squeeze_copy.dims: _squeeze,
    aten.unsqueeze_copy.default: _unsqueeze,
    aten.diagonal_copy.default: _diagonal,
    aten.unfold_copy.default: _unfold,
}
