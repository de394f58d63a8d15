"""Pointwise rows that are exact: arithmetic, comparison, bits, selection, casts.

Every text agrees with eager bit for bit where no division or root is approximated, on NaN, infinities,
signed zeros and the extreme integers.
"""

from __future__ import annotations

import math
from typing import Any, Iterator

import torch
from torch._ops import OpOverload, OpOverloadPacket

from fxfuser.ops.cast import FLOATS, INTEGERS, TRITON_NAMES, rounded
from fxfuser.ops.row import Emit, Kind, Operands, Promotion, Row

aten, prims = torch.ops.aten, torch.ops.prims

NUMERIC = FLOATS | INTEGERS
WHOLE = INTEGERS | {torch.bool}


def overloads(packet: OpOverloadPacket, *names: str) -> Iterator[OpOverload]:
    """The named overloads of an op."""
    for name in names:
        yield getattr(packet, name)


def pointwise(emit: Emit, promote: Promotion = Promotion.DEFAULT, *, cost: int = 1, rounded: bool = False,
              operands: tuple[int, ...] | None = None, dtypes: frozenset[torch.dtype] | None = None,
              libdevice: tuple[str, ...] = ()) -> Row:
    """A POINTWISE row."""
    return Row(Kind.POINTWISE, emit, promote, operands, rounded, cost=cost, dtypes=dtypes, libdevice=libdevice)


def divide(ops: Operands, a: str, b: str) -> str:
    """a / b of floats, as exact as the numerics ask."""
    return f"tl.div_rn({a}, {b})" if ops.precise and ops.dtype == torch.float32 else f"{a} / {b}"


def truth(ops: Operands, i: int) -> str:
    """Operand i as a truth value."""
    return ops.raw(i) if ops.source(i) == torch.bool else f"({ops.raw(i)} != 0)"


# -- arithmetic


def _scaled(ops: Operands, i: int) -> str:
    """Operand i times the argument `alpha`."""
    alpha = ops.argument("alpha", 1)
    if isinstance(alpha, (bool, int, float)):
        return ops.text(i) if alpha == 1 else f"{ops.text(i)} * {ops.literal(alpha)}"
    return f"{ops.text(i)} * {alpha}"


def _add(ops: Operands) -> str:
    if ops.dtype == torch.bool:
        return f"{ops.text(0)} | {ops.text(1)}" if ops.argument("alpha", 1) else ops.text(0)
    return f"{ops.text(0)} + {_scaled(ops, 1)}"


def _sub(ops: Operands) -> str:
    return f"{ops.text(0)} - {_scaled(ops, 1)}"


def _rsub(ops: Operands) -> str:
    return f"{ops.text(1)} - {_scaled(ops, 0)}"


def _mul(ops: Operands) -> str:
    return f"{ops.text(0)} {'&' if ops.dtype == torch.bool else '*'} {ops.text(1)}"


def _divide(ops: Operands) -> str:
    mode = ops.argument("rounding_mode")
    if mode == "floor":
        return _floor_divide(ops)
    if mode is None:
        return divide(ops, ops.text(0), ops.text(1))
    if not ops.dtype.is_floating_point:
        return f"{ops.text(0)} // {ops.text(1)}"
    quotient = ops.let(f"divide_exact({ops.let(ops.text(0))}, {ops.let(ops.text(1))})")
    # eager truncates the half that it divided to; by a number it divides in fp32
    return f"truncate({quotient if _by_number(ops) else rounded(quotient, ops.result)})"


def _by_number(ops: Operands) -> bool:
    return isinstance(ops.argument("other"), (int, float))


def _floor_divide(ops: Operands) -> str:
    if ops.dtype == torch.uint8:
        return f"{ops.text(0)} // {ops.text(1)}"
    a, b = ops.let(ops.text(0)), ops.let(ops.text(1))
    if ops.result != ops.dtype and not _by_number(ops):
        return f"floor_divide_half({a}, {b}, {TRITON_NAMES[ops.result]})"
    return f"{'floor_divide_float' if ops.dtype.is_floating_point else 'floor_divide_int'}({a}, {b})"


def _prims_div(ops: Operands) -> str:
    """prims.div of integers truncates."""
    return divide(ops, ops.text(0), ops.text(1)) if ops.dtype.is_floating_point else f"{ops.text(0)} // {ops.text(1)}"


