"""Text of sizes, index forms and numbers inside a kernel.

A kernel's sizes are its parameters n0, n1, ..., in the order in which its text first needs them; an axis is
called what the schedule calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Iterator, Mapping

import torch

from fxfuser.domain.index import Atom, Axis, Form, Lookup, Quotient
from fxfuser.domain.points import Bound, Condition
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.ops import TRITON_NAMES, is_negative_zero, literal

HALF = (torch.float16, torch.bfloat16)


@dataclass
class Sizes:
    """The size parameters of one kernel."""

    names: dict[Symbol, str] = field(default_factory=dict)

    def text(self, size: Size) -> str:
        """Source of a size over n0, n1, ...; an atom or a sum in parentheses."""
        if not isinstance(size, Poly):
            return str(size)
        terms = []
        for monomial, coefficient in size.terms:
            factors = [self.names.setdefault(s, f"n{len(self.names)}") for s in monomial]
            if coefficient != 1 or not factors:
                factors.append(str(coefficient))
            terms.append(" * ".join(factors))
        return terms[0] if len(terms) == 1 and " " not in terms[0] else f"({' + '.join(terms)})"


@dataclass
class Indices:
    """Source of forms, given what each axis and each lookup that they name is called.

    `counters` are vectors that count several axes, outermost first, by name: where a form names neighbouring ones as
    one counter, as in h * 56 + w of 56 columns, the vector itself says it and is not taken apart first.
    """

    sizes: Sizes
    names: dict[Axis, str]
    lookups: dict[Lookup, str] = field(default_factory=dict)
    counters: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)

    def form(self, form: Form) -> str:
        parts = []
        for text, coefficient in self._terms(form):
            if coefficient == 1:
                parts.append(text)
            elif coefficient == -1:
                parts.append(f"-{text}")
            else:
                parts.append(f"{text} * {self.sizes.text(coefficient)}")
        if form.constant != 0 or not parts:
            parts.append(self.sizes.text(form.constant))
        return " + ".join(parts).replace("+ -", "- ")

    def _terms(self, form: Form) -> Iterator[tuple[str, Size]]:
        """The text of each term and its coefficient, those of axes that are counted together as one."""
        coefficients = dict(form.terms)
        counted: dict[Axis, tuple[str, Size]] = {}  # by the first axis of each run: the others have no text
        for name, axes in self.counters.items():
            for first, last in _runs(axes, coefficients):
                counted |= dict.fromkeys(axes[first:last + 1], ("", 0))
                counted[axes[first]] = self._run(name, axes, first, last), coefficients[axes[last]]
        for atom, coefficient in form.terms:
            text, factor = counted.get(atom, (None, coefficient)) if isinstance(atom, Axis) else (None, coefficient)
            if text != "":
                yield text or self.atom(atom), factor

    def _run(self, name: str, axes: tuple[Axis, ...], first: int, last: int) -> str:
        """axes[first..last] of a vector that counts `axes`, as one number."""
        inner, size = _count(axes[last + 1:]), _count(axes[first:last + 1])
        text = name if inner == 1 else f"({name} // {self.sizes.text(inner)})"
        return text if first == 0 else f"({text} % {self.sizes.text(size)})"

    def atom(self, atom: Atom) -> str:
        if isinstance(atom, Axis):
            return self.names[atom]
        if isinstance(atom, Lookup):
            return self.lookups[atom]
        operator = "//" if isinstance(atom, Quotient) else "%"
        return f"(({self.form(atom.form)}) {operator} {self.sizes.text(atom.divisor)})"

    def bound(self, bound: Bound, prefix: str = "") -> list[str]:
        """The comparisons of one bound, each in parentheses; `prefix` makes a tile of a form without axes."""
        form, sides = prefix + self.form(bound.form), []
        if bound.lower is not None:
            sides.append(f"({form} >= {self.sizes.text(bound.lower)})")
        if bound.upper is not None:
            sides.append(f"({form} < {self.sizes.text(bound.upper)})")
        return sides

    def condition(self, condition: Condition, prefix: str = "") -> str:
        """Conjunction of the bounds; an atom."""
        sides = [text for bound in condition for text in self.bound(bound, prefix)]
        return sides[0] if len(sides) == 1 else f"({' & '.join(sides)})"


def _runs(axes: tuple[Axis, ...], coefficients: Mapping[Atom, Size]) -> Iterator[tuple[int, int]]:
    """The first and the last place of each run of two axes or more that these coefficients name as one counter."""
    first = 0
    for i, (axis, after) in enumerate(zip(axes, (*axes[1:], None))):
        k, inner = coefficients.get(axis, 0), coefficients.get(after, 0) if after is not None else 0
        if after is None or k == 0 or inner == 0 or k != inner * after.size:
            if i > first:
                yield first, i
            first = i + 1


def _count(axes: Iterable[Axis]) -> Size:
    total: Size = 1
    for axis in axes:
        total = total * axis.size
    return total


def full(value: bool | int | float, dtype: torch.dtype, shape: str) -> str:
    """A tile of `shape`, every element `value`."""
    held = torch.int32 if dtype == torch.bool else dtype  # tl.full takes 0 and 1 for tl.int1
    if held.is_floating_point and is_negative_zero(value):
        return f"{full(0.0, dtype, shape)} * (-1.0)"
    typed = literal(int(bool(value)) if dtype == torch.bool else value, held, typed=True)
    inner = typed.removeprefix("tl.full([], ").rpartition(",")[0]
    return f"tl.full({shape}, {inner}, {TRITON_NAMES[dtype]})"
