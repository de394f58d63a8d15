"""Masks of attention whose rows are no rows of memory are laid out before PyTorch chooses the kernel.

    m = (q_index >= 0)[:, None].expand(S, S)            # m.stride(-1) == 0
    scaled_dot_product_attention(q, k, v, attn_mask=m)     ->      attn_mask=dense_rows(m)

CUDA's fused attention takes no mask whose last dimension is not contiguous; PyTorch then falls back, while it traces
as in eager mode, on products of float32 matrices and a softmax between (BERT of transformers, whose mask exists only
in traces, and T5's biases, which lie by heads).  The choice falls when AOTAutograd takes the call apart, so this looks
at the graph that Dynamo hands over.  What is laid out is what the mask has in memory: dimensions along which it is
repeated stay so.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn.functional import scaled_dot_product_attention

MASK = 3  # the position of `attn_mask` among the arguments


def lay_out_masks(module: fx.GraphModule, device: str = "cuda") -> int:
    """Rewrites the module and those that it calls; returns how many masks of that kind of device it has laid out."""
    changes = 0
    for part in module.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        found = [n for n in part.graph.find_nodes(op="call_function", target=scaled_dot_product_attention) if _apart(
            _mask_of(n), device)]
        for node in found:
            mask = _mask_of(node)
            assert mask is not None
            with part.graph.inserting_before(node):
                dense = part.graph.call_function(dense_rows, (mask,))
            dense.meta = dict(mask.meta)
            node.replace_input_with(mask, dense)
        if found:
            part.recompile()
        changes += len(found)
    return changes


def dense_rows(mask: torch.Tensor) -> torch.Tensor:
    """The same values with a contiguous last dimension; dimensions before it that repeat one place still do."""
    once = mask
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0:
            once = once.narrow(dim, 0, 1)
    return once.contiguous().expand(mask.shape)


def _mask_of(node: fx.Node) -> fx.Node | None:
    found = node.args[MASK] if len(node.args) > MASK else node.kwargs.get("attn_mask")
    return found if isinstance(found, fx.Node) else None


def _apart(mask: fx.Node | None, device: str) -> bool:
    value = mask.meta.get("example_value") if mask is not None else None
    return isinstance(value, torch.Tensor) and value.device.type == device and value.dim() > 1 \
        and value.numel() > 0 and value.shape[-1] != 1 and value.stride(-1) != 1
