"""Statistics of rows are applied behind a product instead of before it: they are factors of its rows.

    r = rsqrt(mean(x * x) + eps)      # [M, 1]               r = rsqrt(mean(x * x) + eps)
    p = aten.mm(x * r * g, w.T)       # [M, N]        ->     p = aten.mm(x * g, w.T) * r

    y = (x - m) * r * g + b                                  v = w.T * g[:, None]                     # [K, N]
    p = aten.mm(y, w.T)                               ->     p = wide_product(x, v) * r + (-m * r) * v.sum(0)
                                                                 + (w.T * b[:, None]).sum(0)

in general an operand that is a sum in which row values multiply what does not depend on them (see row_affine.py), with
one wide term.  Whoever makes x then need not wait for the whole row: its kernel leaves x and the row's statistics, and
the product's kernel applies those to its fp32 sums.  The result is another rounding of the same number, so the option
`defer_normalisation` has to ask for it.

Columns g are multiplied into x, which costs nothing where x is made.  They go into w where x is centred, as the sum
over v that makes up for the mean must be of just the weights that x met, or where x is stored anyway and w is smaller.
Left alone: scales that vary along the sum; row values that follow from no reduction, which the kernel before can apply;
an operand that something else reads, as the backward of a layer with trained weights does, for then it is stored all
the same; float16, in which x that is not normalised may overflow; and a mean taken off x that is only rounded to the
operand's dtype here, or multiplied in float32, as what is rounded away need not cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import torch
from torch import fx

from fxfuser.domain.products import Factors, matrix_product
from fxfuser.ops import Kind, is_view, kind_of
from fxfuser.ops.products import AFTER, WIDE_PRODUCT
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import all_equal, bytes_of, is_contiguous, known_equal
from fxfuser.passes.rebuild import call, replace
from fxfuser.passes.row_affine import Factor, Term, affine, sources
from fxfuser.passes.sizes import as_arguments

aten = torch.ops.aten

DTYPES = frozenset({torch.bfloat16, torch.float32})
FARTHEST = 16  # ops between a row value and the reduction that it follows from


@dataclass(frozen=True)
class Deferral:
    """An operand by its terms: the wide one, what else varies from row to row, and what is the same for all rows.

    `products` read the operand and nothing else does; `fold`: columns go into the weights.
    """

    wide: Term
    centres: tuple[Term, ...]
    others: tuple[Term, ...]
    products: tuple[fx.Node, ...]
    fold: bool


def defer_normalisation(graph: fx.Graph, scope: Scope) -> int:
    if not scope.defer_normalisation:
        return 0
    changes, seen, gone = 0, set[fx.Node](), set[fx.Node]()
    for node in list(graph.nodes):
        factors = _product(node) if node not in gone else None
        operand = None if factors is None else _seen_through(factors.left)
        if operand is None or operand in seen:
            continue
        seen.add(operand)
        deferral = _deferral(operand)
        if deferral is None:
            continue
        if not scope.fuel.take():
            break
        known: dict[Any, fx.Node] = {}
        for product in deferral.products:
            _Rewrite(graph, scope, product, deferral, known).run()
        gone.update(deferral.products)
        changes += 1
    return changes


def _product(node: fx.Node) -> Factors | None:
    """The factors of a product that may be rewritten."""
    factors = matrix_product(node)
    if factors is None or node.meta["val"].dtype not in DTYPES:
        return None
    rows, depth = factors.left.meta["val"].shape[-2:]
    return None if known_equal(rows, 1) or known_equal(depth, 1) else factors


def _sizes_before(product: fx.Node) -> Mapping[str, fx.Node]:
    """The nodes that hold a size, of those that precede the product, by the size's text."""
    return {str(n.meta["val"]): n for n in product.graph.nodes
            if isinstance(n.meta.get("val"), torch.SymInt) and n < product}


