"""Gathers as index maps: which element of its table a node shows, where a tensor holds the position; and scatters,
whose elements are stored where a gather would read them.

Enters: a GATHER or SCATTER node, an index, and a way to look positions up.  Leaves: the index in the table,
`base_of(node)`, whose forms name lookups; None where the node has no map.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.domain.index import Form, Index, Splits
from fxfuser.domain.size import Size
from fxfuser.domain.tensors import shape_of
from fxfuser.domain.views import base_of, broadcast, reshape
from fxfuser.ops import argument

aten = torch.ops.aten

# (tensor of positions, index in it, size of the dimension that they count, whether negative ones wrap) -> position
LookUp = Callable[[fx.Node, Index, Size, bool], Form]
GatherMap = Callable[[fx.Node, Index, LookUp, Splits], Index]


def gather_index(node: fx.Node, index: Index, look_up: LookUp, splits: Splits) -> Index | None:
    """The index in its table of the element of a GATHER node at `index`."""
    assert isinstance(node.target, OpOverload)
    found = _MAPS.get(node.target)
    return None if found is None else found(node, index, look_up, splits)


def scatter_index(node: fx.Node, index: Index, look_up: LookUp) -> Index:
    """The index in its base at which a SCATTER node stores its element at `index`."""
    return _indexed(node, index, look_up, argument(node, 3))


def _gather(node: fx.Node, index: Index, look_up: LookUp, splits: Splits) -> Index:
    shape = shape_of(base_of(node))
    if not shape:
        return ()
    dim = argument(node, 1) % len(shape)
    at = look_up(argument(node, 2), index, shape[dim], False)
    return index[:dim] + (at,) + index[dim + 1:]


def _index_select(node: fx.Node, index: Index, look_up: LookUp, splits: Splits) -> Index:
    shape, positions = shape_of(base_of(node)), argument(node, 2)
    if not shape:
        return ()
    dim = argument(node, 1) % len(shape)
    at = look_up(positions, (index[dim],) if shape_of(positions) else (), shape[dim], False)
    return index[:dim] + (at,) + index[dim + 1:]


def _embedding(node: fx.Node, index: Index, look_up: LookUp, splits: Splits) -> Index:
    rows = shape_of(base_of(node))[0]
    return look_up(argument(node, 1), index[:-1], rows, False), index[-1]


def _take(node: fx.Node, index: Index, look_up: LookUp, splits: Splits) -> Index:
    shape = shape_of(base_of(node))
    total: Size = 1
    for size in shape:
        total = total * size
    return reshape((look_up(argument(node, 1), index, total, True),), (total,), shape, splits)


def _index(node: fx.Node, index: Index, look_up: LookUp, splits: Splits) -> Index:
    return _indexed(node, index, look_up, True)


def _indexed(node: fx.Node, index: Index, look_up: LookUp, wraps: bool) -> Index:
    """The positions' dimensions stand where the first of them stood if they were neighbours, else in front."""
    shape = shape_of(base_of(node))
    given: Sequence[fx.Node | None] = argument(node, 1)
    dims = [d for d, positions in enumerate(given) if positions is not None]
    rank = len(index) - (len(shape) - len(dims))
    first = dims[0] if dims and dims[-1] - dims[0] + 1 == len(dims) else 0
    common, rest = index[first:first + rank], iter(index[:first] + index[first + rank:])
    inner: list[Form] = []
    for d, size in enumerate(shape):
        positions = given[d] if d < len(given) else None
        if positions is None:
            inner.append(next(rest))
        else:
            inner.append(look_up(positions, broadcast(common, shape_of(positions)), size, wraps))
    return tuple(inner)


_MAPS: Mapping[OpOverload, GatherMap] = {
    aten.gather.default: _gather,
    aten.index_select.default: _index_select,
    aten.embedding.default: _embedding,
    aten.take.default: _take,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index.Tensor_hacked_twin: _index,
    aten._unsafe_index.Tensor_hacked_twin: _index,
}
