"""What is written to some places of a tensor that the program mutates is stored there by the kernel that computes it.

    new = aten.index_copy(cache, 1, position, k)       ->    rows = fxfuser.scatter_into(cache, [None, position], k)
    a = attention(q, new, ..);  aten.copy_(cache, new)       new = fxfuser.after(cache, [rows])
                                                             a = attention(q, new, ..);  aten.copy_(cache, new)

also index_put without accumulation, slice_scatter and select_scatter, several in a row, and writes to slices that are
put back.  `scatter_into` computes no tensor of the cache's size, so that kernels hold it: a step of decoding that ends
in a write is one kernel less for each of its keys and values.  The last copy_ then copies a tensor to itself, which the
plan leaves out.

Left alone, with the reason in the node's meta: where the input's old value is read later, or is what is stored; where
anybody gets the new value but by the input; where readers were promised other strides than the input has; where two of
its elements share a place.  A slice whose new value depends on the old one stays pointwise: one kernel reads and writes
it element by element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import torch
from torch import fx

from fxfuser.ops import REFUSED, SCATTER_INTO, argument, is_write_back
from fxfuser.ops.products import AFTER
from fxfuser.passes.aliasing import aliased
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import all_equal, known_equal, same_layout
from fxfuser.passes.rebuild import call, inherited
from fxfuser.passes.saved import SHARED

aten = torch.ops.aten
INDEX_PUTS = frozenset({aten.index_put.default, aten._unsafe_index_put.default})
# what puts a view back, and the view
VIEWS: Mapping[Any, Any] = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}


@dataclass(frozen=True, eq=False)
class _Write:
    """`node` is `old` with something stored: `source` at `positions`, or all that `inner` stores in a view of it.

    Where both `positions` and `inner` are None, `source` is the new value of a view.
    """

    node: fx.Node
    old: fx.Node
    source: fx.Node | None = None
    positions: tuple[fx.Node | None, ...] | None = None
    region: tuple[Any, ...] = ()  # the sizes of what is stored
    wraps: bool = True
    inner: tuple[_Write, ...] | None = None

    def leaves(self) -> Iterator[_Write]:
        """The writes that store something, in their order."""
        for write in self.inner or ():
            yield from write.leaves()
        if self.inner is None:
            yield self

    def nodes(self) -> Iterator[fx.Node]:
        """The new values, those of views included."""
        for write in self.inner or ():
            yield from write.nodes()
        yield self.node


def scatter_in_place(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    for update in [n for n in graph.nodes if is_write_back(n)]:
        target, value = update.args
        assert isinstance(target, fx.Node) and isinstance(value, fx.Node)
        writes, first = _versions(value)
        if not writes or first is not target:
            continue
        reason = _reason(update, target, writes)
        if reason is not None:
            for write in (leaf for w in writes for leaf in w.leaves()):
                write.node.meta[REFUSED] = reason
        elif scope.fuel.take():
            for write in writes:
                _rewrite(write, graph, scope)
            changes += 1
    return changes


# ---------------------------------------------------------------- what is written


def _versions(value: fx.Node) -> tuple[tuple[_Write, ...], fx.Node]:
    """The writes of which a value is the last result, in their order, and what the first of them changed."""
    found: list[_Write] = []
    while (write := _write(value)) is not None:
        found.append(write)
        value = write.old
    return tuple(reversed(found)), value


def _write(node: fx.Node) -> _Write | None:
    if node.target is aten.index_copy.default:
        return _index_copy(node)
    if node.target in INDEX_PUTS:
        return _index_put(node)
    return _put_back(node) if node.target in VIEWS else None


def _index_copy(node: fx.Node) -> _Write | None:
    old, dim, index, source = (argument(node, i) for i in range(4))
    rank = old.meta["val"].dim()
    if rank == 0 or source.meta["val"].dim() != rank or index.meta["val"].dim() > 1:
        return None
    positions = (*[None] * (dim % rank), index)
    return _Write(node, old, source, positions, tuple(source.meta["val"].shape), wraps=False)


def _index_put(node: fx.Node) -> _Write | None:
    old, indices, source, accumulate = (argument(node, i) for i in range(4))
    positions = tuple(indices)
    given = [p.meta["val"] for p in positions if p is not None]
    if accumulate or not given or any(p.dtype not in (torch.int64, torch.int32) for p in given):
        return None
    region = _region(old.meta["val"].shape, [None if p is None else p.meta["val"].shape for p in positions])
    return None if region is None else _Write(node, old, source, positions, region)


def _region(shape: torch.Size, positions: list[torch.Size | None]) -> tuple[Any, ...] | None:
    """The sizes of what positions pick from a tensor of this shape; None where they are not known to fit together."""
    dims = [d for d, p in enumerate(positions) if p is not None]
    picked: list[Any] = []
    for given in (p for p in positions if p is not None):
        picked = [1] * (len(given) - len(picked)) + picked
        for i, size in enumerate(reversed(given), 1):
            if known_equal(picked[-i], 1):
                picked[-i] = size
            elif not known_equal(size, 1) and not known_equal(size, picked[-i]):
                return None
    rest = [n for d, n in enumerate(shape) if d not in dims]
    first = dims[0] if dims[-1] - dims[0] + 1 == len(dims) else 0
    return (*rest[:first], *picked, *rest[first:])


def _put_back(node: fx.Node) -> _Write:
    old, source = argument(node, 0), argument(node, 1)
    writes, view = _versions(source)
    same = view.target is VIEWS[node.target] and view.args[0] is old and _tail(node, 2) == _tail(view, 1)
    if writes and same:
        return _Write(node, old, inner=writes)
    return _Write(node, old, source, region=tuple(source.meta["val"].shape))


def _tail(node: fx.Node, start: int) -> list[Any]:
    """The arguments of a call from one on, those that are not given as well."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return [argument(node, i) for i in range(start, len(node.target._schema.arguments))]


