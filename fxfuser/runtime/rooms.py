"""Results that are made in the storage of something else: a piece inside the tensor that it becomes a part of, and rows
over what nothing reads any more.

    g = kernel(l)                            room = empty((V, H));  g = end_of(room, (C, M));  kernel(l, g)
    room = fxfuser.with_room(g, [V, H])      # nothing
    dw = fxfuser.put_product(                put_product_(room, g[a:b], x, a)
        room, g[a:b], x, a, V, dtype)

Enters: a segment with its kernel or a single call, and the nodes that have been computed before it.  Leaves: where its
result is made.  The graph is functional, so that each tensor holds what its own node says; a storage is shared only
where nothing that is yet to be computed reads the elements that are overwritten, and copied elsewhere.  So logits can
wait for the backward in the memory of the gradient of the weights: of 8192 rows and 4096 inner elements half of them.
"""

from __future__ import annotations

import math
from typing import Collection

import torch
from torch import fx

from fxfuser.lowering.kernel import Lowered
from fxfuser.ops.products import IN_PLACE, PUT_PRODUCT, WITH_ROOM
from fxfuser.passes.aliasing import aliased, root
from fxfuser.passes.layout import is_contiguous, same_layout
from fxfuser.passes.saved import owns_memory
from fxfuser.runtime.in_place import dies, element_by_element, is_mine, once
from fxfuser.segmenter.segment import Segment


def room_for(node: fx.Node) -> fx.Node | None:
    """The tensor in whose storage the result of a kernel is made; None: it gets one of its own."""
    found = [u for u in node.users if u.target is WITH_ROOM]
    if len(found) != 1 or not owns_memory(node) or not _is_plain(node) or not _is_plain(found[0]):
        return None
    return found[0]


def former(
    segment: Segment, low: Lowered, output: fx.Node, computed: Collection[fx.Node], may_take_inputs: bool
) -> fx.Node | None:
    """The tensor whose storage becomes that of `output` with its room: its end is what the kernel reads where it writes
    `output`, and nothing reads it later.  None where there is no such tensor."""
    room = room_for(output)
    o = low.outputs.index(segment.outputs.index(output))
    for i, position in enumerate(low.inputs if room is not None else ()):
        node = segment.inputs[position]
        whole, base = _whole(node), root(node)
        if whole is node or not is_mine(base, may_take_inputs) or not _is_plain(whole) or not _is_plain(node):
            continue
        assert room is not None
        if same_layout(whole.meta["val"], room.meta["val"]) and same_layout(node.meta["val"], output.meta["val"]) \
                and _first(node, whole) == _count(whole) - _count(node) \
                and all(n is node for n in (segment.inputs[p] for p in low.inputs) if root(n) is base) \
                and element_by_element(low.kernel, i, o) and once(segment, output) \
                and dies(base, segment.nodes, computed):
            return whole
    return None


def may_write(node: fx.Node, computed: Collection[fx.Node]) -> bool:
    """Whether a call may write its result over its first argument: that is a buffer of the plan's own, no other node
    that is yet to be computed reads it, and this one reads nothing of what it overwrites."""
    into = node.args[0] if node.target in IN_PLACE else None
    if not isinstance(into, fx.Node) or not owns_memory(root(into)) or not dies(root(into), (node,), computed):
        return False
    return all(_apart(node, into, n) for n in node.all_input_nodes if n is not into and root(n) is root(into))


def _apart(node: fx.Node, into: fx.Node, operand: fx.Node) -> bool:
    """Whether an operand, a view of `into`, has no element in the rows that the call writes."""
    if node.target is not PUT_PRODUCT or not _is_plain(into) or not _views(operand, into):
        return False
    left, start = node.args[1], node.args[3]
    assert isinstance(left, fx.Node)
    value = operand.meta["val"]
    if not isinstance(start, int) or any(type(n) is not int for n in (*value.shape, *value.stride())):
        return False
    width = into.meta["val"].shape[1]
    first = _first(operand, into)
    last = first + sum((n - 1) * s for n, s in zip(value.shape, value.stride()))
    stop = start + int(left.meta["val"].shape[0])
    return bool(last < start * width or first >= stop * width)


def _whole(node: fx.Node) -> fx.Node:
    """What a view is a view of, which may have room for more than its own base."""
    while node.target is not WITH_ROOM and (sources := aliased(node)):
        node = sources[0]
    return node


def _views(node: fx.Node, base: fx.Node) -> bool:
    """Whether the node is a view of `base`, at places that its fake tensor tells."""
    while node is not base:
        sources = aliased(node)
        if not sources or node.target is WITH_ROOM:
            return False
        node = sources[0]
    return True


def _first(view: fx.Node, base: fx.Node) -> int:
    """The place of a view's first element in its base."""
    return int(view.meta["val"].storage_offset() - base.meta["val"].storage_offset())


def _count(node: fx.Node) -> int:
    return math.prod(node.meta["val"].shape)


def _is_plain(node: fx.Node) -> bool:
    """Whether the node's value is a row-major tensor of known sizes."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and is_contiguous(value) \
        and all(type(n) is int for n in (*value.shape, value.storage_offset()))
