"""Graphs told in terms of the one that they were made of.

Enters: a `Source`, what a graph's nodes were before anything changed it, and graphs that stem from it.  Leaves: bytes,
and in another process, for a source of equal text, equal graphs.  A node that stems from one of the source has that
node's own meta, whose values, stack traces and sizes are of the process that reads; other values are made anew, in the
fake mode that is entered, and share storage where they did.  Invariant: what is written holds no tensor, no number of a
call and no line of the user's files; what has no such form is `Unstorable`.
"""

from __future__ import annotations

import io
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import sympy
import torch
from torch import fx

from fxfuser.runtime.values import Reader, Unstorable, Writer

VALUE = "val"
# Of a node's meta: what is told by the graph's text, what the user is told, and what nobody reads after the cut
SILENT = frozenset({
    VALUE, "tensor_meta", "example_value", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "source_fn_stack",
    "fwd_source_fn_stack", "original_aten", "from_node", "seq_nr", "torch_fn", "desc", "output_stack_traces",
    "unbacked_bindings", "fxfuser_geometry"})
REGION = "ac_graph_id"  # of the user's checkpoints
SPENT = SILENT | {"recompute", REGION}  # the cut has followed them
PLAIN = (type(None), bool, int, str)
NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
FUNCTIONS = (FunctionType, BuiltinFunctionType)  # what a node calls beside ops
ARITHMETIC = {name: f for owner in (operator, math, torch) for name, f in vars(owner).items()
              if isinstance(f, FUNCTIONS) and (owner is not torch or name.startswith(("sym_", "_sym_")))}


@dataclass(frozen=True)
class Source:
    """A graph's nodes and their meta before anything changes it."""

    nodes: tuple[fx.Node, ...]
    metas: tuple[Mapping[str, Any], ...]

    @staticmethod
    def of(graph: fx.Graph) -> Source:
        nodes = tuple(graph.nodes)
        return Source(nodes, tuple(dict(n.meta) for n in nodes))


def written(source: Source, graphs: Sequence[fx.Graph]) -> bytes:
    """The graphs as bytes.  Raises Unstorable and what pickle raises."""
    return _Told(source).written(graphs)


def read(source: Source, data: bytes, count: int) -> tuple[fx.Graph, ...]:
    """The `count` graphs that were written; raises whatever comes of bytes that are none."""
    return _Graphs(data, source).read(count)


@dataclass(frozen=True)
class Line:
    """One node: its call, then its meta.  `like` is the place of the original node whose meta it has under `same`;
    `others` has it from other original nodes, `own` holds what no original node has, `value` what it computes."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    like: int
    same: tuple[str, ...]
    others: tuple[tuple[str, int], ...]
    own: tuple[tuple[str, Any], ...]
    value: Any


@dataclass(frozen=True)
class Known:
    """A value of the original graph: of the node at `place`, one of its elements unless `element` is None."""

    place: int
    element: int | None


@dataclass(frozen=True)
class Made:
    """The tensor that was made as the `number`th."""

    number: int


@dataclass(frozen=True)
class Computed:
    """A number that only this node computes: its call on the values of its arguments tells."""


@dataclass(frozen=True)
class Fresh:
    """A tensor to be made, in the storage of `base` where there is one."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device
    base: Known | Made | None


