"""The table itself and the questions that are asked of it."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Iterator, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.bitcast import BITCAST, bitcast_rows
from fxfuser.ops.cast import SUPPORTED
from fxfuser.ops.hashing import hashing_rows
from fxfuser.ops.logic import logic_rows
from fxfuser.ops.pointwise import CAST, COPY, exact_rows, pointwise
from fxfuser.ops.promotion import FLOAT8, promoted_dtype, value_of
from fxfuser.ops.random import random_rows
from fxfuser.ops.reductions import reduction_rows
from fxfuser.ops.refusals import refused
from fxfuser.ops.row import Kind, Operands, Row
from fxfuser.ops.scans import scan_rows
from fxfuser.ops.special import special_rows
from fxfuser.ops.structure import MASK_REASON, structure_rows
from fxfuser.ops.window_place import window_place_rows

aten = torch.ops.aten

# later rows win: max.dim is left to ATen with every other overload of max, max.default reduces
_ROWS: dict[OpOverload, Row] = \
    structure_rows() | reduction_rows() | scan_rows() | exact_rows() | logic_rows() | special_rows() | random_rows() \
    | window_place_rows() | hashing_rows() | bitcast_rows()
TABLE: Mapping[OpOverload, Row] = MappingProxyType(_ROWS)

# By name, since PyTorch defines them when first needed: what Dynamo makes of an addcmul or addcdiv that mutates
_DEFINED_LATER: Mapping[str, Row] = {"prims::fma": pointwise("{0} * {1} + {2}")}


def add_row(op: OpOverload, row: Row) -> None:
    """Teaches the table an op of another library, so that it is lowered and fused like ATen's own.

    A reduction has the schema (Tensor, int[] dim, bool keepdim=False) -> Tensor.  Errors: ValueError where the table
    has a row for it.
    """
    if op in _ROWS:
        raise ValueError(f"the op table has a row for {op}")
    _ROWS[op] = row


def row(target: Any) -> Row | None:
    """The row of an FX node's target; None where the table has none."""
    if not isinstance(target, OpOverload):
        return None
    found = TABLE.get(target)
    return found if found is not None else _DEFINED_LATER.get(target._schema.name)


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of a call node; None for placeholders, outputs, getitem, symbolic arithmetic and unknown ops."""
    found = row(node.target) if node.op == "call_function" else None
    return found.kind if found else None


def is_view(node: fx.Node) -> bool:
    """Whether the node aliases its first operand and moves no data."""
    return kind_of(node) is Kind.VIEW


def is_write_back(node: fx.Node) -> bool:
    """Whether this gives an input that the program has mutated its new value.

    AOTAutograd leaves these at the end, one for each such input, and everything else reads the old value or the new one
    by its own name.
    """
    target = node.args[0] if node.target is torch.ops.aten.copy_.default else None
    return isinstance(target, fx.Node) and target.op == "placeholder"


# Key of a node's meta: it is computed once all have read what it will be written over (passes/updates_last.py)
UPDATE_MARK = "update"

_PLACEHOLDER = re.compile(r"\{(\d+)\}")


def render(row: Row, operands: Operands) -> str:
    """The Triton expression of a POINTWISE row; its dtype is the compute dtype, or int1 where the result is bool."""
    if callable(row.emit):
        return row.emit(operands)
    assert row.emit is not None, "this row has no text"
    return _PLACEHOLDER.sub(lambda match: operands.text(int(match.group(1))), row.emit)


def reads_rounded(node: fx.Node, row: Row) -> bool:
    """Whether the node must read its half operands as rounded: see Row.rounded; casts to integers and float8 as well,
    whose steps show a rounding more."""
    return row.rounded or (row.rounds and _has_steps(node.meta["val"].dtype))


def _has_steps(dtype: torch.dtype) -> bool:
    return dtype in FLOAT8 or not dtype.is_floating_point


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node reads and returns, those in lists included."""
    values = [value_of(argument) for argument in node.all_input_nodes]
    for value in (*values, node.meta.get("val")):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


# Eager refuses float8 in the other gathers and changes of layout, or does on some devices
_FLOAT8_GATHERS = frozenset((aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default,
                             aten.embedding.default))
_FLOAT8_REFUSED = frozenset((aten.tril.default, aten.triu.default, aten.flip.default, torch.ops.prims.rev.default))


def _moves(node: fx.Node, found: Row) -> bool:
    """Whether a node may have float8 operands and results: it makes no numbers of them, but by a cast."""
    if found is CAST or found is COPY or found.kind is Kind.VIEW or node.target is BITCAST:
        return True
    if len({t.dtype for t in _tensors(node) if t.dtype.is_floating_point}) > 1 or node.target in _FLOAT8_REFUSED:
        return False
    if found.kind is Kind.POINTWISE:
        return node.target is aten.where.self and all(isinstance(value_of(a), torch.Tensor) for a in node.args)
    if found.kind is Kind.GATHER:
        return node.target in _FLOAT8_GATHERS
    return found.kind in (Kind.LAYOUT, Kind.FACTORY, Kind.SCATTER)


def _bad_tensor(node: fx.Node, found: Row) -> str | None:
    devices = set()
    for tensor in _tensors(node):
        if tensor.layout is not torch.strided:
            return f"layout {str(tensor.layout).removeprefix('torch.')}"
        if tensor.dtype not in SUPPORTED and not (tensor.dtype in FLOAT8 and _moves(node, found)):
            return f"dtype {str(tensor.dtype).removeprefix('torch.')}"
        devices.add(tensor.device)
    if len(devices) > 1:
        return "operands on several devices: " + ", ".join(sorted(map(str, devices)))
    return None


def _masked(node: fx.Node) -> str | None:
    """A gather whose positions are where a mask holds."""
    masks = (torch.bool, torch.uint8)
    return MASK_REASON if any(value_of(n).dtype in masks for n in node.all_input_nodes[1:]
                              if isinstance(value_of(n), torch.Tensor)) else None


def unsupported(node: fx.Node) -> str | None:
    """Why this call node cannot be lowered; None where a kernel can compute it (a view: be seen through)."""
    found = row(node.target)
    if found is None:
        return f"the op table has no row for {node.target}"
    if found.reason:
        return found.reason
    bad = _bad_tensor(node, found) or refused(node) or (_masked(node) if found.kind is Kind.GATHER else None)
    if bad is not None or found.kind is not Kind.POINTWISE:
        return bad
    dtype = promoted_dtype(node, found)
    if dtype not in SUPPORTED | FLOAT8 or (found.dtypes is not None and dtype not in found.dtypes):
        return f"{node.target} on {str(dtype).removeprefix('torch.')}"
    return None
