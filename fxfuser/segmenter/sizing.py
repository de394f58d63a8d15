"""What tensors weigh: elements, bytes and sizes of FX nodes as numbers, symbols replaced by their hints.

Enters: nodes with meta["val"].  Leaves: plain integers for estimates only; nothing here may decide what is
legal.  Invariant: no guard is added, hints come from the SymInt's own node.
"""

from __future__ import annotations

from typing import Iterable

import sympy
import torch
from torch import fx

from fxfuser.domain import size
from fxfuser.domain.size import Size
from fxfuser.domain.tensors import shape_of, strides_of

UNKNOWN = 1024  # elements of a dimension without a hint


class Sizing:
    """Weights of one graph's nodes, each computed once.  `hints` maps the text of a size symbol to its number."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.hints: dict[str, int] = {}
        self._shapes: dict[fx.Node, tuple[Size, ...]] = {}
        self._elements: dict[fx.Node, int] = {}
        self._bytes: dict[fx.Node, int] = {}
        for node in nodes:  # sizes enter a graph through its placeholders
            value = node.meta.get("val") if node.op == "placeholder" else None
            if isinstance(value, torch.SymInt):
                self._remember(size.from_torch(value), value)
            elif isinstance(value, torch.Tensor):
                self.shape(node)

    def number(self, value: Size) -> int:
        """A size as a number."""
        if isinstance(value, int):
            return value
        for s in size.symbols(value):
            if s.text not in self.hints:
                self.hints[s.text] = self._evaluate(s.text)
        return max(0, size.hint(value, self.hints, UNKNOWN))

    def product(self, sizes: Iterable[Size]) -> int:
        """The product of sizes as a number."""
        total = 1
        for s in sizes:
            total *= self.number(s)
        return total

    def _evaluate(self, text: str) -> int:
        """The number of an opaque size, such as s0//2, from those of its symbols."""
        try:
            expression = sympy.sympify(text)
        except sympy.SympifyError:
            return UNKNOWN
        known = {s: self.hints[s.name] for s in expression.free_symbols if s.name in self.hints}
        result = expression.subs(known)
        return int(result) if result.is_Integer else UNKNOWN

    def shape(self, node: fx.Node) -> tuple[Size, ...]:
        """The sizes of a node's tensor; remembers the hints of their symbols."""
        known = self._shapes.get(node)
        if known is None:
            known = self._shapes[node] = shape_of(node)
            for s, dimension in zip(known, node.meta["val"].shape):
                if not isinstance(s, int):
                    self._remember(s, dimension)
        return known

    def _remember(self, converted: Size, dimension: torch.SymInt) -> None:
        names = size.symbols(converted)
        alone = len(names) == 1 and converted == size.symbol(names[0].text, names[0].lower)
        if alone and (known := size.example(dimension)) is not None:
            self.hints[names[0].text] = known

    def elements(self, node: fx.Node) -> int:
        """How many elements a node's tensor has, expanded ones counted each."""
        known = self._elements.get(node)
        if known is None:
            known = self._elements[node] = self.product(self.shape(node))
        return known

    def bytes(self, node: fx.Node) -> int:
        """How many bytes of memory a node's tensor covers: a broadcast dimension (stride 0) counts once."""
        known = self._bytes.get(node)
        if known is None:
            known = node.meta["val"].dtype.itemsize
            for s, stride in zip(self.shape(node), strides_of(node)):
                if stride != 0:
                    known *= self.number(s)
            self._bytes[node] = known
        return known
