"""Bessel and Airy functions as kernel text: the approximations of the Cephes library, whose tables these are.

S. L. Moshier, Cephes Mathematical Library, release 2.8, 2000: i0.c, i1.c, k0.c, k1.c, airy.c.  A table of a Chebyshev
series and one of a polynomial both begin with the highest order.  The functions take and return fp32 or fp64;
`libdevice` has I0 and I1 where they do not overflow.
"""

from __future__ import annotations

from collections.abc import Sequence

_I0_TAIL = (
    -7.233180487874754e-18, -4.830504485944182e-18, 4.46562142029676e-17, 3.461222867697461e-17,
    -2.8276239805165836e-16, -3.425485619677219e-16, 1.7725601330565263e-15, 3.8116806693526224e-15,
    -9.554846698828307e-15, -4.150569347287222e-14, 1.54008621752141e-14, 3.8527783827421426e-13,
    7.180124451383666e-13, -1.7941785315068062e-12, -1.3215811840447713e-11, -3.1499165279632416e-11,
    1.1889147107846439e-11, 4.94060238822497e-10, 3.3962320257083865e-09, 2.266668990498178e-08,
    2.0489185894690638e-07, 2.8913705208347567e-06, 6.889758346916825e-05, 0.0033691164782556943, 0.8044904110141088)
_I1_TAIL = (
    7.517296310842105e-18, 4.414348323071708e-18, -4.6503053684893586e-17, -3.209525921993424e-17,
    2.96262899764595e-16, 3.3082023109209285e-16, -1.8803547755107825e-15, -3.8144030724370075e-15,
    1.0420276984128802e-14, 4.272440016711951e-14, -2.1015418427726643e-14, -4.0835511110921974e-13,
    -7.198551776245908e-13, 2.0356285441470896e-12, 1.4125807436613782e-11, 3.2526035830154884e-11,
    -1.8974958123505413e-11, -5.589743462196584e-10, -3.835380385964237e-09, -2.6314688468895196e-08,
    -2.512236237870209e-07, -3.882564808877691e-06, -0.00011058893876262371, -0.009761097491361469,
    0.7785762350182801)
_K0_HEAD = (
    1.374465435613523e-16, 4.25981614279661e-14, 1.0349695257633842e-11, 1.904516377220209e-09,
    2.5347910790261494e-07, 2.286212103119452e-05, 0.001264615411446926, 0.0359799365153615, 0.3442898999246285,
    -0.5353273932339028)
_K0_TAIL = (
    5.300433772686263e-18, -1.6475804301524212e-17, 5.2103915050390274e-17, -1.678231096805412e-16,
    5.512055978524319e-16, -1.848593377343779e-15, 6.3400764774050706e-15, -2.2275133269916698e-14,
    8.032890775363575e-14, -2.9800969231727303e-13, 1.140340588208475e-12, -4.514597883373944e-12,
    1.8559491149547177e-11, -7.957489244477107e-11, 3.577397281400301e-10, -1.69753450938906e-09,
    8.574034017414225e-09, -4.660489897687948e-08, 2.766813639445015e-07, -1.8317555227191195e-06,
    1.39498137188765e-05, -0.00012849549581627802, 0.0015698838857300533, -0.0314481013119645, 2.4403030820659555)
_K1_HEAD = (
    -7.023863479386288e-18, -2.427449850519366e-15, -6.666901694199329e-13, -1.4114883926335278e-10,
    -2.213387630734726e-08, -2.4334061415659684e-06, -0.0001730288957513052, -0.006975723859639864,
    -0.12261118082265715, -0.3531559607765449, 1.5253002273389478)
