"""Keys and values that groups of heads share are not repeated for each head where sequences have few queries.

    k = aten.view(aten.clone(aten.expand(aten.unsqueeze(keys, 2), [B, H, G, S, D])), [B, H * G, S, D])   (values alike)
    a = attention(q, k, v, mask)                # q [B, H * G, L, D], mask [B, H * G, L, S]; k may be keys themselves
->
    p = attention(aten.view(q, [B, H, G * L, D]), keys, values, aten.view(mask, [B, H, G * L, S]))
    a = aten.view(aten.clone(p), [B, H * G, L, D])

The heads of a group become the queries of one head: each meets the same keys, so nothing changes but what is read.  A
step of decoding reads a cache of keys and values once then, and does not write it G times over: with the repetition
PyTorch's kernels with a mask have no other way (transformers' `repeat_kv`, `enable_gqa` of the math kernel).  Kernels
that take keys of fewer heads (`enable_gqa`) are called alike, so that few_queries.py finds as many heads of each.
Several queries of a sequence, as where a draft is checked, are copied to lie head by head, and so is their mask for
each head of a group.  Left alone: more of them than a tile of few_queries.py has rows, causal attention, dropout,
attention whose logsumexp is read, as a backward does, and keys that PyTorch's kernels would refuse without the copy,
which laid them out.
"""

from __future__ import annotations

import operator
from typing import Any, Mapping

import torch
from torch import fx

from fxfuser.passes.attention_calls import ATTENTION, QUERIES, arguments_of, only_result_is_read
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import Dim, all_equal, known_equal
from fxfuser.passes.rebuild import call, replace
from fxfuser.passes.sizes import Sizes, as_arguments, size_inputs

aten = torch.ops.aten

ALIGNED = 8  # elements of which each row of keys must begin at a multiple: 16 bytes of a half
RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})


def share_keys_in_groups(graph: fx.Graph, scope: Scope) -> int:
    changes, sizes = 0, size_inputs(graph)
    for node in [n for n in graph.nodes if n.target in ATTENTION]:
        arguments = arguments_of(node)
        heads = arguments["query"].meta["val"].shape[1]
        shared = [_shared(arguments[name], heads) for name in ("key", "value")]
        if None in shared or not _few_queries(node, arguments, shared) or not _named(node, arguments, shared, sizes):
            continue
        if not scope.fuel.take():
            break
        _rewrite(graph, scope, node, arguments, shared, sizes)
        changes += 1
    return changes


def _shared(keys: fx.Node, heads: Dim) -> fx.Node | None:
    """The [B, H, S, D] that so many heads share, of which `keys` may have each G times in a row; None where none do."""
    own = keys.meta["val"].shape[1]
    if isinstance(own, int) and isinstance(heads, int) and own < heads:  # as a kernel takes them that knows of groups
        return keys if heads % own == 0 else None
    node = keys
    if node.target not in RESHAPES:
        return None
    node = node.all_input_nodes[0]
    if node.target is aten.clone.default:
        node = node.all_input_nodes[0]
    if node.target is not aten.expand.default:
        return None
    expanded, inner = node.meta["val"].shape, node.all_input_nodes[0]
    if inner.target is not aten.unsqueeze.default or len(expanded) != 5 or inner.args[1] not in (2, -3):
        return None
    source = inner.all_input_nodes[0]
    batch, distinct, group, length, width = expanded
    whole = all_equal(source.meta["val"].shape, (batch, distinct, length, width))
    together = isinstance(distinct, int) and isinstance(group, int) and group > 1 \
        and all_equal(keys.meta["val"].shape, (batch, distinct * group, length, width))
    return source if whole and together and _laid_out(source.meta["val"]) else None


def _laid_out(keys: torch.Tensor) -> bool:
    """Whether rows of keys are dense and aligned, as the copy's were."""
    *outer, inner = keys.stride()
    return known_equal(inner, 1) and all(known_equal(s % ALIGNED, 0) for s in outer)


