"""Inputs that the program mutates take their new values where these are computed.

    new = aten.add(old, x)
    aten.copy_(old, new)      # nothing is copied: the kernel writes `new` to the memory of `old`

Enters: nodes whose values are about to be computed, and all that has been computed before them.  Leaves: the write-back
(`ops.is_write_back`) that this computation does itself.  Three things must hold: the new value has the input's
dtype, device, sizes and strides; whatever else reads the old value has been computed, and no other input shares its
memory (AOTAutograd sees to that in a forward, `saved.mark` tells of a backward); and nobody outside sees the new value
but through the input, since the caller may mutate that again.  A kernel that reads the old value itself must do
so element by element (see in_place.py); an ATen op must have a twin that mutates.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Mapping

import torch
from torch import fx

from fxfuser.lowering.kernel import Lowered
from fxfuser.ops import is_write_back
from fxfuser.ops.products import IN_PLACE
from fxfuser.passes.aliasing import aliased, root
from fxfuser.passes.layout import same_layout
from fxfuser.passes.saved import SHARED
from fxfuser.runtime.in_place import dies, element_by_element, once, reads_itself
from fxfuser.segmenter.segment import Segment

aten = torch.ops.aten

# Op -> its twin, which takes the same arguments and mutates the first
TWINS: Mapping[Any, Callable[..., torch.Tensor]] = {
    **IN_PLACE,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.index_fill.int_Tensor: aten.index_fill_.int_Tensor,
    aten.index_reduce.default: aten.index_reduce_.default,
    aten.masked_scatter.default: aten.masked_scatter_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter.reduce: aten.scatter_.reduce,
    aten.scatter.value_reduce: aten.scatter_.value_reduce,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
}


def by_kernel(segment: Segment, output: fx.Node, low: Lowered, computed: Collection[fx.Node]) -> fx.Node | None:
    """The write-back that a kernel does when it writes `output`; None where it must write elsewhere."""
    found = _write_back(output, segment.nodes, computed)
    if found is None:
        return None
    target, o = found.args[0], low.outputs.index(segment.outputs.index(output))
    assert isinstance(target, fx.Node)
    reads = [i for i, position in enumerate(low.inputs) if segment.inputs[position] is target]
    apart = all(element_by_element(low.kernel, i, o) for i in reads) and (not reads or once(segment, output))
    return found if apart and reads_itself(segment, low, target) else None


def by_call(node: fx.Node, computed: Collection[fx.Node]) -> fx.Node | None:
    """The write-back that the twin of an ATen op does; None where the op has none or must not be it."""
    found = _write_back(node, (node,), computed) if node.target in TWINS else None
    return found if found is not None and node.args[0] is found.args[0] and _once_given(node) else None


def _write_back(value: fx.Node, own: Collection[fx.Node], computed: Collection[fx.Node]) -> fx.Node | None:
    found = [u for u in value.users if is_write_back(u) and u.args[1] is value]
    if len(found) != 1 or _reaches_caller(value, found[0]):
        return None
    target = found[0].args[0]
    assert isinstance(target, fx.Node)
    old = target.meta["val"]
    plain = not old.is_neg() and not old.is_conj() and not target.name.startswith("tangents")
    fits = plain and SHARED not in target.meta and same_layout(old, value.meta["val"])
    return found[0] if fits and dies(target, own, computed, found[0]) else None


def _once_given(node: fx.Node) -> bool:
    """Whether no other operand is the mutated one or a view of it."""
    return sum(root(n) is node.args[0] for n in node.all_input_nodes) == 1


def _reaches_caller(value: fx.Node, write_back: fx.Node) -> bool:
    """Whether the graph returns the value, or saves it, other than by the input."""
    stack = [value]
    while stack:
        source = stack.pop()
        for user in source.users:
            if user.op == "output":
                return True
            if user is not write_back and source in aliased(user):
                stack.append(user)
    return False
