"""The dtype in which a node computes: PyTorch's type promotion over the values in an FX node's meta."""

from __future__ import annotations

from typing import Any, Iterable, Iterator, Union

import torch
from torch import fx

from fxfuser.ops.row import Promotion, Row

Number = Union[bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool]


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic on `dtype`: fp32 for the half types, else itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


kernel_dtype = opmath  # how a value of that ATen dtype is held inside a kernel


def _number_dtype(value: Number) -> torch.dtype:
    if isinstance(value, (bool, torch.SymBool)):
        return torch.bool
    if isinstance(value, (int, torch.SymInt)):
        return torch.int64
    if isinstance(value, complex):
        return torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
    return torch.get_default_dtype()


def _join(left: torch.dtype | None, right: torch.dtype) -> torch.dtype:
    return right if left is None else torch.promote_types(left, right)


def _absorb(strong: torch.dtype | None, weak: torch.dtype | None) -> torch.dtype | None:
    """`strong` unless the weak operands are of a higher category (bool < integer < float < complex)."""
    if strong is None or weak is None:
        return weak if strong is None else strong
    if strong.is_complex:
        return strong
    if strong.is_floating_point:
        return strong.to_complex() if weak.is_complex else strong
    if strong == torch.bool or weak.is_floating_point or weak.is_complex:
        return torch.promote_types(strong, weak)
    return strong


def promoted(values: Iterable[torch.Tensor | Number]) -> torch.dtype:
    """PyTorch's result type: tensors with dimensions rule, then 0-d tensors, then Python numbers."""
    dimensioned: torch.dtype | None = None
    scalar: torch.dtype | None = None
    number: torch.dtype | None = None
    for value in values:
        if not isinstance(value, torch.Tensor):
            number = _join(number, _number_dtype(value))
        elif value.dim():
            dimensioned = _join(dimensioned, value.dtype)
        else:
            scalar = _join(scalar, value.dtype)
    joined = _absorb(_absorb(dimensioned, scalar), number)
    if joined is None:
        raise ValueError("promotion of no operands")
    return joined


def value_of(argument: Any) -> Any:
    """The fake tensor or symbolic number behind an FX argument; a constant is itself."""
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _operands(node: fx.Node, positions: tuple[int, ...] | None) -> Iterator[torch.Tensor | Number]:
    arguments = node.args if positions is None else [node.args[i] for i in positions if i < len(node.args)]
    for argument in arguments:
        value = value_of(argument)
        if isinstance(value, (torch.Tensor, bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value


def compute_dtype(node: fx.Node, row: Row) -> torch.dtype:
    """The dtype in which the kernel computes `node`; never fp16 or bf16."""
    result = node.meta["val"]
    if row.promote in (Promotion.RESULT, Promotion.NONE):
        return opmath(result.dtype)
    dtype = promoted(_operands(node, row.operands))
    if row.promote is Promotion.INT_TO_FLOAT and not (dtype.is_floating_point or dtype.is_complex):
        dtype = torch.get_default_dtype()
    return opmath(dtype)
