"""Axes, and index forms over them: where in a tensor a point reads or writes.

An `Axis` is one counter of a kernel's iteration space, 0 <= axis < size.  A `Form` is an affine sum over
atoms, {atom: coefficient} + constant, with `Size` coefficients; an `Index` holds one form per dimension of a
tensor.  An atom is an axis or, where a form does not factor, the quotient or the remainder of another form:
those are computed on a vector of indices, which is cheap, so every view has an index.  Where a tensor holds the
positions at which another is read, the atom is a `Lookup`: a number in [0, size) that is itself loaded.

All values are immutable, hash by value and print as source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Iterable, Mapping, Union

from fxfuser.domain.size import Poly, Size, exact_div, nonneg


@dataclass(frozen=True)
class Axis:
    """A counter 0 <= axis < size.  `reduced` axes are summed over somewhere and never split across programs."""

    name: str
    size: Size = field(compare=False)
    reduced: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        return self.name


TURNS = (1, 2, 4, 16, 256, 65536)  # multiples of a symbolic divisor that are tried to bring a form above zero


@dataclass(frozen=True)
class Quotient:
    """floor(form / divisor); the form is known to be non-negative."""

    form: Form
    divisor: Size

    def __repr__(self) -> str:
        return f"(({self.form}) // {self.divisor})"


@dataclass(frozen=True)
class Remainder:
    """form mod divisor, in [0, divisor); the form is known to be non-negative."""

    form: Form
    divisor: Size

    def __repr__(self) -> str:
        return f"(({self.form}) % {self.divisor})"


@dataclass(frozen=True)
class Piece(Axis):
    """`form` inside a region that keeps it in [0, size), as if it were an axis.

    Only the resolver sees pieces: they carry a region's knowledge into the views below it, and the points of
    a domain hold the form itself.
    """

    form: Form = field(kw_only=True)

    @staticmethod
    def of(form: Form, size: Size) -> Form:
        """`form`, whose value is in [0, size) wherever it is used."""
        if size == 1:
            return Form()
        if not form.terms or within(form, size):
            return form
        return Form(((Piece(f"<{form!r}:{size}>", size, form=form), 1),))


@dataclass(frozen=True)
class Lookup:
    """The position that a tensor of integers holds at `index`, in [0, size).

    `source` names that tensor within its group.  Negative positions count from the end if `wraps`.  A position out of
    range has no value: what would be read there is not read.
    """

    source: str
    index: Index
    size: Size
    wraps: bool = False

    def __repr__(self) -> str:
        return f"{self.source}[{', '.join(map(repr, self.index))}]"


Atom = Union[Axis, Quotient, Remainder, Lookup]


@dataclass(frozen=True)
class Form:
    """sum of coefficient * atom, plus a constant.  Terms keep the order in which they appeared, without zeros."""

    terms: tuple[tuple[Atom, Size], ...] = ()
    constant: Size = 0

    @staticmethod
    def of(terms: Mapping[Atom, Size], constant: Size = 0) -> Form:
        kept = [(a, k) for a, k in terms.items() if k != 0]
        return Form(tuple(sorted(kept, key=_order) if len(kept) > 1 else kept), constant)

    @staticmethod
    def axis(axis: Axis) -> Form:
        return Form(((axis, 1),), 0) if axis.size != 1 else Form()

    def __add__(self, other: Form | Size) -> Form:
        if not isinstance(other, Form):
            return Form(self.terms, self.constant + other)
        if not other.terms:
            return Form(self.terms, self.constant + other.constant)
        total = dict(self.terms)
        for atom, coefficient in other.terms:
            total[atom] = total.get(atom, 0) + coefficient
        return Form.of(total, self.constant + other.constant)

    def __sub__(self, other: Form | Size) -> Form:
        return self + (other.scale(-1) if isinstance(other, Form) else -other)

    def scale(self, factor: Size) -> Form:
        if factor == 1:
            return self
        return Form.of({a: k * factor for a, k in self.terms}, self.constant * factor)

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.constant))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def axes(self) -> frozenset[Axis]:
        """Every axis the form depends on, those inside quotients and remainders included."""
        found: set[Axis] = set()
        for atom, _ in self.terms:
            if isinstance(atom, Lookup):
                found |= axes_of(atom.index)
            else:
                found |= atom.form.axes if isinstance(atom, (Piece, Quotient, Remainder)) else {atom}
        return frozenset(found)

    @cached_property
    def lookups(self) -> tuple[Lookup, ...]:
        """Every lookup on whose value the form depends, but not those on which only lookups do."""
        found: dict[Lookup, None] = {}
        for atom, _ in self.terms:
            if isinstance(atom, Lookup):
                found[atom] = None
            elif isinstance(atom, (Piece, Quotient, Remainder)):
                found.update(dict.fromkeys(atom.form.lookups))
        return tuple(found)

    @cached_property
    def depth(self) -> int:
        """How many quotients and remainders are nested in each other; 0 for an affine form."""
        inner = (atom.form.depth + (type(atom) is not Piece) for atom, _ in self.terms
                 if isinstance(atom, (Piece, Quotient, Remainder)))
        return max(inner, default=0)

    @property
    def affine(self) -> bool:
        """Whether every atom is an axis."""
        return all(type(a) is Axis for a, _ in self.terms)

    def coefficient(self, atom: Atom) -> Size:
        return next((k for a, k in self.terms if a == atom), 0)

    def __repr__(self) -> str:
        parts = [repr(a) if k == 1 else f"{k}*{a!r}" if isinstance(k, int) else f"({k})*{a!r}" for a, k in self.terms]
        if self.constant != 0 or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


def _order(term: tuple[Atom, Size]) -> str:
    return repr(term[0])


Index = tuple[Form, ...]
Splits = dict[Axis, list[Size]]  # axes that would factor, had they been split at these inner sizes


def axes_of(index: Iterable[Form]) -> frozenset[Axis]:
    """The axes on which any of these forms depends."""
    return frozenset().union(*(f.axes for f in index))


def lookups_of(index: Iterable[Form]) -> tuple[Lookup, ...]:
    """The lookups that any of these forms names, each once."""
    return tuple(dict.fromkeys(lookup for form in index for lookup in form.lookups))


def linear(index: Index, strides: Iterable[Size]) -> Form:
    """The element offset of `index` in a tensor with these strides."""
    total = Form()
    for form, stride in zip(index, strides):
        total = total + form.scale(stride)
    return fold(total)


def extent(atom: Atom) -> Size | None:
    """An exclusive upper bound of an atom's value, None where none is known."""
    if isinstance(atom, (Axis, Lookup)):
        return atom.size
    if isinstance(atom, Remainder):
        return atom.divisor
    limits = bounds(atom.form)
    if limits is None:
        return None
    top, n = limits[1], atom.divisor
    if isinstance(top, int) and isinstance(n, int):
        return top // n + 1
    exact = exact_div(top + 1, n)
    return exact if exact is not None else top + 1


