"""Rows of the two prims that a hash of a tensor consists of: the bits of a number, and their exclusive or.

The hash is an unsigned integer of 64 bits; the prims hold it as a signed one.
"""

from __future__ import annotations

from typing import Callable, Sequence

import torch
from torch._ops import OpOverload

from fxfuser.ops.monoids import Monoid, function
from fxfuser.ops.pointwise import pointwise
from fxfuser.ops.row import Kind, Promotion, Row


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int64).clone()


def _exclusive_or(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    """Halves of the folded dimensions on each other, until one element is left."""
    kept = [d for d in range(x.dim()) if d not in dim]
    rows = x.permute([*kept, *dim]).reshape([*(x.shape[d] for d in kept), -1] if x.numel() else [0])
    if not x.numel():
        return torch.zeros_like(_reduced_shape(x, dim, keepdim))
    while rows.shape[-1] > 1:
        half = rows.shape[-1] // 2
        rows = torch.cat((rows[..., :half] ^ rows[..., half:2 * half], rows[..., 2 * half:]), -1)
    return rows.reshape(_reduced_shape(x, dim, keepdim).shape).clone()


def _reduced_shape(x: torch.Tensor, dim: Sequence[int], keepdim: bool = False) -> torch.Tensor:
    return x.new_empty([1 if d in dim else s for d, s in enumerate(x.shape) if keepdim or d not in dim])


def _prim(name: str, schema: str, reference: Callable[..., torch.Tensor], shape: Callable[..., torch.Tensor],
          ) -> OpOverload:
    made = torch.library.custom_op(f"fxfuser::{name}", reference, mutates_args=(), schema=schema)
    made.register_fake(shape)
    overload: OpOverload = getattr(torch.ops.fxfuser, name).default
    return overload


BITS64 = _prim("bits64", "(Tensor x) -> Tensor", _bits, lambda x: torch.empty_like(x, dtype=torch.int64))
# over the dimensions `dim`, none of which is negative; of none: 0
EXCLUSIVE_OR = _prim("exclusive_or", "(Tensor x, int[] dim, bool keepdim=False) -> Tensor", _exclusive_or,
                     _reduced_shape)

_MONOID = Monoid("exclusive_or", "combine_exclusive_or", function("combine_exclusive_or", "a, b", "return a ^ b"),
                 lambda dtype: (0,), splits=True)


def hashing_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    return {BITS64: pointwise(lambda ops: f"{ops.raw(0)}.to(tl.int64, bitcast=True)", Promotion.NONE),
            EXCLUSIVE_OR: Row(Kind.REDUCTION, promote=Promotion.RESULT, monoid=_MONOID)}
