"""The gamma function's relatives as kernel text: psi and its derivatives, Hurwitz's zeta, the incomplete gammas.

The functions take and return fp32 or fp64.  A number that is assigned becomes fp32: constants stand inside
expressions with a tensor.
"""

from __future__ import annotations

from fractions import Fraction

from fxfuser.ops.bessel import polynomial

DIGAMMA = '''
@triton.jit
def digamma(x):
    """psi(x): reflection for x < 0, recurrence up to 10, then the asymptotic series.

    Poles at negative integers are NaN, at +-0 an infinity of the opposite sign, as in PyTorch.
    """
    fraction = x - truncate(x)
    angle = fraction * 3.141592653589793
    reflection = tl.cos(angle) / tl.sin(angle) * -3.141592653589793
    y = tl.where(x < 0, 1.0 - x, x)
    shift = tl.full(y.shape, 0.0, y.dtype)
    for _ in range(10):
        shift = tl.where(y < 10.0, shift - 1.0 / y, shift)
        y = tl.where(y < 10.0, y + 1.0, y)
    z = 1.0 / (y * y)
    series = z * (0.08333333333333333 - z * (0.008333333333333333 - z * (0.003968253968253968 - z * (
        0.004166666666666667 - z * (0.007575757575757576 - z * (0.021092796092796094 - z * 0.08333333333333333))))))
    value = tl.log(y) - 0.5 / y - series + shift
    value = tl.where(x < 0, tl.where(fraction == 0, float("nan"), value + reflection), value)
    value = tl.where(x == -float("inf"), float("nan"), value)
    return tl.where(x == 0, tl.where(sign_bit(x), float("inf"), -float("inf")), value)
'''

TRIGAMMA = '''
@triton.jit
def trigamma(x):
    """psi'(x): reflection for x < 1/2, recurrence by 6, then the asymptotic series (DLMF 5.15.8).

    The series has the terms that PyTorch's has: in fp64 a better value would be another one.
    """
    sine = tl.sin(x * 3.141592653589793)
    reflection = 9.869604401089358 / (sine * sine)
    y = tl.where(x < 0.5, 1.0 - x, x)
    total = tl.where(x < 0.5, -reflection, 0.0)
    for _ in range(6):
        total += 1.0 / (y * y)
        y += 1.0
    z = 1.0 / (y * y)
    series = z * (0.16666666666666666 - z * (0.03333333333333333 - z * 0.023809523809523808))
    total += (1.0 + 0.5 / y + series) / y
    return tl.where(x < 0.5, -total, total)
'''

# B(2k) / (2k)! inverted: the Euler-Maclaurin sum's terms
_BERNOULLI = (12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10,
              -2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15, 1.8152105401943546773e17,
              -7.1661652561756670113e18)


def _zeta() -> str:
    """Hurwitz's zeta by nine terms and the Euler-Maclaurin formula, as Cephes' zeta.c stops it (Moshier, 2000)."""
    term = """    product = product * (x + {0})
    b = b / a
    t = product * b / {1!r}
    s = tl.where(done, s, s + t)
    done = done | (tl.abs(t / s) < 1.1102230246251565e-16)
    product = product * (x + {2})
    b = b / a
"""
    tail = "".join(term.format(2.0 * i, value, 2.0 * i + 1.0) for i, value in enumerate(_BERNOULLI))
    return f'''
@triton.jit
def hurwitz_zeta(x, q):
    x = tl.where(q == q, x, x)
    q = tl.where(x == x, q, q)
    s = libdevice.pow(q, -x)
    a = q
    b = s
    count = a * 0.0
    done = s != s
    for _ in tl.range(0, 9 + largest_order(tl.ceil(-q))):
        going = ((count < 9.0) | (a <= 9.0)) & (done == 0)
        a = tl.where(going, a + 1.0, a)
        count += 1.0
        b = tl.where(going, libdevice.pow(a, -x), b)
        s = tl.where(going, s + b, s)
        done = done | (going & (tl.abs(b) < s * 1.1102230246251565e-16))
    done = done | (b == 0)
    s = tl.where(done, s, s + b * a / (x - 1.0) - 0.5 * b)
    product = x * 0.0 + 1.0
{tail}    s = tl.where(((x == float("inf")) | (q == float("inf"))) & (s == 0), float("nan"), s)
    whole = (q <= 0) & (q == tl.floor(q))
    s = tl.where((q <= 0) & (x != tl.floor(x)), float("nan"), s)
    s = tl.where(whole, float("inf"), s)
    return tl.where(x < 1.0, float("nan"), tl.where(x == 1.0, float("inf"), s))
'''


