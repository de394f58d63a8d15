"""What all walks over a group have in common: its nodes, what they read and through which views.

Enters: the nodes of a group and its outputs.  Leaves: a `Pattern`, which no axis changes, so that it is found once
however often the group is walked.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Collection, Sequence

from torch import fx

from fxfuser.domain.size import Size
from fxfuser.domain.tensors import is_tensor, shape_of
from fxfuser.domain.views import base_of, transparent
from fxfuser.ops import Kind, kind_of

Operands = tuple[tuple[fx.Node, "tuple[Size, ...] | None"], ...]  # tensors, and shapes that are not the result's


@dataclass(frozen=True, eq=False)
class Path:
    """Where a tensor's elements are: behind these views, in result `output` of `node`."""

    views: tuple[fx.Node, ...]
    node: fx.Node
    output: int


class Pattern:
    """The nodes of a group, in the graph's order, and its outputs.

    Of products in `left` an earlier kernel has left the sums: their factors are not needed.  `operands` are those of
    POINTWISE nodes.  `reader` maps a node to the POINTWISE one that alone reads it, element by element: it is needed
    just where that one is, so that walks need only follow the operands in `followed`.
    """

    def __init__(self, nodes: Collection[fx.Node], outputs: Sequence[fx.Node], left: frozenset[fx.Node] = frozenset(),
                 ) -> None:
        self.nodes, self.outputs, self.left = ordered(nodes), tuple(outputs), left
        self.numbers = {n: i for i, n in enumerate(self.nodes)}
        self.operands = {n: _operands_of(n) for n in self.nodes if kind_of(n) is Kind.POINTWISE}
        self.reader = {operand: node for node, operands in self.operands.items()
                       for operand, shape in operands if shape is None and self._alone(operand)}
        self.followed = {n: tuple(o for o in operands if o[0] not in self.reader)
                         for n, operands in self.operands.items()}
        self._paths: dict[fx.Node, Path] = {}

    def _alone(self, operand: fx.Node) -> bool:
        """Whether a node of the group has one reader."""
        return operand in self.numbers and len(operand.users) == 1 and operand not in self.outputs

    def path(self, node: fx.Node) -> Path:
        """The path to a tensor's elements."""
        known = self._paths.get(node)
        if known is None:
            known = self._paths[node] = self._path(node)
        return known

    def _path(self, node: fx.Node) -> Path:
        views: list[fx.Node] = []
        while node not in self.numbers:
            if node.target is operator.getitem and node.args[0] in self.numbers:
                made, output = node.args
                assert isinstance(made, fx.Node) and isinstance(output, int)
                return Path(tuple(views), made, output)
            if not transparent(node):
                return Path(tuple(views), node, 0)
            views.append(node)
            node = base_of(node)
        return Path(tuple(views), node, 0)


def _operands_of(node: fx.Node) -> Operands:
    shape = shape_of(node)
    return tuple((operand, None if (of := shape_of(operand)) == shape else of) for operand in tensors_of(node))


def tensors_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor operands of a call in the order of its arguments, repetitions included."""
    found: list[fx.Node] = []
    stack: list[object] = [*reversed(list(node.kwargs.values())), *reversed(node.args)]
    while stack:
        item = stack.pop()
        if isinstance(item, fx.Node):
            if is_tensor(item):
                found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(reversed(item))
    return tuple(found)


def ordered(nodes: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes in the graph's order."""
    return sorted(nodes)
