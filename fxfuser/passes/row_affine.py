"""A tensor as a sum in which numbers of whole rows multiply what does not depend on them.

    ((x - m) * r) * g + b     x: [M, K], m and r: [M, 1], g and b: [K]     ->     r * (x * g) + (-m * r) * g + b

Enters: a node of shape [.., K].  Leaves: its `Term`s, each a product of at most one wide value [.., K], of row values
[.., 1], of columns [K] and of a number.  Rounding to a half type between the ops is dropped, as whoever reassociates
does.  What is not affine in row values is one wide term, whatever it is made of.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping

import torch
from torch import fx

from fxfuser.passes.layout import all_equal, known_equal
from fxfuser.passes.row_values import RESHAPES, SAME

aten = torch.ops.aten

DEEPEST = 24  # ops that follow from each other
MOST_TERMS = 8
FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
SUMS: Mapping[Any, int] = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})


@dataclass(frozen=True)
class Factor:
    """A row value or columns; `inverse`: one over it."""

    node: fx.Node
    inverse: bool = False


@dataclass(frozen=True)
class Term:
    """scale * wide * rows * columns; what is absent is one."""

    wide: fx.Node | None = None
    rows: tuple[Factor, ...] = ()
    columns: tuple[Factor, ...] = ()
    scale: float = 1.0

    def times(self, other: Term) -> Term | None:
        """The product; None where it has two wide values."""
        if self.wide is not None and other.wide is not None:
            return None
        return Term(self.wide or other.wide, self.rows + other.rows, self.columns + other.columns,
                    self.scale * other.scale)

    def inverse(self) -> Term | None:
        """One over the term; None where it is wide."""
        if self.wide is not None or self.scale == 0:
            return None
        turned = [tuple(replace(f, inverse=not f.inverse) for f in fs) for fs in (self.rows, self.columns)]
        return Term(None, turned[0], turned[1], 1 / self.scale)


@dataclass(frozen=True)
class Affine:
    """The terms of a node; `inner` are the wide nodes that follow from row values and were taken apart."""

    terms: tuple[Term, ...]
    inner: frozenset[fx.Node]


def affine(node: fx.Node) -> Affine:
    """The node's terms."""
    inner: set[fx.Node] = set()
    found = _terms(node, inner, 0)
    return Affine(found, frozenset(inner))


def _terms(node: fx.Node, inner: set[fx.Node], depth: int) -> tuple[Term, ...]:
    below: set[fx.Node] = set()
    found = _apart(node, below, depth) if depth < DEEPEST else None
    if found is None or len(found) > MOST_TERMS or not any(t.rows for t in found):
        return (Term(node),)
    inner |= {node, *below}
    return found


def _apart(node: fx.Node, inner: set[fx.Node], depth: int) -> tuple[Term, ...] | None:
    """The terms of a node by those of its operands; None where its op or a shape is none that is known."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in FLOATS:
        return None

    def of(argument: Any) -> tuple[Term, ...] | None:
        return _operand(argument, value, inner, depth + 1)

    target, args = node.target, node.args
    if _passes(node):
        return of(args[0])
    if target is aten.neg.default:
        found = of(args[0])
        return None if found is None else tuple(replace(t, scale=-t.scale) for t in found)
    if target not in SUMS and target not in PRODUCTS and target not in QUOTIENTS:
        return None
    if len(args) != 2 or node.kwargs:
        return None
    left, right = of(args[0]), of(args[1])
    if left is None or right is None:
        return None
    if target in SUMS:
        return (*left, *(replace(t, scale=SUMS[target] * t.scale) for t in right))
    if target in QUOTIENTS:
        turned = [t.inverse() for t in right]
        if len(turned) != 1 or turned[0] is None:
            return None
        right = (turned[0],)
    products = [a.times(b) for a in left for b in right]
    return tuple(p for p in products if p is not None) if None not in products else None


def _passes(node: fx.Node) -> bool:
    """Whether the op changes no value but for its rounding, and keeps the last dimension as it is."""
    if node.target is aten._to_copy.default:
        source = node.args[0].meta["val"]  # type: ignore[union-attr]
        return source.dtype in FLOATS and source.device == node.meta["val"].device
    if node.target in SAME or node.target is aten.expand.default:
        return True
    if node.target not in RESHAPES:
        return False
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    return source.dim() > 0 and known_equal(source.shape[-1], node.meta["val"].shape[-1])


def _operand(argument: Any, value: torch.Tensor, inner: set[fx.Node], depth: int) -> tuple[Term, ...] | None:
    """The terms of what is broadcast to the shape of `value`."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return (Term(scale=float(argument)),)
    operand = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    if not isinstance(operand, torch.Tensor) or operand.dtype not in FLOATS or not operand.dim():
        return None
    lead, width = value.shape[:-1], value.shape[-1]
    own, last = operand.shape[:-1], operand.shape[-1]
    assert isinstance(argument, fx.Node)
    if known_equal(last, 1) and not known_equal(width, 1):
        return (Term(rows=(Factor(argument),)),) if all_equal(own, lead) else None
    if not known_equal(last, width):
        return None
    if all(known_equal(s, 1) for s in own):
        return (Term(columns=(Factor(argument),)),)
    same = known_equal(operand.numel(), value.numel())  # a view has other leading dimensions
    return _terms(argument, inner, depth) if same else None


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """The node and what it is a copy or a view of, nearest first."""
    yield node
    while node.op == "call_function" and _passes(node) and node.target is not aten.expand.default:
        node = node.all_input_nodes[0]
        yield node