# ---------------------------------------------------------------- whether the tensor may be written where it is


def _reason(update: fx.Node, target: fx.Node, writes: tuple[_Write, ...]) -> str | None:
    """Why the writes must make a new tensor; None where they may be done in place."""
    value = target.meta["val"]
    leaves = [leaf for write in writes for leaf in write.leaves()]
    if value.layout is not torch.strided or value.is_neg() or value.is_conj() or target.name.startswith("tangents"):
        return "the tensor is not the caller's as it is"
    if SHARED in target.meta:
        return "another input shares its memory"
    if any(known_equal(s, 0) and not known_equal(n, 1) for n, s in zip(value.shape, value.stride())):
        return "elements of the tensor share their places"
    for leaf in leaves:
        reason = _unfit(leaf)
        if reason is not None:
            return reason
    if not all(_keeps_strides(write, update) for write in writes):
        return "readers of the new value know it with other strides"
    return _read_wrongly(update, target, writes, leaves)


def _unfit(leaf: _Write) -> str | None:
    assert leaf.source is not None
    value, old = leaf.source.meta["val"], leaf.old.meta["val"]
    if value.dtype is not old.dtype or value.device != old.device:
        return "what is stored has another dtype or device"
    return "nothing is stored" if any(known_equal(n, 0) for n in leaf.region) else None


def _keeps_strides(write: _Write, update: fx.Node) -> bool:
    """Whether all that reads a new value, or a view of it, knows its memory by the strides that the old one has."""
    if write.inner is not None and len(write.inner) == 1 and len(write.inner[0].node.users) == 1:
        inside = all(_keeps_strides(w, update) for w in write.inner[0].inner or ())  # one that only puts it back
    else:
        inside = all(_keeps_strides(w, update) for w in write.inner or ())
        inside = inside and all(same_layout(w.node.meta["val"], w.old.meta["val"]) for w in write.inner or ())
    own = set(write.node.users) == {update} or same_layout(write.node.meta["val"], write.old.meta["val"])
    return own and inside


def _read_wrongly(update: fx.Node, target: fx.Node, writes: tuple[_Write, ...], leaves: list[_Write]) -> str | None:
    """What would read another value than it does, as all versions of the tensor have one memory."""
    state = {target: 0}  # of all that has this memory: how many of the leaves have been stored in it
    made = {node: write for write in writes for node in write.nodes()}
    last = {write.node: [leaves.index(leaf) + 1 for leaf in write.leaves()][-1] for write in _all(writes)}
    readers: list[tuple[fx.Node, int]] = []
    pending = [target]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in made:
                found = last[user]
            elif node in aliased(user):
                found = state[node]
            else:
                if user is not update:
                    readers.append((user, state[node]))
                continue
            if user is not update and user not in state:
                state[user] = found
                pending.append(user)
    for leaf in leaves:
        if any(n in state for n in (leaf.source, *(leaf.positions or ()))):
            return "it stores elements of the tensor itself"
        if leaf.positions is None and _depends(leaf.source, {n for n, _ in readers}, state):
            return "its new value depends on the old one"
    for reader, stored in readers:
        if reader.op == "output":
            return "the caller gets the new value other than by the tensor"
        if stored < len(leaves) and not reader < leaves[stored].node:
            return f"{reader.name} reads the value before it later on"
    return None


def _all(writes: tuple[_Write, ...]) -> Iterator[_Write]:
    for write in writes:
        yield from _all(write.inner or ())
        yield write


def _depends(node: fx.Node | None, readers: set[fx.Node], state: Mapping[fx.Node, int]) -> bool:
    """Whether a value follows from something that reads the tensor."""
    pending, seen = [node], {node}
    while pending:
        found = pending.pop()
        if found is None:
            continue
        if found in readers or found in state:
            return True
        new = [n for n in found.all_input_nodes if n not in seen]
        seen.update(new)
        pending += new
    return False


# ---------------------------------------------------------------- the writes in place


def _rewrite(write: _Write, graph: fx.Graph, scope: Scope) -> None:
    for inner in write.inner or ():
        _rewrite(inner, graph, scope)
    node = write.node
    old = node.args[0]  # what has become of `write.old`
    with graph.inserting_before(node):
        stored = node.args[1] if write.inner is not None else _scatter(write, old, graph, scope)
        new = call(graph, scope, AFTER, old, [stored], like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _scatter(write: _Write, old: Any, graph: fx.Graph, scope: Scope) -> fx.Node:
    def make(target: Any, *args: Any) -> fx.Node:
        return call(graph, scope, target, *args, like=write.node)

    source, base = write.source, old
    assert source is not None
    if write.positions is None:
        base = make(VIEWS[write.node.target], old, *_tail(write.node, 2))
    positions = [p if p is None or p.meta["val"].dim() or write.wraps else make(aten.view.default, p, [1])
                 for p in write.positions or ()]
    if not all_equal(source.meta["val"].shape, write.region):
        source = make(aten.expand.default, source, list(write.region))
    node = graph.call_function(SCATTER_INTO, (base, positions, source, write.wraps))
    node.meta = inherited(write.node)
    with scope.fake():
        node.meta["val"] = source.meta["val"].new_empty(write.region)
    return node