_K1_TAIL = (
    -5.756744483665017e-18, 1.7940508731475592e-17, -5.689462558442859e-17, 1.838093544366639e-16,
    -6.057047248373319e-16, 2.038703165624334e-15, -7.019837090418314e-15, 2.4771544244813043e-14,
    -8.976705182324994e-14, 3.3484196660784293e-13, -1.2891739609510289e-12, 5.13963967348173e-12,
    -2.1299678384275683e-11, 9.218315187605006e-11, -4.1903547593418965e-10, 2.015049755197033e-09,
    -1.0345762465678097e-08, 5.7410841254500495e-08, -3.5019606030878126e-07, 2.406484947837217e-06,
    -1.936197974166083e-05, 0.00019521551847135162, -0.002857816859622779, 0.10392373657681724, 2.7206261904844427)
_AIRY_N = (
    0.346538101525629, 12.007595273964581, 76.27960536152345, 168.08922493463058, 159.75639135016442,
    70.53609068404442, 14.026469116338967, 1.0)
_AIRY_D = (
    0.5675945326387702, 14.75625625848472, 84.51389701414746, 177.31808814540045, 164.2346928715297,
    71.47784008255756, 14.095913560783403, 1.0)
_AIRY_FN = (
    -0.1316963234183318, -0.6264565444319123, -0.6931580360369335, -0.2797799815451191, -0.04919001326095003,
    -0.004062659235948854, -0.0001592764962392621, -2.776491081552329e-06, -1.6778769848911465e-08)
_AIRY_FD = (
    13.356042070655324, 32.682503279522464, 26.736704094149957, 9.187074029072596, 1.4752914677166642,
    0.11568717379518804, 0.004402916416152112, 7.547203482874142e-05, 4.5185009297058035e-07)
_AIRY_GN = (
    0.01973399320916857, 0.39110302961568827, 1.0657989759959559, 0.9391692298166502, 0.35146565610554764,
    0.06338889196289255, 0.005858041130483885, 0.000282851600836737, 6.98793669997261e-06, 8.117892395543892e-08,
    3.415517847659236e-10)
_AIRY_GD = (
    9.30892908077442, 19.835292871831214, 15.564662893286462, 5.476860694229755, 0.9542936116189619,
    0.08645808263523921, 0.004126565238242226, 0.00010125908511650914, 1.1716673321441352e-06, 4.9183457006293e-09)


def chebyshev(name: str, coefficients: Sequence[float]) -> str:
    """The function `name(z)`: half the constant term and the sum of c[k] T_k(z / 2), by Clenshaw's recurrence."""
    first, second, *rest = coefficients
    lines = [f"t0 = z * 0.0 + {first!r}", f"t1 = z * t0 + {second!r}"]
    lines += [f"t{i} = z * t{i - 1} - t{i - 2} + {c!r}" for i, c in enumerate(rest, 2)]
    last = len(coefficients) - 1
    body = "\n    ".join([*lines, f"return 0.5 * (t{last} - t{last - 2})"])
    return f"@triton.jit\ndef {name}(z):\n    {body}\n"


def polynomial(coefficients: Sequence[float], z: str) -> str:
    """An expression by Horner's rule; `z` is an atom."""
    first, *rest = coefficients
    text = f"({z} * 0.0 + {first!r})"
    for c in rest:
        text = f"({text} * {z} + {c!r})"
    return text


_SCALED_I = '''
@triton.jit
def scaled_i0(x):
    """exp(-|x|) I0(x)"""
    size = tl.abs(x)
    near = libdevice.exp(-size) * libdevice.cyl_bessel_i0(size)
    return tl.where(size <= 8.0, near, i0_tail(32.0 / size - 2.0) / tl.sqrt(size))
''', '''
@triton.jit
def scaled_i1(x):
    """exp(-|x|) I1(x)"""
    size = tl.abs(x)
    near = libdevice.exp(-size) * libdevice.cyl_bessel_i1(size)
    value = tl.where(size <= 8.0, near, i1_tail(32.0 / size - 2.0) / tl.sqrt(size))
    return tl.where(x < 0, -value, value)
'''

