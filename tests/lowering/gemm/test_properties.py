"""Random products with random epilogues, under a random policy and tile, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from .harness import POLICIES, Blocks, check

Tensor = torch.Tensor
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "relu": lambda h, b, c, r: h.relu(),
    "sigmoid": lambda h, b, c, r: h.sigmoid(),
    "scaled": lambda h, b, c, r: h * 0.25,
    "row": lambda h, b, c, r: h + b,
    "column": lambda h, b, c, r: h * c,
    "tile": lambda h, b, c, r: h - r,
    "itself": lambda h, b, c, r: h * h.cos(),
    "float": lambda h, b, c, r: h.float(),
    "mask": lambda h, b, c, r: torch.where(r > 0, h, -1.0),
}
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "stored": lambda h: h,
    "transposed": lambda h: h.transpose(-1, -2).contiguous() + 1,
    "row sums": lambda h: h.float().sum(-1),
    "row maxima": lambda h: h.amax(-1, keepdim=True),
    "row means": lambda h: h.float().mean(-1),
    "column sums": lambda h: h.float().sum(-2),
    "column minima": lambda h: h.amin(-2) * 2,
    "logsumexp": lambda h: ((f := h.float()) - (m := f.amax(-1, keepdim=True))).exp().sum(-1, keepdim=True).log() + m,
}
PROLOGUES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x, "relu": lambda x: x.relu(), "cos": lambda x: x.cos(),
    "rounded": lambda x: x.float().to(x.dtype),
}


@dataclass(frozen=True)
class Drawn:
    """One product: sizes, layouts and padding of its factors, what is before it and what follows."""

    dtype: torch.dtype
    batch: int
    rows: int
    columns: int
    depth: int
    transposed: tuple[bool, bool]
    pads: tuple[int, int]
    prologues: tuple[str, str]
    steps: tuple[str, ...]
    results: tuple[str, ...]
    symbolic: bool

    def factor(self, first: int, second: int, side: int) -> Tensor:
        shape = (second, first) if self.transposed[side] else (first, second)
        lead = (self.batch,) if self.batch else ()
        whole = torch.randn(*lead, shape[0], shape[1] + self.pads[side]).to(self.dtype)
        return whole[..., :shape[1]]

    def arguments(self, rows: int) -> list[Tensor]:
        lead = (self.batch,) if self.batch else ()
        beside = [torch.randn(self.columns), torch.randn(*lead, rows, 1), torch.randn(*lead, rows, self.columns)]
        return [self.factor(rows, self.depth, 0), self.factor(self.depth, self.columns, 1),
                *(t.to(self.dtype) for t in beside)]

    def dynamic(self) -> list[set[int]]:
        """The rows of the left factor and of what goes with them."""
        rank = 3 if self.batch else 2
        return [{rank - 1 - (not self.transposed[0])}, set(), set(), {rank - 2}, {rank - 2}] if self.symbolic else []

    def __call__(self, left: Tensor, right: Tensor, b: Tensor, c: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        x, y = (PROLOGUES[p](f.transpose(-1, -2) if t else f)
                for p, f, t in zip(self.prologues, (left, right), self.transposed))
        h = torch.bmm(x, y) if self.batch else torch.mm(x, y)
        for step in self.steps:
            h = STEPS[step](h, b, c, r)
        return tuple(RESULTS[name](h) for name in self.results)


def sizes(most: int) -> st.SearchStrategy[int]:
    return st.integers(9, most) | st.sampled_from([16, 32])  # shorter ones unroll where they are reduced


DRAWN = st.builds(
    Drawn, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.sampled_from([0, 0, 9]), sizes(40),
    sizes(40), st.integers(2, 50), st.tuples(st.booleans(), st.booleans()),
    st.tuples(st.sampled_from([0, 1, 8]), st.sampled_from([0, 3, 8])),
    st.tuples(st.sampled_from([*PROLOGUES]), st.sampled_from([*PROLOGUES])),
    st.lists(st.sampled_from([*STEPS]), max_size=3).map(tuple),
    st.lists(st.sampled_from([*RESULTS]), min_size=1, max_size=3, unique=True).map(tuple), st.booleans())
BLOCKS = st.builds(Blocks, st.sampled_from([16, 32]), st.sampled_from([16, 32]), st.sampled_from([16, 32]),
                   st.integers(1, 4), st.sampled_from([1, 2, 8]))


@settings(max_examples=25, phases=[Phase.generate])  # shrinking would take minutes, and what is drawn is short
@given(DRAWN, BLOCKS, st.sampled_from(POLICIES))
def test_random_products(drawn: Drawn, blocks: Blocks, policy: str) -> None:
    """Whatever is drawn lowers, leaves its counters at zero, writes every element, and is as exact as eager; one of
    symbolic rows also for other rows."""
    torch.manual_seed(drawn.rows * 1000 + drawn.columns)
    more = [drawn.arguments(drawn.rows + 7)] if drawn.symbolic else []
    check(drawn, drawn.arguments(drawn.rows), drawn.dynamic(), more, [policy], blocks)
