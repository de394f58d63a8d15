"""What is written to some places of a tensor that the program mutates is stored there by the kernel that computes it.

    new = aten.index_copy(cache, 1, position, k)       ->    rows = fxfuser.scatter_into(cache, [None, position], k)
    a = attention(q, new, ..);  aten.copy_(cache, new)       new = fxfuser.after(cache, [rows])
                                                             a = attention(q, new, ..);  aten.copy_(cache, new)

also index_put without accumulation, copies and fills of slices, several in a row, and writes to views that are put
back.  `scatter_into` computes no tensor of the cache's size, so that kernels hold it: a step of decoding that ends in a
write is one kernel less for each of its keys and values.  The last copy_ then copies a tensor to itself, which the plan
leaves out.

Left alone, with the reason in the node's meta: where the input's old value is read later, or is what is stored; where
anybody gets the new value but by the input; where a reader reshapes the new value, whose strides are then those of the
input, not those of a copy; where two of its elements share a place.  A slice whose new value depends on the old one
stays pointwise, and so do those of small tensors: one kernel reads and writes all of it, with what else it is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import torch
from torch import fx

from fxfuser.ops import FLOAT8, REFUSED, SCATTER_INTO, argument, is_write_back
from fxfuser.ops.products import AFTER
from fxfuser.passes.aliasing import aliased
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import bytes_of, known_equal, same_layout, same_shape
from fxfuser.passes.rebuild import call, inherited
from fxfuser.passes.saved import SHARED

aten = torch.ops.aten
INDEX_PUTS = frozenset({aten.index_put.default, aten._unsafe_index_put.default})
FILLS = frozenset({aten.fill.Scalar, aten.fill.Tensor})
# what puts a view back, and the view
VIEWS: Mapping[Any, Any] = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
# views that are there whatever strides their tensors have
OF_ANY_STRIDES = frozenset({
    aten.slice.Tensor, aten.select.int, aten.permute.default, aten.transpose.int, aten.t.default, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    aten.detach.default, AFTER})
# bytes of a tensor that take no longer to read and to write than another launch, which a slice of it would be
SMALL = 4 << 20
DEEPEST = 4  # views of each other that one view undoes


@dataclass(frozen=True, eq=False)
class _Write:
    """`node` is `old` with something stored: `source`, a tensor or a number, at `positions`, or all that `inner` stores
    in a view of it, `view`.

    Without positions and `inner` all of `old` is overwritten, or that view of it which `node` puts back.
    """

    node: fx.Node
    old: fx.Node
    source: fx.Node | bool | int | float = 0
    positions: tuple[fx.Node | None, ...] = ()
    region: tuple[Any, ...] = ()  # the sizes of what is stored
    wraps: bool = True
    inner: tuple[_Write, ...] = ()
    view: fx.Node | None = None

    def leaves(self) -> Iterator[_Write]:
        """The writes that store something, in their order."""
        for write in self.inner:
            yield from write.leaves()
        if not self.inner:
            yield self

    def nodes(self) -> Iterator[fx.Node]:
        """The new values, those of views included."""
        for write in self.inner:
            yield from write.nodes()
        yield self.node

    @property
    def whole(self) -> bool:
        """Whether it overwrites all of its tensor."""
        return not self.inner and not self.positions and self.node.target not in VIEWS


def scatter_in_place(graph: fx.Graph, scope: Scope) -> int:
    changes = 0
    for update in [n for n in graph.nodes if is_write_back(n)]:
        target, value = update.args
        assert isinstance(target, fx.Node) and isinstance(value, fx.Node)
        writes, first = _versions(value, scope)
        if first is not target or all(write.whole for write in writes):
            continue  # the latter is no more than a kernel's result, see runtime/write_backs.py
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


def _versions(value: fx.Node, scope: Scope, first: fx.Node | None = None) -> tuple[tuple[_Write, ...], fx.Node]:
    """The writes of which a value is the last result, in their order, and what the first of them changed; none that
    made `first`."""
    found: list[_Write] = []
    while value is not first and (write := _write(value, scope)) is not None:
        found.append(write)
        value = write.old
    return tuple(reversed(found)), value


def _write(node: fx.Node, scope: Scope) -> _Write | None:
    if node.target is aten.index_copy.default:
        return _index_copy(node)
    if node.target in INDEX_PUTS:
        return _index_put(node)
    if node.target is aten.copy.default or node.target in FILLS:
        old, source = argument(node, 0), argument(node, 1)
        return _Write(node, old, source, region=tuple(old.meta["val"].shape))
    if node.target in VIEWS:
        return _put_back(node, scope)
    return _view_undone(node, scope) if _of_any_strides(node) or node.target is aten.view.default else None


def _of_any_strides(node: fx.Node) -> bool:
    """Whether a view is there whatever strides its tensor has; one as another dtype is, if that has as many bytes."""
    if node.target is aten.view.dtype:
        return bool(node.meta["val"].dtype.itemsize == argument(node, 0).meta["val"].dtype.itemsize)
    return node.target in OF_ANY_STRIDES


def _index_copy(node: fx.Node) -> _Write | None:
    old, dim, index, source = (argument(node, i) for i in range(4))
    rank = old.meta["val"].dim()
    if old.meta["val"].dtype in FLOAT8:  # eager refuses it, or does on some devices
        return None
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


def _put_back(node: fx.Node, scope: Scope) -> _Write:
    old: fx.Node = argument(node, 0)
    source: fx.Node = argument(node, 1)
    writes, view = _versions(source, scope, old)
    if writes and view is old and same_shape(source.meta["val"], old.meta["val"]):
        return _Write(node, old, inner=writes)  # a slice of all that there is
    if writes and view.target is VIEWS[node.target] and view.args[0] is old and _tail(node, 2) == _tail(view, 1):
        return _Write(node, old, inner=writes, view=view)
    return _Write(node, old, source, region=tuple(source.meta["val"].shape))


def _view_undone(node: fx.Node, scope: Scope) -> _Write | None:
    """A view of a view's new value that shows it as the tensor of which that was a view: a transpose and another."""
    writes, view = _versions(argument(node, 0), scope)
    path = [node]
    for _ in range(DEEPEST if writes else 0):
        if not _of_any_strides(view) and view.target is not aten.view.default:
            return None
        path.insert(0, view)
        view = argument(view, 0)
        if _same_elements(view, path, scope):
            return _Write(node, view, inner=writes, view=path[0])
    return None


