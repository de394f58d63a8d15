"""Makes the alias that a call of `fxfuser.boundary` left behind an op that no kernel sees through.

    b = aten.alias(a)      # marked            b = fxfuser.boundary(a)
    c = aten.cos(b)                     ->     c = aten.cos(b)

The cut between forward and backward saves what it views, never the boundary.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxfuser.ops.hints import BOUNDARY, is_marked_boundary
from fxfuser.passes.funnel import Scope


def mark_boundaries(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    for node in graph.nodes:
        if not is_marked_boundary(node):
            continue
        if not scope.fuel.take():
            break
        node.target = BOUNDARY
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
        changes += 1
    return changes
