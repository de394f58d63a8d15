"""New nodes that carry all that the node they replace carried.

Enters: a graph with its insertion point set, a target and arguments.  Leaves: nodes whose meta holds the value of
the call, and the stack trace, sequence number, module stack, checkpoint and partitioner tags of the node `like`.
Invariant: where a node is replaced, readers see its old strides; kernels write the strides of the meta.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, TypeVar

import torch
from torch import fx

from fxfuser.passes.aliasing import aliased
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_layout

aten = torch.ops.aten
Make = Callable[..., fx.Node]  # (target, *args, **kwargs) -> a call node at the insertion point
Found = TypeVar("Found")
VALUE_KEYS = ("val", "tensor_meta", "example_value")


def inherited(like: fx.Node) -> dict[str, Any]:
    """The meta of `like` without what describes its value."""
    return {k: v for k, v in like.meta.items() if k not in VALUE_KEYS}


def call(graph: fx.Graph, scope: Scope, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A call node at the insertion point, with meta."""
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    node.meta = inherited(like)
    with scope.fake():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def replace(old: fx.Node, new: fx.Node, graph: fx.Graph, scope: Scope) -> None:
    """All uses of `old` read `new`, which was made for it and is used nowhere else; erases `old`.

    A new node that computes takes over the old strides; one that is a view cannot, so it is copied.
    """
    value = old.meta["val"]
    if aliased(new) and not same_layout(new.meta["val"], value):
        with graph.inserting_after(new):
            new = call(graph, scope, aten.clone.default, new, like=old)
    assert new.meta["val"].dtype is value.dtype, (old, value.dtype, new.meta["val"].dtype)
    if not aliased(new):
        new.meta["val"] = value
    forward(old, new, graph)


def replace_each(graph: fx.Graph, scope: Scope, match: Callable[[fx.Node], Found | None],
                 rewritten: Callable[[Make, fx.Node, Found], fx.Node]) -> int:
    """Replaces every node of which `match` finds something by what `rewritten` makes of it, while there is fuel.

    How many were replaced.  Nodes that are made on the way are not looked at.
    """
    changes = 0
    for node in list(graph.nodes):
        found = match(node)
        if found is None:
            continue
        if not scope.fuel.take():
            break
        with graph.inserting_before(node):
            new = rewritten(partial(call, graph, scope, like=node), node, found)
        replace(node, new, graph, scope)
        changes += 1
    return changes


def forward(old: fx.Node, new: fx.Node, graph: fx.Graph) -> None:
    """All uses of `old` read `new`, an existing node of the same layout; erases `old`."""
    old.replace_all_uses_with(new)
    graph.erase_node(old)
