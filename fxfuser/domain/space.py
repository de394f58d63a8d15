"""The axes of a group while its domain is being found.

Axes are born with output dimensions and reduced dimensions and are then replaced: split in two, united with
another, cut into pieces, or unrolled.  A `Space` remembers these decisions by name, so that a new walk over
the group starts from what earlier walks have learnt.  Being reduced is sticky: what an axis is split into and
what it is united with are reduced too.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Iterator, Sequence

from fxfuser.domain.index import Atom, Axis, Form, Index, Lookup, Piece, Quotient, Remainder, Splits, divide
from fxfuser.domain.size import Size, exact_div


class Space:
    def __init__(self) -> None:
        self.unrolled: set[str] = set()
        self._sizes: dict[str, Size] = {}
        self._reduced: set[str] = set()
        self._replaced: dict[str, tuple[tuple[str, Size], ...]] = {}
        self._cut: dict[str, tuple[tuple[str, Size], ...]] = {}  # pieces and where each starts
        self._current: dict[str, Axis] = {}
        self._forms: dict[str, Form] = {}

    def form(self, name: str, size: Size, reduced: bool = False) -> Form:
        """The axis that was born under this name, as it stands now; an axis of size 1 is the constant 0."""
        if size == 1:
            return Form()
        if name not in self._sizes:
            self._sizes[name] = size
            if reduced:
                self._reduced.add(name)
        return self._resolve(name)

    def _resolve(self, name: str) -> Form:
        known = self._forms.get(name)
        if known is None:
            known = Form()
            for part, stride in self._replaced.get(name, ()):
                known = known + self._resolve(part).scale(stride)
            if name not in self._replaced:
                known = Form(((self._axis(name), 1),)) if self._sizes[name] != 1 else Form()
            self._forms[name] = known
        return known

    def _axis(self, name: str) -> Axis:
        if name not in self._current:
            self._current[name] = Axis(name, self._sizes[name], name in self._reduced)
        return self._current[name]

    def split(self, splits: Splits) -> None:
        """Splits each axis at its inner sizes, as far as these divide each other."""
        for axis, inners in splits.items():
            name, size = axis.name, axis.size
            for inner in sorted(inners, key=lambda s: s if isinstance(s, int) else 0, reverse=True):
                outer = exact_div(size, inner)
                if outer is None or inner == size or inner == 1 or name in self._replaced:
                    continue
                parts = ((f"{name}o", inner), (f"{name}i", 1))
                self._new(parts[0][0], outer, name)
                self._new(parts[1][0], inner, name)
                self._replaced[name] = parts
                name, size = parts[1][0], inner
        self._changed()

    def cut(self, axis: Axis, borders: Sequence[Size]) -> None:
        """Replaces [0, size) by one axis for each piece between the borders, which rise strictly."""
        pieces = []
        for number, (start, end) in enumerate(itertools.pairwise([0, *borders, axis.size])):
            pieces.append((f"{axis.name}p{number}", start))
            self._new(pieces[-1][0], end - start, axis.name)
        self._cut[axis.name] = tuple(pieces)
        self._changed()

    def variants(self, index: Index) -> tuple[Index, ...]:
        """The index once for each choice of pieces of its cut axes; itself where none is cut."""
        for form in index:
            for atom, _ in form.terms:
                if isinstance(atom, Axis) and atom.name in self._cut:
                    return tuple(v for piece in self._pieces(atom)
                                 for v in self.variants(tuple(_substituted(f, atom, piece) for f in index)))
        return (index,)

    def _pieces(self, axis: Axis) -> Iterator[Form]:
        for name, start in self._cut[axis.name]:
            yield self._resolve(name) + start

    def copy(self) -> Space:
        """A space that may learn more without this one knowing."""
        other = Space()
        other.unrolled, other._sizes, other._reduced = set(self.unrolled), dict(self._sizes), set(self._reduced)
        other._replaced, other._cut = dict(self._replaced), dict(self._cut)
        return other

    def unite(self, kept: Axis, gone: Axis) -> None:
        """Replaces `gone` by `kept`; call `settle` after the last."""
        self._replaced[gone.name] = ((kept.name, 1),)
        if gone.name in self._reduced:
            self._reduced.add(kept.name)

    def settle(self) -> None:
        """Makes what was united visible to the next walk."""
        self._changed()

    def _new(self, name: str, size: Size, parent: str) -> None:
        self._sizes[name] = size
        if parent in self._reduced:
            self._reduced.add(name)

    def _changed(self) -> None:
        self._forms.clear()
        self._current.clear()


def _substituted(form: Form, axis: Axis, value: Form) -> Form:
    k = form.coefficient(axis)
    return form if k == 0 else form - Form(((axis, k),)) + value.scale(k)


class Inliner:
    """Writes indices without pieces, each index once."""

    def __init__(self, splits: Splits) -> None:
        self.splits = splits
        self._forms: dict[Form, Form] = {}
        self._indices: dict[Index, Index] = {}

    def index(self, index: Index) -> Index:
        known = self._indices.get(index)
        if known is None:
            known = self._indices[index] = tuple(map(self.form, index))
        return known

    def form(self, form: Form) -> Form:
        for atom, _ in form.terms:
            if type(atom) is not Axis:
                break
        else:
            return form
        known = self._forms.get(form)
        if known is None:
            known = Form((), form.constant)
            for atom, k in form.terms:
                known = known + self._atom(atom).scale(k)
            self._forms[form] = known
        return known

    def _atom(self, atom: Atom) -> Form:
        if isinstance(atom, Piece):
            return self.form(atom.form)
        if isinstance(atom, Quotient):
            return divide(self.form(atom.form), atom.divisor, self.splits)[0]
        if isinstance(atom, Remainder):
            return divide(self.form(atom.form), atom.divisor, self.splits)[1]
        return Form(((self.lookup(atom), 1),)) if isinstance(atom, Lookup) else Form(((atom, 1),))

    def lookup(self, lookup: Lookup) -> Lookup:
        """The same lookup, without pieces in its index."""
        return replace(lookup, index=self.index(lookup.index))
