"""Pointwise rows that are rounded functions of reals: roots, exponentials, powers, activations.

Where Triton has no builtin the text calls CUDA's libdevice, the library behind eager CUDA's own kernels; the
interpreter calls the torch functions in `LIBDEVICE` instead.  Such rows are accurate near 0 on both sides.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Callable, Mapping

import torch
from torch._ops import OpOverload

from fxfuser.ops.cast import FLOATS, rounded
from fxfuser.ops.exponent import exponent_rows
from fxfuser.ops.pointwise import NUMERIC, bounded, divide, pointwise
from fxfuser.ops.row import Emit, Operands, Promotion, Row
from fxfuser.ops.series import series_rows
from fxfuser.ops.trigonometric import cosine, hyperbolic_tangent, sine

aten, prims = torch.ops.aten, torch.ops.prims

LIBDEVICE: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType({
    "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin, "asinh": torch.asinh, "atan": torch.atan,
    "atan2": torch.atan2, "atanh": torch.atanh, "cbrt": torch.ops.prims.cbrt, "cosh": torch.cosh,
    "cyl_bessel_i0": torch.special.i0, "cyl_bessel_i1": torch.special.i1, "erfc": torch.special.erfc,
    "erfcx": torch.special.erfcx, "erfinv": torch.special.erfinv, "exp": torch.exp, "expm1": torch.expm1,
    "fmod": torch.fmod, "hypot": torch.hypot, "j0": torch.special.bessel_j0, "j1": torch.special.bessel_j1,
    "lgamma": torch.lgamma, "log10": torch.log10, "log1p": torch.log1p, "nextafter": torch.nextafter,
    "normcdfinv": torch.special.ndtri, "pow": torch.pow, "rint": torch.round, "sinh": torch.sinh, "tan": torch.tan,
    "tanh": torch.tanh, "y0": torch.special.bessel_y0, "y1": torch.special.bessel_y1,
})


def exponential(ops: Operands, x: str) -> str:
    """exp(x); the fast form is off by up to about |x| units of the last place."""
    return f"{'libdevice.exp' if ops.precise else 'tl.exp'}({x})"


def root(ops: Operands, x: str) -> str:
    return f"tl.sqrt_rn({x})" if ops.precise and ops.dtype == torch.float32 else f"tl.sqrt({x})"


def sigmoid(ops: Operands, x: str) -> str:
    return _one_over(ops, f"(1.0 + {exponential(ops, f'-{x}')})")


def _coarse(ops: Operands) -> bool:
    """Whether the result does not show an error of some units of the last fp32 place."""
    return not ops.precise and ops.result in (torch.float16, torch.bfloat16) and ops.dtype == torch.float32


def _one_over(ops: Operands, y: str) -> str:
    """1 / y for y >= 1.  The square of 1 / sqrt(y) is off by four units of the last place and takes a third of a
    division's instructions."""
    if not _coarse(ops):
        return divide(ops, "1.0", y)
    inverse = ops.let(f"tl.rsqrt({y})")
    return f"({inverse} * {inverse})"


def _sigmoid(ops: Operands) -> str:
    return sigmoid(ops, ops.text(0))


def _exp(ops: Operands) -> str:
    return exponential(ops, ops.text(0))


def _sqrt(ops: Operands) -> str:
    return root(ops, ops.text(0))


def _rsqrt(ops: Operands) -> str:
    if ops.precise:
        return divide(ops, "1.0", root(ops, ops.text(0)))
    return f"tl.rsqrt({ops.text(0)})"


def _reciprocal(ops: Operands) -> str:
    return divide(ops, "1.0", ops.text(0))


# -- powers

_UNROLLED = 64  # an integer exponent up to this is a chain of multiplications


def _power(ops: Operands) -> str:
    if not ops.dtype.is_floating_point:
        return f"integer_power({ops.let(ops.text(0))}, {ops.let(ops.text(1))})"
    return f"libdevice.pow({ops.text(0)}, {ops.text(1)})"


def _power_of_number(ops: Operands) -> str:
    """pow.Tensor_Scalar; eager takes these exponents apart in the same way."""
    exponent, x = ops.argument("exponent"), ops.text(0)
    if not isinstance(exponent, (int, float)):
        return _power(ops)
    if not ops.dtype.is_floating_point:
        return _integer_chain(ops, x, int(exponent)) if 0 <= exponent <= _UNROLLED else _power(ops)
    forms: dict[float, Callable[[], str]] = {
        0.0: lambda: ops.literal(1.0), 1.0: lambda: x, 2.0: lambda: f"{x} * {x}", 3.0: lambda: f"{x} * {x} * {x}",
        0.5: lambda: root(ops, x), -0.5: lambda: _rsqrt(ops), -1.0: lambda: _reciprocal(ops),
        -2.0: lambda: divide(ops, "1.0", f"({x} * {x})"),
    }
    return forms[exponent]() if exponent in forms else _power(ops)


