"""A number that follows from inputs alone, and is only written back to one, is computed last.

    n = aten.add(step, 1);  ...;  y = f(step);  ...;  aten.copy_(step, n)              # step has one element
->                     ...;  y = f(step);  ...;  n = aten.add(step, 1);  aten.copy_(step, n)

Computed before something that reads the old value, or beside it in one kernel, the new one could not be written over it
(runtime/write_backs.py): it would be a tensor of its own, and a copy.  A mark keeps the segmenter from that.  Counters
of all layers, such as those of caches and of batch norms, are neighbours then, and one kernel serves them.
"""

from __future__ import annotations

from torch import fx

from fxfuser.ops import UPDATE_MARK, Kind, is_write_back, kind_of
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import known_equal


def updates_last(graph: fx.Graph, scope: Scope) -> int:
    written, changes = _at_the_end(graph), 0
    for update in written:
        value = update.args[1]
        if _waits(value, update) and scope.fuel.take():
            assert isinstance(value, fx.Node)
            value.meta[UPDATE_MARK] = True
            written[0].prepend(value)
            changes += 1
    return changes


def _at_the_end(graph: fx.Graph) -> list[fx.Node]:
    """The write-backs behind all that computes: what comes after any other may depend on it."""
    found = []
    node = graph.output_node().prev
    while is_write_back(node):
        found.append(node)
        node = node.prev
    return found[::-1]


def _waits(value: object, update: fx.Node) -> bool:
    """Whether inputs alone make the number that a write-back writes, and nothing else reads it."""
    return (isinstance(value, fx.Node) and kind_of(value) is Kind.POINTWISE and list(value.users) == [update]
            and UPDATE_MARK not in value.meta and known_equal(value.meta["val"].numel(), 1)
            and all(n.op == "placeholder" for n in value.all_input_nodes))
