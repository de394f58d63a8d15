"""From a finished walk to points: operands first, equal points one object, indices without pieces."""

from __future__ import annotations

from typing import Any, Iterable, Iterator

import torch
from torch import fx

from fxfuser.domain.index import Axis, Form, Index, Lookup, axes_of, lookups_of
from fxfuser.domain.points import Point, PointKind, Reject, Store
from fxfuser.domain.size import Size
from fxfuser.domain.tensors import dtype_of, is_tensor, size_argument
from fxfuser.domain.walk import Demand, Key, Operand, Ref, Rejected, Value, Walk

_NOWHERE: frozenset[Axis] = frozenset()


class Builder:
    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._inline = walk.inliner.index
        self._interned: dict[tuple[Any, ...], Point] = {}
        self._sources = {**walk.lookups, **{walk.inliner.lookup(name): ref for name, ref in walk.lookups.items()}}
        self._built: dict[fx.Node, dict[Key, Point]] = {node: {} for node in walk.pattern.nodes}
        for node in walk.pattern.nodes:
            for key in walk.demands[node]:
                if walk.lookups:
                    self._build(node, key)
                else:  # all that it needs precedes it
                    self._built[node][key] = self._point(node, key, walk.demand(node, key))

    def _build(self, node: fx.Node, key: Key) -> None:
        """A demand's point, and before it those that it needs.

        Mostly they are built: only positions may come from nodes that follow the one that is read there.
        """
        stack = [(node, key)]
        while stack:
            node, key = stack[-1]
            if key in self._built[node]:
                stack.pop()
                continue
            demand = self._walk.demand(node, key)
            missing = [(ref.node, (ref.index, ref.output)) for ref in self._needs(demand)]
            missing = [(n, k) for n, k in missing if k not in self._built[n]]
            if missing:
                stack += missing
            else:
                self._built[node][key] = self._point(node, key, demand)

    def _needs(self, demand: Demand) -> Iterator[Ref]:
        """What is needed of the group's own nodes."""
        refs = [o for o in demand.operands if isinstance(o, Ref)]
        inside = [ref for ref in refs if ref.node in self._built]
        forms = [f for ref in refs if ref.node not in self._built for f in ref.index]
        forms += [o.value for o in demand.operands if isinstance(o, Value) and isinstance(o.value, Form)]
        forms += [*demand.place, *(bound.form for condition in demand.conditions for bound in condition)]
        yield from inside
        names = list(lookups_of(forms))
        for name in names:  # a table of positions may itself be read where another says
            ref = self._sources[name]
            if ref.node in self._built:
                yield ref
            else:
                names += [n for n in lookups_of(ref.index) if n not in names]

    def stores(self) -> tuple[Store, ...]:
        """One store per output, or one per piece of it, in the outputs' order."""
        walk = self._walk
        return tuple(Store(node, self._inline(index), self._operand(root))
                     for node, index, root in zip(walk.root_nodes, walk.root_indices, walk.roots))

    def _operand(self, operand: Operand) -> Point:
        if isinstance(operand, Value):
            return self._value(operand)
        built = self._built.get(operand.node)
        if built is not None:
            return built[operand.index, operand.output]
        index = self._inline(operand.index)
        key = (PointKind.LOAD, operand.node, index)
        return self._interned.get(key) or self._keep(key, Point(
            PointKind.LOAD, dtype_of(operand.node), operand.node, index, deps=axes_of(index),
            lookups=self._lookups(index)))

    def _lookups(self, forms: Iterable[Form]) -> tuple[tuple[Lookup, Point], ...]:
        return tuple((name, self._operand(self._sources[name])) for name in lookups_of(forms))

    def _value(self, value: Value) -> Point:
        held = value.value
        if isinstance(held, Form):
            index = (self._walk.inliner.form(held),)
            key: tuple[Any, ...] = (PointKind.IOTA, value.dtype, index)
            return self._interned.get(key) or self._keep(key, Point(
                PointKind.IOTA, value.dtype, index=index, deps=axes_of(index), lookups=self._lookups(index)))
        key = (PointKind.CONSTANT, value.dtype, repr(held))
        return self._interned.get(key) or self._keep(key, Point(PointKind.CONSTANT, value.dtype, value=held))

    def _keep(self, key: tuple[Any, ...], point: Point) -> Point:
        self._interned[key] = point
        return point

    def _point(self, node: fx.Node, key: Key, demand: Demand) -> Point:
        operands = tuple(map(self._operand, demand.operands))
        if demand.kind is None:
            return operands[0]
        if demand.kind is PointKind.SELECT:
            return self._select(node, key, demand, operands)
        if demand.kind is PointKind.SCATTERED:
            return self._scattered(node, self._inline(demand.place), operands)
        index, output = self._inline(key[0]), key[1]
        same = (demand.kind, node, output, tuple(map(id, operands)), demand.axes, demand.reverse)
        known = self._interned.get(same)
        if known is not None:
            return known
        deps = _NOWHERE.union(*(p.deps for p in operands))
        if demand.kind is PointKind.REDUCE:
            deps = deps.difference(*demand.axes)
            return self._keep(same, Point(PointKind.REDUCE, _result_dtype(node, output), node, index,
                                          operands=operands, axes=demand.axes, output=output, deps=deps))
        if demand.kind is PointKind.DOT:
            return self._keep(same, Point(PointKind.DOT, _result_dtype(node, output), node, index, operands=operands,
                                          axes=demand.axes, deps=deps.difference(*demand.axes)))
        if demand.kind is PointKind.SCAN:
            return self._keep(same, Point(PointKind.SCAN, _result_dtype(node, output), node, index, operands=operands,
                                          axes=demand.axes, value=demand.reverse, output=output,
                                          deps=deps.union(*demand.axes)))
        if demand.numbers:
            return self._keep(same, Point(PointKind.OP, dtype_of(node), node, index, (*operands, *demand.numbers),
                                          operands=operands, deps=deps))
        points = iter(operands)
        args = tuple(_mirrored(a, points, node) for a in node.args)
        kwargs = tuple((name, _mirrored(a, points, node)) for name, a in node.kwargs.items())
        return self._keep(same, Point(PointKind.OP, _result_dtype(node, output), node, index, args, kwargs, operands,
                                      output=output, deps=deps))

    def _scattered(self, node: fx.Node, place: Index, operands: tuple[Point, ...]) -> Point:
        same = (PointKind.SCATTERED, node, tuple(map(id, operands)), place)
        return self._interned.get(same) or self._keep(same, Point(
            PointKind.SCATTERED, dtype_of(node), node, place, operands=operands, lookups=self._lookups(place),
            deps=axes_of(place).union(*(p.deps for p in operands))))

    def _select(self, node: fx.Node, key: Key, demand: Demand, operands: tuple[Point, ...]) -> Point:
        if all(p is operands[0] for p in operands):
            return operands[0]
        same = (PointKind.SELECT, node, tuple(map(id, operands)), demand.conditions)
        known = self._interned.get(same)
        if known is not None:
            return known
        deps = _NOWHERE.union(*(p.deps for p in operands), *(b.form.axes for c in demand.conditions for b in c))
        lookups = self._lookups(b.form for c in demand.conditions for b in c)
        return self._keep(same, Point(PointKind.SELECT, dtype_of(node), node, self._inline(key[0]), operands=operands,
                                      conditions=demand.conditions, lookups=lookups, deps=deps))


def _result_dtype(node: fx.Node, output: int) -> torch.dtype:
    value = node.meta["val"]
    dtype: torch.dtype = (value[output] if isinstance(value, (tuple, list)) else value).dtype
    return dtype


def _mirrored(argument: Any, points: Iterator[Point], node: fx.Node) -> Any:
    """The argument with points for tensors and sizes for symbolic integers."""
    if isinstance(argument, fx.Node):
        if is_tensor(argument):
            return next(points)
        if isinstance(argument.meta.get("val"), (int, torch.SymInt)):
            return _size(argument)
        raise Rejected(Reject(f"{node.target} takes a number that is computed at run time",
                              "keep it a tensor instead of calling .item()", node))
    if isinstance(argument, (list, tuple)):
        return tuple(_mirrored(a, points, node) for a in argument)
    return argument


def _size(argument: fx.Node) -> Size:
    return size_argument(argument)
