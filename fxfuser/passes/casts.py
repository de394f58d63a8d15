"""Drops casts to the same dtype and shortens chains that begin with a widening cast.

    b = aten._to_copy(a, dtype=float32)      # a: bfloat16        d = aten.mul(a, 2)
    c = aten._to_copy(b, dtype=bfloat16)                    ->
    d = aten.mul(c, 2)

A widening cast loses nothing, so what follows it may read its source.  A narrowing cast rounds: `a` in float32 cast
to bfloat16 and back is another value and stays.  A cast to the same dtype copies, so it stays where its storage
reaches the caller, and where its source is an input, which the caller may update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxfuser.passes.aliasing import escaping, root
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_layout, same_strides
from fxfuser.passes.rebuild import forward

aten = torch.ops.aten

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether every value of `narrow` is one of `wide`, so that casting there and back is the identity."""
    if narrow is wide:
        return True
    if narrow is torch.bool:
        return wide in _SIGNED or wide is torch.uint8 or wide in _FLOATS
    if narrow in _SIGNED and wide in _SIGNED:
        return narrow.itemsize < wide.itemsize
    if narrow is torch.uint8 and wide in _SIGNED:
        return wide.itemsize > 1
    if narrow in _FLOATS and wide in _FLOATS:
        return narrow.itemsize < wide.itemsize  # float16 and bfloat16 have equal size and different values
    return False


def canonicalise_casts(graph: fx.Graph, scope: Scope) -> int:
    outside = escaping(graph)
    changes = 0
    for node in list(graph.nodes):
        if not is_plain_cast(node):
            continue
        source = node.args[0]
        if is_plain_cast(source) and _may_skip(source):
            if not scope.fuel.take():
                break
            node.args = (source.args[0],)
            source = node.args[0]
            changes += 1
        if node in outside or root(source).op in ("placeholder", "get_attr"):
            continue
        if same_layout(node.meta["val"], source.meta["val"]):
            if not scope.fuel.take():
                break
            forward(node, source, graph)
            changes += 1
    return changes


def is_plain_cast(node: Any) -> bool:
    """A `_to_copy` that changes the dtype alone: same device, dense, strides kept."""
    if not isinstance(node, fx.Node) or node.target is not aten._to_copy.default:
        return False
    value, source = node.meta["val"], node.args[0].meta["val"]  # type: ignore[union-attr]
    return (set(node.kwargs) <= {"dtype", "memory_format", "device", "layout", "pin_memory"}
            and (node.kwargs.get("memory_format") in (None, torch.preserve_format) or same_strides(value, source))
            and not node.kwargs.get("pin_memory")
            and value.layout is source.layout is torch.strided and value.device == source.device)


def _may_skip(source: fx.Node) -> bool:
    """Whether a cast of this cast equals one cast: it is lossless, so the second sees the same numbers."""
    origin = source.args[0].meta["val"]  # type: ignore[union-attr]
    return widens(origin.dtype, source.meta["val"].dtype)