def _same_elements(base: fx.Node, path: list[fx.Node], scope: Scope) -> bool:
    """Whether views of each other show a tensor's elements where they are in it."""
    value = old = base.meta["val"]
    with scope.fake():
        for view in path:
            arguments = fx.map_arg((view.args[1:], view.kwargs), lambda n: n.meta["val"])
            try:
                value = view.target(value, *arguments[0], **arguments[1])  # type: ignore[operator]
            except RuntimeError:  # no view of these strides
                return False
    return same_layout(value, old) and known_equal(value.storage_offset(), old.storage_offset())


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
    known = all(type(n) is int for n in value.shape)
    if known and bytes_of(value) < SMALL and not any(leaf.positions for leaf in leaves):
        return "the tensor is small"
    for leaf in leaves:
        reason = _unfit(leaf)
        if reason is not None:
            return reason
    reshaped = _reshaped(target, writes)
    if reshaped is not None:
        return f"{reshaped.name} reshapes the new value, which has the tensor's own strides"
    return _read_wrongly(update, target, writes, leaves)


def _unfit(leaf: _Write) -> str | None:
    value, old = leaf.source.meta["val"] if isinstance(leaf.source, fx.Node) else None, leaf.old.meta["val"]
    if value is not None and value.device != old.device:
        return "what is stored is on another device"
    if value is not None and value.dtype is not old.dtype and leaf.positions:
        return "what is stored has another dtype"
    return "nothing is stored" if any(known_equal(n, 0) for n in leaf.region) else None


def _reshaped(target: fx.Node, writes: tuple[_Write, ...]) -> fx.Node | None:
    """A view of a new value that its memory's strides may not allow, where these are not known to be the value's."""
    made = {node for write in writes for node in write.nodes()}
    memory = target.meta["val"]
    as_made = all(same_layout(w.node.meta["val"], memory) for w in writes if not all(map(is_write_back, w.node.users)))

    def reshaped(nest: tuple[_Write, ...], memory: torch.Tensor) -> Iterator[fx.Node]:
        for write in nest:
            if write.inner:
                yield from reshaped(write.inner, write.inner[0].old.meta["val"])
            if not as_made or not same_layout(write.node.meta["val"], memory):
                yield from _reshapes(write.node, made)

    return next(reshaped(writes, memory), None)


