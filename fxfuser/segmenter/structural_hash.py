"""When two groups of nodes are the same computation.

Enters: the nodes of a group and those it writes.  Leaves: a key that is equal exactly for equal ops, dtypes,
shapes, strides, arguments and connectivity.  Node names and the group's place in the graph do not enter.

`Signatures.shape` is for one graph: cheap to build and to compare, size symbols by name.  `structural_key` is a
text hash for any graph: size symbols are numbered by first occurrence.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Hashable, Iterable, Mapping

import torch
from torch import fx

from fxfuser.domain.size import Size, from_torch, symbols
from fxfuser.domain.tensors import shape_of, strides_of
from fxfuser.segmenter.facts import Facts

_NAME = re.compile(r"\b[a-z]+\d+\b")


@dataclass(frozen=True, eq=False)
class Shape:
    """Groups with equal `key` are the same computation, node for node in the order of `nodes`: members, and the
    views and operands outside that they read."""

    key: Hashable
    nodes: tuple[fx.Node, ...]


class Signatures:
    """Interned descriptions of a graph's nodes: what a node is, apart from where its operands come from."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._own: dict[fx.Node, int] = {}
        self._input: dict[fx.Node, int] = {}
        self._operands: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self._ids: dict[Hashable, int] = {}

    def shape(self, nodes: Iterable[fx.Node], outputs: Iterable[fx.Node]) -> Shape:
        """The shape of the group that holds `nodes` and writes `outputs`."""
        place: dict[fx.Node, int] = {}
        parts: list[int] = []
        for node in nodes:
            for operand in self._operands_of(node):
                self._enter(operand, place, parts)
            place[node] = len(place)
            parts.append(self._own_id(node))
            parts.extend(place[n] for n in node.all_input_nodes)
        return Shape((tuple(parts), tuple(place[n] for n in outputs)), tuple(place))

    def _enter(self, node: fx.Node, place: dict[fx.Node, int], parts: list[int]) -> None:
        """Number an operand from outside, or a view, at its first use; parts of it are told apart by sign."""
        if node in place:
            return
        place[node] = len(place)
        if node in self._facts.transparent:
            parts.append(-1 - self._own_id(node))
            parts.extend(place[n] for n in node.all_input_nodes)
        else:
            parts.append(-1 - self._input_id(node))

    def _operands_of(self, node: fx.Node) -> tuple[fx.Node, ...]:
        known = self._operands.get(node)
        if known is None:
            known = self._operands[node] = tuple(operands_in_order(node, self._facts))
        return known

    def _own_id(self, node: fx.Node) -> int:
        known = self._own.get(node)
        if known is None:
            hole = {n: i for i, n in enumerate(node.all_input_nodes)}
            known = self._own[node] = self._intern(
                (node.target, _literal(node.args, hole), _literal(node.kwargs, hole), _value(node)))
        return known

    def _input_id(self, node: fx.Node) -> int:
        known = self._input.get(node)
        if known is None:
            known = self._input[node] = self._intern(("input", _value(node)))
        return known

    def _intern(self, description: Hashable) -> int:
        return self._ids.setdefault(description, len(self._ids))


def operands_in_order(node: fx.Node, facts: Facts) -> Iterable[fx.Node]:
    """The operands of `node` and, before each, the views between it and its source, all operands before users."""
    found: dict[fx.Node, None] = {}

    def visit(operand: fx.Node) -> None:
        if operand in found:
            return
        if operand in facts.transparent:
            for below in operand.all_input_nodes:
                visit(below)
        found[operand] = None

    for operand in node.all_input_nodes:
        visit(operand)
    return found


def _literal(value: Any, hole: Mapping[fx.Node, int]) -> Hashable:
    """Arguments with a numbered hole for each node; 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return ("node", hole[value])
    if isinstance(value, (list, tuple)):
        return tuple(_literal(v, hole) for v in value)
    if isinstance(value, dict):
        return tuple((k, _literal(v, hole)) for k, v in sorted(value.items()))
    return (type(value).__name__, repr(value))


def _value(node: fx.Node) -> Hashable:
    """Dtype, device, sizes and strides of a node's value; the type and text of one that is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return (type(value).__name__, str(value))
    return (value.dtype, value.device, shape_of(node), strides_of(node))


def structural_key(nodes: Iterable[fx.Node], outputs: Iterable[fx.Node], facts: Facts) -> str:
    """The group's key in any graph: 16 hexadecimal digits."""
    names: dict[str, str] = {}
    place: dict[fx.Node, int] = {}
    lines: list[str] = []

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            return f"%{place[value]}" if value in place else "%"
        if isinstance(value, (list, tuple)):
            return "(" + ",".join(text(v) for v in value) + ")"
        if isinstance(value, dict):
            return "(" + ",".join(f"{k}={text(v)}" for k, v in sorted(value.items())) + ")"
        return f"{type(value).__name__}:{value!r}"

    def size(value: Size) -> str:
        if isinstance(value, int):
            return str(value)
        lower = ",".join(str(s.lower) for s in symbols(value))
        renamed = _NAME.sub(lambda m: names.setdefault(m.group(), f"n{len(names)}"), str(value))
        return f"{renamed}>={lower}"

    def tensor(node: fx.Node) -> str:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            number = from_torch(value) if isinstance(value, (int, torch.SymInt)) else 0
            return f"{type(value).__name__} {size(number)}"
        shape, strides = (",".join(map(size, sizes)) for sizes in (shape_of(node), strides_of(node)))
        return f"{value.dtype} {value.device} [{shape}] ({strides})"

    def line(node: fx.Node, computed: bool) -> None:
        head = f"{node.target}{text(node.args)}{text(node.kwargs)}" if computed else "input"
        place[node] = len(place)
        lines.append(f"{head} {tensor(node)}")

    for node in nodes:
        for operand in operands_in_order(node, facts):
            if operand not in place:
                line(operand, operand in facts.transparent)
        line(node, True)
    lines.append(text(tuple(outputs)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
