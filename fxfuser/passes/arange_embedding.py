"""Rows of a table that are named in order are the table's first rows; their gradient is where it lies.

    i = aten.arange(1024)                               s = aten.slice(table, 0, 0, 1024)
    e = aten.embedding(table, i)                ->      e = aten.clone(s)
    g = aten.embedding_dense_backward(d, i, 1024, -1, False)    ->      g = aten.clone(d)

So learned positions are read without a gather, and their gradient is neither sorted nor scattered.  The clone moves no
data in a fused kernel; it keeps results apart from the table.  Left alone: symbolic sizes, a padding row among the
rows, gradients scaled by frequency, and an arange that does not count 0, 1, 2, ...
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import Make, replace_each

aten = torch.ops.aten
SAME_ORDER = frozenset({aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim})


def rows_in_order(graph: fx.Graph, scope: Scope) -> int:
    return replace_each(graph, scope, _rows_read, _rewritten)


def _rows_read(node: fx.Node) -> int | None:
    """How many first rows of the table a lookup or its gradient names in order; None for any other node."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    arguments = dict(enumerate(node.args))
    if node.target == aten.embedding_dense_backward.default:
        rows, padding, scaled = arguments[2], arguments[3], arguments[4]
        if scaled:
            return None
    elif node.target == aten.embedding.default:
        rows, padding = node.args[0].meta["val"].shape[0], -1  # type: ignore[union-attr]
    else:
        return None
    count = _counted(arguments[1])
    if not isinstance(rows, int) or count is None or count > rows or not isinstance(padding, int):
        return None
    return None if 0 <= padding < count else count


def _counted(index: Any) -> int | None:
    """n where the index holds 0, 1, ..., n - 1 in this order, in whatever shape."""
    while isinstance(index, fx.Node) and index.target in SAME_ORDER:
        index = index.args[0]
    if not isinstance(index, fx.Node) or not _counts_from_zero(index):
        return None
    count = index.meta["val"].numel()
    return count if isinstance(count, int) and count else None


def _counts_from_zero(node: fx.Node) -> bool:
    if node.target == aten.arange.default:
        return isinstance(node.args[0], int)
    if node.target == aten.arange.start:
        return bool(node.args[0] == 0) and isinstance(node.args[1], int)
    if node.target == aten.arange.start_step:
        step = node.args[2] if len(node.args) > 2 else 1
        return bool(node.args[0] == 0 and step == 1) and isinstance(node.args[1], int)
    return False


def _rewritten(make: Make, node: fx.Node, count: int) -> fx.Node:
    return (_lookup if node.target == aten.embedding.default else _gradient)(make, node, count)


def _lookup(make: Make, node: fx.Node, count: int) -> fx.Node:
    first = make(aten.slice.Tensor, node.args[0], 0, 0, count)
    return make(aten.clone.default, make(aten.view.default, first, list(node.meta["val"].shape)))


def _gradient(make: Make, node: fx.Node, count: int) -> fx.Node:
    rows, width = node.meta["val"].shape
    tangent = node.args[0]
    assert isinstance(tangent, fx.Node)
    if not tangent.meta["val"].is_contiguous():  # then no view need have the shape
        tangent = make(aten.clone.default, tangent, memory_format=torch.contiguous_format)
    flat = make(aten.view.default, tangent, [count, width])
    return make(aten.constant_pad_nd.default, flat, [0, 0, 0, rows - count], 0.0) if rows > count else \
        make(aten.clone.default, flat)
