"""Sizes: integers, or polynomials with integer coefficients in size symbols.

Enters: integers and the sympy expressions behind `torch.SymInt`.  Leaves: `Size`, an `int` wherever the
value is static (so static graphs pay nothing for symbols) and a `Poly` otherwise.  Invariant: a `Poly` is
never constant, holds no zero coefficient, and compares and hashes by value, so equal sizes are equal keys.

sympy is correct here too, but simplifying through it cost 0.8 s for one module's position embeddings; these are a
dozen dictionary operations.  An expression that is no polynomial (a floor division, a maximum) becomes one opaque
symbol whose text is that expression.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Callable, Mapping, Union

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True, order=True)
class Symbol:
    """A size known at run time: `text` is Python source over graph symbols (`s0`, `s0//2`), `lower` its least value."""

    text: str
    lower: int = 0

    def __str__(self) -> str:
        return self.text if self.text.isidentifier() else f"({self.text})"


UNBOUNDED = -(1 << 63)  # the lower bound of a symbol that may be any integer, as a number that the user passes may

Monomial = tuple[Symbol, ...]  # sorted, with repetition: s0*s0*s1 is (s0, s0, s1); () is the constant


@dataclass(frozen=True)
class Poly:
    """A polynomial that is not constant: monomials, sorted, with their non-zero coefficients."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: Size) -> Size:
        return _combine(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return _combine(self, other, -1)

    def __rsub__(self, other: Size) -> Size:
        return _combine(self * -1, other, 1)

    def __neg__(self) -> Size:
        return self * -1

    def __mul__(self, other: Size) -> Size:
        product: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                key = tuple(sorted(left + right))
                product[key] = product.get(key, 0) + a * b
        return _build(product)

    __rmul__ = __mul__

    def __str__(self) -> str:
        parts = []
        for monomial, coefficient in self.terms:
            factors = [str(s) for s in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            parts.append("*".join(factors))
        return " + ".join(parts).replace("+ -", "- ")

    __repr__ = __str__


Size = Union[int, Poly]


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(size, Poly):
        return size.terms
    return (((), size),) if size else ()


def _build(terms: Mapping[Monomial, int]) -> Size:
    kept = tuple(sorted((m, c) for m, c in terms.items() if c))
    if not kept:
        return 0
    if len(kept) == 1 and kept[0][0] == ():
        return kept[0][1]
    return Poly(kept)


def _combine(left: Size, right: Size, sign: int) -> Size:
    total = dict(_terms(left))
    for monomial, coefficient in _terms(right):
        total[monomial] = total.get(monomial, 0) + sign * coefficient
    return _build(total)


def symbol(text: str, lower: int = 0) -> Poly:
    """The size that has this name at run time and is at least `lower`."""
    return Poly((((Symbol(text, lower),), 1),))


def symbols(size: Size) -> tuple[Symbol, ...]:
    """The symbols that occur in `size`, sorted, each once."""
    return tuple(sorted({s for monomial, _ in _terms(size) for s in monomial}))


def exact_div(numerator: Size, denominator: Size) -> Size | None:
    """`numerator / denominator` where that is a polynomial with integer coefficients, else None.

    Long division with respect to the sorted order of monomials; zero divides nothing.
    """
    if isinstance(numerator, int) and isinstance(denominator, int):
        return numerator // denominator if denominator and numerator % denominator == 0 else None
    if numerator == denominator:
        return 1
    divisor = _terms(denominator)
    if not divisor:
        return None
    # a graded order is needed for the leading terms of a product to be the product of the leading terms
    lead, lead_coefficient = max(divisor, key=_grade)
    quotient: Size = 0
    rest = numerator
    while rest != 0:
        top, coefficient = max(_terms(rest), key=_grade)
        factor = _remove(top, lead)
        if factor is None or coefficient % lead_coefficient:
            return None
        step = _build({factor: coefficient // lead_coefficient})
        quotient = quotient + step
        rest = rest - step * denominator
    return quotient


def _grade(term: tuple[Monomial, int]) -> tuple[int, list[Symbol]]:
    return len(term[0]), list(reversed(term[0]))


def _remove(monomial: Monomial, factor: Monomial) -> Monomial | None:
    left = list(monomial)
    for s in factor:
        if s not in left:
            return None
        left.remove(s)
    return tuple(left)


@lru_cache(maxsize=65536)
def nonneg(size: Size) -> bool:
    """Whether `size >= 0` for every admitted value of its symbols; False where that is not proven.

    Each symbol is written as its lower bound plus a non-negative rest; the sum is then non-negative if no
    coefficient is negative.
    """
    if isinstance(size, int):
        return size >= 0
    shifted: Size = 0
    for monomial, coefficient in size.terms:
        product: Size = coefficient
        for s in monomial:
            product = product * (Poly((((Symbol(s.text, 0),), 1),)) + s.lower)
        shifted = shifted + product
    return all(coefficient >= 0 for _, coefficient in _terms(shifted))


def positive(size: Size) -> bool:
    """Whether `size >= 1` is proven."""
    return nonneg(size - 1)


def hint(size: Size, values: Mapping[str, int], default: int = 1024) -> int:
    """The number that `size` has with these symbol values; a symbol that is missing counts as `default`."""
    total = 0
    for monomial, coefficient in _terms(size):
        product = coefficient
        for s in monomial:
            product *= values.get(s.text, default)
        total += product
    return total


def example(value: torch.SymInt) -> int | None:
    """The number that a size was when the graph was traced.

    None where only a run tells, or where it is no number: a ragged dimension of a nested tensor is a name.
    """
    known = value.node.hint if value.node.has_hint() else None
    return None if known is None or isinstance(known, torch.SymInt) else int(known)


def from_torch(value: int | torch.SymInt | sympy.Expr) -> Size:
    """The Size of a dimension, a stride or a size argument of an FX graph.

    Ranges come from the shape environment without adding a guard: backed sizes are at least 2 there
    (0 and 1 specialise), unbacked ones at least 0; a number of the user's that is no size may be negative.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        node = value.node
        shape_env = node.shape_env
        expr = sympy.sympify(node.expr)
        least = _sizes_least if shape_env is None else lambda e: _least(e, shape_env)
    else:
        expr, least = sympy.sympify(value), _sizes_least
    if expr.is_Integer:
        return int(expr)
    return _from_sympy(expr, least)


def _sizes_least(expr: sympy.Expr) -> int:
    return 0


def _least(expr: sympy.Expr, environment: ShapeEnv) -> int:
    if not expr.free_symbols <= environment.var_to_range.keys():  # the name of a ragged dimension has no range
        return UNBOUNDED
    lower = environment.bound_sympy(expr).lower
    return int(lower) if lower.is_Integer else UNBOUNDED


def _from_sympy(expr: sympy.Expr, least: Callable[[sympy.Expr], int]) -> Size:
    total: Size = 0
    for term in sympy.Add.make_args(sympy.expand(expr)):
        product: Size = 1
        for factor in sympy.Mul.make_args(term):
            base, power = factor.as_base_exp()
            if base.is_Integer and power == 1:
                product = product * int(base)
            elif power.is_Integer and power > 0:
                atom = symbol(str(base), least(base))
                for _ in range(int(power)):
                    product = product * atom
            else:
                product = product * symbol(str(factor), least(factor))
        total = total + product
    return total