def bounds(form: Form) -> tuple[Size, Size] | None:
    """The least and the greatest value of a form; None where a coefficient's sign is not known."""
    low = high = form.constant
    for atom, coefficient in form.terms:
        limit = extent(atom)
        if limit is None:
            return None
        span = coefficient * (limit - 1)
        if nonneg(coefficient):
            high = high + span
        elif nonneg(-coefficient):
            low = low + span
        else:
            return None
    return low, high


def within(form: Form, n: Size) -> bool:
    """Whether 0 <= form < n is proven."""
    limits = bounds(form)
    return limits is not None and nonneg(limits[0]) and nonneg(n - 1 - limits[1])


def divide(form: Form, n: Size, splits: Splits | None = None) -> tuple[Form, Form]:
    """(form // n, form mod n), for a form that is not negative.

    Terms that n divides go to the quotient.  What is left is the remainder if it provably lies in [0, n); else
    both become atoms, and `splits`, if given, learns which axis straddles n and factors when it is split.
    """
    if n == 1 or not form.terms and form.constant == 0:
        return form, Form()
    if n == 0:
        return Form(), Form()  # an empty tensor, of which no element is ever read
    quotient, rest = _factor(form, n)
    settled = _settle(rest, n)
    if settled is not None:
        return quotient + settled[0], settled[1]
    if splits is not None:
        _request(rest, n, splits)
    lifted, rest = _lift(rest, n)
    above, below = _opaque(rest, n)
    return quotient + above - lifted, below


def fold(form: Form) -> Form:
    """The form with digits put together again: k*n * (f // n) + k * (f mod n) is k * f."""
    while any(type(atom) is Remainder for atom, _ in form.terms) and (shorter := _fold_once(form)) is not None:
        form = shorter
    return form


def _fold_once(form: Form) -> Form | None:
    terms = dict(form.terms)
    for atom, k in form.terms:
        if not isinstance(atom, Remainder):
            continue
        above = divide(atom.form, atom.divisor)[0]
        if len(above.terms) != 1 or above.constant != 0 or above.terms[0][1] != 1:
            continue
        upper = above.terms[0][0]
        if terms.get(upper) == k * atom.divisor:
            return form - Form.of({upper: k * atom.divisor, atom: k}) + atom.form.scale(k)
        for other, m in form.terms:  # the upper digit is itself one of several
            if isinstance(other, Remainder) and other.form == above and m == k * atom.divisor:
                joined = divide(atom.form, atom.divisor * other.divisor)[1]
                return form - Form.of({other: m, atom: k}) + joined.scale(k)
    return None


