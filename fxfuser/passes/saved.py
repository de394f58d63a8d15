"""What a forward saves for its backward: old values of inputs that it mutates, and whose memory the rest is.

    forward:  copy_(x, new);  return ..., x     ->      old = clone(x);  copy_(x, new);  return ..., old

Enters: both halves of a joint graph after the cut.  Leaves: halves in which each saved value still is, when the
backward runs, what the backward takes it for; and marks on the backward's inputs.  An input that the backward mutates
itself, such as a buffer in which it accumulates gradients, stays the caller's tensor there.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops import Kind, is_write_back, kind_of
from fxfuser.ops.products import ADD_PRODUCT, PUT_PRODUCT
from fxfuser.passes.aliasing import HOSTS, aliased, root
from fxfuser.passes.layout import bytes_of

aten = torch.ops.aten

# In the meta of a backward's input:
OWNED = "owned"  # saved for this backward alone, and nothing else has its memory
SHARED = "shared"  # other inputs have memory in common with it


def keep_old_values(
    forward: fx.GraphModule, backward: fx.GraphModule, updated: frozenset[str], num_outputs: int
) -> None:
    """Saves a copy of each input that the forward writes to; `updated` are the names of those that are written after.

    The backward needs the old value only where the user copied it (else tracing has refused the program as eager
    does), and the cut may have taken the input for that copy.
    """
    updated |= {n.args[0].name for n in forward.graph.nodes if is_write_back(n)}
    inputs = {n.name: n for n in backward.graph.find_nodes(op="placeholder")}
    output, last = forward.graph.output_node(), forward.graph.find_nodes(op="placeholder")[-1]
    values = list(output.args[0])  # type: ignore[arg-type]
    kept = values[:num_outputs]
    for node in values[num_outputs:]:
        if not isinstance(node, fx.Node) or root(node).op != "placeholder" or root(node).name not in updated:
            kept.append(node)
            continue
        if any(map(is_write_back, inputs[node.name].users)):
            kept.append(node)
            if not _read_apart(inputs[node.name]):
                continue
        with forward.graph.inserting_after(last if node.op == "placeholder" else node):
            old = forward.graph.call_function(aten.clone.default, (node,))
        old.meta = {"val": node.meta["val"]}
        kept.append(old)
    output.args = (tuple(kept),)
    forward.recompile()
    backward.recompile()


def _read_apart(mutated: fx.Node) -> bool:
    """Whether a backward that mutates this input reads it besides; then an input of its own holds the old value."""
    readers = [n for n in mutated.users if not is_write_back(n)]
    if readers:
        with mutated.graph.inserting_after(mutated):
            old = mutated.graph.placeholder(f"{mutated.name}_old")
        old.meta = dict(mutated.meta)
        for reader in readers:
            reader.replace_input_with(mutated, old)
    return bool(readers)


def mark(forward: fx.GraphModule, backward: fx.GraphModule, num_outputs: int) -> None:
    """Marks inputs of the backward as OWNED, where no output and nothing else that is saved has that memory, and as
    SHARED."""
    values = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    roots = [root(v) if isinstance(v, fx.Node) else None for v in values]
    saved = roots[num_outputs:]
    for node, value, source in zip(backward.graph.find_nodes(op="placeholder"), values[num_outputs:], saved):
        if source is None:
            continue
        if saved.count(source) > 1:
            node.meta = {**node.meta, SHARED: True}
        elif roots.count(source) == 1 and owns_memory(source) and _covers(value, source):
            node.meta = {**node.meta, OWNED: True}


def owns_memory(node: fx.Node) -> bool:
    """Whether a node's result is a buffer of its own, as that of a kernel or a product is."""
    if node.op != "call_function" or aliased(node):
        return False
    made = kind_of(node) in (Kind.GEMM, Kind.POINTWISE, Kind.REDUCTION, Kind.LAYOUT)
    return made or node.target in (ADD_PRODUCT, PUT_PRODUCT)


def _covers(view: fx.Node, base: fx.Node) -> bool:
    """Whether all of the base is in the view, which may have room beside it."""
    a, b = view.meta.get("val"), base.meta.get("val")
    return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) \
        and (bytes_of(a) == bytes_of(b) or view.target in HOSTS)