def _remainder(ops: Operands) -> str:
    if ops.dtype == torch.uint8:
        return f"{ops.text(0)} % {ops.text(1)}"
    name = "remainder_float" if ops.dtype.is_floating_point else "remainder_int"
    return f"{name}({ops.let(ops.text(0))}, {ops.let(ops.text(1))})"


def _fmod(ops: Operands) -> str:
    if ops.dtype.is_floating_point:
        return f"libdevice.fmod({ops.text(0)}, {ops.text(1)})"
    return f"{ops.text(0)} % {ops.text(1)}"


def _neg(ops: Operands) -> str:
    # not -x: Triton subtracts from 0, which loses the sign of -0.0
    return f"{ops.text(0)} * {ops.literal(-1)}" if ops.dtype.is_floating_point else f"-{ops.text(0)}"


def _abs(ops: Operands) -> str:
    return ops.text(0) if ops.dtype in (torch.bool, torch.uint8) else f"tl.abs({ops.text(0)})"


def _sign(ops: Operands) -> str:
    if ops.dtype == torch.bool:
        return ops.text(0)
    x, one, zero = ops.text(0), ops.literal(1), ops.literal(0)
    if ops.dtype == torch.uint8:
        return f"tl.where({x} != 0, {one}, {zero})"
    return f"tl.where({x} > 0, {one}, tl.where({x} < 0, {ops.literal(-1)}, {zero}))"


def _signbit(ops: Operands) -> str:
    if ops.dtype.is_floating_point:
        return f"sign_bit({ops.text(0)})"
    return f"{ops.text(0)} != {ops.text(0)}" if ops.dtype in (torch.bool, torch.uint8) else f"{ops.text(0)} < 0"


def _copysign(ops: Operands) -> str:
    magnitude = ops.let(f"tl.abs({ops.text(0)})")
    return f"tl.where(sign_bit({ops.let(ops.text(1))}), {magnitude} * {ops.literal(-1)}, {magnitude})"


def _whole(function: str) -> Emit:
    """A rounding function: the identity on integers."""
    def emit(ops: Operands) -> str:
        return f"{function}({ops.text(0)})" if ops.dtype.is_floating_point else ops.text(0)
    return emit


def _round_decimals(ops: Operands) -> str:
    decimals = ops.argument("decimals", 0)
    if not ops.dtype.is_floating_point:
        return ops.text(0)
    if decimals == 0:
        return f"libdevice.rint({ops.text(0)})"
    scale = ops.literal(10.0 ** abs(decimals))
    if decimals > 0:
        return f"divide_exact(libdevice.rint({ops.text(0)} * {scale}), {ops.let(scale)})"
    return f"libdevice.rint(divide_exact({ops.text(0)}, {ops.let(scale)})) * {scale}"


def _addcmul(ops: Operands) -> str:
    value = ops.argument("value", 1)
    factor = "" if value == 1 else f"{ops.literal(value)} * "
    return f"{ops.text(0)} + {factor}{ops.text(1)} * {ops.text(2)}"


def _addcdiv(ops: Operands) -> str:
    value = ops.argument("value", 1)
    numerator = ops.text(1) if value == 1 else f"({ops.literal(value)} * {ops.text(1)})"
    return f"{ops.text(0)} + {divide(ops, numerator, ops.text(2))}"


def _lerp(ops: Operands) -> str:
    """From the nearer end, so that both ends are met exactly."""
    start, end, weight = ops.text(0), ops.text(1), ops.text(2)
    distance = ops.let(f"{end} - {start}")
    return (f"tl.where(tl.abs({weight}) < 0.5, {start} + {weight} * {distance}, "
            f"{end} - {distance} * (1.0 - {weight}))")


# -- selection


def bounded(ops: Operands, x: str, bound: str, below: bool, number: Any = None) -> str:
    """max(x, bound) if `below` else min(x, bound), NaN if either is; `number` is the bound's value, if known."""
    if ops.dtype == torch.bool:
        return f"({x} {'|' if below else '&'} {bound})"
    # nested, not `|`: in the interpreter a comparison of scalars does not combine with one of blocks
    other = x
    if ops.dtype.is_floating_point and (number is None or math.isnan(number)):
        other = f"tl.where({bound} != {bound}, {bound}, {x})"
    return f"tl.where({x} {'<' if below else '>'} {bound}, {bound}, {other})"