_K = '''
@triton.jit
def bessel_k0(x, scaled: tl.constexpr):
    """K0(x), or exp(x) K0(x); an infinity at 0, NaN below."""
    near = k0_head(x * x - 2.0) - tl.log(0.5 * x) * libdevice.cyl_bessel_i0(x)
    far = k0_tail(8.0 / x - 2.0) / tl.sqrt(x)
    if scaled:
        near = near * libdevice.exp(x)
    else:
        far = far * libdevice.exp(-x)
    value = tl.where(x <= 2.0, near, far)
    return tl.where(x == 0, float("inf"), tl.where(x < 0, float("nan"), value))
''', '''
@triton.jit
def bessel_k1(x, scaled: tl.constexpr):
    """K1(x), or exp(x) K1(x); an infinity at 0, NaN below."""
    near = tl.log(0.5 * x) * libdevice.cyl_bessel_i1(x) + k1_head(x * x - 2.0) / x
    far = k1_tail(8.0 / x - 2.0) / tl.sqrt(x)
    if scaled:
        near = near * libdevice.exp(x)
    else:
        far = far * libdevice.exp(-x)
    value = tl.where(x <= 2.0, near, far)
    return tl.where(x == 0, float("inf"), tl.where(x < 0, float("nan"), value))
'''

_SPHERICAL = '''
@triton.jit
def spherical_j0(x):
    """sin(x) / x, by its series near 0."""
    y = x * x
    near = 1.0 - y / 72.0 * (1.0 - y / 110.0 * (1.0 - y / 156.0))
    near = 1.0 - y / 6.0 * (1.0 - y / 20.0 * (1.0 - y / 42.0 * near))
    value = tl.where(tl.abs(x) < 0.5, near, tl.sin(x) / x)
    return tl.where(tl.abs(x) == float("inf"), 0.0, value)
'''

_AIRY = f'''
@triton.jit
def airy_left(x):
    """Ai(x) for x < -2.09: a wave."""
    size = tl.abs(x)
    phase = 2.0 * size * tl.sqrt(size) / 3.0
    z = 1.0 / phase
    y = z * z
    f = {polynomial(_AIRY_FN, "y")} / {polynomial(_AIRY_FD, "y")}
    g = {polynomial(_AIRY_GN, "y")} / {polynomial(_AIRY_GD, "y")}
    t = phase + 0.7853981633974483
    return 0.5641895835477563 / tl.sqrt(tl.sqrt(size)) * (tl.sin(t) * (1.0 + y * f) - tl.cos(t) * (z * g))
''', f'''
@triton.jit
def airy_right(x):
    """Ai(x) for x >= 2.09: it decays."""
    phase = 2.0 * x * tl.sqrt(x) / 3.0
    z = 1.0 / phase
    ratio = {polynomial(_AIRY_N, "z")} / {polynomial(_AIRY_D, "z")}
    return 0.5641895835477563 * ratio / (2.0 * tl.sqrt(tl.sqrt(x)) * libdevice.exp(phase))
''', '''
@triton.jit
def airy_ai(x):
    """Ai(x); 16 terms of the Maclaurin series serve between.  NaN at infinities and 0 past 103.892, as in PyTorch."""
    cube = x * x * x
    f = x * 0.0 + 1.0
    g = x
    m = f
    n = x
    for i in range(16):
        k = 3.0 * i
        m = m * cube / ((k + 2.0) * (k + 3.0))
        n = n * cube / ((k + 3.0) * (k + 4.0))
        f += m
        g += n
    middle = 0.3550280538878172 * f - 0.2588194037928068 * g
    value = tl.where(x < -2.09, airy_left(x), tl.where(x >= 2.09, airy_right(x), middle))
    value = tl.where(x > 103.892, 0.0, value)
    return tl.where(tl.abs(x) == float("inf"), float("nan"), value)
'''

BESSEL_SOURCES: tuple[str, ...] = (
    chebyshev("i0_tail", _I0_TAIL), chebyshev("i1_tail", _I1_TAIL), chebyshev("k0_head", _K0_HEAD),
    chebyshev("k0_tail", _K0_TAIL), chebyshev("k1_head", _K1_HEAD), chebyshev("k1_tail", _K1_TAIL), *_SCALED_I, *_K,
    _SPHERICAL, *_AIRY)
