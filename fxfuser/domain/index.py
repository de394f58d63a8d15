"""Axes, and index forms over them: where in a tensor a point reads or writes.

An `Axis` is one counter of a kernel's iteration space, 0 <= axis < size.  A `Form` is an affine sum over
atoms, {atom: coefficient} + constant, with `Size` coefficients; an `Index` holds one form per dimension of a
tensor.  An atom is an axis or, where a form does not factor, the quotient or the remainder of another form:
those are computed on a vector of indices, which is cheap, so every view has an index.

All values are immutable, hash by value and print as source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Iterable, Mapping, Union

from fxfuser.domain.size import Size


@dataclass(frozen=True)
class Axis:
    """A counter 0 <= axis < size.  `reduced` axes are summed over somewhere and never split across programs."""

    name: str
    size: Size = field(compare=False)
    reduced: bool = field(default=False, compare=False)

    def __repr__(self) -> str:
        return self.name


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


Atom = Union[Axis, Quotient, Remainder]


@dataclass(frozen=True)
class Form:
    """sum of coefficient * atom, plus a constant.  Terms keep the order in which they appeared, without zeros."""

    terms: tuple[tuple[Atom, Size], ...] = ()
    constant: Size = 0

    @staticmethod
    def of(terms: Mapping[Atom, Size], constant: Size = 0) -> Form:
        return Form(tuple(sorted(((a, k) for a, k in terms.items() if k != 0), key=lambda t: repr(t[0]))), constant)

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
    def axes(self) -> frozenset[Axis]:
        """Every axis the form depends on, those inside quotients and remainders included."""
        found: set[Axis] = set()
        for atom, _ in self.terms:
            found |= {atom} if isinstance(atom, Axis) else atom.form.axes
        return frozenset(found)

    @property
    def affine(self) -> bool:
        """Whether every atom is an axis."""
        return all(isinstance(a, Axis) for a, _ in self.terms)

    def coefficient(self, atom: Atom) -> Size:
        return dict(self.terms).get(atom, 0)

    def __repr__(self) -> str:
        parts = [repr(a) if k == 1 else f"{k}*{a!r}" if isinstance(k, int) else f"({k})*{a!r}" for a, k in self.terms]
        if self.constant != 0 or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


Index = tuple[Form, ...]


def axes_of(index: Iterable[Form]) -> frozenset[Axis]:
    """The axes on which any of these forms depends."""
    return frozenset().union(*(f.axes for f in index))


def linear(index: Index, strides: Iterable[Size]) -> Form:
    """The element offset of `index` in a tensor with these strides."""
    total = Form()
    for form, stride in zip(index, strides):
        total = total + form.scale(stride)
    return total
