"""Lines for POINTWISE rows: arguments from the schema, operands first brought to where the function is defined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from tests.fuzz.drafting import DTYPES, Draft, Refused
from tests.fuzz.program import Ref, op_name

FLOATS = tuple(d for d in DTYPES if d.is_floating_point)
INTEGERS = tuple(d for d in DTYPES if not d.is_floating_point and d != torch.bool)
UNIT, WIDE, POSITIVE = (-0.9, 0.9), (-6.0, 6.0), (0.25, 40.0)

# bounds of an operand, by op name and position: outside is another branch, a pole or an overflow
SLOW: Mapping[str, Mapping[int, tuple[float, float]]] = {  # eager takes a step for each unit outside of these
    **dict.fromkeys(("special_zeta", "zeta"), {0: (1.5, 8.0), 1: POSITIVE}),
    "polygamma": {1: POSITIVE},
    **{f"special_{name}": {0: (-1.5, 2.0), 1: (0.0, 9.0)} for name in (
        *(f"{before}chebyshev_polynomial_{form}" for before in ("", "shifted_") for form in "tuvw"),
        "hermite_polynomial_h", "hermite_polynomial_he", "laguerre_polynomial_l", "legendre_polynomial_p")},
}
BOUNDS: Mapping[str, Mapping[int, tuple[float, float]]] = {
    **SLOW, **dict.fromkeys(("igamma", "igammac"), {0: (0.25, 16.0), 1: (0.25, 40.0)}),
    "special_airy_ai": {0: (-6.0, 6.0)},
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma", "special_bessel_y0",
                     "special_bessel_y1"), {0: POSITIVE}),
    "log1p": {0: (-0.5, 40.0)}, "acosh": {0: (1.1, 40.0)},
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv", "erf_inv"), {0: UNIT}),
    **dict.fromkeys(("special_ndtri", "ndtri"), {0: (0.1, 0.9)}),
    **dict.fromkeys(("exp", "exp2", "expm1", "sinh", "cosh", "i0", "special_i1", "bessel_i0", "bessel_i1",
                     "special_erfcx", "erfcx"), {0: (-4.0, 6.0)}),
    "tan": {0: (-1.2, 1.2)},
    **dict.fromkeys(("div", "true_divide"), {1: POSITIVE}), "addcdiv": {2: POSITIVE},
    "pow": {0: (0.25, 4.0), 1: (0.0, 3.0)}, "xlogy": {1: POSITIVE}, "ldexp": {1: (-4, 4)},
    "atan2": {0: POSITIVE},
    # eager traps on an integer division by zero, and on that of the smallest by -1
    **dict.fromkeys(("floor_divide", "remainder", "fmod"), {1: (1, 40)}),
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "shift_left",
                     "shift_right_arithmetic"), {1: (0, 7)}),
}
# rows that jump, where a rounding error shows as another number: they read what no rounding made, if there is such
MODES = (None, "floor", "trunc")


def line(draft: Draft, op: OpOverload, attempt: int) -> Ref:
    """Adds the line; later attempts give operands other dtypes."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    first: Ref | None = None
    name = op._schema.name.split("::")[1]
    # prims do not promote; backward formulas of mixed dtypes crash PyTorch itself (gelu_backward of int8 and float32)
    backward = name.endswith("_backward")
    exactly = op.namespace == "prims" or backward
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]"):
            attempt = 3 if backward else attempt  # floats
            value: Any = _tensor(draft, first, exactly, attempt, name, position, argument.name)
            if first is None or draft.value(first).dtype == torch.bool:
                first = value if argument.name not in ("condition", "mask", "pred") else first
        elif kind == "Optional[Tensor]" and draft.chance(0.3):
            value = None
        elif (value := _other(draft, kind, argument, name)) is _SKIP:
            continue
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return draft.add(op_name(op), *args, **kwargs)


def _tensor(draft: Draft, first: Ref | None, exactly: bool, attempt: int, name: str, position: int,
            argument: str) -> Ref:
    if argument in ("condition", "mask", "pred"):
        return _condition(draft, first)
    if first is None:
        value = _first(draft, attempt)
    elif argument == "value":  # fill and masked_fill take one number
        value = draft.fresh((), draft.value(first).dtype)
    else:
        value = draft.partner(first, exactly)
    return _bounded(draft, value, name, position)


