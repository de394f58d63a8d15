"""Where in a window its maximum is: the row of the prim that the indices of max pooling come from.

Eager takes an element that is greater than all before it, and every nan.  So of equal maxima the first counts, and of
several nan the last; `argmax` takes the first nan.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch._ops import OpOverload

from fxfuser.ops.monoids import Folds, Monoid, function, lowest
from fxfuser.ops.row import Kind, Promotion, Row


def _reference(x: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    kept = [d for d in range(x.dim()) if d not in dim]
    windows = x.permute(*kept, *dim).flatten(len(kept))
    last = windows.shape[-1] - 1 - windows.isnan().flip(-1).int().argmax(-1)
    return torch.where(windows.isnan().any(-1), last, windows.argmax(-1))


def _shape(x: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    return x.new_empty([size for d, size in enumerate(x.shape) if d not in dim], dtype=torch.int64)


def _prim() -> OpOverload:
    made = torch.library.custom_op("fxfuser::window_place", _reference, mutates_args=(),
                                   schema="(Tensor x, int[] dim) -> Tensor")
    made.register_fake(_shape)
    overload: OpOverload = torch.ops.fxfuser.window_place.default
    return overload


WINDOW_PLACE = _prim()  # the number of the element among those of dimensions `dim`, which rise, in row-major order

_MONOID = Monoid(
    "window_place", "combine_window_place",
    function("combine_window_place", "a, a_at, b, b_at",
             "a_nan = a != a",
             "b_nan = b != b",
             "first = (a > b) | (a_nan & (b == b)) | ((a == b) & (a_at < b_at)) | (a_nan & b_nan & (a_at > b_at))",
             "return tl.where(first, a, b), tl.where(first, a_at, b_at)"),
    lambda dtype: (lowest(dtype), torch.iinfo(torch.int64).max), lambda dtype: (dtype, torch.int64),
    ("{x}", "{at}"), ("{1}",), Folds.OPERAND)


def window_place_rows() -> dict[OpOverload, Row]:
    """The row of this file."""
    return {WINDOW_PLACE: Row(Kind.REDUCTION, promote=Promotion.RESULT, rounded=True, monoid=_MONOID)}
