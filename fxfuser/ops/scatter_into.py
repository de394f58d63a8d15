"""Values that are stored inside a tensor that exists, at positions which other tensors hold.

    rows = scatter_into(base, positions, source)    base[positions] = source
    new = after(base, [rows])                       `base`, once that has been done

A kernel that computes `source` stores it there itself.  The passes make one only of a write that nobody can tell from
one to a copy (see passes/scatter_in_place.py).  The node stands for the elements that it stores: its meta["val"] has
the sizes of base[positions], to which `source` is broadcast.  Without positions all of `base` is overwritten, then a
view as a rule.  Negative positions count from the end if `wraps`; else they are refused like those past the end.
"""

from __future__ import annotations

from typing import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.row import Kind, Row
from fxfuser.ops.table import add_row

REFUSED = "fxfuser.refused_in_place"  # in the meta of a write that makes a new tensor: why it must


def scatter_into(
    base: torch.Tensor, positions: Sequence[torch.Tensor | None], source: torch.Tensor, wraps: bool = True
) -> torch.Tensor:
    """`base`, in which `source` has been stored."""
    given = [d for d, p in enumerate(positions) if p is not None]
    if not given:
        return base.copy_(source)
    first = positions[given[0]]
    if not wraps and len(given) == 1 and first is not None and first.dim() == 1:  # refuses negative positions
        return base.index_copy_(given[0], first.long(), source)
    result: torch.Tensor = torch.ops.aten.index_put_.default(base, list(positions), source)
    return result


def _define() -> OpOverload:
    torch.library.define(
        "fxfuser::scatter_into",
        "(Tensor(a!) base, Tensor?[] positions, Tensor source, bool wraps=True) -> Tensor(a!)")
    torch.library.impl("fxfuser::scatter_into", "CompositeExplicitAutograd", scatter_into)
    op: OpOverload = torch.ops.fxfuser.scatter_into.default
    add_row(op, Row(Kind.SCATTER))
    return op


SCATTER_INTO = _define()


def memory_of(node: fx.Node) -> fx.Node:
    """The tensor in whose memory a kernel stores the value of `node`: its own, or the one that it is scattered into."""
    base = node.args[0] if node.target is SCATTER_INTO else node
    assert isinstance(base, fx.Node)
    return base