def _few_queries(node: fx.Node, arguments: Mapping[str, Any], shared: list[Any]) -> bool:
    """Whether the heads of a group may become queries, and nothing but the result is read."""
    query, keys, values = (n.meta["val"].shape for n in (arguments["query"], *shared))
    queries, group = query[2], query[1] // keys[1]
    few = isinstance(queries, int) and (queries == 1 or 1 < queries * group <= QUERIES)
    return (few and only_result_is_read(node) and not arguments["is_causal"] and arguments["dropout_p"] == 0.0
            and known_equal(keys[1], values[1]))


def _named(node: fx.Node, arguments: Mapping[str, Any], shared: list[Any], sizes: Sizes) -> bool:
    """Whether inputs hold all sizes that vary, so that an op can be given them."""
    mask = ATTENTION[node.target]
    operands = (arguments["query"], *shared, arguments[mask] if mask else None)
    return all(n is None or as_arguments(n.meta["val"].shape, sizes) is not None for n in operands)


def _rewrite(graph: fx.Graph, scope: Scope, node: fx.Node, arguments: dict[str, Any], shared: list[Any], sizes: Sizes,
             ) -> None:
    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        given = [as_arguments(a, sizes) if isinstance(a, list) else a for a in args]
        return call(graph, scope, target, *given, like=node, **kwargs)

    batch, together, queries, width = arguments["query"].meta["val"].shape
    heads, length = shared[0].meta["val"].shape[1:3]
    group = together // heads

    def gathered(operand: fx.Node, last: Any) -> fx.Node:
        """[*, heads, group, queries, last] with the queries of a group's heads behind each other."""
        if queries > 1:
            operand = make(aten.clone.default, operand, memory_format=torch.contiguous_format)
        before = list(operand.meta["val"].shape[:2])
        return make(aten.view.default, operand, [*before, group * queries, last])

    def of_groups(operand: fx.Node, count: Any, last: Any) -> fx.Node:
        """[*, count * group, queries, last] with a dimension of its own for the heads of a group."""
        return make(aten.view.default, operand, [operand.meta["val"].shape[0], count, group, queries, last])

    def mask_of(operand: fx.Node) -> fx.Node:
        shape = operand.meta["val"].shape
        many = len(shape) > 2 and not known_equal(shape[-3], 1)
        first = shape[0] if len(shape) == 4 else 1
        if many:
            whole = of_groups(make(aten.expand.default, operand, [first, together, queries, length]), heads, length)
        else:  # all heads see the same: once for those of a group, for all groups
            whole = make(aten.unsqueeze.default, make(aten.expand.default, operand, [first, 1, queries, length]), 2)
            whole = make(aten.expand.default, whole, [first, 1, group, queries, length])
        return make(aten.expand.default, gathered(whole, length), [batch, heads, group * queries, length])

    mask = ATTENTION[node.target]
    with graph.inserting_before(node):
        changed = {"query": gathered(of_groups(arguments["query"], heads, width), width),
                   "key": shared[0], "value": shared[1]}
        if mask is not None and arguments[mask] is not None:
            changed[mask] = mask_of(arguments[mask])
        args, kwargs = _called(node, arguments | changed)
        new = make(node.target, *args, **kwargs)
    for reader in list(node.users):
        if reader.users:
            with graph.inserting_before(reader):
                got = call(graph, scope, operator.getitem, new, 0, like=reader)
                copied = call(graph, scope, aten.clone.default, got, memory_format=torch.contiguous_format, like=reader)
                shape = as_arguments(reader.meta["val"].shape, sizes)
                shaped = call(graph, scope, aten.view.default, copied, shape, like=reader)
            replace(reader, shaped, graph, scope)
        else:
            graph.erase_node(reader)
    graph.erase_node(node)


def _called(node: fx.Node, arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the op was called, by position and by name."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return (tuple(arguments[n] for n in names[:len(node.args)]),
            {n: arguments[n] for n in node.kwargs})