def _extremum(below: bool) -> Emit:
    def emit(ops: Operands) -> str:
        return bounded(ops, ops.text(0), ops.text(1), below)
    return emit


def _ignoring_nan(below: bool) -> Emit:
    """fmax, fmin: NaN only where both are."""
    def emit(ops: Operands) -> str:
        x, y = ops.text(0), ops.text(1)
        if not ops.dtype.is_floating_point:
            return bounded(ops, x, y, below)
        return f"tl.where(({x} {'<' if below else '>'} {y}) | ({x} != {x}), {y}, {x})"
    return emit


def _clamp(ops: Operands) -> str:
    x = ops.text(0)
    if ops.has("min"):
        x = ops.let(bounded(ops, x, ops.text(1), True, _number(ops.argument("min"))))
    return bounded(ops, x, ops.text(2), False, _number(ops.argument("max"))) if ops.has("max") else x


def _hardtanh(ops: Operands) -> str:
    low, high = ops.argument("min_val", -1), ops.argument("max_val", 1)
    x = ops.let(bounded(ops, ops.text(0), ops.literal(low), True, low))
    return bounded(ops, x, ops.literal(high), False, high)


def _number(value: Any) -> float | int | None:
    return value if isinstance(value, (int, float)) else None


def _clamp_one(name: str, below: bool) -> Emit:
    def emit(ops: Operands) -> str:
        return bounded(ops, ops.text(0), ops.text(1), below, _number(ops.argument(name)))
    return emit


def _relu(ops: Operands) -> str:
    x = ops.text(0)
    return x if ops.dtype == torch.uint8 else f"tl.where({x} < 0, {ops.literal(0)}, {x})"


def _where(ops: Operands) -> str:
    return f"tl.where({truth(ops, 0)}, {ops.text(1)}, {ops.text(2)})"


def _masked_fill(ops: Operands) -> str:
    return f"tl.where({truth(ops, 1)}, {ops.text(2)}, {ops.text(0)})"


# -- comparison and logic


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


# -- casts: the emitter converts operand texts to the compute dtype, here the node's own

CAST = Row(Kind.POINTWISE, "{0}", Promotion.RESULT, rounds=True)
COPY = Row(Kind.POINTWISE, "{1}", Promotion.RESULT, rounds=True)


def _group(row: Row, *ops: OpOverload) -> dict[OpOverload, Row]:
    return dict.fromkeys(ops, row)