def _integer_chain(ops: Operands, x: str, exponent: int) -> str:
    if exponent == 0:
        return f"{x} * 0 + 1"
    factors, square = [], x
    while exponent:
        if exponent & 1:
            factors.append(square)
        exponent >>= 1
        square = ops.let(f"{square} * {square}") if exponent else square
    return " * ".join(factors)


# -- activations


def _gelu(ops: Operands) -> str:
    x = ops.text(0)
    if ops.argument("approximate", "none") != "none":
        return f"{x} * {_gelu_gate(ops, x)}"
    if _coarse(ops):
        return f"{x} * {_normal_cdf(ops, x)}"
    return f"0.5 * {x} * (1.0 + tl.erf({x} * {math.sqrt(0.5)!r}))"


def _gelu_gate(ops: Operands, x: str) -> str:
    """0.5 * (1 + tanh(u)) of GELU's approximation, u = sqrt(2 / pi) * (x + 0.044715 * x**3): a sigmoid of 2 * u, which
    takes a fifth of the instructions of a tanh and keeps its relative error where the tanh approaches -1."""
    scale = -2 * math.sqrt(2 / math.pi)
    if not _coarse(ops):
        inner = f"{scale!r} * ({x} + 0.044715 * {x} * {x} * {x})"
        return ops.let(_one_over(ops, f"(1.0 + {exponential(ops, inner)})"))
    scale *= math.log2(math.e)
    inner = f"{x} * ({scale!r} + {0.044715 * scale!r} * ({x} * {x}))"
    return ops.let(_one_over(ops, f"(1.0 + tl.exp2({inner}))"))


# log2 of the normal distribution's tail beyond z >= 0 as a polynomial in z, constant first: a least-squares fit,
# weighted until the error was even.  In fp32 the tail's relative error is 1e-5 up to z = 5.6, beyond which fp16 is 0,
# and 1e-4 up to 13.2, where bfloat16 ends; from there on the polynomial falls without end
_LOG2_TAIL = (-0.9999903440475464, -1.1513681411743164, -0.45802855491638184, -0.05456288903951645,
              0.008911100216209888, -0.001076132757589221, 9.09383743419312e-05, -5.022051027481211e-06,
              1.614712488162695e-07, -2.2797252974271487e-09)


def _normal_cdf(ops: Operands, x: str) -> str:
    """The standard normal distribution's cdf at x, for results that are stored as half.

    Half as many instructions as erf, one exponential, and without erf's cancellation in the lower tail.
    """
    z = ops.let(f"tl.abs({x})")
    polynomial = repr(_LOG2_TAIL[-1])
    for coefficient in reversed(_LOG2_TAIL[:-1]):
        polynomial = f"({polynomial} * {z} + {coefficient!r})"
    tail = ops.let(f"tl.exp2({polynomial})")
    return ops.let(f"tl.where({x} < 0, {tail}, 1.0 - {tail})")


def _silu(ops: Operands) -> str:
    x = ops.text(0)
    y = f"(1.0 + {exponential(ops, f'-{x}')})"
    return f"{x} * {_one_over(ops, y)}" if _coarse(ops) else divide(ops, x, y)


def _elu(ops: Operands) -> str:
    x, alpha = ops.text(0), ops.argument("alpha", 1.0)
    scale, inner = ops.argument("scale", 1.0), ops.argument("input_scale", 1.0)
    negative = f"libdevice.expm1({x} * {ops.literal(inner)}) * {ops.literal(alpha * scale)}"
    return f"tl.where({x} > 0, {x} * {ops.literal(scale)}, {negative})"


def _leaky_relu(ops: Operands) -> str:
    x = ops.text(0)
    return f"tl.where({x} > 0, {x}, {x} * {ops.literal(ops.argument('negative_slope', 0.01))})"


def _threshold(ops: Operands) -> str:
    x, threshold = ops.text(0), ops.literal(ops.argument("threshold"))
    return f"tl.where({x} <= {threshold}, {ops.literal(ops.argument('value'))}, {x})"


def _threshold_backward(ops: Operands) -> str:
    threshold = ops.literal(ops.argument("threshold"))
    return f"tl.where({ops.text(1)} <= {threshold}, {ops.literal(0)}, {ops.text(0)})"


def _softplus(ops: Operands) -> str:
    x, beta, threshold = ops.text(0), ops.argument("beta", 1), ops.argument("threshold", 20)
    scaled = ops.let(f"{x} * {ops.literal(beta)}")
    soft = divide(ops, f"libdevice.log1p({exponential(ops, scaled)})", ops.literal(beta))
    return f"tl.where({scaled} > {ops.literal(threshold)}, {x}, {soft})"


