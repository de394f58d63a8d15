"""Dtypes and numbers as kernel text.  Values are held as `kernel_dtype` of their dtype; bool as `tl.int1`."""

from __future__ import annotations

import math

import torch

from fxfuser.ops.promotion import FLOAT8, kernel_dtype, opmath

TRITON_NAMES: dict[torch.dtype, str] = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16", torch.int64: "tl.int64", torch.int32: "tl.int32", torch.int16: "tl.int16",
    torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}
SUPPORTED = frozenset(TRITON_NAMES)
FLOATS = frozenset(d for d in SUPPORTED if d.is_floating_point)
INTEGERS = SUPPORTED - FLOATS - {torch.bool}

_SMALLEST_NORMAL, _LARGEST = 2.0**-126, 3.4028234663852886e38


def convert(text: str, source: torch.dtype, target: torch.dtype) -> str:
    """The atom `text`, a value of ATen dtype `source`, as a value of `target`, both as kernels hold them.

    Truncates floats as eager does; narrow integers go through a wider one, because what the device does
    with values that do not fit is otherwise undefined where eager wraps.  Does not round to half types; a float8 is
    rounded to, as its bytes are nothing else.
    """
    if source == target:
        return text
    if target in FLOAT8:
        return f"to_{_name(target)}({convert(text, source, torch.float32)})"
    if source in FLOAT8:
        return convert(f"from_{_name(source)}({text})", torch.float32, target)
    held, wanted = opmath(source), opmath(target)
    if held == wanted:
        return text
    if wanted == torch.bool:
        return f"({text} != 0)"
    if held.is_floating_point and wanted in (torch.int8, torch.int16):
        return f"{text}.to(tl.int32).to({TRITON_NAMES[wanted]})"
    if held.is_floating_point and wanted == torch.uint8:
        return f"{text}.to(tl.int64).to(tl.uint8)"
    return f"{text}.to({TRITON_NAMES[wanted]})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rounded(text: str, dtype: torch.dtype) -> str:
    """The atom `text`, held as fp32 for a half dtype, rounded to that dtype; other dtypes are left alone."""
    if opmath(dtype) == dtype:
        return text
    if dtype is torch.bfloat16:
        return f"through_bfloat16({text})"
    return f"{text}.to({TRITON_NAMES[dtype]}).to(tl.float32)"


def ranged(text: str, dtype: torch.dtype) -> str:
    """The atom `text`, held as fp32 for a half dtype, an infinity where that dtype has no number as large."""
    return f"within_float16({text})" if dtype is torch.float16 else text  # bfloat16 has the range of fp32


def operand(text: str, source: torch.dtype, promoted: torch.dtype) -> str:
    """The atom `text`, a tensor's element of dtype `source`, as promotion to `promoted` makes it.

    An integer that becomes a half is rounded to it, as eager rounds it before it computes: 65535 is an fp16
    infinity.  Of bytes each is a half already, and halves themselves stay what the kernel holds.
    """
    converted = convert(text, source, promoted)
    return rounded(converted, promoted) if source in INTEGERS and source.itemsize > 1 else converted


def literal(value: bool | int | float, dtype: torch.dtype, typed: bool = False) -> str:
    """A Python number as an atom in `dtype`, integers wrapped into its range.

    Plain where Triton would infer that very dtype; `typed` forces a `tl.full`, which a value that stands for
    a tensor needs.
    """
    if dtype in FLOAT8:
        value, dtype = float8_bits(value, dtype), kernel_dtype(dtype)
    held = opmath(dtype)
    if held == torch.bool:
        text, plain = repr(bool(value)), True
    elif held.is_floating_point:
        number = float(value)
        plain = held == torch.float32 and (
            number == 0 or not math.isfinite(number) or _SMALLEST_NORMAL <= abs(number) <= _LARGEST)
        text = repr(number) if math.isfinite(number) else f'float("{number}")'
    else:
        text, plain = repr(_wrap(int(value), held)), held == torch.int32
    if is_negative_zero(value) and held.is_floating_point:  # Triton makes 0.0 of it
        return f"(tl.full([], 0.0, {TRITON_NAMES[held]}) * (-1.0))"
    if typed or not plain:
        return f"tl.full([], {text}, {TRITON_NAMES[held]})"
    return f"({text})" if text.startswith("-") else text


def float8_bits(value: bool | int | float, dtype: torch.dtype) -> int:
    """The byte that is this number, rounded to a float8 dtype."""
    return int(torch.tensor(value, dtype=dtype).view(torch.uint8))


def is_negative_zero(value: bool | int | float) -> bool:
    return value == 0 and math.copysign(1.0, value) < 0


def _wrap(value: int, dtype: torch.dtype) -> int:
    info = torch.iinfo(dtype)
    return (value - info.min) % (info.max - info.min + 1) + info.min