def exact_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    add, sub = pointwise(_add, operands=(0, 1)), pointwise(_sub, operands=(0, 1), dtypes=NUMERIC)
    mul, division = pointwise(_mul), pointwise(_divide, Promotion.DIVISION, operands=(0, 1), cost=4)
    rounded_division = pointwise(
        _divide, Promotion.DIVISION, operands=(0, 1), cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    floor_divide = pointwise(_floor_divide, cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    remainder = pointwise(_remainder, cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    fmod = pointwise(_fmod, cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    neg, absolute, sign = pointwise(_neg, dtypes=NUMERIC), pointwise(_abs), pointwise(_sign)
    floor, ceil, trunc, rint = (
        pointwise(_whole(f), rounded=True, dtypes=NUMERIC, libdevice=needs) for f, needs in (
            ("tl.floor", ()), ("tl.ceil", ()), ("truncate", ()), ("libdevice.rint", ("rint",))))
    maximum, minimum = pointwise(_extremum(True)), pointwise(_extremum(False))
    fmax, fmin = pointwise(_ignoring_nan(True)), pointwise(_ignoring_nan(False))
    where = pointwise(_where, operands=(1, 2))
    rows = {
        **_group(add, *overloads(aten.add, "Tensor", "Scalar"), prims.add.default),
        **_group(sub, *overloads(aten.sub, "Tensor", "Scalar"), prims.sub.default),
        **_group(pointwise(_rsub, operands=(0, 1), dtypes=NUMERIC), *overloads(aten.rsub, "Tensor", "Scalar")),
        **_group(mul, *overloads(aten.mul, "Tensor", "Scalar"), prims.mul.default),
        **_group(division, *overloads(aten.div, "Tensor", "Scalar"), *overloads(aten.true_divide, "Tensor", "Scalar")),
        **_group(rounded_division, *overloads(aten.div, "Tensor_mode", "Scalar_mode")),
        **_group(floor_divide, *overloads(aten.floor_divide, "default", "Scalar")),
        **_group(pointwise(_prims_div, cost=4), prims.div.default),
        **_group(remainder, *overloads(aten.remainder, "Tensor", "Scalar", "Scalar_Tensor"), prims.remainder.default),
        **_group(fmod, *overloads(aten.fmod, "Tensor", "Scalar"), prims.fmod.default),
        **_group(neg, aten.neg.default, prims.neg.default),
        **_group(absolute, aten.abs.default, prims.abs.default),
        **_group(sign, aten.sign.default, aten.sgn.default, prims.sign.default),
        **_group(pointwise(_signbit, Promotion.ALWAYS_BOOL), aten.signbit.default, prims.signbit.default),
        **_group(pointwise(_copysign, Promotion.INT_TO_FLOAT), *overloads(aten.copysign, "Tensor", "Scalar")),
        **_group(floor, aten.floor.default, prims.floor.default),
        **_group(ceil, aten.ceil.default, prims.ceil.default),
        **_group(trunc, aten.trunc.default, aten.fix.default, prims.trunc.default),
        **_group(rint, aten.round.default, prims.round.default),
        aten.round.decimals: pointwise(
            _round_decimals, rounded=True, operands=(0,), dtypes=NUMERIC, cost=4, libdevice=("rint",)),
        aten.addcmul.default: pointwise(_addcmul, dtypes=NUMERIC, operands=(0, 1, 2)),
        aten.addcdiv.default: pointwise(_addcdiv, dtypes=FLOATS, operands=(0, 1, 2), cost=4),
        aten.lerp.Tensor: pointwise(_lerp, dtypes=FLOATS, cost=2),
        aten.lerp.Scalar: pointwise(_lerp, dtypes=FLOATS, cost=2),
        **_group(maximum, aten.maximum.default, aten.max.other, prims.maximum.default),
        **_group(minimum, aten.minimum.default, aten.min.other, prims.minimum.default),
        **_group(fmax, aten.fmax.default, prims.fmax.default),
        **_group(fmin, aten.fmin.default, prims.fmin.default),
        **_group(pointwise(_clamp), *overloads(aten.clamp, "default", "Tensor")),
        **_group(pointwise(_clamp_one("min", True)), *overloads(aten.clamp_min, "default", "Tensor")),
        **_group(pointwise(_clamp_one("max", False)), *overloads(aten.clamp_max, "default", "Tensor")),
        aten.hardtanh.default: pointwise(_hardtanh, Promotion.RESULT, dtypes=NUMERIC),
        aten.relu.default: pointwise(_relu, dtypes=NUMERIC),
        **_group(where, *overloads(aten.where, "self", "Scalar", "ScalarSelf", "ScalarOther"), prims.where.default),
        **_group(pointwise(_masked_fill, Promotion.RESULT, operands=(0,)),
                 *overloads(aten.masked_fill, "Scalar", "Tensor")),
        **_group(CAST, aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default),
        aten.copy.default: COPY,
        aten.fill.Tensor: COPY,
        **_group(pointwise("{0}"), aten.positive.default, aten.conj_physical.default),
    }
    return {**rows, **_comparison_rows(), **_bit_rows()}


def _comparison_rows() -> dict[OpOverload, Row]:
    rows: dict[OpOverload, Row] = {}
    for name, symbol in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
        own, prim = getattr(aten, name), getattr(prims, name)
        rows.update(_group(_compare(symbol), own.Tensor, own.Scalar, prim.default))
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
        rows.update(_group(row, own.Tensor, own.Scalar, own.Scalar_Tensor, prim.default))
    left, right = pointwise(_shift(True), dtypes=INTEGERS), pointwise(_shift(False), dtypes=INTEGERS)
    shifts = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
    return {
        **rows,
        **_group(pointwise(_bitwise_not, dtypes=WHOLE), aten.bitwise_not.default, prims.bitwise_not.default),
        **_group(left, *overloads(aten.bitwise_left_shift, *shifts), *overloads(aten.__lshift__, "Tensor", "Scalar"),
                 prims.shift_left.default),
        **_group(right, *overloads(aten.bitwise_right_shift, *shifts), *overloads(aten.__rshift__, "Tensor", "Scalar"),
                 prims.shift_right_arithmetic.default),
        **_group(pointwise(_gcd, dtypes=INTEGERS, cost=32), aten.gcd.default, prims.gcd.default),
        aten.lcm.default: pointwise(_lcm, dtypes=INTEGERS, cost=32),
    }