def _reshapes(node: fx.Node, made: set[fx.Node]) -> Iterator[fx.Node]:
    for user in node.users:
        if user in made or node not in aliased(user) or is_write_back(user):
            continue
        if not _of_any_strides(user):
            yield user
        yield from _reshapes(user, made)


def _read_wrongly(update: fx.Node, target: fx.Node, writes: tuple[_Write, ...], leaves: list[_Write]) -> str | None:
    """What would read another value than it does, as all versions of the tensor have one memory."""
    state, readers = _memory(update, target, writes, leaves)
    for leaf in leaves:
        if any(n in state for n in (leaf.source, *leaf.positions)):
            return "it stores elements of the tensor itself"
        if not leaf.positions and isinstance(leaf.source, fx.Node) and _depends(leaf.source, {*readers, *state}):
            return "its new value depends on the old one"
    for reader, stored in readers.items():
        if reader.op == "output":
            return "the caller gets the new value other than by the tensor"
        if stored < len(leaves) and not reader < leaves[stored].node:
            return f"{reader.name} reads the value before it later on"
    return None


def _memory(update: fx.Node, target: fx.Node, writes: tuple[_Write, ...], leaves: list[_Write],
            ) -> tuple[dict[fx.Node, int], dict[fx.Node, int]]:
    """What has the tensor's memory and what reads that, each with how many of the leaves must have been stored in it,
    and no more."""
    last = {write.node: leaves.index([*write.leaves()][-1]) + 1 for write in _all(writes)}
    state: dict[fx.Node, int] = {target: 0}
    readers: dict[fx.Node, int] = {}
    pending = [target]
    while pending:
        node = pending.pop()
        for user in node.users:
            if user is update or user in state:
                continue
            if user in last or node in aliased(user):
                state[user] = last.get(user, state[node])
                pending.append(user)
            else:
                readers[user] = min(state[node], readers.get(user, len(leaves)))
    return state, readers


def _all(writes: tuple[_Write, ...]) -> Iterator[_Write]:
    for write in writes:
        yield from _all(write.inner)
        yield write


def _depends(node: fx.Node, found: set[fx.Node]) -> bool:
    """Whether a value follows from one of these."""
    pending, seen = [node], {node}
    while pending:
        below = pending.pop()
        if below in found:
            return True
        new = [n for n in below.all_input_nodes if n not in seen]
        seen.update(new)
        pending += new
    return False


# ---------------------------------------------------------------- the writes in place


def _rewrite(write: _Write, graph: fx.Graph, scope: Scope) -> None:
    for inner in write.inner:
        _rewrite(inner, graph, scope)
    node, view = write.node, write.view
    old = argument(node if view is None else view, 0)  # what has become of `write.old`
    with graph.inserting_before(node):
        stored = argument(node, 1 if node.target in VIEWS else 0) if write.inner else _scatter(write, old, graph, scope)
        new = call(graph, scope, AFTER, old, [stored], like=node)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    if not same_layout(new.meta["val"], node.meta["val"]):
        _restride(new, scope)


def _scatter(write: _Write, old: Any, graph: fx.Graph, scope: Scope) -> fx.Node:
    def make(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(graph, scope, target, *args, like=write.node, **kwargs)

    value = old.meta["val"]
    base = make(VIEWS[write.node.target], old, *_tail(write.node, 2)) if write.node.target in VIEWS else old
    positions = [p if p is None or p.meta["val"].dim() or write.wraps else make(aten.view.default, p, [1])
                 for p in write.positions]
    source = write.source if isinstance(write.source, fx.Node) else \
        make(aten.full.default, [], write.source, dtype=value.dtype, device=value.device)
    if source.meta["val"].dtype is not value.dtype:
        source = make(aten._to_copy.default, source, dtype=value.dtype)
    node = graph.call_function(SCATTER_INTO, (base, positions, source, write.wraps))
    node.meta = inherited(write.node)
    with scope.fake():
        node.meta["val"] = source.meta["val"].new_empty(write.region)
    return node


def _restride(node: fx.Node, scope: Scope) -> None:
    """Gives views of a tensor the strides that follow from its own."""
    for user in node.users:
        if node in aliased(user) and _of_any_strides(user):
            args, kwargs = fx.map_arg((user.args, user.kwargs), lambda n: n.meta["val"])
            with scope.fake():
                user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
            _restride(user, scope)
