"""A segment as its ATen ops: the executor of CPU tensors, the fall-back of a kernel and the body of a repro.

Enters: a Segment.  Leaves: the source of a function whose parameters are the nodes it reads and the size symbols,
and which returns one tensor per `segment.outputs`, with exactly the strides of its meta; where values are scattered
into a tensor, that very one, in which they have been stored.  Views between the segment's nodes are part of it, as
kernels see through them too.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterable, Mapping, Union

import torch
from torch import fx

from fxfuser.domain.views import source
from fxfuser.ops import SCATTER_INTO, memory_of
from fxfuser.ops.scatter_into import scatter_into
from fxfuser.runtime import buffers, sizes
from fxfuser.runtime.literals import Namespace, call_text, tuple_text
from fxfuser.segmenter.segment import Segment

aten = torch.ops.aten
SizeText = Callable[[fx.Node], Union[str, None]]


@dataclass(frozen=True)
class Reference:
    """`source` defines `name(*leaves, *symbols)`; `leaves` are nodes that the caller has at hand."""

    name: str
    source: str
    leaves: tuple[fx.Node, ...]
    symbols: tuple[str, ...]


def is_size(node: fx.Node) -> bool:
    """Whether the node's value is a number of the host, not a tensor."""
    return isinstance(node.meta.get("val"), (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def reference(segment: Segment, namespace: Namespace, known: Iterable[str], text_of_size: SizeText) -> Reference:
    """The segment's function.

    `known` are the symbols of the graph; `text_of_size` gives the source of a host number over symbols, or None
    where it has to be passed in.
    """
    return References(namespace, tuple(known), text_of_size).of(segment)


@dataclass
class References:
    """The functions of segments of one graph, as `reference` makes them: segments that compute the same have one."""

    namespace: Namespace
    known: tuple[str, ...]
    text_of_size: SizeText
    _made: dict[tuple[str, ...], Reference] = field(default_factory=dict)

    def of(self, segment: Segment) -> Reference:
        order, leaves = closure(segment, self.text_of_size)
        places = {node: f"%{place}" for place, node in enumerate([*leaves, *order])}
        note = f'"""{segment.kind.value}{": " + segment.reason if segment.reason else ""}"""'
        computed = (note, str(len(leaves)), *self._lines(segment, order, leaves, places))
        found = self._made.get(computed)
        if found is None:
            found = self._made[computed] = self._written(segment, order, leaves, note)
        return replace(found, leaves=tuple(leaves))

    def _written(self, segment: Segment, order: list[fx.Node], leaves: list[fx.Node], note: str) -> Reference:
        scope = self.namespace.function()
        local = {node: scope.local(node.name) for node in [*leaves, *order]}
        lines = self._lines(segment, order, leaves, local)
        read = frozenset[str]().union(*(buffers.names(line).read for line in lines))
        symbols = tuple(s for s in self.known if s in read)
        name = self.namespace.local(f"{segment.name}_aten")
        params = [*(local[leaf] for leaf in leaves), *symbols]
        body = _with_frees(lines, params)
        return Reference(name, "\n".join([f"def {name}({', '.join(params)}):", f"    {note}", *body]), (), symbols)

    def _lines(self, segment: Segment, order: list[fx.Node], leaves: list[fx.Node], local: Mapping[fx.Node, str],
               ) -> list[str]:
        """The function's statements with these names of nodes."""
        def node_text(node: fx.Node) -> str:
            return local[node] if node in local else self.text_of_size(node) or node.name

        lines = [f"{local[node]} = {call_text(node, node_text, self.namespace, _instead(node))}" for node in order]
        return [*lines, f"return {tuple_text([_returned(node, local, leaves) for node in segment.outputs])}"]


def closure(segment: Segment, text_of_size: SizeText) -> tuple[list[fx.Node], list[fx.Node]]:
    """(nodes to call in order, nodes to pass in) so that the outputs can be computed from the segment's inputs."""
    called: dict[fx.Node, None] = {}
    leaves: dict[fx.Node, None] = dict.fromkeys(
        [*segment.inputs, *(source(memory_of(n)) for n in segment.nodes if memory_of(n) is not n)])
    given = set(leaves)
    stack: list[tuple[fx.Node, bool]] = [(node, False) for node in reversed(segment.outputs)]
    while stack:
        node, done = stack.pop()
        if node in called or node in given or node in leaves:
            continue
        if done:
            called[node] = None
        elif is_size(node) and text_of_size(node) is not None:
            continue
        elif node.op != "call_function" or is_size(node):
            leaves[node] = None
        else:
            stack.append((node, True))
            stack.extend((n, False) for n in reversed(node.all_input_nodes))
    read = {n for node in called for n in node.all_input_nodes} | set(segment.outputs)
    return list(called), [leaf for leaf in leaves if leaf in read]


def _instead(node: fx.Node) -> Callable[..., Any] | None:
    """A view may be of a value that a pass computes in another way, and so with other strides than its meta's."""
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return aten.reshape.default
    return scatter_into if node.target is SCATTER_INTO else None


def _returned(node: fx.Node, local: Mapping[fx.Node, str], leaves: list[fx.Node]) -> str:
    value = node.meta.get("val")
    text = local[node]
    if node.target is SCATTER_INTO:
        return text  # the very tensor
    if node in leaves or may_alias(node):
        text = f"{text}.clone()"  # a kernel's outputs are buffers of their own
    if not isinstance(value, torch.Tensor):
        return text
    return strided_text(text, value)


def strided_text(text: str, value: torch.Tensor, typed: bool = False) -> str:
    """Source of the tensor `text` with the strides of `value`, its fake tensor, and where `typed` its dtype."""
    dtype = f", {value.dtype}" if typed else ""
    return f"strided({text}, {dims_text(value.shape)}, {dims_text(value.stride())}{dtype})"


def dims_text(dims: Iterable[Any]) -> str:
    return tuple_text([sizes.source(d) for d in dims])


def may_alias(node: fx.Node) -> bool:
    """Whether the ATen op may return (a view of) one of its arguments."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return may_alias(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return any(r.alias_info is not None for r in node.target._schema.returns)


def _with_frees(lines: list[str], params: list[str]) -> list[str]:
    unread, frees = buffers.last_uses(lines, params)
    body = [f"    del {', '.join(unread)}"] if unread else []
    for line, names in zip(lines, frees):
        body.append(f"    {line}")
        if names:
            body.append(f"    del {', '.join(names)}")
    return body