def _six(ops: Operands, x: str) -> str:
    """min(max(x + 3, 0), 6)"""
    moved = ops.let(f"{x} + 3.0")
    low = ops.let(bounded(ops, moved, ops.literal(0.0), True, 0.0))
    return bounded(ops, low, ops.literal(6.0), False, 6.0)


def _hardsigmoid(ops: Operands) -> str:
    return f"{_six(ops, ops.text(0))} * {ops.literal(1 / 6)}"


def _hardswish(ops: Operands) -> str:
    return f"{ops.text(0)} * {_six(ops, ops.text(0))} * {ops.literal(1 / 6)}"


def _mish(ops: Operands) -> str:
    x = ops.text(0)
    return f"{x} * libdevice.tanh(libdevice.log1p({exponential(ops, x)}))"


def _sigmoid_backward(ops: Operands) -> str:
    gradient, y = ops.text(0), ops.text(1)
    return f"{gradient} * (1.0 - {y}) * {y}"


def _tanh_backward(ops: Operands) -> str:
    gradient, y = ops.text(0), ops.text(1)
    return f"{gradient} * (1.0 - {y} * {y})"


def _silu_backward(ops: Operands) -> str:
    gradient, x = ops.text(0), ops.text(1)
    y = ops.let(sigmoid(ops, x))
    return f"{gradient} * {y} * (1.0 + {x} * (1.0 - {y}))"


def _gelu_backward(ops: Operands) -> str:
    gradient, x = ops.text(0), ops.text(1)
    if ops.argument("approximate", "none") == "none":
        cdf = _normal_cdf(ops, x) if _coarse(ops) else f"0.5 * (1.0 + tl.erf({x} * {math.sqrt(0.5)!r}))"
        bell = f"tl.exp2({x} * {x} * {-math.log2(math.e) / 2!r})" if _coarse(ops) else \
            exponential(ops, f"-0.5 * {x} * {x}")
        return f"{gradient} * ({cdf} + {x} * ({bell} * {1 / math.sqrt(2 * math.pi)!r}))"
    gate = _gelu_gate(ops, x)
    slope = f"{2 * math.sqrt(2 / math.pi)!r} * (1.0 + 0.134145 * {x} * {x})"
    return f"{gradient} * ({gate} + {x} * {gate} * (1.0 - {gate}) * {slope})"


def _angle(ops: Operands) -> str:
    x = ops.text(0)
    return f"tl.where({x} < 0, {ops.literal(math.pi)}, tl.where({x} != {x}, {x}, {ops.literal(0.0)}))"


def _xlogy(ops: Operands) -> str:
    x, y = ops.text(0), ops.text(1)
    return f"tl.where({x} == 0, tl.where({y} == {y}, {ops.literal(0.0)}, {y}), {x} * tl.log({y}))"


def _ldexp(ops: Operands) -> str:
    """Eager stores the power in the exponent's dtype before it multiplies: a half is rounded, and may be infinite."""
    power, kind = ops.let(f"tl.exp2({ops.text(1)})"), ops.source(1)
    return f"{ops.text(0)} * {rounded(power, kind) if kind.is_floating_point else power}"


# -- rows

_BUILTIN = {"log": 16, "log2": 16, "exp2": 8, "erf": 16}
_LIBRARY = {  # ATen name -> libdevice name
    "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan", "atanh": "atanh",
    "cosh": "cosh", "sinh": "sinh", "tan": "tan", "erfc": "erfc", "erfinv": "erfinv",
    "expm1": "expm1", "log10": "log10", "log1p": "log1p", "lgamma": "lgamma", "i0": "cyl_bessel_i0",
    "special_i1": "cyl_bessel_i1", "special_erfcx": "erfcx", "special_ndtri": "normcdfinv",
}
_BESSEL = {name: f"special_bessel_{name}" for name in ("j0", "j1", "y0", "y1")}  # libdevice name -> ATen name
# An exponential, a pole, or both; powers are steep as well
_STEEP = frozenset({"exp", "exp2", "expm1", "sinh", "cosh", "i0", "tan", "reciprocal", "digamma"})
_PRIMS = {"erf_inv": "erfinv", "bessel_i0": "i0", "bessel_i1": "special_i1", "bessel_j0": "special_bessel_j0",
          "bessel_j1": "special_bessel_j1", "erfcx": "special_erfcx", "ndtri": "special_ndtri"}


def _function(emit: Emit, *libdevice: str, cost: int = 16) -> Row:
    return pointwise(emit, Promotion.INT_TO_FLOAT, cost=cost, libdevice=libdevice)


