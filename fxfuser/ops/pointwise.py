"""Pointwise rows that are exact: arithmetic, selection, casts.

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


def overloads(packet: OpOverloadPacket, *names: str) -> Iterator[OpOverload]:
    """The named overloads of an op."""
    for name in names:
        yield getattr(packet, name)


def pointwise(emit: Emit, promote: Promotion = Promotion.DEFAULT, *, cost: int = 1, rounded: bool = False,
              operands: tuple[int, ...] | None = None, dtypes: frozenset[torch.dtype] | None = None,
              libdevice: tuple[str, ...] = (), steep: bool = False) -> Row:
    """A POINTWISE row."""
    return Row(
        Kind.POINTWISE, emit, promote, operands, rounded, steep=steep, cost=cost, dtypes=dtypes, libdevice=libdevice)


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


# -- casts: the emitter converts operand texts to the compute dtype, here the node's own

CAST = Row(Kind.POINTWISE, "{0}", Promotion.RESULT, rounds=True)
COPY = Row(Kind.POINTWISE, "{1}", Promotion.RESULT, rounds=True)


def group(row: Row, *ops: OpOverload) -> dict[OpOverload, Row]:
    """The same row for several ops."""
    return dict.fromkeys(ops, row)


def exact_rows() -> dict[OpOverload, Row]:
    """Every row of this file."""
    return _arithmetic_rows() | _selection_rows()


def _arithmetic_rows() -> dict[OpOverload, Row]:
    add, sub = pointwise(_add, operands=(0, 1)), pointwise(_sub, operands=(0, 1), dtypes=NUMERIC)
    mul, division = pointwise(_mul), pointwise(_divide, Promotion.DIVISION, operands=(0, 1), cost=4, steep=True)
    rounded_division = pointwise(
        _divide, Promotion.DIVISION, operands=(0, 1), cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    floor_divide = pointwise(_floor_divide, cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    remainder = pointwise(_remainder, cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    fmod = pointwise(_fmod, cost=8, rounded=True, dtypes=NUMERIC, libdevice=("fmod",))
    neg, absolute, sign = pointwise(_neg, dtypes=NUMERIC), pointwise(_abs), pointwise(_sign)
    floor, ceil, trunc, rint = (
        pointwise(_whole(f), rounded=True, dtypes=NUMERIC, libdevice=needs) for f, needs in (
            ("tl.floor", ()), ("tl.ceil", ()), ("truncate", ()), ("libdevice.rint", ("rint",))))
    return {
        **group(add, *overloads(aten.add, "Tensor", "Scalar"), prims.add.default),
        **group(sub, *overloads(aten.sub, "Tensor", "Scalar"), prims.sub.default),
        **group(pointwise(_rsub, operands=(0, 1), dtypes=NUMERIC), *overloads(aten.rsub, "Tensor", "Scalar")),
        **group(mul, *overloads(aten.mul, "Tensor", "Scalar"), prims.mul.default),
        **group(division, *overloads(aten.div, "Tensor", "Scalar"), *overloads(aten.true_divide, "Tensor", "Scalar")),
        **group(rounded_division, *overloads(aten.div, "Tensor_mode", "Scalar_mode")),
        **group(floor_divide, *overloads(aten.floor_divide, "default", "Scalar")),
        **group(pointwise(_prims_div, cost=4), prims.div.default),
        **group(remainder, *overloads(aten.remainder, "Tensor", "Scalar", "Scalar_Tensor"), prims.remainder.default),
        **group(fmod, *overloads(aten.fmod, "Tensor", "Scalar"), prims.fmod.default),
        **group(neg, aten.neg.default, prims.neg.default),
        **group(absolute, aten.abs.default, prims.abs.default),
        **group(sign, aten.sign.default, aten.sgn.default, prims.sign.default),
        **group(pointwise(_signbit, Promotion.ALWAYS_BOOL), aten.signbit.default, prims.signbit.default),
        **group(pointwise(_copysign, Promotion.INT_TO_FLOAT), *overloads(aten.copysign, "Tensor", "Scalar")),
        **group(floor, aten.floor.default, prims.floor.default),
        **group(ceil, aten.ceil.default, prims.ceil.default),
        **group(trunc, aten.trunc.default, aten.fix.default, prims.trunc.default),
        **group(rint, aten.round.default, prims.round.default),
        aten.round.decimals: pointwise(
            _round_decimals, rounded=True, operands=(0,), dtypes=NUMERIC, cost=4, libdevice=("rint",)),
        aten.addcmul.default: pointwise(_addcmul, dtypes=NUMERIC, operands=(0, 1, 2)),
        aten.addcdiv.default: pointwise(_addcdiv, dtypes=FLOATS, operands=(0, 1, 2), cost=4),
        aten.lerp.Tensor: pointwise(_lerp, dtypes=FLOATS, cost=2),
        aten.lerp.Scalar: pointwise(_lerp, dtypes=FLOATS, cost=2, operands=(0, 1)),
    }


def _selection_rows() -> dict[OpOverload, Row]:
    maximum, minimum = pointwise(_extremum(True)), pointwise(_extremum(False))
    fmax, fmin = pointwise(_ignoring_nan(True)), pointwise(_ignoring_nan(False))
    where = pointwise(_where, operands=(1, 2))
    return {
        **group(maximum, aten.maximum.default, aten.max.other, prims.maximum.default),
        **group(minimum, aten.minimum.default, aten.min.other, prims.minimum.default),
        **group(fmax, aten.fmax.default, prims.fmax.default),
        **group(fmin, aten.fmin.default, prims.fmin.default),
        **group(pointwise(_clamp), *overloads(aten.clamp, "default", "Tensor")),
        **group(pointwise(_clamp_one("min", True)), *overloads(aten.clamp_min, "default", "Tensor")),
        **group(pointwise(_clamp_one("max", False)), *overloads(aten.clamp_max, "default", "Tensor")),
        aten.hardtanh.default: pointwise(_hardtanh, Promotion.RESULT, dtypes=NUMERIC),
        aten.relu.default: pointwise(_relu, dtypes=NUMERIC),
        **group(where, *overloads(aten.where, "self", "Scalar", "ScalarSelf", "ScalarOther"), prims.where.default),
        **group(pointwise(_masked_fill, Promotion.RESULT, operands=(0,)),
                 *overloads(aten.masked_fill, "Scalar", "Tensor")),
        **group(CAST, aten._to_copy.default, aten.to.dtype, prims.convert_element_type.default),
        aten.copy.default: COPY,
        aten.fill.Tensor: COPY,
        **group(pointwise("{0}"), aten.positive.default, aten.conj_physical.default),
    }
