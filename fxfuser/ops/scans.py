"""Rows of scans: running folds along one dimension.

cummax and cummin return two tensors; the expand pass makes two prims of each, whose scans share their loads.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch._ops import OpOverload

from fxfuser.ops.monoids import MONOIDS, SOFTMAX, Folds, Monoid, Number, function, highest, lowest
from fxfuser.ops.row import Kind, Promotion, Row

aten = torch.ops.aten


def _last_place(name: str, sign: str, identity: Callable[[torch.dtype], Number]) -> Monoid:
    """Where the extremum so far is: the last of equal ones, and nan is more extreme than any number."""
    combine = f"combine_{name}"
    source = function(combine, "a, a_at, b, b_at", f"later = (b {sign}= a) | (b != b)",
                      "later = later & ((a == a) | (b != b))",
                      "return tl.where(later, b, a), tl.where(later, b_at, a_at)")
    return Monoid(name, combine, source, lambda dtype: (identity(dtype), -1), lambda dtype: (dtype, torch.int64),
                  ("{x}", "{at}"), ("{1}",), Folds.OPERAND)


LOGCUMSUMEXP = Monoid(
    "logcumsumexp", SOFTMAX.combine, SOFTMAX.source, SOFTMAX.identity, SOFTMAX.dtypes, SOFTMAX.lift,
    ("tl.where(tl.abs({0}) < float('inf'), {0} + tl.log({1}), {0})",))


def _prim(name: str, source: Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]], result: int) -> OpOverload:
    """`fxfuser::name(x, dim)`: one of the two results of cummax or cummin."""
    def reference(x: torch.Tensor, dim: int) -> torch.Tensor:
        return source(x, dim)[result].clone()

    schema = "(Tensor x, int dim) -> Tensor"
    made = torch.library.custom_op(f"fxfuser::{name}", reference, mutates_args=(), schema=schema)
    made.register_fake(lambda x, dim: torch.empty_like(x, dtype=torch.int64 if result else x.dtype))
    overload: OpOverload = getattr(torch.ops.fxfuser, name).default
    return overload


CUMMAX, CUMMAX_PLACE = _prim("cummax", torch.cummax, 0), _prim("cummax_place", torch.cummax, 1)
CUMMIN, CUMMIN_PLACE = _prim("cummin", torch.cummin, 0), _prim("cummin_place", torch.cummin, 1)


def scan_rows() -> dict[OpOverload, Row]:
    """Every scan that has a monoid and one result."""
    monoids = {
        aten.cumsum.default: MONOIDS["sum"], aten.cumprod.default: MONOIDS["prod"],
        aten.logcumsumexp.default: LOGCUMSUMEXP, CUMMAX: MONOIDS["amax"], CUMMIN: MONOIDS["amin"],
        CUMMAX_PLACE: _last_place("cummax_place", ">", lowest), CUMMIN_PLACE: _last_place("cummin_place", "<", highest),
    }
    return {op: Row(Kind.SCAN, promote=Promotion.RESULT, rounded=m.indexed, monoid=m, cost=4)
            for op, m in monoids.items()}