def _activation(emit: Emit, *libdevice: str, cost: int = 16, operands: tuple[int, ...] = (0,)) -> Row:
    return pointwise(emit, cost=cost, libdevice=libdevice, operands=operands, dtypes=FLOATS)


def special_rows() -> dict[OpOverload, Row]:
    """Every row of this file, those of series.py and of exponent.py."""
    unary: dict[str, Row] = {name: _function(f"tl.{name}({{0}})", cost=cost) for name, cost in _BUILTIN.items()}
    unary |= {name: _function(f"libdevice.{f}({{0}})", f) for name, f in _LIBRARY.items()}
    # at infinity libdevice has the limit, 0, and ATen the cosine of infinity
    unary |= {name: _function(f"tl.where(tl.abs({{0}}) == float('inf'), float('nan'), libdevice.{f}({{0}}))", f)
              for f, name in _BESSEL.items()}
    unary |= {
        "exp": _function(_exp, "exp", cost=8), "sigmoid": _function(_sigmoid, "exp"), "sqrt": _function(_sqrt, cost=4),
        "rsqrt": _function(_rsqrt, cost=4), "reciprocal": _function(_reciprocal, cost=4),
        "digamma": _function("digamma({0})", cost=64), "angle": _function(_angle, cost=2),
        "sin": _function(sine), "cos": _function(cosine), "tanh": _function(hyperbolic_tangent, "tanh"),
    }
    unary |= {name: replace(unary[name], steep=True) for name in _STEEP}
    rows: dict[OpOverload, Row] = {getattr(aten, name).default: row for name, row in unary.items()}
    for name in dir(prims):
        if (row := unary.get(_PRIMS.get(name, name))) is not None:
            rows[getattr(prims, name).default] = row
    rows[prims.cbrt.default] = _function("libdevice.cbrt({0})", "cbrt")
    return rows | _binary_rows() | _activation_rows() | series_rows() | exponent_rows()


def _binary_rows() -> dict[OpOverload, Row]:
    power = pointwise(_power, cost=32, libdevice=("pow",), dtypes=NUMERIC, steep=True)
    hypot = pointwise("libdevice.hypot({0}, {1})", cost=16, libdevice=("hypot",), dtypes=FLOATS)
    atan2 = _function("libdevice.atan2({0}, {1})", "atan2")
    full_precision = frozenset({torch.float32, torch.float64})  # the neighbour of a half is not fp32's
    nextafter = pointwise("libdevice.nextafter({0}, {1})", libdevice=("nextafter",), dtypes=full_precision)
    return {
        aten.pow.Tensor_Tensor: power, aten.pow.Scalar: power, prims.pow.default: power,
        aten.pow.Tensor_Scalar: pointwise(
            _power_of_number, cost=16, libdevice=("pow",), dtypes=NUMERIC, steep=True),
        aten.hypot.default: hypot, prims.hypot.default: hypot,
        aten.atan2.default: atan2, prims.atan2.default: atan2,
        aten.nextafter.default: nextafter, prims.nextafter.default: nextafter,
        aten.xlogy.Tensor: _function(_xlogy), aten.xlogy.Scalar_Self: _function(_xlogy),
        aten.xlogy.Scalar_Other: _function(_xlogy), aten.ldexp.Tensor: _function(_ldexp),
    }


def _activation_rows() -> dict[OpOverload, Row]:
    threshold_backward = pointwise(_threshold_backward, dtypes=NUMERIC, operands=(0, 1))
    return {
        aten.gelu.default: _activation(_gelu, "exp"),
        aten.gelu_backward.default: _activation(_gelu_backward, "exp", operands=(0, 1)),
        aten.silu.default: _activation(_silu, "exp"),
        aten.silu_backward.default: _activation(_silu_backward, "exp", operands=(0, 1)),
        aten.mish.default: _activation(_mish, "tanh", "log1p", "exp"),
        aten.elu.default: _activation(_elu, "expm1"),
        aten.leaky_relu.default: _activation(_leaky_relu, cost=2),
        aten.softplus.default: _activation(_softplus, "log1p", "exp"),
        aten.hardsigmoid.default: _activation(_hardsigmoid, cost=2),
        aten.hardswish.default: _activation(_hardswish, cost=2),
        aten.threshold.default: pointwise(_threshold, dtypes=NUMERIC, operands=(0,)),
        aten.threshold_backward.default: threshold_backward,
        aten.sigmoid_backward.default: _activation(_sigmoid_backward, cost=2, operands=(0, 1)),
        aten.tanh_backward.default: _activation(_tanh_backward, cost=2, operands=(0, 1)),
    }