# -- incomplete gammas

_ORDERS, _TERMS = 7, 18  # enough for fp64 where a > 200 and |x - a| < 0.3 a


def _uniform_coefficients() -> list[list[float]]:
    """d[k][n] of Temme's uniform expansion, as exact fractions: DLMF 8.12.11 to 8.12.14."""
    most = _TERMS + 2 * _ORDERS + 2
    alpha = [Fraction(0), Fraction(1), Fraction(1, 3)]
    for n in range(3, most + 1):
        convolved = sum((j * alpha[j] * alpha[n - j + 1] for j in range(2, n)), Fraction(0))
        alpha.append((alpha[n - 1] - convolved) / (n + 1))
    first = [Fraction(-1, 3)] + [(n + 2) * alpha[n + 2] for n in range(1, most - 1)]
    rows, odd = [first], Fraction(1)
    for k in range(1, _ORDERS):
        odd *= 2 * k + 1
        stirling = (-1) ** k * odd * alpha[2 * k + 1]
        before = rows[-1]
        rows.append([stirling * first[n] + (n + 2) * before[n + 2] for n in range(len(before) - 2)])
    return [[float(d) for d in row[:_TERMS]] for row in rows]


def _uniform() -> str:
    rows = [polynomial(row[::-1], "eta") for row in _uniform_coefficients()]
    total = rows[-1]
    for row in rows[-2::-1]:
        total = f"({row} + {total} * rest)"
    return f'''
@triton.jit
def gamma_uniform(a, x, sign):
    """P for sign -1 and Q for +1, for large a and x near it (Temme, 1979)."""
    mu = (x - a) / a
    exponent = log_minus(mu)
    eta = tl.sqrt(tl.where(exponent < 0, -2.0 * exponent, mu * 0.0))
    eta = tl.where(mu < 0, -eta, eta)
    rest = 1.0 / a
    series = {total}
    half = 0.5 * libdevice.erfc(sign * eta * tl.sqrt(0.5 * a))
    return half + sign * libdevice.exp(a * exponent) * series / tl.sqrt(a * 6.283185307179586)
'''


_LOG_MINUS = f'''
@triton.jit
def log_minus(mu):
    """log(1 + mu) - mu without cancellation: the series of atanh(mu / (2 + mu)) near 0."""
    r = mu / (2.0 + mu)
    y = r * r
    near = r * (2.0 * y * {polynomial([1 / (2 * k + 3) for k in range(15)][::-1], "y")} - mu)
    return tl.where(tl.abs(mu) < 0.4, near, libdevice.log1p(mu) - mu)
'''

_FACTOR = '''
@triton.jit
def gamma_factor(a, x):
    """x^a exp(-x) / Gamma(a), through x - a and Stirling's series where a is no small number."""
    z = 1.0 / (a * a)
    stirling = (0.08333333333333333 - z * (0.002777777777777778 - z * (0.0007936507936507937 - z * (
        0.0005952380952380953 - z * (0.0008417508417508417 - z * (0.0019175269175269176 - z * (
            0.00641025641025641 - z * 0.029550653594771242))))))) / a
    large = libdevice.exp(a * log_minus((x - a) / a) - stirling) * tl.sqrt(a * 0.15915494309189535)
    return tl.where(a < 8.0, libdevice.exp(a * tl.log(x) - x - libdevice.lgamma(a)), large)
'''

