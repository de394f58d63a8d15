"""Removes nodes that nothing reads.

    b = aten.mul(a, 2)    # no reader         c = aten.add(a, 1)
    c = aten.add(a, 1)                   ->   return c
    return c

Kept without a reader: ops that write an argument, return nothing (assertions), draw random numbers (eager advances
the generator too), and all that is not ATen: custom ops, collectives and higher-order ops may do anything.
"""

from __future__ import annotations

from torch import fx

from fxfuser.passes.aliasing import is_pure
from fxfuser.passes.funnel import Scope


def remove_dead_nodes(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    for node in reversed(list(graph.nodes)):
        if node.users or not (is_pure(node) or node.op == "get_attr"):
            continue
        if not scope.fuel.take():
            break
        graph.erase_node(node)
        changes += 1
    return changes
