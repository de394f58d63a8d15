"""Pointwise rows whose results are truth values or bits: comparison, logic, classification, shifts, divisors."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from fxfuser.ops.cast import INTEGERS
from fxfuser.ops.pointwise import group, overloads, pointwise, truth
from fxfuser.ops.row import Emit, Operands, Promotion, Row

aten, prims = torch.ops.aten, torch.ops.prims

WHOLE = INTEGERS | {torch.bool}


def _compare(symbol: str) -> Row:
    return pointwise(f"{{0}} {symbol} {{1}}", Promotion.ALWAYS_BOOL, rounded=True)


def _logical(symbol: str) -> Row:
    def emit(ops: Operands) -> str:
        return f"{truth(ops, 0)} {symbol} {truth(ops, 1)}"
    return pointwise(emit, Promotion.NONE)


def _logical_not(ops: Operands) -> str:
    return f"{truth(ops, 0)} == 0"


def _classify(float_text: str, otherwise: bool) -> Row:
    """A predicate on floats that integers answer with `otherwise`."""
    def emit(ops: Operands) -> str:
        if ops.dtype.is_floating_point:
            return float_text.replace("{0}", ops.text(0))
        return f"{ops.text(0)} {'==' if otherwise else '!='} {ops.text(0)}"
    return pointwise(emit, Promotion.ALWAYS_BOOL, rounded=True)


# -- bits


def _bitwise_not(ops: Operands) -> str:
    return f"{ops.text(0)} == 0" if ops.dtype == torch.bool else f"{ops.text(0)} ^ {ops.literal(-1)}"


def _shift(left: bool) -> Emit:
    """A shift by a negative or too large count moves every bit out: 0, or the sign for a right shift."""
    def emit(ops: Operands) -> str:
        x, count = ops.text(0), ops.text(1)
        bits = torch.iinfo(ops.dtype).bits
        inside = f"{count} < {bits}" if ops.dtype == torch.uint8 else f"({count} >= 0) & ({count} < {bits})"
        if left:
            return f"tl.where({inside}, {x} << tl.where({inside}, {count}, {ops.literal(0)}), {ops.literal(0)})"
        if ops.dtype == torch.uint8:
            return f"tl.where({inside}, {x} >> tl.where({inside}, {count}, {ops.literal(0)}), {ops.literal(0)})"
        return f"{x} >> tl.where({inside}, {count}, {ops.literal(bits - 1)})"
    return emit


def _gcd(ops: Operands) -> str:
    return f"greatest_common_divisor({ops.let(ops.text(0))}, {ops.let(ops.text(1))})"


def _lcm(ops: Operands) -> str:
    return f"least_common_multiple({ops.let(ops.text(0))}, {ops.let(ops.text(1))})"


def logic_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    return _comparison_rows() | _bit_rows()


def _comparison_rows() -> dict[OpOverload, Row]:
    rows: dict[OpOverload, Row] = {}
    for name, symbol in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        own, prim = getattr(aten, name), getattr(prims, name)
        rows.update(group(_compare(symbol), own.Tensor, own.Scalar, prim.default))
    return {
        **rows,
        aten.logical_and.default: _logical("&"), aten.logical_or.default: _logical("|"),
        aten.logical_xor.default: _logical("^"), aten.logical_not.default: pointwise(_logical_not, Promotion.NONE),
        aten.isnan.default: _classify("{0} != {0}", False),
        aten.isinf.default: _classify('tl.abs({0}) == float("inf")', False),
        aten.isposinf.default: _classify('{0} == float("inf")', False),
        aten.isneginf.default: _classify('{0} == -float("inf")', False),
        aten.isfinite.default: _classify('tl.abs({0}) < float("inf")', True),
        prims.isfinite.default: _classify('tl.abs({0}) < float("inf")', True),
    }


def _bit_rows() -> dict[OpOverload, Row]:
    rows: dict[OpOverload, Row] = {}
    for name, symbol in (("and", "&"), ("or", "|"), ("xor", "^")):
        own, prim = getattr(aten, f"bitwise_{name}"), getattr(prims, f"bitwise_{name}")
        row = pointwise(f"{{0}} {symbol} {{1}}", dtypes=WHOLE)
        rows.update(group(row, own.Tensor, own.Scalar, own.Scalar_Tensor, prim.default))
    left, right = pointwise(_shift(True), dtypes=INTEGERS), pointwise(_shift(False), dtypes=INTEGERS)
    shifts = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    return {
        **rows,
        **group(pointwise(_bitwise_not, dtypes=WHOLE), aten.bitwise_not.default, prims.bitwise_not.default),
        **group(left, *overloads(aten.bitwise_left_shift, *shifts), *overloads(aten.__lshift__, "Tensor", "Scalar"),
                 prims.shift_left.default),
        **group(right, *overloads(aten.bitwise_right_shift, *shifts), *overloads(aten.__rshift__, "Tensor", "Scalar"),
                 prims.shift_right_arithmetic.default),
        **group(pointwise(_gcd, dtypes=INTEGERS, cost=32), aten.gcd.default, prims.gcd.default),
        aten.lcm.default: pointwise(_lcm, dtypes=INTEGERS, cost=32),
    }
