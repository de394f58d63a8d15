"""Inputs for every POINTWISE row: edge values of each dtype, and the dtypes' own ways in which an op is used.

`SAMPLES[op]` is a list; adding a row to the table means adding a line here.  Eager decides which dtypes an op
admits: a sample that eager refuses is skipped for that dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch._ops import OpOverload

from fxfuser import ops as table
from fxfuser.ops import exponent, hashing, philox
from fxfuser.ops.bitcast import BITCAST

aten, prims = torch.ops.aten, torch.ops.prims

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool)
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# of results that are rounded functions of reals; the absolute one is a tenth of it
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}

_FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 0.1,
           1e-6, -1e-6, 0.7, -0.3, 7.25, -20.5, 33.0, 80.0, -80.0, 1000.25, -1e30, 1e30)
_WHOLE = (-3, -2, -1, 0, 1, 2, 3, 5, 7, 8, 31, 32, 63, 64, 100)


@dataclass(frozen=True)
class Sample:
    """`make(dtype)` gives the arguments; an `exact` result is eager's bit for bit, another within TOLERANCE."""

    make: Callable[[torch.dtype], Arguments]
    exact: bool = True
    note: str = ""


def eager(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Eager's result; None where it refuses these arguments."""
    try:
        result: torch.Tensor = op(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return result


def edges(dtype: torch.dtype) -> torch.Tensor:
    """The values at which `dtype` misbehaves, among ordinary ones."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_floating_point:
        return torch.tensor(_FLOATS, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    inside = [v for v in _WHOLE if info.min <= v <= info.max]
    return torch.tensor([info.min, info.min + 1, *inside, info.max - 1, info.max], dtype=dtype)


def divisors(dtype: torch.dtype) -> torch.Tensor:
    """Edges without what makes integer division trap: zero, and -1 under the smallest integer."""
    values = edges(dtype)
    return values if dtype.is_floating_point else values[(values != 0) & (values.to(torch.int64) != -1)]


def unit(dtype: torch.dtype) -> torch.Tensor:
    """Values around [-1, 1] and the special ones."""
    if not dtype.is_floating_point:
        return edges(dtype)
    grid = torch.linspace(-1.25, 1.25, 41, dtype=torch.float64)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-6, -1e-6, 1e-3], dtype=torch.float64)
    return torch.cat([grid, special]).to(dtype)


def pairs(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every combination, as two flat tensors; whole vectors of eager's, whose scalar tail rounds halves differently."""
    shape = (left.numel(), right.numel())
    size = left.numel() * right.numel()
    size -= size % 64 if size > 64 else 0
    return left[:, None].expand(shape).reshape(-1)[:size], right.expand(shape).reshape(-1)[:size]


def one(values: Callable[[torch.dtype], torch.Tensor] = edges, *rest: Any, exact: bool = True, note: str = "",
        **kwargs: Any) -> Sample:
    """One tensor, then the same further arguments for every dtype."""
    return Sample(lambda dtype: ((values(dtype), *rest), kwargs), exact, note)


def two(right: Callable[[torch.dtype], torch.Tensor] = edges, *rest: Any, exact: bool = True, note: str = "",
        **kwargs: Any) -> Sample:
    """Every pair of edge values, then the same further arguments."""
    return Sample(lambda dtype: ((*pairs(edges(dtype), right(dtype)), *rest), kwargs), exact, note)


def three(*rest: Any, exact: bool = False, weight: bool = False, **kwargs: Any) -> Sample:
    """Three tensors of finite values."""
    def make(dtype: torch.dtype) -> Arguments:
        base = torch.linspace(-3, 3, 64, dtype=torch.float64)
        last = base.flip(0) / 3 if weight else base.flip(0) + 5
        return ((base.to(dtype), (base * 2 + 1).to(dtype), last.to(dtype), *rest), kwargs)
    return Sample(make, exact)


def number_first(value: float, values: Callable[[torch.dtype], torch.Tensor] = edges, exact: bool = True) -> Sample:
    """A Python number, then a tensor."""
    return Sample(lambda dtype: ((value, values(dtype)), {}), exact)


def mixed(left: torch.dtype, scalar: bool = False) -> Sample:
    """Operands of different dtypes; a 0-d right operand is weak."""
    def make(dtype: torch.dtype) -> Arguments:
        x, y = pairs(divisors(left), divisors(dtype))
        return ((divisors(left), torch.tensor(3, dtype=dtype)) if scalar else (x, y), {})
    return Sample(make, note=f"with {left}, {'0-d' if scalar else 'tensor'}")


def _arithmetic() -> dict[OpOverload, list[Sample]]:
    mixes = [mixed(torch.int32), mixed(torch.float16), mixed(torch.bfloat16, scalar=True), mixed(torch.uint8),
             mixed(torch.int8, scalar=True), mixed(torch.bool)]
    modes = [*(two(divisors, rounding_mode=m) for m in ("floor", "trunc")),
             two(divisors, rounding_mode=None, exact=False)]
    scalar_modes = [one(edges, d, rounding_mode=m) for m in ("floor", "trunc") for d in (3, -2, 0.1)]
    return {
        aten.add.Tensor: [two(), two(alpha=2), *mixes],
        aten.add.Scalar: [one(edges, 3), one(edges, 0.1), one(edges, 2, 5)],
        aten.sub.Tensor: [two(), two(alpha=2), *mixes], aten.sub.Scalar: [one(edges, 300), one(edges, -1.5)],
        aten.rsub.Tensor: [two(), two(alpha=2)], aten.rsub.Scalar: [one(edges, 7), one(edges, 2.5)],
        aten.mul.Tensor: [two(), *mixes], aten.mul.Scalar: [one(edges, -3), one(edges, 0.1), one(edges, True)],
        aten.div.Tensor: [two(exact=False), mixed(torch.int32), mixed(torch.float16)],
        aten.div.Scalar: [one(edges, 3, exact=False)], aten.true_divide.Tensor: [two(exact=False)],
        aten.true_divide.Scalar: [one(edges, 7, exact=False)],
        aten.div.Tensor_mode: modes, aten.div.Scalar_mode: scalar_modes,
        aten.floor_divide.default: [two(divisors)], aten.floor_divide.Scalar: [one(edges, -3), one(edges, 0.1)],
        aten.remainder.Tensor: [two(divisors)], aten.remainder.Scalar: [one(edges, 3), one(edges, -2.5)],
        aten.remainder.Scalar_Tensor: [number_first(7, divisors)],
        aten.fmod.Tensor: [two(divisors)], aten.fmod.Scalar: [one(edges, 3), one(edges, -2.5)],
        aten.addcmul.default: [three(), three(value=3)], aten.addcdiv.default: [three(), three(value=0.5)],
        aten.lerp.Tensor: [three(weight=True)], aten.lerp.Scalar: [
            Sample(lambda d, w=w: ((edges(d)[3:], edges(d).flip(0)[:-3], w), {}), False) for w in (0.3, 0.75)],
        aten.copysign.Tensor: [two()], aten.copysign.Scalar: [one(edges, -2.0), one(edges, 1)],
        aten.gcd.default: [two()], aten.lcm.default: [Sample(lambda d: (pairs(divisors(d)[1:], divisors(d)[1:]), {}))],
        **{op: [one()] for op in (
            aten.neg.default, aten.abs.default, aten.sign.default, aten.sgn.default, aten.signbit.default,
            aten.floor.default, aten.ceil.default, aten.trunc.default, aten.fix.default, aten.round.default,
            aten.positive.default, aten.conj_physical.default)},
        aten.round.decimals: [one(edges, decimals=d) for d in (0, 2, -1)],
    }


def _selection() -> dict[OpOverload, list[Sample]]:
    def masked(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, y = pairs(edges(dtype), edges(dtype))
        return torch.arange(x.numel()) % 3 == 0, x, y

    bounds = [Sample(lambda d: ((*pairs(edges(d), edges(d)), edges(d)[5 % edges(d).numel()]), {})),
              Sample(lambda d: ((*pairs(edges(d), edges(d)), None), {})),
              Sample(lambda d: ((pairs(edges(d), edges(d))[0], None, pairs(edges(d), edges(d))[1]), {}))]
    return {
        **{op: [two(), mixed(torch.int32)] for op in (
            aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default, aten.max.other,
            aten.min.other)},
        aten.clamp.default: [one(edges, -1, 2), one(edges, 0), one(edges, None, 3), one(edges, 0.5, 2.5),
                             one(edges, 5, 2), one(edges, max=1), one(edges, float("nan"), 1.0)],
        aten.clamp.Tensor: bounds, aten.clamp_min.default: [one(edges, 1)], aten.clamp_max.default: [one(edges, 1.5)],
        aten.clamp_min.Tensor: [two()], aten.clamp_max.Tensor: [two()],
        aten.hardtanh.default: [one(), one(edges, -2, 3)], aten.relu.default: [one()],
        aten.where.self: [Sample(lambda d: (masked(d), {})),
                          Sample(lambda d: ((masked(d)[0], masked(d)[1], torch.tensor(2.5)), {}), note="0-d")],
        aten.where.Scalar: [Sample(lambda d: ((masked(d)[0], 1, 2.5), {}))],
        aten.where.ScalarSelf: [Sample(lambda d: ((masked(d)[0], 3, masked(d)[2]), {}))],
        aten.where.ScalarOther: [Sample(lambda d: ((masked(d)[0], masked(d)[1], -1), {}))],
        aten.masked_fill.Scalar: [
            Sample(lambda d, v=v: ((masked(d)[1], masked(d)[0], v), {})) for v in (1, -float("inf"))],
        aten.masked_fill.Tensor: [Sample(lambda d: ((masked(d)[1], masked(d)[0], torch.tensor(1, dtype=d)), {}))],
        aten.copy.default: [
            Sample(lambda d, t=t: ((torch.zeros(safe(d).numel(), dtype=t), safe(d)), {}), note=str(t))
            for t in DTYPES],
        aten.fill.Tensor: [
            Sample(lambda d, t=t: ((safe(d), torch.tensor(3, dtype=t)), {}), note=str(t)) for t in DTYPES],
        aten._to_copy.default: [one(safe, dtype=t, note=str(t)) for t in DTYPES],
        aten.to.dtype: [one(safe, t, note=str(t)) for t in DTYPES],
        prims.convert_element_type.default: [one(safe, t, note=str(t)) for t in DTYPES],
    }


def safe(dtype: torch.dtype) -> torch.Tensor:
    """Edges that fit every integer dtype when they are floats, for what does not fit is undefined in eager."""
    values = edges(dtype)
    return values[values.isfinite() & (values.abs() < 120)] if dtype.is_floating_point else values


def _logic() -> dict[OpOverload, list[Sample]]:
    samples: dict[OpOverload, list[Sample]] = {}
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        packet = getattr(aten, name)
        samples[packet.Tensor] = [two(), mixed(torch.int8), mixed(torch.bfloat16, scalar=True), mixed(torch.uint8)]
        samples[packet.Scalar] = [one(edges, 1), one(edges, 0.5)]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        packet = getattr(aten, name)
        samples |= {packet.Tensor: [two()], packet.Scalar: [one(edges, 5)], packet.Scalar_Tensor: [number_first(5)]}
    for name in ("bitwise_left_shift", "bitwise_right_shift"):
        packet = getattr(aten, name)
        samples |= {packet.Tensor: [two()], packet.Tensor_Scalar: [one(edges, n) for n in (0, 3, -1, 70)],
                    packet.Scalar_Tensor: [number_first(-7), number_first(100)]}
    for packet in (aten.__lshift__, aten.__rshift__):
        samples |= {packet.Tensor: [two()], packet.Scalar: [one(edges, 2)]}
    for name in ("logical_and", "logical_or", "logical_xor"):
        samples[getattr(aten, name).default] = [two(), mixed(torch.float32)]
    for name in ("logical_not", "isnan", "isinf", "isposinf", "isneginf", "isfinite", "bitwise_not"):
        samples[getattr(aten, name).default] = [one()]
    return samples


def _special() -> dict[OpOverload, list[Sample]]:
    unary = (
        "acos acosh asin asinh atan atanh cosh sinh tan tanh erfc erfinv expm1 log10 log1p lgamma i0 special_i1 "
        "special_erfcx special_ndtri special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 log log2 "
        "exp2 cos sin erf exp sigmoid sqrt rsqrt reciprocal digamma angle silu mish elu leaky_relu softplus "
        "hardsigmoid hardswish"
    ).split()
    def curve(dtype: torch.dtype) -> torch.Tensor:
        """A plain range next to the edges; huge arguments of periodic functions are left out."""
        grid = torch.linspace(-9.3, 9.3, 63, dtype=torch.float64).to(dtype)
        values = edges(dtype)
        return torch.cat([grid, values[values.abs() < 90] if dtype.is_floating_point else values])

    samples = {getattr(aten, name).default: [one(curve, exact=False), one(unit, exact=False)] for name in unary}
    for name in ("tanh", "exp", "sqrt", "rsqrt", "reciprocal", "angle", "sigmoid", "erf", "log", "silu"):
        samples[getattr(aten, name).default].append(one(exact=False))
    samples[aten.gelu.default] = [one(curve, exact=False), one(curve, approximate="tanh", exact=False)]
    samples[aten.elu.default].append(one(curve, 1.5, 1.05, 0.7, exact=False))
    samples[aten.leaky_relu.default].append(one(curve, 0.3, exact=False))
    samples[aten.softplus.default].append(one(curve, 2, 5, exact=False))
    both = [two(exact=False), mixed(torch.int32)]
    exponents = (0, 1, 2, 3, -1, -2, 5, 1.5, 20)
    gradient = Sample(lambda d: ((curve(d).flip(0), curve(d)), {}), False)
    return samples | {
        aten.pow.Tensor_Tensor: [Sample(lambda d: (pairs(curve(d), small(d)), {}), False)],
        aten.pow.Scalar: [Sample(lambda d, b=b: ((b, small(d)), {}), False) for b in (2, 1, -3, 0.5)],
        aten.pow.Tensor_Scalar: [
            *(one(curve, e, exact=False, note=str(e)) for e in exponents),
            *(one(positive, e, exact=False, note=str(e)) for e in (0.5, -0.5))],
        aten.hypot.default: both[:1], aten.atan2.default: both[:1], aten.nextafter.default: [two()],
        aten.xlogy.Tensor: both[:1],
        aten.xlogy.Scalar_Self: [number_first(2, curve, False), number_first(0, curve, False)],
        aten.xlogy.Scalar_Other: [one(curve, 3, exact=False)], aten.ldexp.Tensor: [
            Sample(lambda d: ((small(d), small(torch.int32)[:small(d).numel()]), {}), False)],
        aten.threshold.default: [one(edges, 1, 7)], aten.threshold_backward.default: [two(edges, 0)],
        **{getattr(aten, f"{n}_backward").default: [gradient] for n in ("sigmoid", "tanh", "silu", "gelu")},
    }


SERIES = ("special_i0e", "special_i1e", *(f"special_{name}" for name in (
    "modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 "
    "scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai").split()))
POLYNOMIALS = tuple(f"special_{name}" for name in (
    *(f"{before}chebyshev_polynomial_{form}" for before in ("", "shifted_") for form in "tuvw"),
    "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p"))


def grid(low: float, high: float, count: int = 64) -> Callable[[torch.dtype], torch.Tensor]:
    """Values at equal distances."""
    return lambda dtype: torch.linspace(low, high, count, dtype=torch.float64).to(dtype)


def _series() -> dict[OpOverload, list[Sample]]:
    """Long functions, where eager is accurate: of the incomplete gammas it is not for a > 20 near x, nor in halves."""
    def of(left: Callable[[torch.dtype], torch.Tensor], right: Callable[[torch.dtype], torch.Tensor]) -> Sample:
        return Sample(lambda d: (pairs(left(d), right(d)), {}), False)

    def infinite(dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -1.0, 2.0], dtype=torch.float64).to(dtype)

    orders = grid(-1, 12, 14)
    def wide(dtype: torch.dtype) -> torch.Tensor:
        return edges(dtype).to(table.opmath(dtype))

    gammas = [of(grid(0.05, 17, 24), grid(0.02, 40, 40)), of(infinite, infinite)]
    samples = {getattr(aten, name).default: [one(grid(-20, 20), exact=False), one(wide, exact=False)]
               for name in SERIES}
    zeta = [of(grid(1.1, 12, 24), grid(0.1, 30, 24)), of(grid(2, 5, 4), grid(-8.5, 3, 24)), of(infinite, infinite)]
    samples |= {
        aten.special_zeta.default: zeta, aten.special_zeta.self_scalar: [number_first(2.5, grid(0.1, 30), False)],
        aten.special_zeta.other_scalar: [one(grid(1.1, 30), 2.5, exact=False)],
        aten.igamma.default: gammas, aten.igammac.default: gammas,
        aten.polygamma.default: [number_first(n, grid(0.1, 30), False) for n in range(6)],
    }
    for name in POLYNOMIALS:
        packet = getattr(aten, name)
        samples |= {packet.default: [of(grid(-1.5, 2, 29), orders)],
                    packet.x_scalar: [number_first(0.3, orders, False)],
                    packet.n_scalar: [one(grid(-1.5, 2), n, exact=False) for n in (0, 5, 11)]}
    return samples


def positive(dtype: torch.dtype) -> torch.Tensor:
    """Roots: eager's half kernels differ from its own fp32 ones at zero."""
    values = edges(dtype)
    return values[values > 0]


def small(dtype: torch.dtype) -> torch.Tensor:
    """Exponents."""
    if dtype == torch.bool:
        return edges(dtype)
    return torch.tensor([0, 1, 2, 3, 5, 7] if dtype == torch.uint8 else [-3, -2, -1, 0, 1, 2, 3, 7], dtype=dtype)


def _of_prims(known: dict[OpOverload, list[Sample]]) -> dict[OpOverload, list[Sample]]:
    """prims take the samples of the aten op that they mirror; their operands must agree in dtype."""
    other = {"erf_inv": "erfinv", "bessel_i0": "i0", "bessel_i1": "special_i1", "bessel_j0": "special_bessel_j0",
             "bessel_j1": "special_bessel_j1", "erfcx": "special_erfcx", "ndtri": "special_ndtri",
             "bessel_i0e": "special_i0e", "bessel_i1e": "special_i1e", "zeta": "special_zeta",
             "spherical_bessel_j0": "special_spherical_bessel_j0"}
    samples: dict[OpOverload, list[Sample]] = {}
    for name in dir(prims):
        op = getattr(getattr(prims, name), "default", None)
        for overload in ("default", "Tensor", "Tensor_Tensor", "self"):
            aten_op = getattr(getattr(aten, other.get(name, name), None), overload, None)
            if op in table.TABLE and aten_op in known and table.TABLE[op].kind is table.Kind.POINTWISE:
                samples[op] = known[aten_op][:1]
    return samples | {
        prims.div.default: [two(divisors, exact=False)], prims.shift_left.default: [two()],
        prims.shift_right_arithmetic.default: [two()],
        prims.cbrt.default: [one(small, exact=False)],
    }


def _random() -> dict[OpOverload, list[Sample]]:
    """Of a seed and indices, which have one dtype."""
    index = torch.cat([torch.arange(40), torch.tensor([2**33, 2**62 + 1, 2**63 - 1])])
    given = ((torch.tensor(-0x123456789ABCDEF), index), {})
    exact = {philox.UNIFORM: True, philox.BITS: True, philox.NORMAL: False}
    return {op: [Sample(lambda _: given, known)] for op, known in exact.items()}


def _exponents() -> dict[OpOverload, list[Sample]]:
    """Also the smallest numbers, which have no exponent of their own."""
    def tiny(dtype: torch.dtype) -> torch.Tensor:
        values = (5e-324, 1e-310, 1e-45, 1e-40, -3e-39, 6e-8, 1.2e-38, 2.3e-308)
        return torch.tensor(values, dtype=torch.float64).to(dtype)

    return {op: [one(), one(tiny)] for op in (exponent.FREXP_MANTISSA, exponent.FREXP_EXPONENT)}


def _bits() -> dict[OpOverload, list[Sample]]:
    """Of doubles, whatever dtype is asked for."""
    given = ((torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), float("nan"), 5e-324], dtype=torch.float64),), {})
    return {hashing.BITS64: [Sample(lambda _: given, True)], BITCAST: [Sample(_bits_of, True)]}


def _bits_of(dtype: torch.dtype) -> Any:
    """Those of bools are refused, as no pass asks for them."""
    x = torch.tensor([0.0, -0.0, 1.5, -2.0, float("inf"), 6e-8, 3.0]).to(dtype)
    size = 8 if dtype is torch.bool else dtype.itemsize
    return (x, {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]), {}


def _all() -> dict[OpOverload, list[Sample]]:
    samples = _arithmetic() | _selection() | _logic() | _special() | _series() | _random() | _exponents() | _bits()
    return samples | _of_prims(samples)


SAMPLES = _all()
