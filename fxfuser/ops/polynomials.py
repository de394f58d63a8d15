"""Orthogonal polynomials as kernel text, by their three-term recurrences (NIST DLMF 18.9).

`x` and `n` are fp32 or fp64; the order is n cut to an integer, and one that is negative or no number gives 0, as in
PyTorch.  The recurrence runs up to the largest order that a program holds.  `tl.where` with two equal sides makes a
tile of a number beside a tile.
"""

from __future__ import annotations

_ORDER = '''
@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)
''', '''
@triton.jit
def largest_order(n):
    """The largest element, at least 0, as a number for loops; a lane past the end of its tensor holds anything, so
    it is at most 2^20."""
    bounded = tl.where((n >= 0) & (n <= 1048576.0), n, 0.0)
    if len(n.shape) == 0:
        return bounded.to(tl.int32)
    else:
        return tl.reduce(bounded, None, larger).to(tl.int32)
''', '''
@triton.jit
def whole_order(n):
    """n cut to an integer; -1 where it is none."""
    return tl.where(tl.abs(n) < float("inf"), truncate(n), -1.0)
'''

_CHEBYSHEV = '''
@triton.jit
def chebyshev_recurrence(y, first, n, closed):
    """The polynomial of order n that begins with 1 and `first`; `closed` inside (-1, 1) from order 9 on."""
    n = tl.where(y == y, whole_order(n), whole_order(n))
    y = y + n * 0.0
    first = first + n * 0.0
    inside = (tl.abs(y) < 1.0) & (n > 8.0)
    p = tl.full(y.shape, 1.0, y.dtype)
    q = first
    for k in tl.range(2, largest_order(tl.where(inside, 0.0, n)) + 1):
        r = (y + y) * q - p
        p = tl.where(n >= k, q, p)
        q = tl.where(n >= k, r, q)
    value = tl.where(inside, closed, tl.where(n == 0, 1.0, q))
    return tl.where(n < 0, 0.0, value)
''', '''
@triton.jit
def chebyshev_t(x, n):
    return chebyshev_recurrence(x, x, n, tl.cos(whole_order(n) * libdevice.acos(x)))
''', '''
@triton.jit
def chebyshev_u(x, n):
    angle = libdevice.acos(x)
    return chebyshev_recurrence(x, x + x, n, tl.sin((whole_order(n) + 1.0) * angle) / tl.sin(angle))
''', '''
@triton.jit
def chebyshev_v(x, n):
    angle = libdevice.acos(x)
    closed = tl.cos((whole_order(n) + 0.5) * angle) / tl.cos(0.5 * angle)
    return chebyshev_recurrence(x, x + x - 1.0, n, closed)
''', '''
@triton.jit
def chebyshev_w(x, n):
    angle = libdevice.acos(x)
    closed = tl.sin((whole_order(n) + 0.5) * angle) / tl.sin(0.5 * angle)
    return chebyshev_recurrence(x, x + x + 1.0, n, closed)
'''

_HERMITE = '''
@triton.jit
def hermite(y, weight, n):
    """H (y = 2x, weight 2) or He (y = x, weight 1); past order 128, in fp64 512, NaN, as in PyTorch."""
    n = tl.where(y == y, whole_order(n), whole_order(n))
    if n.dtype == tl.float64:
        n = tl.where(n > 512.0, float("nan"), n)
    else:
        n = tl.where(n > 128.0, float("nan"), n)
    y = y + n * 0.0
    p = tl.full(y.shape, 1.0, y.dtype)
    q = y
    for k in tl.range(1, largest_order(n)):
        r = y * q - weight * k * p
        p = tl.where(n > k, q, p)
        q = tl.where(n > k, r, q)
    value = tl.where(n == 0, 1.0, q)
    return tl.where(n < 0, 0.0, value)
''', '''
@triton.jit
def hermite_h(x, n):
    return hermite(x + x, 2.0, n)
''', '''
@triton.jit
def hermite_he(x, n):
    return hermite(x, 1.0, n)
'''

_LAGUERRE = '''
@triton.jit
def laguerre_l(x, n):
    n = tl.where(x == x, whole_order(n), whole_order(n))
    x = x + n * 0.0
    p = tl.full(x.shape, 1.0, x.dtype)
    q = 1.0 - x
    for k in tl.range(1, largest_order(n)):
        r = ((2.0 * k + 1.0 - x) * q - 1.0 * k * p) / (1.0 * k + 1.0)
        p = tl.where(n > k, q, p)
        q = tl.where(n > k, r, q)
    value = tl.where((n == 0) | (x == 0), 1.0, q)
    return tl.where(n < 0, 0.0, value)
'''

_LEGENDRE = '''
@triton.jit
def legendre_p(x, n):
    n = tl.where(x == x, whole_order(n), whole_order(n))
    x = x + n * 0.0
    p = tl.full(x.shape, 1.0, x.dtype)
    q = x
    for k in tl.range(1, largest_order(n)):
        r = ((2.0 * k + 1.0) * x * q - 1.0 * k * p) / (1.0 * k + 1.0)
        p = tl.where(n > k, q, p)
        q = tl.where(n > k, r, q)
    value = tl.where(n == 0, 1.0, q)
    return tl.where(n < 0, 0.0, value)
'''

POLYNOMIAL_SOURCES: tuple[str, ...] = (*_ORDER, *_CHEBYSHEV, *_HERMITE, _LAGUERRE, _LEGENDRE)
