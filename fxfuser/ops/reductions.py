"""Reduction rows, the dimensions that a node reduces and the dtype in which it accumulates."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.monoids import MONOIDS, Folds
from fxfuser.ops.promotion import named_argument, opmath, value_of
from fxfuser.ops.row import Kind, Promotion, Row

aten, prims = torch.ops.aten, torch.ops.prims

# in the meta of a REDUCTION node that is a half of a split one: (which, whether it is the half that reads the whole)
HALF_MARK = "half"
_KEEPS_ALL_WHEN_EMPTY = frozenset({aten.any.dims, aten.all.dims, prims.sum.default, prims.prod.default,
                                   prims.amax.default, prims.amin.default})


def _reduction(monoid: str, rounded: bool = False) -> Row:
    return Row(Kind.REDUCTION, promote=Promotion.RESULT, rounded=rounded, monoid=MONOIDS[monoid])


def reduction_rows() -> dict[OpOverload, Row]:
    """Every reduction that has a monoid and one result."""
    families = {
        "sum": (aten.sum.default, aten.sum.dim_IntList, prims.sum.default),
        "mean": (aten.mean.default, aten.mean.dim),
        "prod": (aten.prod.default, aten.prod.dim_int, prims.prod.default),
        "amax": (aten.amax.default, prims.amax.default, aten.max.default),
        "amin": (aten.amin.default, prims.amin.default, aten.min.default),
        "argmax": (aten.argmax.default,),
        "argmin": (aten.argmin.default,),
        "any": (aten.any.default, aten.any.dim, aten.any.dims),
        "all": (aten.all.default, aten.all.dim, aten.all.dims),
    }
    return {op: _reduction(monoid, rounded=monoid.startswith("arg")) for monoid, ops in families.items() for op in ops}


def reduction_dims(node: fx.Node) -> tuple[tuple[int, ...], bool]:
    """The reduced dimensions of a REDUCTION node, non-negative and sorted, and whether each is kept with size 1.

    An absent or empty list means all dimensions, except for the overloads that take an empty list literally.
    argmax and argmin without a dimension reduce all of them to an index into the flattened input.
    """
    rank = value_of(node.args[0]).dim()
    dims = named_argument(node, "dim", named_argument(node, "dims"))
    if dims is None or (dims == [] and node.target not in _KEEPS_ALL_WHEN_EMPTY):
        dims = range(rank)
    if isinstance(dims, int):
        dims = (dims,)
    reduced = tuple(sorted(d % rank for d in dims)) if rank else ()
    return reduced, bool(named_argument(node, "keepdim", False))


def reduction_dtype(node: fx.Node, row: Row) -> torch.dtype:
    """The dtype in which the monoid accumulates, and to which it converts its operand first.

    sum, prod and mean convert to the result's dtype (int64 for integers and bool, the `dtype` argument where
    given); amax, amin, argmax and argmin compare in the operand's; any and all fold truth values.  Half types
    accumulate in fp32.
    """
    assert row.monoid is not None, node
    if row.monoid.folds is Folds.TRUTH:
        return torch.bool
    if row.monoid.folds is Folds.OPERAND:
        return opmath(value_of(node.args[0]).dtype)
    value = node.meta["val"]
    return opmath((value[0] if isinstance(value, (tuple, list)) else value).dtype)