_SERIES = '''
@triton.jit
def gamma_series(a, x):
    """P by its power series (DLMF 8.11.4), for x up to about a."""
    total = a * 0.0 + 1.0
    term = total
    place = a
    for _ in range(128):
        place += 1.0
        term = term * (x / place)
        total += term
    return total * gamma_factor(a, x) / a
''', '''
@triton.jit
def gamma_small(a, x):
    """Q by a power series (DLMF 8.7.3) for small x, where 1 - P would cancel."""
    factor = a * 0.0 + 1.0
    total = a * 0.0
    for i in range(1, 24):
        factor = factor * (-x / i)
        total += factor / (a + i)
    log = tl.log(x)
    return -libdevice.expm1(a * log - libdevice.lgamma(1.0 + a)) \\
        - libdevice.exp(a * log - libdevice.lgamma(a)) * total
''', '''
@triton.jit
def gamma_fraction(a, x):
    """Q by Legendre's continued fraction (DLMF 8.9.2) for x above a, evaluated from its front (Lentz).

    Factors that are 1 but for their rounding are left out: a hundred of them would add up.
    """
    settled: tl.constexpr = 2.4e-07 if a.dtype == tl.float32 else 4.5e-16
    b = x + 1.0 - a
    c = a * 0.0 + 1e30
    d = 1.0 / b
    value = d
    for i in range(1, 129):
        numerator = (a - i) * i
        b += 2.0
        d = numerator * d + b
        d = 1.0 / tl.where(d == 0, 1e-30, d)
        c = b + numerator / c
        c = tl.where(c == 0, 1e-30, c)
        factor = c * d
        value = tl.where(tl.abs(factor - 1.0) <= settled, value, value * factor)
    return value * gamma_factor(a, x)
'''

_INCOMPLETE = '''
@triton.jit
def upper_gamma(a, x):
    """Q(a, x), the regularized upper incomplete gamma function; the regions are those of SciPy and PyTorch."""
    x = tl.where(a == a, x, x)
    a = tl.where(x == x, a, a)
    near = (a > 200.0) & (tl.abs(x - a) < 0.3 * a)
    below = tl.where(x > 1.1, x < a, tl.where(x <= 0.5, tl.log(x) * a < -0.4, x * 1.1 < a))
    other = tl.where(x > 1.1, gamma_fraction(a, x), gamma_small(a, x))
    value = tl.where(below, 1.0 - gamma_series(a, x), other)
    value = tl.where(near, gamma_uniform(a, x, 1.0), value)
    value = tl.where((x != x) | (a != a), float("nan"), value)
    value = tl.where(tl.abs(x) == float("inf"), 0.0, value)
    value = tl.where(tl.abs(a) == float("inf"), tl.where(tl.abs(x) == float("inf"), float("nan"), 1.0), value)
    value = tl.where(x == 0, 1.0, value)
    value = tl.where(a == 0, tl.where(x > 0, 0.0, float("nan")), value)
    return tl.where((x < 0) | (a < 0), float("nan"), value)
''', '''
@triton.jit
def lower_gamma(a, x):
    """P(a, x) = 1 - Q(a, x)"""
    x = tl.where(a == a, x, x)
    a = tl.where(x == x, a, a)
    near = (a > 200.0) & (tl.abs(x - a) < 0.3 * a)
    upper = tl.where(x > 1.1, gamma_fraction(a, x), gamma_small(a, x))
    value = tl.where((x > 1.0) & (x > a), 1.0 - upper, gamma_series(a, x))
    value = tl.where(near, gamma_uniform(a, x, -1.0), value)
    value = tl.where((x != x) | (a != a), float("nan"), value)
    value = tl.where(tl.abs(x) == float("inf"), 1.0, value)
    value = tl.where(tl.abs(a) == float("inf"), tl.where(tl.abs(x) == float("inf"), float("nan"), 0.0), value)
    value = tl.where(x == 0, 0.0, value)
    value = tl.where(a == 0, tl.where(x > 0, 1.0, float("nan")), value)
    return tl.where((x < 0) | (a < 0), float("nan"), value)
'''

GAMMA_SOURCES: tuple[str, ...] = (
    DIGAMMA, TRIGAMMA, _zeta(), _LOG_MINUS, _uniform(), _FACTOR, *_SERIES, *_INCOMPLETE)
