"""frexp: a mantissa in [1/2, 1) and a power of two, by the bits of a float.

frexp returns two tensors; the expand pass makes a prim of each, which share their load.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from fxfuser.ops.cast import FLOATS
from fxfuser.ops.pointwise import pointwise
from fxfuser.ops.row import Row

_FIELD = '''
@triton.jit
def raised(x):
    """x, times 2^64 where its exponent field may be 0; exact."""
    if x.dtype == tl.float32:
        return tl.where(tl.abs(x) < 1.1754943508222875e-38, x * 18446744073709551616.0, x)
    else:
        return tl.where(tl.abs(x) < 2.2250738585072014e-308, x * 18446744073709551616.0, x)
''', '''
@triton.jit
def exponent_field(x):
    """What a float's exponent bits say beyond those of [1/2, 1), as an integer of its width."""
    if x.dtype == tl.float32:
        return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126
    else:
        return ((x.to(tl.int64, bitcast=True) >> 52) & 2047) - 1022
'''

_EXPONENT = '''
@triton.jit
def frexp_power(x):
    """The exponent, as a float; 0 of zeros, infinities and NaN."""
    y = raised(x)
    power = exponent_field(y).to(x.dtype)
    power = tl.where(y == x, power, power - 64.0)
    return tl.where((x == 0) | (x - x != 0), 0.0, power)
'''

_MANTISSA = '''
@triton.jit
def frexp_fraction(x):
    """The mantissa with the sign of x; zeros, infinities and NaN are their own."""
    y = raised(x)
    if x.dtype == tl.float32:
        fraction = (y.to(tl.int32, bitcast=True) - (exponent_field(y) << 23)).to(tl.float32, bitcast=True)
    else:
        fraction = (y.to(tl.int64, bitcast=True) - (exponent_field(y) << 52)).to(tl.float64, bitcast=True)
    return tl.where((x == 0) | (x - x != 0), x, fraction)
'''

EXPONENT_SOURCES: tuple[str, ...] = (*_FIELD, _EXPONENT, _MANTISSA)


def _prim(name: str, result: int) -> OpOverload:
    """`fxfuser::name(x)`: one of the two results of frexp."""
    def reference(x: torch.Tensor) -> torch.Tensor:
        return torch.frexp(x)[result].clone()

    made = torch.library.custom_op(f"fxfuser::{name}", reference, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(lambda x: torch.empty_like(x, dtype=torch.int32 if result else x.dtype))
    overload: OpOverload = getattr(torch.ops.fxfuser, name).default
    return overload


FREXP_MANTISSA, FREXP_EXPONENT = _prim("frexp_mantissa", 0), _prim("frexp_exponent", 1)


def exponent_rows() -> dict[OpOverload, Row]:
    """Every row of this file; the bits are those of what eager stored."""
    return {FREXP_MANTISSA: pointwise("frexp_fraction({0})", cost=4, rounded=True, dtypes=FLOATS),
            FREXP_EXPONENT: pointwise("frexp_power({0})", cost=4, rounded=True, dtypes=FLOATS)}
