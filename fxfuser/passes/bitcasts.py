"""Views as another dtype of as many bytes, of what kernels compute, become the same bits as values.

    b = aten.bitwise_or(w, 0x4300)                      b = aten.bitwise_or(w, 0x4300)
    x = aten.view.dtype(b, torch.bfloat16)       ->     x = fxfuser.bitcast(b, torch.bfloat16)
    y = aten.sub(x, 128)                                y = aten.sub(x, 128)

Such a view is made on the host, of a tensor in memory: it ends the kernel that computes its bits and begins another.
A view of an input costs nothing and stays, as does one whose storage the caller may see or that something writes to,
and one that an op reads for which there is no kernel.
"""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops import Kind, is_view, kind_of
from fxfuser.ops.bitcast import BITCAST, castable
from fxfuser.passes.aliasing import escaping, root
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_strides
from fxfuser.passes.rebuild import Make, replace_each

aten = torch.ops.aten
COMPUTED = frozenset((Kind.POINTWISE, Kind.REDUCTION, Kind.LAYOUT, Kind.GATHER, Kind.FACTORY, Kind.SCAN, Kind.GEMM))
READ = COMPUTED | {Kind.SCATTER}


def join_bitcasts(graph: fx.Graph, scope: Scope) -> int:
    outside = escaping(graph)

    def match(node: fx.Node) -> torch.dtype | None:
        """The dtype as which a value's bits are read; None where they are read in memory."""
        base = node.args[0] if node.target is aten.view.dtype else None
        if not isinstance(base, fx.Node) or node in outside or kind_of(root(base)) not in COMPUTED:
            return None
        source, target = base.meta["val"], node.meta["val"]
        if not castable(source.dtype, target.dtype) or not all(kind_of(n) in READ for n in _readers(node)):
            return None
        # what is expanded has strides that no kernel can write
        return target.dtype if same_strides(torch.empty_like(source), source) else None

    return replace_each(graph, scope, match, _bits)


def _bits(make: Make, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return make(BITCAST, node.args[0], dtype)


def _readers(node: fx.Node) -> list[fx.Node]:
    """The nodes that read a view, through others."""
    found: dict[fx.Node, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if is_view(user):
            pending.extend(user.users)
        else:
            found[user] = None
    return list(found)
