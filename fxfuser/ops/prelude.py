"""Helper functions that kernel text may call: name -> source of one `@triton.jit` function.

A kernel's module includes those whose name occurs in its text, and those that they name in turn.  Each works
elementwise on any shape, in the dtype of its operands.  `libdevice` is CUDA's on the device and a torch-backed stand-in
in the interpreter.
"""

from __future__ import annotations

import re

from fxfuser.ops.bessel import BESSEL_SOURCES
from fxfuser.ops.exponent import EXPONENT_SOURCES
from fxfuser.ops.float8 import FLOAT8_SOURCES
from fxfuser.ops.gamma import GAMMA_SOURCES
from fxfuser.ops.philox import PHILOX_SOURCES
from fxfuser.ops.polynomials import POLYNOMIAL_SOURCES
from fxfuser.ops.trigonometric import TRIGONOMETRIC_SOURCES

_INTEGER_DIVISION = '''
@triton.jit
def floor_divide_int(a, b):
    """floor(a / b); Triton's // truncates."""
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
'''

_INTEGER_REMAINDER = '''
@triton.jit
def remainder_int(a, b):
    """The remainder with the divisor's sign."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
'''

_REMAINDER = '''
@triton.jit
def remainder_float(a, b):
    """The remainder with the divisor's sign; exact, since fmod is."""
    rest = libdevice.fmod(a, b)
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
'''

_DIVIDE = '''
@triton.jit
def divide_exact(a, b):
    """a / b rounded to nearest; the plain fp32 quotient may be 2 units of the last place off."""
    if a.dtype == tl.float32:
        return tl.div_rn(a, b)
    else:
        return a / b
'''

# by its bits: the compiler then rounds two numbers with one instruction, and not each with one at a quarter of the rate
_THROUGH_BFLOAT16 = '''
@triton.jit
def through_bfloat16(x):
    """fp32 rounded to bfloat16 and back."""
    return (x.to(tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
'''

_WITHIN_FLOAT16 = '''
@triton.jit
def within_float16(x):
    """x, an infinity of its sign where float16 rounds it to one."""
    return tl.where(tl.abs(x) < 65520.0, x, x * 1e38)
'''

_JUST_BELOW = '''
@triton.jit
def just_below(m, kind: tl.constexpr):
    """The largest number whose rounding to `kind`, ties to even, is below m, which is of that kind; a half is held as
    fp32.  Nothing but NaN is above that of NaN, which is inf; that of -inf is NaN, as there is none."""
    held: tl.constexpr = tl.int64 if kind == tl.float64 else tl.int32
    bits = (m + 0.0).to(held, bitcast=True)
    lowest: tl.constexpr = -(2**63) if kind == tl.float64 else -(2**31)
    bits = tl.where(bits == 0, lowest, bits)
    step = tl.full([], 1, held)
    if kind == tl.bfloat16:
        step = 0x8001 - ((bits >> 16) & 1)
    if kind == tl.float16:
        bits = tl.where(m == float('inf'), 0x47800000, bits)
        step = 0x1001 - ((bits >> 13) & 1)
    edge = tl.where(bits > 0, bits - step, bits + step)
    if kind == tl.float16:
        middle = (m - 2.0**-25).to(tl.int32, bitcast=True)
        even = 1 - ((tl.abs(m) * 2.0**24).to(tl.int32) & 1)
        fine = tl.where(middle > 0, middle - even, middle + even)
        edge = tl.where((m > -(2.0**-14)) & (m <= 2.0**-14), fine, edge)
    below = tl.where(m != m, float('inf'), edge.to(m.dtype, bitcast=True))
    return tl.where(m == float('-inf'), float('nan'), below)
'''

_COLUMN_SUMS = '''
@triton.jit
def column_sums(tile):
    """The sums over the rows of a tile of halves, [1, columns] in fp32: a product with ones, as tensor cores add what
    lanes would else have to pass to each other.  All 16 rows of it, the fewest that there are, are these sums."""
    ones = tl.full([16, tile.shape[0]], 1.0, tl.float32).to(tile.dtype)
    return tl.reduce(tl.dot(ones, tile), 0, first_of_two, keep_dims=True)
'''

_COLUMN_STRIP = '''
@triton.jit
def column_strip(tile, number: tl.constexpr, width: tl.constexpr):
    """Columns number * width to (number + 1) * width of a tile; width is its own, a half or a quarter of it.  They stay
    in the registers where they are."""
    half: tl.constexpr = tile.shape[1] // 2
    if half >= width:
        low, high = tl.split(tl.permute(tile.reshape([tile.shape[0], 2, half]), [0, 2, 1]))
        tile = low if number * width < half else high
        if half > width:
            low, high = tl.split(tl.permute(tile.reshape([tile.shape[0], 2, width]), [0, 2, 1]))
            tile = low if number % 2 == 0 else high
    return tile
'''

_FIRST_OF_TWO = '''
@triton.jit
def first_of_two(a, b):
    """Of elements that are all equal."""
    return a
'''