def _seen_through(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def _deferral(operand: fx.Node) -> Deferral | None:
    products = _readers(operand)
    factors = matrix_product(products[0]) if products else None
    if factors is None or products is None:
        return None
    left, found = factors.left, affine(factors.left)
    if not _leads_to(found.inner, products):
        return None
    wide = [t for t in found.terms if t.wide is not None]
    centres = tuple(t for t in found.terms if t.wide is None and t.rows)
    values = [f.node for t in found.terms for f in t.rows]
    if len(wide) != 1 or not any(map(_is_statistic, values)):
        return None
    assert wide[0].wide is not None
    if as_arguments(left.meta["val"].shape, _sizes_before(products[0])) is None:
        return None
    dtype = left.meta["val"].dtype
    rounded = all(n.meta["val"].dtype is not dtype for n in sources(wide[0].wide))
    if centres and (dtype is torch.float32 or rounded):
        return None
    others = tuple(t for t in found.terms if t.wide is None and not t.rows)
    return Deferral(wide[0], centres, others, products, _folds(wide[0], centres, found.inner, products))


def _readers(operand: fx.Node) -> tuple[fx.Node, ...] | None:
    """The products whose left factor is one view of the operand; None where anything else reads it."""
    found: list[fx.Node] = []
    pending, lefts = list(operand.users), set[fx.Node]()
    while pending:
        user = pending.pop()
        factors = _product(user) if user.op == "call_function" else None
        if factors is not None and _seen_through(factors.left) is operand:
            if _seen_through(factors.right) is operand or factors.added is not None \
                    and _seen_through(factors.added) is operand:
                return None
            lefts.add(factors.left)
            found.append(user)
        elif user.op == "call_function" and is_view(user):
            pending.extend(user.users)
        else:
            return None
    return tuple(sorted(set(found))) if len(lefts) == 1 else None


def _leads_to(inner: frozenset[fx.Node], products: Sequence[fx.Node]) -> bool:
    """Whether all that reads what was taken apart is the rest of it, the products, and reductions of rows."""
    return all(u in inner or u in products or _only_reduced(u, FARTHEST) for n in inner for u in n.users)


def _only_reduced(node: fx.Node, steps: int) -> bool:
    if kind_of(node) is Kind.REDUCTION:
        return True
    passes = kind_of(node) in (Kind.POINTWISE, Kind.VIEW)
    return passes and steps > 0 and bool(node.users) and all(_only_reduced(u, steps - 1) for u in node.users)


def _is_statistic(value: fx.Node) -> bool:
    """Whether a row value follows from a reduction."""
    pending, seen = [(value, 0)], set[fx.Node]()
    while pending:
        node, steps = pending.pop()
        if kind_of(node) is Kind.REDUCTION:
            return True
        if node not in seen and steps < FARTHEST and kind_of(node) in (Kind.POINTWISE, Kind.VIEW):
            seen.add(node)
            pending.extend((n, steps + 1) for n in node.all_input_nodes)
    return False


def _folds(wide: Term, centres: Sequence[Term], inner: frozenset[fx.Node], products: Sequence[fx.Node]) -> bool:
    """Whether columns go into the weights rather than into the operand."""
    if not wide.columns or centres:
        return bool(wide.columns)
    assert wide.wide is not None
    within = {*inner, *products}
    stored = any(u not in within and not _only_reduced(u, FARTHEST)
                 for n in sources(wide.wide) for u in n.users if u not in set(sources(wide.wide)))
    weights = sum(bytes_of(f.right.meta["val"]) for p in products if (f := matrix_product(p)) is not None)
    return stored and 2 * weights < bytes_of(wide.wide.meta["val"])


@dataclass(frozen=True)
class _Rewrite:
    """One product.  `known` has what products of one operand share."""

    graph: fx.Graph
    scope: Scope
    product: fx.Node
    deferral: Deferral
    known: dict[Any, fx.Node]

    @property
    def factors(self) -> Factors:
        found = matrix_product(self.product)
        assert found is not None
        return found

    def run(self) -> None:
        with self.graph.inserting_before(self.product):
            new = self._made()
        replace(self.product, new, self.graph, self.scope)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, self.scope, target, *args, like=self.product, **kwargs)

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype is dtype else self._call(aten._to_copy.default, node, dtype=dtype)

    def _viewed(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        if all_equal(node.meta["val"].shape, shape):
            return node
        if not is_contiguous(node.meta["val"]):
            node = self._call(aten.clone.default, node, memory_format=torch.contiguous_format)
        arguments = as_arguments(shape, _sizes_before(self.product))
        assert arguments is not None, "the operand was viewed so"
        return self._call(aten.view.default, node, arguments)

    def _once(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _made(self) -> fx.Node:
        deferral, factors = self.deferral, self.factors
        dtype = self.product.meta["val"].dtype
        left = self._once("left", self._left)
        right = self._weights(deferral.wide.columns) if deferral.fold else factors.right
        plain = aten.mm.default if left.meta["val"].dim() == 2 else aten.bmm.default
        if deferral.centres:  # a half of the sum may be smaller than what the mean leaves of it
            plain = WIDE_PRODUCT
        total = self._scaled(self._call(plain, left, right), deferral.wide, factors.alpha)
        for term in (*deferral.centres, *deferral.others):
            total = self._call(aten.add.Tensor, total, self._scaled(self._sums(term, right), term, factors.alpha))
        if factors.added is not None:
            added = self._cast(factors.added, torch.float32)
            added = added if factors.beta == 1 else self._call(aten.mul.Tensor, added, factors.beta)
            total = self._call(aten.add.Tensor, total, added)
        return self._cast(total, dtype)

    def _left(self) -> fx.Node:
        """The wide value, with its columns unless these go into the weights."""
        wide, dtype = self.deferral.wide, self.product.meta["val"].dtype
        assert wide.wide is not None
        shape = self.factors.left.meta["val"].shape
        node = next((n for n in sources(wide.wide) if n.meta["val"].dtype is dtype), wide.wide)
        if wide.columns and not self.deferral.fold:
            node = self._cast(node, torch.float32)
            for factor in wide.columns:
                node = self._multiplied(node, factor, [shape[-1]])
        return self._viewed(self._cast(node, dtype), shape)

    def _multiplied(self, node: fx.Node, factor: Factor, shape: Sequence[Any]) -> fx.Node:
        """Times a factor of this shape, in float32."""
        other = self._viewed(self._cast(factor.node, torch.float32), shape)
        return self._call(aten.div.Tensor if factor.inverse else aten.mul.Tensor, node, other)

    def _weighted(self, columns: Sequence[Factor]) -> fx.Node:
        """The weights, [.., K, N] in float32, times columns."""
        right = self.factors.right
        node = self._cast(right, torch.float32)
        for factor in columns:
            node = self._multiplied(node, factor, [right.meta["val"].shape[-2], 1])
        return node

    def _weights(self, columns: Sequence[Factor]) -> fx.Node:
        return self._once((self.factors.right, tuple(columns)), lambda: self._cast(
            self._weighted(columns), self.product.meta["val"].dtype))

    def _sums(self, term: Term, right: fx.Node) -> fx.Node:
        """What columns [.., K] become in the product, [.., 1, N] in float32."""
        same = self.deferral.fold and term.columns == self.deferral.wide.columns
        summed = self._cast(right, torch.float32) if same else self._weighted(term.columns)
        # apart from what reads them: the tiles of the product hold no column of the weights
        return self._call(AFTER, self._call(aten.sum.dim_IntList, summed, [-2], True), [])

    def _scaled(self, node: fx.Node, term: Term, alpha: float) -> fx.Node:
        """Times the row values of a term and its number, in float32."""
        shape = [*self.factors.left.meta["val"].shape[:-1], 1]
        scale = term.scale * alpha
        if scale == 1 and not term.rows:
            return self._cast(node, torch.float32)
        rows = None if not term.rows else self._once((term.rows, scale), lambda: self._rows(term.rows, scale, shape))
        return self._call(aten.mul.Tensor, node, scale if rows is None else rows)

    def _rows(self, factors: Sequence[Factor], scale: float, shape: Sequence[Any]) -> fx.Node:
        first, *others = sorted(factors, key=lambda f: f.inverse)
        node = self._viewed(self._cast(first.node, torch.float32), shape)
        if first.inverse:
            node = self._call(aten.reciprocal.default, node)
        for factor in others:
            node = self._multiplied(node, factor, shape)
        return node if scale == 1 else self._call(aten.mul.Tensor, node, scale)
