"""Pointwise rows of long functions: Bessel and Airy functions, zeta, incomplete gammas, orthogonal polynomials.

Their texts call functions of the prelude (`bessel.py`, `gamma.py`, `polynomials.py`), for neither Triton nor libdevice
has them.
"""

from __future__ import annotations

import math

import torch
from torch._ops import OpOverload

from fxfuser.ops.pointwise import pointwise
from fxfuser.ops.row import Emit, Operands, Promotion, Row

aten, prims = torch.ops.aten, torch.ops.prims

FULL = frozenset({torch.float32, torch.float64})  # eager has no halves of most of these

# ATen name (without special_) -> text and the libdevice functions that it calls
_UNARY: dict[str, tuple[str, tuple[str, ...]]] = {
    "modified_bessel_i0": ("libdevice.cyl_bessel_i0({0})", ("cyl_bessel_i0",)),
    "modified_bessel_i1": ("libdevice.cyl_bessel_i1({0})", ("cyl_bessel_i1",)),
    "modified_bessel_k0": ("bessel_k0({0}, False)", ("cyl_bessel_i0", "exp")),
    "modified_bessel_k1": ("bessel_k1({0}, False)", ("cyl_bessel_i1", "exp")),
    "scaled_modified_bessel_k0": ("bessel_k0({0}, True)", ("cyl_bessel_i0", "exp")),
    "scaled_modified_bessel_k1": ("bessel_k1({0}, True)", ("cyl_bessel_i1", "exp")),
    "spherical_bessel_j0": ("spherical_j0({0})", ()),
    "airy_ai": ("airy_ai({0})", ("exp",)),
}
_POLYNOMIALS = {  # the same -> function of x and the order
    "chebyshev_polynomial_t": "chebyshev_t", "chebyshev_polynomial_u": "chebyshev_u",
    "chebyshev_polynomial_v": "chebyshev_v", "chebyshev_polynomial_w": "chebyshev_w",
    "hermite_polynomial_h": "hermite_h", "hermite_polynomial_he": "hermite_he",
    "laguerre_polynomial_l": "laguerre_l", "legendre_polynomial_p": "legendre_p",
}
_INCOMPLETE = ("exp", "log1p", "expm1", "erfc", "lgamma")


def _polygamma(ops: Operands) -> str:
    """The derivative of order n of digamma; past the first a multiple of Hurwitz's zeta (DLMF 25.11.12)."""
    n, x = ops.argument("n"), ops.let(ops.text(1))
    if n <= 1:
        return f"{'trigamma' if n else 'digamma'}({x})"
    factor = float(math.factorial(n)) if n <= 170 else math.inf
    order = ops.let(ops.literal(n + 1.0))
    return f"hurwitz_zeta({order}, {x}) * {ops.literal(factor if n % 2 else -factor)}"


def _two(function: str) -> Emit:
    """A function of two values; a number is bound first, which makes a value of it."""
    def emit(ops: Operands) -> str:
        return f"{function}({ops.let(ops.text(0))}, {ops.let(ops.text(1))})"
    return emit


def _shifted(function: str) -> Emit:
    """A polynomial of 2x - 1."""
    def emit(ops: Operands) -> str:
        x = ops.let(ops.text(0))
        return f"{function}({ops.let(f'{x} + {x} - 1.0')}, {ops.let(ops.text(1))})"
    return emit


def series_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    return {**_unary_rows(), **_binary_rows()}


def _unary_rows() -> dict[OpOverload, Row]:
    rows = {getattr(aten, f"special_{name}").default: _function(text, *needs, cost=64)
            for name, (text, needs) in _UNARY.items()}
    i0e = pointwise("scaled_i0({0})", Promotion.INT_TO_FLOAT, cost=64, libdevice=("exp", "cyl_bessel_i0"))
    i1e = pointwise("scaled_i1({0})", Promotion.INT_TO_FLOAT, cost=64, libdevice=("exp", "cyl_bessel_i1"))
    spherical = rows[aten.special_spherical_bessel_j0.default]
    return rows | {
        aten.special_i0e.default: i0e, prims.bessel_i0e.default: i0e,
        aten.special_i1e.default: i1e, prims.bessel_i1e.default: i1e,
        prims.spherical_bessel_j0.default: spherical,
        aten.polygamma.default: pointwise(
            _polygamma, Promotion.INT_TO_FLOAT, operands=(1,), cost=128, libdevice=("pow",), steep=True),
    }


def _binary_rows() -> dict[OpOverload, Row]:
    zeta = _function(_two("hurwitz_zeta"), "pow", cost=256)
    rows = {
        aten.igamma.default: pointwise(_two("lower_gamma"), cost=1024, libdevice=_INCOMPLETE, dtypes=FULL),
        aten.igammac.default: pointwise(_two("upper_gamma"), cost=1024, libdevice=_INCOMPLETE, dtypes=FULL),
        prims.zeta.default: zeta, **_overloads("special_zeta", zeta),
    }
    for name, function in _POLYNOMIALS.items():
        needs = ("acos",) if function.startswith("chebyshev") else ()
        rows |= _overloads(f"special_{name}", _function(_two(function), *needs))
        if needs:
            rows |= _overloads(f"special_shifted_{name}", _function(_shifted(function), *needs))
    return rows


def _function(emit: Emit, *libdevice: str, cost: int = 128) -> Row:
    return pointwise(emit, Promotion.INT_TO_FLOAT, cost=cost, libdevice=libdevice, dtypes=FULL)


def _overloads(name: str, row: Row) -> dict[OpOverload, Row]:
    """`row` for two tensors and for a tensor and a number."""
    packet = getattr(aten, name)
    return {getattr(packet, o): row for o in packet.overloads() if "out" not in o.split("_")}