_FLOOR_DIVIDE = '''
@triton.jit
def floor_divide_float(a, b):
    """floor(a / b) as Python and PyTorch define it: from the exact remainder, so that 1.0 // 0.1 is 9."""
    true_quotient = divide_exact(a, b)
    rest = libdevice.fmod(a, b)
    quotient = divide_exact(a - rest, b)
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1.0, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    signed_zero = true_quotient * 0.0
    whole = tl.where(quotient != 0, whole, tl.where(signed_zero == 0, signed_zero, whole))
    return tl.where(b == 0, true_quotient, whole)
'''

_FLOOR_DIVIDE_HALF = '''
@triton.jit
def floor_divide_half(a, b, half: tl.constexpr):
    """floor(a / b) of halves held as fp32, with every step rounded: eager computes it in the half dtype."""
    rest = libdevice.fmod(a, b)
    quotient = divide_exact((a - rest).to(half).to(tl.float32), b).to(half).to(tl.float32)
    lower = (quotient - 1.0).to(half).to(tl.float32)
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), lower, quotient)
    whole = tl.floor(quotient)
    whole = tl.where(quotient - whole > 0.5, whole + 1.0, whole)
    signed_zero = divide_exact(a, b) * 0.0
    whole = tl.where(quotient != 0, whole, tl.where(signed_zero == 0, signed_zero, whole))
    return tl.where(b == 0, divide_exact(a, b), whole)
'''

_TRUNCATE = '''
@triton.jit
def truncate(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))
'''

_SIGN_BIT = '''
@triton.jit
def sign_bit(x):
    """Whether the float's sign bit is set: true of -0.0 and of negative NaNs."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) < 0
    else:
        return x.to(tl.int64, bitcast=True) < 0
'''

_POWER = '''
@triton.jit
def integer_power(base, exponent):
    """base ** exponent, wrapping; a negative exponent gives 0, or +-1 where the base is +-1."""
    base = base + exponent * 0  # one shape: a loop carries it
    result = base * 0 + 1
    square = base
    rest = tl.where(exponent < 0, exponent * 0, exponent)
    for _ in range(63):
        result = tl.where((rest & 1) != 0, result * square, result)
        square = square * square
        rest = rest >> 1
    odd = (exponent & 1) != 0
    inverse = tl.where(base == 1, base, tl.where(base == -1, tl.where(odd, base, base * base), base * 0))
    return tl.where(exponent < 0, inverse, result)
'''

_GCD = '''
@triton.jit
def greatest_common_divisor(a, b):
    """Euclid; 91 steps suffice for 64 bits."""
    a = tl.abs(a) + b * 0  # one shape: a loop carries them
    b = tl.abs(b) + a * 0
    for _ in range(91):
        rest = a % tl.where(b == 0, b * 0 + 1, b)
        a = tl.where(b == 0, a, b)
        b = tl.where(b == 0, b, rest)
    return a
'''

_LCM = '''
@triton.jit
def least_common_multiple(a, b):
    """|a / gcd * b|; narrow integers multiply as int32, as C promotes them, and wrap at the end."""
    divisor = greatest_common_divisor(a, b)
    quotient = a // tl.where(divisor == 0, divisor + 1, divisor)
    if a.dtype == tl.int64 or a.dtype == tl.int32:
        return tl.abs(quotient * b)
    else:
        return tl.abs(quotient.to(tl.int32) * b.to(tl.int32)).to(a.dtype)
'''


def _by_name(*sources: str) -> dict[str, str]:
    named = {}
    for source in sources:
        match = re.search(r"def (\w+)\(", source)
        assert match is not None
        named[match.group(1)] = source.strip() + "\n"
    return named


PRELUDE: dict[str, str] = _by_name(
    _INTEGER_DIVISION, _INTEGER_REMAINDER, _REMAINDER, _DIVIDE, _FLOOR_DIVIDE, _FLOOR_DIVIDE_HALF, _TRUNCATE,
    _THROUGH_BFLOAT16, _WITHIN_FLOAT16, _JUST_BELOW, _COLUMN_SUMS, _COLUMN_STRIP, _FIRST_OF_TWO, _SIGN_BIT, _POWER,
    _GCD, _LCM, *BESSEL_SOURCES, *GAMMA_SOURCES, *POLYNOMIAL_SOURCES, *PHILOX_SOURCES, *EXPONENT_SOURCES,
    *FLOAT8_SOURCES, *TRIGONOMETRIC_SOURCES)


def prelude_for(text: str) -> str:
    """The sources of every prelude function that `text` names, directly or through another, callees first."""
    needed: dict[str, None] = {}

    def visit(body: str, own: str = "") -> None:
        for name in PRELUDE:
            if name != own and name not in needed and re.search(rf"(?<![\w.]){name}\b", body):
                visit(PRELUDE[name], name)
                needed[name] = None

    visit(text)
    return "\n\n".join(PRELUDE[name] for name in needed)
