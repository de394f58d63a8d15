"""Row of a number's bits as a number of another dtype: what `view(dtype)` gives of a value that a kernel has.

Kernels hold halves as fp32, whose upper bits those of a bfloat16 are; float8 as its bytes.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from fxfuser.ops.cast import SUPPORTED, TRITON_NAMES
from fxfuser.ops.pointwise import pointwise
from fxfuser.ops.promotion import FLOAT8, kernel_dtype
from fxfuser.ops.row import Operands, Promotion, Row

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def _value(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.view(dtype).clone()


torch.library.custom_op("fxfuser::bitcast", _value, mutates_args=(), schema="(Tensor x, ScalarType dtype) -> Tensor"
                        ).register_fake(lambda x, dtype: torch.empty_like(x, dtype=dtype))
# the same bits; both dtypes have as many
BITCAST: OpOverload = torch.ops.fxfuser.bitcast.default


def castable(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether kernels can read the bits of one dtype as those of another: bools have no others than two bytes."""
    known = (SUPPORTED | FLOAT8) - {torch.bool}
    return {source, target} <= known and source.itemsize == target.itemsize


def _bitcast(ops: Operands) -> str:
    source, target = ops.source(0), ops.argument("dtype")
    return _of_bits(_bits(ops.raw(0), source), target)


def _bits(text: str, source: torch.dtype) -> str:
    """A value's bits as a signed integer of its size."""
    wanted = TRITON_NAMES[SIGNED[source.itemsize]]
    if source is torch.bfloat16:
        return f"({text}.to(tl.int32, bitcast=True) >> 16).to({wanted})"
    held = f"{text}.to(tl.float16)" if source is torch.float16 else text
    return held if kernel_dtype(source) is SIGNED[source.itemsize] else f"{held}.to({wanted}, bitcast=True)"


def _of_bits(text: str, target: torch.dtype) -> str:
    """What a kernel holds of a value of these bits."""
    if target is torch.bfloat16:
        return f"({text}.to(tl.int32) << 16).to(tl.float32, bitcast=True)"
    if target is torch.float16:
        return f"{text}.to(tl.float16, bitcast=True).to(tl.float32)"
    held = kernel_dtype(target)
    return text if held is SIGNED[target.itemsize] else f"{text}.to({TRITON_NAMES[held]}, bitcast=True)"


def bitcast_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    return {BITCAST: pointwise(_bitcast, Promotion.NONE, rounded=True)}
