"""Puts the ATen ops that a function consists of in the place of one node.

Enters: a node and a function of tensors and sizes that computes the same.  Leaves: the graph with the function's ops
instead of the node.  Invariant: the results have the node's dtypes, shapes and strides, and storages of their own;
sizes that the function asks of its inputs become the graph's own size inputs.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx

from fxfuser.passes.aliasing import aliased
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import same_layout, same_shape
from fxfuser.passes.rebuild import call, inherited
from fxfuser.passes.sizes import Sizes

aten = torch.ops.aten


def trace_body(
    function: Callable[..., Any], values: Sequence[Any], expected: Any, scope: Scope
) -> fx.Graph | None:
    """The graph of `function` on fake `values`, one placeholder per value.

    None where a result would differ from `expected` in dtype or shape and, unless strict, where the trace fails.
    """
    try:
        graph = scope.trace(function, values).graph
    except Exception:
        if scope.strict:
            raise
        return None  # the op runs as its ATen call, which is always right
    return graph if _fits(_results(graph), expected) else None


def _results(graph: fx.Graph) -> tuple[Any, ...]:
    found = graph.output_node().args[0]
    return tuple(found) if isinstance(found, (list, tuple)) else (found,)


def _fits(results: tuple[Any, ...], value: Any) -> bool:
    expected = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(results) != len(expected):
        return False
    for new, old in zip(results, expected):
        if new is None and old is None:
            continue
        if not isinstance(new, fx.Node) or not isinstance(old, torch.Tensor):
            return False
        made = new.meta["val"]
        if made.dtype is not old.dtype or not same_shape(made, old):
            return False
    return True


def splice(
    graph: fx.Graph, node: fx.Node, inputs: Sequence[fx.Node], body: fx.Graph, scope: Scope, sizes: Sizes
) -> list[fx.Node]:
    """Copies the body before `node` and hands its results to the readers of `node`, which is erased.

    `inputs` are the nodes for which the body's placeholders stand.  Returns the copies.
    """
    copies: dict[fx.Node, fx.Node] = dict(zip((n for n in body.nodes if n.op == "placeholder"), inputs))
    given = frozenset(copies.values())
    with graph.inserting_before(node):
        for inner in body.nodes:
            if inner.op != "call_function":
                continue
            known = sizes.get(str(inner.meta["val"])) if inner.target is aten.sym_size.int else None
            copies[inner] = known if known is not None else _copy(graph, inner, copies, node)
        value = node.meta["val"]
        expected = list(value) if isinstance(value, (list, tuple)) else [value]
        results = [new and _settle(graph, scope, copies[new], old, node, copies[new] in given)
                   for new, old in zip(_results(body), expected)]
    readers = [(node, results[0])] if isinstance(value, torch.Tensor) else \
        [(user, results[user.args[1]]) for user in list(node.users)]  # type: ignore[index]
    for old, new in readers:
        if new is not None:
            old.replace_all_uses_with(new)
        graph.erase_node(old)
    if not isinstance(value, torch.Tensor):
        graph.erase_node(node)
    return [n for n in copies.values() if n not in given and n not in sizes.values()]


def _copy(graph: fx.Graph, inner: fx.Node, copies: Mapping[fx.Node, fx.Node], like: fx.Node) -> fx.Node:
    copy = graph.node_copy(inner, copies.__getitem__)
    copy.meta = {**inherited(like), "val": inner.meta["val"]}
    return copy


def _settle(
    graph: fx.Graph, scope: Scope, new: fx.Node, old: torch.Tensor, like: fx.Node, is_input: bool
) -> fx.Node:
    """A result with exactly the layout of `old` and a storage of its own."""
    if not is_input and not aliased(new):
        new.meta["val"] = old
        return new
    if not is_input and same_layout(new.meta["val"], old):
        return new
    copy = call(graph, scope, aten.clone.default, new, like=like)
    copy.meta["val"] = old
    return copy
