"""Gives every reader of a cheap producer a copy of its own, so that it never is a boundary between kernels.

    c = aten.full([], 2.0)                c = aten.full([], 2.0)
    d = aten.mul(a, c)           ->       c1 = aten.full([], 2.0)
    e = aten.mul(b, c)                    d = aten.mul(a, c)
                                          e = aten.mul(b, c1)

Cheap are factories, whose value follows from the index; casts to a wider dtype, of which the narrow operand is less
to write and to read; views and casts of these; and arithmetic of one large tensor that lies in memory anyway with
rows or columns (x - mean), since storing it for a second kernel costs more than reading the tensor again.  Runs after
the cut between forward and backward, which merges equal nodes again.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxfuser.domain.tensors import is_tensor
from fxfuser.ops import Kind, kind_of, row
from fxfuser.ops.products import AFTER
from fxfuser.passes.aliasing import is_pure
from fxfuser.passes.casts import is_plain_cast
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import bytes_of
from fxfuser.passes.rebuild import inherited

DEAR = 16  # cost of a transcendental: not worth repeating
SMALL = 16  # how many times smaller than the result rows and columns are at least


def duplicate_cheap_producers(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    # readers first: when a view of a factory has been copied, the factory has one reader per copy
    for node in reversed(list(graph.nodes)):
        if not is_cheap(node) or len(node.users) < 2:
            continue
        readers = list(node.users)
        kept = next((r for r in readers if r.op == "output"), readers[0])
        for reader in readers:
            if reader is kept or reader.op == "output":
                continue
            if not scope.fuel.take():
                return changes
            _give_copy(graph, node, reader)
            changes += 1
    return changes


def is_cheap(node: fx.Node) -> bool:
    """A factory that no tensor feeds or a widening cast, a view or cast of one, or what `_lies_in_memory` says."""
    if _lies_in_memory(node):
        return True
    while True:
        if is_plain_cast(node) and _widens(node):
            return True
        kind = kind_of(node)
        if not is_pure(node) or kind is None or node.target is AFTER:  # which kernels do not see through
            return False
        if kind is Kind.FACTORY:
            return not any(is_tensor(n) for n in node.all_input_nodes)
        if kind is not Kind.VIEW and not is_plain_cast(node):
            return False
        sources = [n for n in node.all_input_nodes if is_tensor(n)]
        if len(sources) != 1 or not is_tensor(node):
            return False
        node = sources[0]


def _widens(node: fx.Node) -> bool:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize  # type: ignore[no-any-return]


def _lies_in_memory(node: fx.Node) -> bool:
    """Whether this is cheap arithmetic of one tensor in memory, no larger than the result, and of small ones."""
    found = row(node.target)
    if found is None or found.kind is not Kind.POINTWISE or found.cost >= DEAR or not is_tensor(node):
        return False
    own = bytes_of(node.meta["val"])
    operands = [n for n in node.all_input_nodes if is_tensor(n)]
    large = [n for n in operands if bytes_of(n.meta["val"]) * SMALL > own]
    if len(large) != 1 or len(operands) < 2:
        return False
    source = large[0]
    while kind_of(source) is Kind.VIEW or is_plain_cast(source):
        source = source.args[0]  # type: ignore[assignment]
    return kind_of(source) in (None, Kind.EXTERN, Kind.GEMM) and bytes_of(source.meta["val"]) <= own


def _give_copy(graph: fx.Graph, node: fx.Node, reader: fx.Node) -> None:
    target: Any = node.target
    with graph.inserting_before(reader):
        copy = graph.call_function(target, node.args, node.kwargs)
    copy.meta = inherited(node)
    copy.meta["val"] = node.meta["val"]
    reader.replace_input_with(node, copy)
