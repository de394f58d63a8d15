"""Sines and cosines of fp32 by one reduction of the angle, and hyperbolic tangents for results that are half.

libdevice reduces each angle anew, with a branch and an array of the thread's own for large ones, so that the compiler
neither shares the work of a sine with that of its cosine nor unrolls over a thread's elements.  The reduction here is
Cody and Waite's (Software Manual for the Elementary Functions, 1980) in three steps of fma; only where a program has
an angle beyond NEAR, whose elements alone take libdevice's result, does it branch.
"""

from __future__ import annotations

import torch

from fxfuser.ops.row import Operands

# pi / 2 as a multiple of 2^-19, of which up to 2^17 turns leave an exact rest, and what that lacks, twice.  The
# polynomials on [-pi/4, pi/4] are least-squares fits, weighted until the relative error was even: 4e-9 and 1e-10
_NEAR = '''
@triton.jit
def sine_cosine_near(x):
    """(sin x, cos x) of fp32 up to 65536, within two units of the last place."""
    shifted = tl.fma(x, 0.6366197723675814, 12582912.0)  # whose low bits are the number of quarter turns
    turns = shifted - 12582912.0
    rest = tl.fma(turns, -1.5707950592041016, x)
    rest = tl.fma(turns, -1.2675907328230096e-06, rest)
    rest = tl.fma(turns, -6.223371969669989e-14, rest)
    square = rest * rest
    s = tl.fma(square, -0.00019514957966748625, 0.00833215843886137)
    s = tl.fma(s, square, -0.16666655242443085)
    s = tl.fma(s, tl.fma(square, rest, 0.0), rest)  # the zero keeps the sign of -0
    c = tl.fma(square, 2.4438089894829318e-05, -0.0013887364184483886)
    c = tl.fma(c, square, 0.04166664555668831)
    c = tl.fma(tl.fma(c, square, -0.5), square, 1.0)
    return quarter_turned(s, c, shifted.to(tl.int32, bitcast=True))
'''

# the same for results that are rounded to bfloat16: relative errors of 2^-19 and 2^-16, and a rest within 3e-9
_COARSE = '''
@triton.jit
def sine_cosine_coarse_near(x):
    """(sin x, cos x) of fp32 up to 65536, within 2^-16 of themselves for any x of bfloat16."""
    shifted = tl.fma(x, 0.6366197723675814, 12582912.0)
    turns = shifted - 12582912.0
    rest = tl.fma(turns, -1.5707950592041016, x)
    rest = tl.fma(turns, -1.2675907328230096e-06, rest)
    square = rest * rest
    s = tl.fma(tl.fma(square, 0.00816461, -0.16663459), tl.fma(square, rest, 0.0), rest)
    c = tl.fma(tl.fma(square, 0.04045845, -0.49976056), square, 1.0)
    return quarter_turned(s, c, shifted.to(tl.int32, bitcast=True))
'''

_TURNED = '''
@triton.jit
def quarter_turned(s, c, quarter):
    """(sine, cosine) of an angle whose rest after this many quarter turns has these."""
    odd = (quarter & 1) != 0
    sine = tl.where(odd, c, s).to(tl.int32, bitcast=True) ^ ((quarter & 2) << 30)
    cosine = tl.where(odd, s, c).to(tl.int32, bitcast=True) ^ (((quarter + 1) & 2) << 30)
    return sine.to(tl.float32, bitcast=True), cosine.to(tl.float32, bitcast=True)
'''

_GREATER = '''
@triton.jit
def greater_of_two(a, b):
    return tl.maximum(a, b)
'''

_FAR = '''
@triton.jit
def sine_cosine_everywhere(x, sine, cosine):
    """(sin x, cos x) of fp32, which are given up to 65536."""
    size = tl.abs(x)
    largest = size
    if len(x.shape) > 0:
        largest = tl.reduce(size, None, greater_of_two)
    if largest > 65536.0:
        far = size > 65536.0
        sine = tl.where(far, tl.sin(x), sine)
        cosine = tl.where(far, tl.cos(x), cosine)
    return sine, cosine
'''

_PAIR = '''
@triton.jit
def sine_cosine(x):
    """(sin x, cos x) of fp32."""
    sine, cosine = sine_cosine_near(x)
    return sine_cosine_everywhere(x, sine, cosine)
'''

_COARSE_PAIR = '''
@triton.jit
def sine_cosine_coarse(x):
    """(sin x, cos x) of fp32, for results that are rounded to bfloat16."""
    sine, cosine = sine_cosine_coarse_near(x)
    return sine_cosine_everywhere(x, sine, cosine)
'''

_TANH = '''
@triton.jit
def tanh_coarse(x):
    """tanh x of fp32 within 2^-18 of itself: by an exponential, and near 0, where that would cancel, by its series."""
    power = tl.exp2(tl.abs(x) * -2.8853900817779268)
    inverse = tl.rsqrt(1.0 + power)
    bits = ((1.0 - power) * (inverse * inverse)).to(tl.int32, bitcast=True)
    large = (bits | (x.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < 0.0625, x * tl.fma(x * x, -0.3333333333333333, 1.0), large)
'''

TRIGONOMETRIC_SOURCES: tuple[str, ...] = (_NEAR, _COARSE, _TURNED, _GREATER, _FAR, _PAIR, _COARSE_PAIR, _TANH)


def sine(ops: Operands) -> str:
    """The text of a row."""
    return _of_pair(ops, "sin", 0)


def cosine(ops: Operands) -> str:
    """The text of a row."""
    return _of_pair(ops, "cos", 1)


def _of_pair(ops: Operands, builtin: str, index: int) -> str:
    """A kernel that needs both has them from one value."""
    x = ops.text(0)
    if ops.precise or ops.dtype != torch.float32:
        return f"tl.{builtin}({x})"
    function = "sine_cosine_coarse" if ops.result == torch.bfloat16 else "sine_cosine"
    return f"{ops.let(f'{function}({x})')}[{index}]"


def hyperbolic_tangent(ops: Operands) -> str:
    """The text of a row."""
    coarse = not ops.precise and ops.dtype == torch.float32 and ops.result in (torch.float16, torch.bfloat16)
    return f"{'tanh_coarse' if coarse else 'libdevice.tanh'}({ops.text(0)})"