class _Told(Writer):
    """Writes graphs in terms of the one that they were made of."""

    def __init__(self, source: Source) -> None:
        self._file, self._source = io.BytesIO(), source
        self._places: dict[fx.Node, int] = {}  # of the graph that is being written
        super().__init__(self._file, self._places)
        self._tensors: dict[int, Known | Made] = {id(v): where for v, where in _values(source.metas)}
        self._storages: dict[int, Known | Made] = {
            _storage(v): where for v, where in _values(source.metas) if isinstance(v, torch.Tensor)}
        self._made = 0
        self._owners: dict[tuple[str, int], int] = {}
        for place, meta in reversed(tuple(enumerate(source.metas))):
            self._owners.update({(key, id(value)): place for key, value in meta.items()})
        self._functions = {n.target: place for place, n in enumerate(source.nodes) if isinstance(n.target, FUNCTIONS)}
        self._numbers = {_expression(n) for n in numbers(source.metas)}

    def written(self, graphs: Sequence[fx.Graph]) -> bytes:
        """A count of nodes for each graph, then the nodes one by one."""
        self.dump([len(graph.nodes) for graph in graphs])
        for graph in graphs:
            self._places.clear()
            for node in graph.nodes:
                self.dump(self._line(node))
                self._places[node] = len(self._places)
        return self._file.getvalue()

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, NUMBERS):
            if _expression(value) not in self._numbers:
                raise Unstorable(f"no node computes {value}")
            return ("number", _expression(value))
        if isinstance(value, FUNCTIONS) and ARITHMETIC.get(value.__name__) is value:
            return ("arithmetic", value.__name__)
        if isinstance(value, FUNCTIONS) and value in self._functions:
            return ("call", self._functions[value])
        return super().persistent_id(value)

    def _line(self, node: fx.Node) -> Line:
        like = self._like(node)
        theirs: Mapping[str, Any] = self._source.metas[like] if like >= 0 else {}
        same, others, own = [], [], []
        for key, value in node.meta.items():
            if key == VALUE or value is theirs.get(key, self):
                same.append(key)
            elif (key, id(value)) in self._owners:
                others.append((key, self._owners[key, id(value)]))
            elif key not in SPENT:
                own.append((key, _plain(node, key, value)))
        value = None if VALUE not in node.meta else self._value(node.meta[VALUE])
        same = [k for k in same if k != VALUE or isinstance(value, Known) and value == Known(like, None)]
        told = value if VALUE not in same else None
        return Line(node.op, node.name, node.target, node.args, node.kwargs, like, tuple(same), tuple(others),
                    tuple(own), told)

    def _like(self, node: fx.Node) -> int:
        """The original node with the same value, or else with the most of this one's meta; -1 where there is none."""
        found = {self._owners.get((k, id(v)), -1): None for k, v in node.meta.items() if not isinstance(v, PLAIN[:3])}
        return max(found, default=-1, key=lambda place: 0 if place < 0 else sum(
            v is self._source.metas[place].get(k, self) for k, v in node.meta.items()))

    def _value(self, value: Any) -> Any:
        known = self._tensors.get(id(value))
        if known is not None:
            return known
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._value, value))
        if isinstance(value, (*PLAIN, float)) or isinstance(value, NUMBERS) and _expression(value) in self._numbers:
            return value
        if isinstance(value, NUMBERS):
            self._numbers.add(_expression(value))
            return Computed()
        if not isinstance(value, torch.Tensor) or _is_special(value):
            raise Unstorable(f"a {type(value).__name__} is no plain tensor")
        made = Fresh(tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.device,
                     self._storages.get(_storage(value)))
        self._tensors[id(value)] = number = Made(self._made)
        self._storages.setdefault(_storage(value), number)
        self._made += 1
        return made


def _expression(number: Any) -> str:
    """What a number is in any process where its symbols have the same names."""
    return f"{type(number).__name__} {sympy.srepr(number.node.expr)}"


def _values(metas: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, Known]]:
    """The tensors of nodes and where they are; the first of equals last, so that a table holds it."""
    for place, meta in reversed(tuple(enumerate(metas))):
        value = meta.get(VALUE)
        if isinstance(value, (tuple, list)):
            yield from ((v, Known(place, i)) for i, v in enumerate(value) if isinstance(v, torch.Tensor))
        if isinstance(value, (torch.Tensor, tuple, list)):
            yield value, Known(place, None)


def _storage(value: torch.Tensor) -> int:
    return -id(value) if value.layout is not torch.strided else value.untyped_storage()._cdata