def _first(draft: Draft, attempt: int) -> Ref:
    if attempt < 3:
        return draft.operand()
    wanted = ((torch.float32,), INTEGERS, (torch.bool,), FLOATS)[attempt % 4]
    return draft.operand(dtypes=wanted, fresh=0.05)


def _condition(draft: Draft, first: Ref | None) -> Ref:
    shape = draft.value(first).shape if first is not None else draft.shape
    found = draft.pick(lambda t: t.dtype == torch.bool and t.shape == shape)
    if found is not None and draft.chance(0.8):
        return found
    same = draft.pick(lambda t: t.shape == shape and not t.dtype.is_complex)
    if same is not None and draft.chance(0.5):
        return draft.add("aten.gt.Scalar", same, 0)
    return draft.fresh(tuple(shape), torch.bool)


def _bounded(draft: Draft, value: Ref, name: str, position: int) -> Ref:
    limits = BOUNDS.get(name, {}).get(position)
    dtype = draft.value(value).dtype
    traps = name in ("floor_divide", "remainder", "fmod", "div") and not dtype.is_floating_point
    shifts = "shift" in name and name not in SLOW
    if limits is None or dtype.is_complex or not (traps or shifts or name in SLOW) and draft.chance(0.1):
        return value
    if dtype == torch.bool:
        if traps:
            return draft.add("aten.logical_or.default", value, draft.add("aten.logical_not.default", value))
        return value
    if not dtype.is_floating_point:
        low, high = int(-(-limits[0] // 1)), int(limits[1])
        return draft.add("aten.clamp.default", value, max(low, 0) if dtype == torch.uint8 else low, high)
    if name.startswith("special_") and "_polynomial_" in name:  # of NaN eager returns what its memory held
        value = draft.add("aten.nan_to_num.default", value, 0.5)
    return draft.add("aten.clamp.default", value, *map(float, limits))


_SKIP = object()


def _other(draft: Draft, kind: str, argument: Any, name: str) -> Any:
    """An argument that is no tensor."""
    rng = draft.rng
    if kind in ("number", "Scalar", "Optional[number]"):
        return _number(draft, argument, name)
    if kind == "Optional[str]" or kind == "str":
        if argument.name == "approximate":
            return rng.choice(("none", "tanh"))
        return rng.choice(MODES[1:] if draft.chance(0.8) else MODES)
    if argument.name in ("dtype", "type"):
        return draft.draw_dtype()
    if name == "polygamma":
        return rng.choice((0, 1, 2, 3))
    if argument.name == "decimals":
        return rng.choice((0, 1, 2, -1))
    if argument.has_default_value():
        return _SKIP
    raise Refused(f"{argument.name}: {kind}")


def _number(draft: Draft, argument: Any, name: str) -> Any:
    rng = draft.rng
    if argument.name in ("alpha", "value", "beta", "negative_slope", "scale", "input_scale", "lambd") and draft.chance(
            0.5) and argument.has_default_value():
        return _SKIP
    if str(argument.type) == "Optional[number]" and draft.chance(0.2):
        return None
    if argument.name in ("min_val", "min"):
        return rng.choice((-2, -1.0, 0, -0.5))
    if argument.name in ("max_val", "max"):
        return rng.choice((1, 2.0, 0.75, 3))
    if name == "pow":
        return rng.choice((0, 1, 2, 3, 0.5, -1, 1.5, 2.0))
    if name in ("floor_divide", "remainder", "fmod", "div", "true_divide"):
        return rng.choice((2, 3, 0.75, 7, 1.5))
    if "shift" in name and name not in SLOW:
        return rng.choice((0, 1, 2, 5))
    if name.startswith("bitwise"):
        return rng.choice((1, 5, 12, True))
    if argument.name in ("beta", "scale", "input_scale", "negative_slope"):
        return rng.choice((0.5, 1.0, 1.25))
    return rng.choice((2, -1, 3, 0.5, -1.5, 0.1, 1, 0))
