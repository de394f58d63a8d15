"""Float8 as bytes: helper functions of kernel text, for `prelude`.

By their bits, as c10 does it (Float8_e4m3fn.h and Float8_e5m2.h of torch/headeronly/util), so that one text is exact
in the interpreter and on devices that have no instruction for it.
"""

import torch

# what PyTorch makes of a number that is too large: the largest there is from 2.13 on, before NaN
_OVERFLOW = int(torch.tensor(1e4).to(torch.float8_e4m3fn).view(torch.uint8))

_FROM_E4M3FN = '''
@triton.jit
def from_float8_e4m3fn(x):
    """Bytes as fp32: a half has four more bits for its mantissa than the three that are there, and another bias."""
    size = tl.where((x & 127) == 127, 0x7E00, (x & 127).to(tl.int32) << 7)
    half = (size | ((x & 128).to(tl.int32) << 8)).to(tl.uint16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0
'''

_FROM_E5M2 = '''
@triton.jit
def from_float8_e5m2(x):
    """Bytes as fp32: they are the upper ones of a half."""
    return (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
'''

_TO_E4M3FN = f'''
@triton.jit
def to_float8_e4m3fn(x):
    """fp32 rounded to nearest even, as bytes; numbers above 464 and infinities are no smaller than the largest.  A sum
    with 2^14 rounds to multiples of 2^-9, which the numbers below 2^-6 are."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    normal = (size - 0x3C000000 + 0x7FFFF + ((size >> 20) & 1)) >> 20
    byte = tl.where(size < 0x3C800000, small, normal)
    byte = tl.where(size > 0x43E80000, tl.where(size > 0x7F800000, 127, {_OVERFLOW}), byte)
    return (byte | ((bits >> 24) & 128)).to(tl.uint8)
'''

_TO_E5M2 = '''
@triton.jit
def to_float8_e5m2(x):
    """fp32 rounded to nearest even, as bytes.  A sum with 2^7 rounds to multiples of 2^-16, which the numbers below
    2^-14 are."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
    normal = (size - 0x38000000 + 0xFFFFF + ((size >> 21) & 1)) >> 21
    byte = tl.where(size < 0x38800000, small, normal)
    byte = tl.where(size >= 0x47800000, tl.where(size > 0x7F800000, 127, 124), byte)
    return (byte | ((bits >> 24) & 128)).to(tl.uint8)
'''

FLOAT8_SOURCES = (_FROM_E4M3FN, _FROM_E5M2, _TO_E4M3FN, _TO_E5M2)
