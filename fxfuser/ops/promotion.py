"""The dtype in which a node computes: PyTorch's type promotion over the values in an FX node's meta."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Iterable, Iterator, Union

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.row import Promotion, Row

Number = Union[bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool]


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic on `dtype`: fp32 for the half types, else itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Dtypes of storage: in kernels they are their bytes, which casts make and read, and all else only moves
FLOAT8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """How a value of that ATen dtype is held inside a kernel."""
    return torch.uint8 if dtype in FLOAT8 else opmath(dtype)


def memory_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a kernel's pointers to a tensor of that ATen dtype point to."""
    return torch.uint8 if dtype in FLOAT8 else dtype


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


@lru_cache(maxsize=4096)
def declared_arguments(target: OpOverload) -> tuple[Any, ...]:
    """The arguments that an op's schema declares; PyTorch makes new objects of them for whoever asks."""
    return tuple(target._schema.arguments)


def argument(node: fx.Node, position: int, default: Any = None) -> Any:
    """The schema argument at `position`, given by position or by name; else the schema's default, else `default`."""
    if position < len(node.args):
        return node.args[position]
    assert isinstance(node.target, OpOverload)
    declared = declared_arguments(node.target)[position]
    return node.kwargs.get(declared.name, declared.default_value if declared.has_default_value() else default)


def named_argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """The schema argument called `name`, given by position or by name; the schema's default, else `default`."""
    if name in node.kwargs:
        return node.kwargs[name]
    assert isinstance(node.target, OpOverload)
    for position, declared in enumerate(declared_arguments(node.target)):
        if declared.name != name:
            continue
        if position < len(node.args):
            return node.args[position]
        return declared.default_value if declared.has_default_value() else default
    return default


def _operands(node: fx.Node, row: Row) -> Iterator[torch.Tensor | Number]:
    assert isinstance(node.target, OpOverload)
    declared = declared_arguments(node.target)
    for position in row.operands or [i for i, a in enumerate(declared) if not a.kwarg_only]:
        value = value_of(argument(node, position))
        if isinstance(value, (torch.Tensor, bool, int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield value


def promoted_dtype(node: fx.Node, row: Row) -> torch.dtype:
    """The ATen dtype that the node's operands promote to; fp16 and bf16 stay what they are."""
    if row.promote in (Promotion.RESULT, Promotion.NONE):
        dtype: torch.dtype = node.meta["val"].dtype
        return dtype
    dtype = promoted(_operands(node, row))
    to_float = row.promote is Promotion.INT_TO_FLOAT or (
        row.promote is Promotion.DIVISION and named_argument(node, "rounding_mode") is None)
    if to_float and not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return dtype


def compute_dtype(node: fx.Node, row: Row) -> torch.dtype:
    """The dtype in which the kernel computes `node`; never fp16 or bf16."""
    return opmath(promoted_dtype(node, row))
