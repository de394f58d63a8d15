"""The table itself and the questions that are asked of it."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Callable, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.row import Kind, Operands, Row

aten = torch.ops.aten

TABLE: Mapping[OpOverload, Row] = MappingProxyType({
    aten.add.Tensor: Row(Kind.POINTWISE, "{0} + {1}"),
    aten.mul.Tensor: Row(Kind.POINTWISE, "{0} * {1}"),
    aten.view.default: Row(Kind.VIEW),
    aten.sum.dim_IntList: Row(Kind.REDUCTION, monoid="sum"),
})

LIBDEVICE: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType({})


def row(target: Any) -> Row | None:
    """The row of an FX node's target; None where the table has none."""
    return TABLE.get(target) if isinstance(target, OpOverload) else None


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a call node; None for placeholders, outputs, getitem and symbolic arithmetic."""
    found = row(node.target) if node.op == "call_function" else None
    return found.kind if found else None


def is_view(node: fx.Node) -> bool:
    """Whether the node aliases its first operand and moves no data."""
    return kind_of(node) is Kind.VIEW


_PLACEHOLDER = re.compile(r"\{(\d+)\}")


def render(row: Row, operands: Operands) -> str:
    """The Triton expression of a POINTWISE row; its dtype is the compute dtype, or int1 where the result is bool."""
    if callable(row.emit):
        return row.emit(operands)
    assert row.emit is not None, "only POINTWISE rows have text"
    return _PLACEHOLDER.sub(lambda match: operands.text(int(match.group(1))), row.emit)


def reads_rounded(node: fx.Node, row: Row) -> bool:
    """Whether the node must read its half operands as rounded: see Row.rounded; casts to integers as well."""
    return row.rounded or (row.rounds and not node.meta["val"].dtype.is_floating_point)


def reduction_dims(node: fx.Node) -> tuple[tuple[int, ...], bool]:
    """The reduced dimensions of a REDUCTION node, non-negative and sorted, and whether they are kept as 1."""
    raise NotImplementedError


def reduction_dtype(node: fx.Node) -> torch.dtype:
    """The dtype in which a REDUCTION node's monoid accumulates."""
    raise NotImplementedError


def unsupported(node: fx.Node) -> str | None:
    """Why this node cannot be lowered; None where a kernel can compute it."""
    found = row(node.target)
    if found is None:
        return f"no row for {node.target}"
    return found.reason or None if found.kind is Kind.EXTERN else None