def _is_special(value: torch.Tensor) -> bool:
    """Whether a tensor says more than sizes, strides, dtype and device."""
    return value.layout is not torch.strided or value.is_nested or value.is_quantized or value.requires_grad \
        or value.is_neg() or value.is_conj()


def _plain(node: fx.Node, key: str, value: Any) -> Any:
    if not all(type(v) in PLAIN for v in (value if type(value) is tuple else (value,))):
        raise Unstorable(f"{node.name} is marked with a {type(value).__name__} as {key}")
    return value


class _Graphs(Reader):
    """Makes graphs of what `_Told` has written, node by node."""

    def __init__(self, data: bytes, source: Source) -> None:
        self._built: list[fx.Node] = []
        super().__init__(data, self._built)
        self._source = source
        self._made: list[torch.Tensor] = []
        self._numbers: dict[str, Any] = {_expression(n): n for n in numbers(source.metas)}

    def read(self, count: int) -> tuple[fx.Graph, ...]:
        lengths = self.load()
        if len(lengths) != count:
            raise Unstorable(f"{len(lengths)} graphs, not {count}")
        return tuple(map(self._graph, lengths))

    def persistent_load(self, name: Any) -> Any:
        if not isinstance(name, tuple) or len(name) != 2:
            return super().persistent_load(name)
        kind, which = name
        if kind == "arithmetic":
            return ARITHMETIC[which]
        return self._numbers[which] if kind == "number" else self._source.nodes[which].target

    def _graph(self, count: int) -> fx.Graph:
        graph = fx.Graph()
        self._built.clear()
        for _ in range(count):
            line: Line = self.load()
            node = graph.create_node(line.op, line.target, line.args, line.kwargs, line.name)
            if node.name != line.name:
                raise Unstorable(f"{line.name} is called {node.name} here")
            node.meta = self._meta(line)
            if isinstance(line.value, Computed):
                self._compute(node)
            self._built.append(node)
        return graph

    def _compute(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta[VALUE])
        number = node.meta[VALUE] = node.target(*args, **kwargs)  # type: ignore[operator]
        self._numbers[_expression(number)] = number

    def _meta(self, line: Line) -> dict[str, Any]:
        metas = self._source.metas
        theirs = metas[line.like] if line.same else {}
        # what is only told to the user may be missing where the source was itself read
        found = {key: theirs[key] for key in line.same if key in theirs}
        found.update({key: metas[place][key] for key, place in line.others if key in metas[place]})
        found.update(line.own)
        if line.value is not None and not isinstance(line.value, Computed):
            found[VALUE] = self._value(line.value)
        return found

    def _value(self, told: Any) -> Any:
        if isinstance(told, Known):
            value = self._source.metas[told.place][VALUE]
            return value if told.element is None else value[told.element]
        if isinstance(told, Made):
            return self._made[told.number]
        if isinstance(told, (tuple, list)):
            return type(told)(map(self._value, told))
        if not isinstance(told, Fresh):
            return told
        self._made.append(self._tensor(told))
        return self._made[-1]

    def _tensor(self, told: Fresh) -> torch.Tensor:
        if told.base is None:
            return torch.empty_strided(told.shape, told.strides, dtype=told.dtype, device=told.device)
        base: torch.Tensor = self._value(told.base)
        if base.dtype != told.dtype:
            base = torch.empty(0, dtype=told.dtype, device=told.device).set_(base.untyped_storage())
        return base.as_strided(told.shape, told.strides, told.offset)


def numbers(metas: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """The sizes and other numbers that the graph names."""
    for meta in metas:
        value = meta.get(VALUE)
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, NUMBERS):
                yield one
            elif isinstance(one, torch.Tensor) and one.layout is torch.strided:
                yield from (n for n in (*one.shape, *one.stride(), one.storage_offset()) if isinstance(n, torch.SymInt))
