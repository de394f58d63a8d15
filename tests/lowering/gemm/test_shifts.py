"""Which results let a maximum and its scaled sum be one number between two kernels, and what that number tells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxfuser.ops.monoids import SOFTMAX

from .harness import Blocks, check
from .test_epilogues import B, K, M, N, factors

INFINITE, LOWEST = float("inf"), torch.finfo(torch.float32).min


def states(h: Tensor) -> tuple[Tensor, Tensor]:
    """A maximum of each row and the sum that it scales."""
    m = h.amax(1, keepdim=True)
    return m, (h - m).exp().sum(1, keepdim=True)


Result = Callable[[Tensor, Tensor, Tensor], Any]  # of a maximum, its sum and another number
ONE_NUMBER: dict[str, Result] = {
    "their logsumexp": lambda m, s, y: s.log() + m,
    "a loss": lambda m, s, y: -(y - m - s.log()),
    "a loss where a label counts": lambda m, s, y: torch.where(y > 0, m - (y - s.log()), 0.0),
    "a likelihood": lambda m, s, y: (y - m).exp() / s,
    "an inverse": lambda m, s, y: s * (m - y).exp(),
    "half of it": lambda m, s, y: 0.5 * s.log() + m / 2,
    "in double": lambda m, s, y: s.log().double() + m.double(),
    "a difference that is added": lambda m, s, y: y + -m - s.log(),
    "a square": lambda m, s, y: (s.log() + m).square(),
    "two": lambda m, s, y: (s.log() + m, y - m - s.log()),
}
TWO_NUMBERS: dict[str, Result] = {
    "the maximum": lambda m, s, y: (m, s.log() + m),
    "the sum": lambda m, s, y: s,
    "the logarithm": lambda m, s, y: s.log(),
    "twice the maximum": lambda m, s, y: s.log() + 2 * m,
    "a difference": lambda m, s, y: s.log() - m,
    "a rounded maximum": lambda m, s, y: s.log() + m.to(B).float(),
    "a comparison": lambda m, s, y: torch.where(m > 0, s.log() + m, 0.0),
    "a choice of both": lambda m, s, y: torch.where(y > 0, s.log(), m),
    "a choice of one": lambda m, s, y: torch.where(y > 0, s.log() + m, m),
    "one of two stores": lambda m, s, y: (y - m - s.log(), y - m),
    "a product": lambda m, s, y: (s.log() + m) * m,
    "an exponential of the sum": lambda m, s, y: (s * 0.1).exp() * m.exp(),
    "an exponential of the sum alone": lambda m, s, y: (s * 0.1).exp(),
    "a logarithm of the maximum": lambda m, s, y: (m + 50).log() + (y - m - s.log()),
    "the sum beside": lambda m, s, y: s.log() + m + s,
    "a power of the sum": lambda m, s, y: s * s * m.exp(),
    "a weighted sum": lambda m, s, y: torch.add(s.log(), m, alpha=2),
}


def of(fn: Result) -> Callable[..., Any]:
    def result(x: Tensor, w: Tensor, y: Tensor) -> Any:
        return fn(*states((x @ w.t()).float()), y)

    return result


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_results_that_no_shift_changes_take_one_number(name: str) -> None:
    found = check(of(ONE_NUMBER[name]), factors(B, (M, 1)), policies=["persistent"])
    assert len(found.programs["persistent"].scratch) == 1


@pytest.mark.parametrize("name", TWO_NUMBERS)
def test_results_that_a_shift_changes_take_two(name: str) -> None:
    found = check(of(TWO_NUMBERS[name]), factors(B, (M, 1)), policies=["persistent"])
    assert len(found.programs["persistent"].scratch) == 2


def test_two_maxima_are_judged_each_for_itself() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        h = (x @ w.t()).float()
        (m, s), (n, t) = states(h), states(h.t())
        return s.log() + m, t.log() + n, n

    found = check(fn, factors(B), policies=["persistent"])
    assert len(found.programs["persistent"].scratch) == 3


def test_pytorch_s_own_logsumexp() -> None:
    found = check(lambda x, w: torch.logsumexp(x @ w.t(), 1), factors(B), policies=["persistent"])
    assert len(found.programs["persistent"].scratch) == 1


def rows_at_the_ends() -> list[Tensor]:
    """x, w and what is added to their product: rows of the lowest number, in part, in whole tiles and alone; rows of
    -inf, and of large numbers with and without one that dominates."""
    x, w, r = factors(torch.float32, (M, N))
    r[0], r[1, :16], r[2, 5] = [LOWEST] * 3
    r[3], r[4, :16], r[5, 2] = [-INFINITE] * 3
    r[6], r[7, 16:], r[8] = -1e30, -1e30, 3e38
    r[9], r[10, 3], r[11, 20] = 1e4, 1e4, -1e4
    r[12] = torch.full((N,), -INFINITE).index_fill(0, torch.tensor([7]), 2.0)
    return [x, w, r]


@pytest.mark.parametrize("blocks", [Blocks(), Blocks(32, 32, 16, strips=1), Blocks(16, 8, 16, strips=1)], ids=str)
def test_rows_at_the_ends_of_all_numbers(blocks: Blocks) -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        m, s = states(x @ w.t() + r)
        return s.log() + m, r[:, :1] - m - s.log()

    found = check(fn, rows_at_the_ends(), policies=["persistent"], blocks=blocks)
    check(lambda x, w, r: torch.logsumexp(x @ w.t() + r, 1), rows_at_the_ends(), policies=["persistent"], blocks=blocks)
    assert len(found.programs["persistent"].scratch) == 1


def test_a_row_that_its_label_dominates_loses_nothing() -> None:
    """A loss of 0, and none below it."""
    x, w = torch.zeros(M, K, dtype=B), torch.zeros(N, K, dtype=B)
    x[:, 0], w[:, 0], w[3, 0] = 1, -90, 90.5
    y = torch.full((M, 1), 90.5)
    found = check(of(ONE_NUMBER["a loss"]), [x, w, y], policies=["persistent"])
    assert len(found.programs["persistent"].scratch) == 1


def test_the_identity_s_number_is_that_of_its_states() -> None:
    packing = SOFTMAX.packing
    assert packing is not None
    top, sums = SOFTMAX.identity(torch.float32)
    assert float(top) + torch.tensor(float(sums)).log().item() == packing.nothing


@pytest.mark.parametrize("columns", [N, 32, 9])
def test_the_last_tile_alone_is_masked(columns: int) -> None:
    """Columns that end within a tile, with a tile, and within the first; more and fewer of them at run time."""
    fn = of(ONE_NUMBER["their logsumexp"])
    x, w, y = factors(B, (M, 1))
    wide = torch.cat([w, w])
    found = check(fn, [x, wide[:columns], y], policies=["persistent", "last_arriver"])
    assert ("fold_softmax_1(tl.where(strip_mask" in found.source()) == (columns % 16 != 0)
    dynamic = check(fn, [x, wide[:columns], y], [set(), {0}], [[x, wide[:n], y] for n in (5, 16, 40)],
                    policies=["persistent"])
    assert "if strip_start + STRIPBLOCK > n0" in dynamic.source()
