"""Products that ATen lacks, and ops of a loop that is unrolled over pieces of a tensor: what runs after what, products
that gather their results, and tensors that lie in the storage of what they become.

    wide_product(a, b)              a @ b of half matrices or batches of them in float32

    after(x, done)                  a view of x that exists once `done` has been computed: the edge that keeps one
                                    piece's buffers from being allocated before the last piece's have died
    add_product(into, a, b, dtype, alpha=1)
                                    into + alpha * a @ b in `dtype`, which may be wider than a's and b's; without
                                    `into`, a @ b
    put_product(into, a, b, start, rows, dtype)
                                    `into`, [rows, N] of `dtype`, with a @ b from row `start` on; without `into`, the
                                    other rows hold anything
    with_room(piece, shape)         a tensor of `shape` that ends with the elements of `piece`; the others hold anything

All are functional.  `IN_PLACE` maps those with `into` to functions that write to it instead of to a copy: a plan calls
them where nothing else reads what they overwrite.  A plan makes a `piece` inside its `with_room`, which then copies
nothing: so what is needed until some rows are written takes the memory of those rows.  Products of half types
accumulate in float32, and `add_product` into float32 rounds nothing in between.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping, Sequence

import torch
from torch._ops import OpOverload

from fxfuser.ops.row import Kind, Row
from fxfuser.ops.table import add_row

_PRODUCT = "a matrix product runs as its ATen kernel"


def _after(x: torch.Tensor, done: Sequence[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten.alias.default(x)
    return result


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if left.dtype is dtype:
        return left @ right
    if left.is_cuda:
        wide: torch.Tensor = torch.ops.aten.mm.dtype(left, right, dtype)
        return wide
    return left.to(dtype) @ right.to(dtype)


def add_product_(
    into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, alpha: float = 1
) -> torch.Tensor:
    """`into`, to which the product has been added."""
    if left.dtype is dtype:
        return into.addmm_(left, right, alpha=alpha)
    if left.is_cuda:
        wide: torch.Tensor = torch.ops.aten.addmm.dtype_out(into, left, right, dtype, alpha=alpha, out=into)
        return wide
    return into.addmm_(left.to(dtype), right.to(dtype), alpha=alpha)


def _add_product(
    into: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, alpha: float = 1
) -> torch.Tensor:
    return _product(left, right, dtype) if into is None else add_product_(into.clone(), left, right, dtype, alpha)


def _shape_of_sum(
    into: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, alpha: float = 1
) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


def put_product_(
    into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, start: int, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    """`into`, of whose rows some have been written."""
    part = into[start:start + left.shape[0]]
    if left.dtype is dtype:
        torch.mm(left, right, out=part)
    elif left.is_cuda:
        torch.ops.aten.mm.dtype_out(left, right, dtype, out=part)
    else:
        part.copy_(_product(left, right, dtype))
    return into


def _put_product(
    into: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, start: int, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    whole = _shape_of_rows(None, left, right, start, rows, dtype) if into is None else into.clone()
    return put_product_(whole, left, right, start, rows, dtype)


def _shape_of_rows(
    into: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, start: int, rows: int, dtype: torch.dtype
) -> torch.Tensor:
    return left.new_empty((rows, right.shape[1]), dtype=dtype)


def end_of(whole: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The last elements of a contiguous tensor, as a view of `shape`."""
    return whole.view(-1)[whole.numel() - math.prod(shape):].view(shape)


def _with_room(piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    whole = piece.new_empty(shape)
    end_of(whole, piece.shape).copy_(piece)
    return whole


def _shape_with_room(piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return piece.new_empty(shape)


def _wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.is_cuda and left.dtype is not torch.float32:
        product = torch.ops.aten.mm if left.dim() == 2 else torch.ops.aten.bmm
        wide: torch.Tensor = product.dtype(left, right, torch.float32)
        return wide
    return left.float() @ right.float()


def _shape_of_wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.new_empty((*left.shape[:-1], right.shape[-1]), dtype=torch.float32)


def _define(name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any] | None, row: Row) -> OpOverload:
    torch.library.define(f"fxfuser::{name}", schema)
    # a view has to be composite: fake tensors and functionalisation then see the alias, which they know
    key = "CompositeImplicitAutograd" if fake is None else "CompositeExplicitAutograd"
    torch.library.impl(f"fxfuser::{name}", key, body)
    if fake is not None:
        torch.library.register_fake(f"fxfuser::{name}", fake)
    op: OpOverload = getattr(torch.ops.fxfuser, name).default
    add_row(op, row)
    return op


AFTER = _define("after", "(Tensor(a) x, Tensor[] done) -> Tensor(a)", _after, None, Row(Kind.VIEW))
ADD_PRODUCT = _define(
    "add_product", "(Tensor? into, Tensor left, Tensor right, ScalarType dtype, Scalar alpha=1) -> Tensor",
    _add_product, _shape_of_sum, Row(Kind.EXTERN, reason=_PRODUCT))
PUT_PRODUCT = _define(
    "put_product", "(Tensor? into, Tensor left, Tensor right, SymInt start, SymInt rows, ScalarType dtype) -> Tensor",
    _put_product, _shape_of_rows, Row(Kind.EXTERN, reason=_PRODUCT))
WITH_ROOM = _define(
    "with_room", "(Tensor piece, SymInt[] shape) -> Tensor", _with_room, _shape_with_room,
    Row(Kind.EXTERN, reason="uninitialised memory with a piece that is made in it, or copied"))
WIDE_PRODUCT = _define(
    "wide_product", "(Tensor left, Tensor right) -> Tensor", _wide_product, _shape_of_wide,
    Row(Kind.GEMM, reason=_PRODUCT, cost=64))

# what an op may do in place: the function, which takes the same arguments and writes to the first
IN_PLACE: Mapping[Any, Callable[..., torch.Tensor]] = {ADD_PRODUCT: add_product_, PUT_PRODUCT: put_product_}
