"""Calls of PyTorch's attention kernels: their arguments, and who reads what."""

from __future__ import annotations

import operator
from typing import Any, Mapping

import torch
from torch import fx

aten = torch.ops.aten

QUERIES = 16  # few: at most as many as a tensor core's tile has rows

# the name of each op's mask; None: it takes none
ATTENTION: Mapping[Any, str | None] = {
    aten._scaled_dot_product_efficient_attention.default: "attn_bias",
    aten._scaled_dot_product_cudnn_attention.default: "attn_bias",
    aten._scaled_dot_product_flash_attention.default: None,
    aten._scaled_dot_product_flash_attention_for_cpu.default: "attn_mask"}


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """All arguments by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args)) | node.kwargs
    return {a.name: given.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}


def only_result_is_read(node: fx.Node) -> bool:
    """Whether nobody reads the logsumexp, or what else a backward asks of attention."""
    return all(u.target is operator.getitem and (u.args[1] == 0 or not u.users) for u in node.users)
