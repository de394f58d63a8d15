"""Reductions as monoids: states, identity, lift, combine, finish.

One description serves every kernel kind: a persistent row, a loop over a row, one state per region, and the
epilogues to come.  Lanes that pad a tile hold the identity.  NaN propagates, which is why each combine is
written out instead of taken from `tl.max`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Callable, Mapping

import torch


@dataclass(frozen=True)
class Monoid:
    """`states` tensors per element.

    `combine` is the name of a function of 2 * states arguments in `source`; `identity(dtype)` gives a Python
    number per state and `dtypes(dtype)` the dtype of each, where `dtype` is the accumulation dtype.
    `indexed` monoids take the position in the reduced dimensions as their second state, `weighted` ones the
    number 1.  `finish` is a format
    string over {0}, {1}, ... (states) and {count} (the number of reduced elements, in the state's dtype).
    """

    name: str
    combine: str
    source: str
    identity: Callable[[torch.dtype], tuple[bool | int | float, ...]]
    dtypes: Callable[[torch.dtype], tuple[torch.dtype, ...]] = lambda dtype: (dtype,)
    lift: str = "{0}"
    finish: str = "{0}"
    indexed: bool = False
    weighted: bool = False

    @property
    def states(self) -> int:
        return len(self.dtypes(torch.float32))


def _lowest(dtype: torch.dtype) -> bool | int | float:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> bool | int | float:
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _function(name: str, arguments: str, *lines: str) -> str:
    return f"@triton.jit\ndef {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)


def _extremum(name: str, sign: str, identity: Callable[[torch.dtype], bool | int | float]) -> Monoid:
    combine = f"combine_{name}"
    return Monoid(name, combine, _function(combine, "a, b", f"return tl.where((a {sign} b) | (a != a), a, b)"),
                  lambda dtype: (identity(dtype),))


def _arg_extremum(name: str, sign: str, identity: Callable[[torch.dtype], bool | int | float]) -> Monoid:
    combine = f"combine_{name}"
    source = _function(
        combine, "a, a_at, b, b_at",
        "a_nan = a != a",
        "b_nan = b != b",
        "tie = (a == b) | (a_nan & b_nan)",
        f"first = (a {sign} b) | (a_nan & (b == b)) | (tie & (a_at < b_at))",
        "return tl.where(first, a, b), tl.where(first, a_at, b_at)")
    return Monoid(name, combine, source, lambda dtype: (identity(dtype), torch.iinfo(torch.int64).max),
                  lambda dtype: (dtype, torch.int64), finish="{1}", indexed=True)


# exp of the distance scales the sum of the smaller maximum.  Two infinite maxima have no distance: see `finish`
_SOFTMAX = _function(
    "combine_softmax", "a, a_sum, b, b_sum",
    "distance = b - a",
    "scale = tl.where(distance == distance, tl.exp(-tl.abs(distance)), 0.0)",
    "total = tl.where(distance > 0, a_sum * scale + b_sum, a_sum + b_sum * scale)",
    "return tl.where((a > b) | (a != a), a, b), total")


def _softmax(name: str, finish: str) -> Monoid:
    return Monoid(name, "combine_softmax", _SOFTMAX, lambda dtype: (float("-inf"), 0), lambda dtype: (dtype, dtype),
                  finish=finish, weighted=True)


_SUM = _function("combine_sum", "a, b", "return a + b")

MONOIDS: Mapping[str, Monoid] = MappingProxyType({m.name: m for m in (
    Monoid("sum", "combine_sum", _SUM, lambda dtype: (0,)),
    Monoid("mean", "combine_sum", _SUM, lambda dtype: (0,), finish="{0} / {count}"),
    Monoid("prod", "combine_prod", _function("combine_prod", "a, b", "return a * b"), lambda dtype: (1,)),
    _extremum("amax", ">", _lowest),
    _extremum("amin", "<", _highest),
    _arg_extremum("argmax", ">", _lowest),
    _arg_extremum("argmin", "<", _highest),
    Monoid("any", "combine_any", _function("combine_any", "a, b", "return a | b"), lambda dtype: (0,),
           lambda dtype: (torch.int32,), finish="{0} != 0"),
    Monoid("all", "combine_all", _function("combine_all", "a, b", "return a & b"), lambda dtype: (1,),
           lambda dtype: (torch.int32,), finish="{0} != 0"),
    # a maximum and the sum of exponentials that it shifts; the sum is nan where the maximum is infinite or nan
    _softmax("softmax_maximum", "{0}"),
    _softmax("softmax_sum", "tl.where(tl.abs({0}) < float('inf'), {1}, float('nan'))"),
)})
