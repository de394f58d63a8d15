"""Form arithmetic: division into digits, folding them back, and what is refused as unproven."""

from __future__ import annotations

import random

import pytest

from fxfuser.domain.index import Axis, Form, Piece, Quotient, Remainder, Splits, divide, fold, within
from fxfuser.domain.size import symbol

A, B = Axis("a", 6), Axis("b", 4)
N, M = symbol("n", 2), symbol("m", 2)


def axis(axis: Axis, k: int = 1) -> Form:
    return Form(((axis, k),))


def test_divisible_terms_go_to_the_quotient() -> None:
    assert divide(axis(A, 4) + axis(B), 4) == (axis(A), axis(B))


def test_the_constant_is_divided_too() -> None:
    assert divide(axis(A, 4) + axis(B) + 8, 4) == (axis(A) + 2, axis(B))


def test_a_reversed_axis_has_digits() -> None:
    assert divide(axis(A, -4) + axis(B, -1) + 23, 4) == (axis(A, -1) + 5, axis(B, -1) + 3)


def test_symbolic_sizes_divide_exactly() -> None:
    outer, inner = Axis("o", M), Axis("i", N)
    form = Form.axis(outer).scale(N) + Form.axis(inner)
    assert divide(form, N) == (Form.axis(outer), Form.axis(inner))


def test_what_straddles_asks_for_a_split() -> None:
    splits: Splits = {}
    whole = Axis("w", 24)
    above, below = divide(axis(whole), 4, splits)
    assert splits == {whole: [4]}
    assert above == Form(((Quotient(axis(whole), 4), 1),)) and below == Form(((Remainder(axis(whole), 4), 1),))


def test_what_does_not_factor_asks_for_none() -> None:
    splits: Splits = {}
    divide(axis(A) + 1, 4, splits)
    divide(axis(A), 5, splits)
    assert not splits


def test_a_piece_carries_what_its_region_knows() -> None:
    shifted = Form.axis(Axis("w", 12)) - 4
    assert not within(shifted, 8)
    assert within(Piece.of(shifted, 8), 8)
    assert divide(axis(A, 8) + Piece.of(shifted, 8), 8)[0] == axis(A)


def test_digits_fold_back() -> None:
    whole = Axis("w", 105)
    rest, low = divide(axis(whole), 7)
    high, middle = divide(rest, 5)
    assert fold(high.scale(35) + middle.scale(7) + low) == axis(whole)
    assert fold(middle.scale(7) + low) == divide(axis(whole), 35)[1]


def test_other_digits_do_not_fold() -> None:
    whole = Axis("w", 105)
    high, low = divide(axis(whole), 7)
    for form in (high.scale(8) + low, high.scale(7) + low.scale(2)):
        assert fold(form) == form


@pytest.mark.parametrize("seed", range(200))
def test_division_is_exact_for_every_value(seed: int) -> None:
    rng = random.Random(seed)
    axes = [Axis(f"x{i}", rng.choice([2, 3, 4, 6])) for i in range(3)]
    form = Form.of({a: rng.choice([1, 2, 3, 4, 6, 8, 12]) for a in axes}, rng.randrange(10))
    steps = [rng.choice([2, 3, 4, 6, 8, 12]) for _ in range(3)]
    total, parts = form, Form()
    scale = 1
    for n in steps:
        total, digit = divide(total, n)
        parts, scale = parts + digit.scale(scale), scale * n
    parts = parts + total.scale(scale)
    for _ in range(20):
        at = {a: rng.randrange(a.size) for a in axes if isinstance(a.size, int)}
        assert value(parts, at) == value(fold(parts), at) == value(form, at)
        above, below = divide(form, steps[0])
        assert (value(above, at), value(below, at)) == divmod(value(form, at), steps[0])


def value(form: Form, at: dict[Axis, int]) -> int:
    total = form.constant
    for atom, k in form.terms:
        if isinstance(atom, Quotient):
            inside = value(atom.form, at)
            assert inside >= 0
            total += k * (inside // atom.divisor)
        elif isinstance(atom, Remainder):
            inside = value(atom.form, at)
            assert inside >= 0
            total += k * (inside % atom.divisor)
        else:
            total += k * at[atom]
    return total
