"""Random chains of views and layouts: every one resolves, and reads what the graph reads."""

from __future__ import annotations

import math
from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.domain.groups import check

Step = Callable[[torch.Tensor], torch.Tensor]
SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12])


def factors(draw: st.DrawFn, total: int) -> list[int]:
    """A shape with this many elements."""
    shape: list[int] = []
    while total > 1:
        part = draw(st.sampled_from([d for d in range(1, total + 1) if total % d == 0]))
        shape.append(part)
        total //= part
        if len(shape) == 4:
            shape.append(total)
            break
    return shape


def _view(draw: st.DrawFn, shape: list[int]) -> Step:
    to = factors(draw, math.prod(shape)) if math.prod(shape) else [0, 3]
    return lambda x: x.reshape(to)


def _permute(draw: st.DrawFn, shape: list[int]) -> Step:
    order = draw(st.permutations(range(len(shape))))
    return lambda x: x.permute(order)


def _slice(draw: st.DrawFn, shape: list[int]) -> Step:
    dim = draw(st.integers(0, len(shape) - 1))
    start, step = draw(st.integers(-shape[dim], shape[dim])), draw(st.integers(1, 3))
    end = draw(st.integers(0, shape[dim] + 2))
    return lambda x: torch.ops.aten.slice.Tensor(x, dim, start, end, step)


def _select(draw: st.DrawFn, shape: list[int]) -> Step:
    dims = [d for d, n in enumerate(shape) if n]
    if not dims:
        return lambda x: x
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(-shape[dim], shape[dim] - 1))
    return lambda x: x.select(dim, at)


def _expand(draw: st.DrawFn, shape: list[int]) -> Step:
    n = draw(st.integers(1, 3))
    return lambda x: x[None].expand(n, *shape)


def _pad(draw: st.DrawFn, shape: list[int]) -> Step:
    low = draw(st.integers(-min(1, shape[-1]), 3))
    high = draw(st.integers(-min(1, shape[-1] + min(low, 0)), 3))
    return lambda x: F.pad(x, (low, high), value=2.0)


def _cat(draw: st.DrawFn, shape: list[int]) -> Step:
    dim = draw(st.integers(0, len(shape) - 1))
    return lambda x: torch.cat([x, -x[:1], x] if dim == 0 else [x, x + 1], dim)


def _flip(draw: st.DrawFn, shape: list[int]) -> Step:
    dim = draw(st.integers(0, len(shape) - 1))
    return lambda x: x.flip(dim)


def _roll(draw: st.DrawFn, shape: list[int]) -> Step:
    dim, shift = draw(st.integers(0, len(shape) - 1)), draw(st.integers(-5, 5))
    return lambda x: x.roll(shift, dim)


def _repeat(draw: st.DrawFn, shape: list[int]) -> Step:
    times = [draw(st.integers(1, 2)) for _ in shape]
    return lambda x: x.repeat(times)


def _scatter(draw: st.DrawFn, shape: list[int]) -> Step:
    dim, step = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
    start = draw(st.integers(0, shape[dim]))
    return lambda x: torch.slice_scatter(x, x.select(dim, 0).unsqueeze(dim).expand(
        [len(range(start, n, step)) if d == dim else n for d, n in enumerate(x.shape)]), dim, start, shape[dim], step) \
        if shape[dim] else x


def _sum(draw: st.DrawFn, shape: list[int]) -> Step:
    dim, keep = draw(st.integers(0, len(shape) - 1)), draw(st.booleans())
    return lambda x: x.sum(dim, keepdim=keep)


MOVES = [_view, _view, _permute, _slice, _select, _expand, _pad, _cat, _flip, _roll, _repeat, _scatter]


@st.composite
def chains(draw: st.DrawFn, moves: list[Callable[[st.DrawFn, list[int]], Step]]) -> tuple[torch.Tensor, list[Step]]:
    tensor = torch.arange(math.prod(shape := draw(st.lists(SIZES, min_size=1, max_size=3))),
                          dtype=torch.float64).view(shape)
    steps: list[Step] = []
    now = tensor
    for _ in range(draw(st.integers(1, 6))):
        if now.dim() == 0 or now.numel() > 4000:
            break
        step = draw(st.sampled_from(moves))(draw, list(now.shape))
        now = step(now)
        steps.append(step)
    return tensor, steps


def run(steps: list[Step]) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        for step in steps:
            x = step(x)
        return x + 1
    return fn


# tracing a graph takes too long for shrinking; the chains are short as drawn
QUICK = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate])


@settings(QUICK, max_examples=120)
@given(chains(MOVES))
def test_any_chain_of_views_resolves(case: tuple[torch.Tensor, list[Step]]) -> None:
    tensor, steps = case
    check(run(steps), [tensor])


@settings(QUICK, max_examples=60)
@given(chains(MOVES))
def test_any_chain_can_be_cut(case: tuple[torch.Tensor, list[Step]]) -> None:
    tensor, steps = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxfuser.domain.resolve.may_pay", lambda whole: True)
        patch.setattr("fxfuser.domain.resolve.pays", lambda whole, pieces: True)
        check(run(steps), [tensor])


@settings(QUICK, max_examples=60)
@given(chains(MOVES), st.data())
def test_a_chain_and_its_reduction(case: tuple[torch.Tensor, list[Step]], data: st.DataObject) -> None:
    tensor, steps = case
    shape = list(run(steps)(tensor).shape)
    if not shape:
        return
    last = _sum(data.draw, shape)
    check(lambda x: last(run(steps)(x)) * 2, [tensor])
