"""Numbers that eager refuses: its kernels ask whether a number fits where they convert it, ours would wrap it.

A call with such a number is left to ATen, which knows best, and says what is wrong in the words that the user knows.
What is asked here may therefore admit too little, but never too much.
"""

from __future__ import annotations

import math
from typing import Any, Mapping

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.promotion import named_argument, value_of

aten = torch.ops.aten

# by overload packet, the arguments that become a number of the result's dtype
CONVERTED: Mapping[Any, tuple[str, ...]] = {
    aten.full: ("fill_value",), aten.full_like: ("fill_value",), aten.fill: ("value",), aten.scalar_tensor: ("s",),
    aten.masked_fill: ("value",), aten.constant_pad_nd: ("value",), aten.where: ("self", "other"),
    aten.clamp: ("min", "max"), aten.clamp_min: ("min",), aten.clamp_max: ("max",),
    aten.add: ("alpha",), aten.sub: ("alpha",), aten.rsub: ("alpha",), aten.addcmul: ("value",),
    aten.pow: ("exponent",), aten.threshold: ("threshold", "value"),
}

NOT_WRAPPED = (aten.constant_pad_nd,)


def refused(node: fx.Node) -> str | None:
    """Why eager may refuse a number that it is given in this call; None where it takes all."""
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else None
    if packet not in CONVERTED:
        return None
    dtype = node.meta["val"].dtype
    for name in CONVERTED[packet]:
        number = named_argument(node, name)
        if isinstance(number, (bool, int, float)) and not _fits(number, dtype, packet in NOT_WRAPPED):
            return f"{number} is no {_name(dtype)}"
        if name == "alpha" and not _scales(number, dtype):
            return f"a factor {number} for {_name(dtype)}"
    if packet in (aten.sub, aten.rsub) and _subtracts_bool(node):
        return "a difference of bool"
    exponent = named_argument(node, "exponent") if packet is aten.pow else None
    if isinstance(exponent, int) and exponent < 0 and not (dtype.is_floating_point or dtype.is_complex):
        return "an integer to a negative power"
    return None


def _fits(number: bool | int | float, dtype: torch.dtype, strict: bool) -> bool:
    if dtype == torch.bool or dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(number) or abs(number) <= torch.finfo(dtype).max
    info = torch.iinfo(dtype)
    # of a negative integer c10 makes an unsigned one by its two's complement
    least = -info.max if info.min == 0 and isinstance(number, int) and not strict else info.min
    return math.isfinite(number) and least <= number <= info.max


def _scales(alpha: Any, dtype: torch.dtype) -> bool:
    """Whether eager multiplies a term of that dtype by `alpha`: by no truth value, and integers by integers only."""
    if isinstance(alpha, bool):
        return dtype == torch.bool
    return not isinstance(alpha, float) or dtype.is_floating_point or dtype.is_complex


def _subtracts_bool(node: fx.Node) -> bool:
    values = (value_of(argument) for argument in node.args[:2])
    return any(isinstance(v, bool) or isinstance(v, torch.Tensor) and v.dtype == torch.bool for v in values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