def _factor(form: Form, n: Size) -> tuple[Form, Form]:
    """form = n * first + second, with as much as possible in the first."""
    upper: dict[Atom, Size] = {}
    lower: dict[Atom, Size] = {}
    for atom, k in form.terms:
        exact = exact_div(k, n)
        if exact is None:
            lower[atom] = k
        else:
            upper[atom] = exact
    above: Size = 0
    below: Size = 0
    constant = form.constant
    for part in (constant,) if isinstance(constant, int) else (Poly((t,)) if t[0] else t[1] for t in constant.terms):
        exact = exact_div(part, n)
        if exact is not None:
            above = above + exact
        elif isinstance(part, int) and isinstance(n, int):
            above, below = above + part // n, below + part % n
        else:
            below = below + part
    return Form.of(upper, above), Form.of(lower, below)


def _settle(rest: Form, n: Size) -> tuple[Size, Form] | None:
    """(q, r) with rest = q * n + r and r proven to lie in [0, n)."""
    limits = bounds(rest)
    if limits is None:
        return None
    low, high = limits
    for q in (0, -1, 1):
        if nonneg(low - n * q) and nonneg(n - 1 - high + n * q):
            return q, rest - n * q
    return None


def _request(rest: Form, n: Size, splits: Splits) -> None:
    for atom, k in rest.terms:
        if type(atom) is not Axis or atom.size == 0:
            continue
        inner = exact_div(n, k if nonneg(k) else -k)
        if inner is None or inner == atom.size or exact_div(atom.size, inner) is None:
            continue
        lower = Form.of({(Axis(a.name, inner) if a is atom and isinstance(a, Axis) else a): c for a, c in rest.terms},
                        rest.constant)
        if _settle(lower, n) is not None:
            wanted = splits.setdefault(atom, [])
            if inner not in wanted:
                wanted.append(inner)


def _lift(rest: Form, n: Size) -> tuple[Size, Form]:
    """(m, rest + m * n) that is not negative; kernels divide like C, which differs from floor below zero."""
    limits = bounds(rest)
    if limits is None or nonneg(limits[0]):
        return 0, rest
    if isinstance(limits[0], int) and isinstance(n, int):
        m = -(limits[0] // n)
        return m, rest + m * n
    for m in TURNS:
        if nonneg(limits[0] + n * m):
            return m, rest + n * m
    return 0, rest


def _opaque(rest: Form, n: Size) -> tuple[Form, Form]:
    """Quotient and remainder as atoms, digits of digits written as digits of the whole."""
    if len(rest.terms) == 1 and rest.terms[0][1] == 1:
        atom = rest.terms[0][0]
        if isinstance(atom, Quotient):
            above = divide(atom.form + rest.constant * atom.divisor, atom.divisor * n)[0]
            return above, _atom(Remainder(rest, n))
        count = exact_div(atom.divisor, n) if isinstance(atom, Remainder) and rest.constant == 0 else None
        if isinstance(atom, Remainder) and count is not None:
            above, below = divide(atom.form, n)
            return divide(above, count)[1], below
    common = _gcd(rest, n)
    if common > 1 and isinstance(n, int) and isinstance(rest.constant, int):
        smaller = Form(tuple((a, k // common) for a, k in rest.terms if isinstance(k, int)), rest.constant // common)
        above, below = divide(smaller, n // common)
        return above, below.scale(common) + rest.constant % common
    return _atom(Quotient(rest, n)), _remainder(rest, n)


def _remainder(rest: Form, n: Size) -> Form:
    """rest mod n; a remainder inside whose own divisor is a multiple of n adds nothing."""
    plain = Form((), rest.constant)
    for atom, k in rest.terms:
        inside = isinstance(atom, Remainder) and exact_div(k * atom.divisor, n) is not None
        plain = plain + (atom.form.scale(k) if inside and isinstance(atom, Remainder) else Form(((atom, k),)))
    return _atom(Remainder(rest, n)) if plain == rest else divide(plain, n)[1]


def _gcd(rest: Form, n: Size) -> int:
    numbers = [n, *(k for _, k in rest.terms)]
    return math.gcd(*(k for k in numbers if isinstance(k, int))) if all(isinstance(k, int) for k in numbers) else 1


def _atom(atom: Atom) -> Form:
    return Form(((atom, 1),))
