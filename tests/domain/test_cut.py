"""Cutting at the borders of regions: when it happens, what is left, and when selects stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxfuser.domain.borders import borders, decided, simplified
from fxfuser.domain.index import Axis, Form
from fxfuser.domain.points import Bound, Domain, PointKind
from fxfuser.domain.size import symbol
from tests.domain.groups import check
from tests.domain.test_views import tensors

N = symbol("n", 2)


def selects(domain: Domain) -> int:
    return sum(p.kind is PointKind.SELECT for p in domain.points())


def halves(x: torch.Tensor) -> torch.Tensor:
    middle = x.shape[-1] // 2
    return torch.cat((-x[..., middle:], x[..., :middle]), -1)


def test_two_halves_become_one_axis_and_two_stores() -> None:
    domain = check(lambda x, c: x * c + halves(x) * c, tensors((1024, 64), (1024, 64)))
    assert selects(domain) == 0 and len(domain.stores) == 2
    assert [a.size for a in domain.axes] == [1024, 32]
    loads = [p for p in domain.points() if p.kind is PointKind.LOAD]
    assert len(loads) == 4


def test_with_few_rows_selects_stay() -> None:
    domain = check(lambda x, c: x * c + halves(x) * c, tensors((8, 64), (8, 64)))
    assert selects(domain) > 0 and len(domain.stores) == 1


def test_a_symbolic_length_counts_as_many_rows() -> None:
    domain = check(lambda x: x + halves(x), tensors((8, 64)), [(0,)], [tensors((3, 64))])
    assert selects(domain) == 0


def test_a_short_border_stays_a_select() -> None:
    domain = check(lambda x: F.pad(x, (1, 1)) * 2, tensors((2048, 62)))
    assert selects(domain) == 1 and len(domain.stores) == 1


def test_interleaved_stores_stay_whole() -> None:
    domain = check(lambda x: torch.stack((x.exp(), x.sin()), -1).flatten(-2) + 0, tensors((2048, 16)))
    assert len(domain.stores) == 1


def test_an_uneven_cat_of_long_rows_is_walked_piece_by_piece() -> None:
    domain = check(lambda x, y: torch.cat((x.exp(), y.sin()), 1), tensors((1024, 64), (1024, 128)))
    assert selects(domain) == 0
    assert ([a.size for a in domain.program], len(domain.stores)) == ([1024], 2)


def test_a_row_sum_over_halves_reads_each_element_once() -> None:
    domain = check(lambda x, c: (x * c + halves(x) * c).sum(1), tensors((1024, 128), (1024, 128)))
    assert selects(domain) == 0
    assert [a.size for a in domain.axes] == [1024, 64]


def test_rows_are_not_cut() -> None:
    domain = check(lambda x, y: torch.cat((x.exp(), y.sin())), tensors((64, 1024), (128, 1024)))
    assert len(domain.stores) == 1


def test_a_cut_reduction_has_one_operand_per_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuser.domain.resolve.may_pay", lambda whole: True)
    monkeypatch.setattr("fxfuser.domain.resolve.pays", lambda whole, pieces: True)
    domain = check(lambda x, y: torch.softmax(torch.cat((x.exp(), y.sin()), 1), 1), tensors((16, 64), (16, 128)))
    assert selects(domain) == 0
    assert all(len(p.operands) == 2 for p in domain.reductions())


def test_positions_are_counted_through_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuser.domain.resolve.may_pay", lambda whole: True)
    monkeypatch.setattr("fxfuser.domain.resolve.pays", lambda whole, pieces: True)
    rows = check(lambda x, y: torch.cat((x, y)).argmax(), tensors((3, 4), (2, 4)))
    assert selects(rows) == 0
    columns = check(lambda x, y: torch.cat((x, y), 1).argmax(), tensors((3, 4), (3, 2)))
    assert selects(columns) == 1


def test_bounds_lose_terms_that_cannot_matter() -> None:
    h, j = Axis("h", 12), Axis("j", 16)
    form = Form.axis(h).scale(16) + Form.axis(j)
    assert simplified(Bound(form, None, 128)) == Bound(Form.axis(h), None, 8)
    assert simplified(Bound(form, 16, 128)) == Bound(Form.axis(h), 1, 8)
    assert simplified(Bound(form, None, 120)) == Bound(form, None, 120)


def test_borders_of_one_axis() -> None:
    a = Axis("a", 10)
    assert borders(Bound(Form.axis(a) + 2, 4, 9)) == (a, [2, 7])
    assert borders(Bound(Form.axis(a).scale(-1) + 9, None, 4)) == (a, [6])
    assert borders(Bound(Form.axis(a).scale(3), None, 10)) == (a, [4])
    assert borders(Bound(Form.axis(a), None, N)) == (a, [])
    assert borders(Bound(Form.axis(a) + Form.axis(Axis("b", 4)), None, 3)) is None


def test_borders_are_right_for_every_value() -> None:
    for size in range(1, 7):
        axis = Axis("a", size)
        for k in (-3, -1, 1, 2):
            for constant in range(-4, 8):
                for value in range(-6, 12):
                    form = Form.axis(axis).scale(k) + constant
                    if not form.terms:
                        continue
                    holds = [k * a + constant < value for a in range(size)]
                    expected = [a for a in range(1, size) if holds[a] != holds[a - 1]]
                    assert borders(Bound(form, None, value)) == (axis, expected)


def test_what_is_decided() -> None:
    assert decided(Bound(Form(), 0, 5), (0, 4)) is True
    assert decided(Bound(Form(), None, N), (0, N - 1)) is True
    assert decided(Bound(Form(), N, None), (0, N - 1)) is False
    assert decided(Bound(Form(), 0, 5), (0, 5)) is None
    assert decided(Bound(Form(), None, N), (0, 7)) is None
