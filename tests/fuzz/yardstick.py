"""How far apart two faithful evaluations of a program may be.

A program is evaluated in float64 (`Wide`), once as it stands and a few times with noise of the size of a rounding
after each op that rounds.  Where the noisy results differ, rounding decides: there a compiled result may differ as
much.  Ops that only move or choose values, and operations on integers, make no noise, so that a comparison of
inputs, a cast or a maximum is held to eager's bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxfuser.ops import TABLE, Kind
from tests.fuzz.program import Line, Program

TRIALS = 4
WIDE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
        torch.complex64: torch.complex128, torch.complex32: torch.complex128}
# in units of the dtype: a half is rounded once, a float's functions are off by a few units
AMPLITUDE = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 4.0, torch.float64: 8.0}

# they choose among their operands, or their results are exact
EXACT = frozenset("""
    maximum minimum fmax fmin max min clamp clamp_min clamp_max hardtanh relu where masked_fill abs neg sign sgn floor
    ceil trunc fix round positive conj_physical copysign copy fill threshold threshold_backward signbit nextafter
    amax amin argmax argmin any all neg_ relu_ clamp_ copy_ fill_ masked_fill_ zero_ view_as_complex to _to_copy
    convert_element_type
""".split())
# of two zeros they take the one or the other
EITHER_ZERO = frozenset("maximum minimum fmax fmin max min clamp clamp_ clamp_min clamp_max amax amin".split())
CASTS = frozenset(("to", "_to_copy", "convert_element_type"))
# their operands' bits are what they read
BITWISE = frozenset(("view.dtype", "view_copy.dtype", "view_of_dtype.default", "nextafter.default"))


def widened(t: Tensor) -> Tensor:
    return t.to(WIDE.get(t.dtype, t.dtype))


class Wide:
    """Evaluation in float64; `dtypes` are those of eager's values by name.  `noise` of 0 makes none."""

    def __init__(self, dtypes: dict[str, torch.dtype], noise: float = 0.0, seed: int = 0) -> None:
        self._dtypes = dtypes
        self._noise = noise
        self._sign = 1.0 if seed % 2 else -1.0  # of NaN, and of zeros that may be either
        self._generator = torch.Generator().manual_seed(seed)

    def call(self, line: Line, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        wanted = self._dtypes[line.result]
        name = op._schema.name.split("::")[1]
        if f"{name}.{op._overloadname}" in BITWISE:
            narrow = [self._narrow(a, r) for a, r in zip(args, line.args)]
            return widened(_index(op(*narrow, **kwargs), line))
        if name in CASTS:  # rounds, and so does every compiled form of it
            dtype = kwargs.get("dtype", args[1] if len(args) > 1 else None)
            return widened(args[0].to(dtype) if dtype is not None else args[0].clone())
        result = _index(op(*map(_wide_argument, args), **{k: _wide_argument(v) for k, v in kwargs.items()}), line)
        if op._schema.is_mutable:
            if name in ("copy_", "fill_") and wanted in WIDE:
                result.copy_(result.to(wanted))
        elif result.dtype != WIDE.get(wanted, wanted):
            result = result.to(WIDE.get(wanted, wanted))
        if TABLE.get(op) is not None and TABLE[op].kind is Kind.FACTORY and wanted in WIDE:
            result = result.to(wanted).to(result.dtype)  # a constant is rounded where it is made
        if self._noise and rounds(op) and wanted in AMPLITUDE and result.is_floating_point():
            self._disturb(result, wanted, [a for a in args if isinstance(a, Tensor)], name)
        if self._noise and result.is_floating_point() and not any(_share(result, a) for a in args):
            loose = result.isnan() | ((result == 0) & (name in EITHER_ZERO))
            result.copy_(torch.where(loose, result.copysign(torch.tensor(self._sign, dtype=result.dtype)), result))
        return result

    def _narrow(self, value: Any, reference: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtypes[reference.name])
        return value

    def _disturb(self, result: Tensor, dtype: torch.dtype, operands: list[Tensor], name: str) -> None:
        unit = torch.finfo(dtype).eps * AMPLITUDE[dtype] * self._noise
        scale = result.abs()
        floats = [o.detach() for o in operands if o.is_floating_point()]
        if name in ("sum", "mean", "prod", "sum_", "cumsum"):
            largest = max((float(o[o.isfinite()].abs().max()) for o in floats if o.isfinite().any()), default=0.0)
            scale = scale + largest * (1 if name == "mean" else 2)
        else:
            for o in floats:
                if o.dim() <= result.dim() and _broadcastable(o, result):
                    scale = scale + 0.25 * o.abs()
        random = torch.rand(result.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        moved = result + torch.nan_to_num(scale, 0.0, 0.0, 0.0) * random * unit + random * torch.finfo(dtype).tiny
        result.copy_(torch.where(result.isfinite(), moved, result))


def rounds(op: OpOverload) -> bool:
    """Whether results of the op carry a rounding of its own."""
    row = TABLE.get(op)
    name = op._schema.name.split("::")[1]
    if name in EXACT:
        return False
    return row is None or row.kind in (Kind.POINTWISE, Kind.REDUCTION, Kind.EXTERN, Kind.GEMM) or name == "linspace"


def evaluations(program: Program, dtypes: dict[str, torch.dtype]) -> list[dict[str, Tensor]]:
    """Every name's value without noise, then under noise, once for each trial; inputs are left as the lines do."""
    found = []
    for trial in range(TRIALS + 1):
        inputs = program.tensors(torch.device("cpu"), widened)
        found.append(program.run(Wide(dtypes, 1.0 if trial else 0.0, trial), inputs))
    return found


def _wide_argument(value: Any) -> Any:
    return WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _index(result: Any, line: Line) -> Tensor:
    found: Tensor = result if line.index is None else result[line.index]
    return found


def _share(a: Tensor, b: Any) -> bool:
    return isinstance(b, Tensor) and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _broadcastable(a: Tensor, b: Tensor) -> bool:
    return all(m in (1, n) for m, n in zip(a.shape[::-1], b.shape[::-1]))
