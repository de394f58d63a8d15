"""Rotary position embeddings, forward and backward: each module is one group with shared rows."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fxfuser.domain.points import Domain
from tests.domain.groups import check, trace

HEADS, KV, DIM = 8, 2, 16
Tensors = list[torch.Tensor]


def halves(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., DIM // 2:], x[..., :DIM // 2]), -1)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.view(x.shape[0], x.shape[1], count, DIM).transpose(1, 2)


def repeated(x: torch.Tensor) -> torch.Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, HEADS // KV, s, d).reshape(b, HEADS, s, d)


def rotary(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angle: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """q, k, v: [B, S, heads * dim]; angle: [B, S, dim / 2]."""
    both = torch.cat((angle, angle), -1).unsqueeze(1)
    cos, sin = both.cos(), both.sin()
    q, k = heads(q, HEADS), heads(k, KV)
    return q * cos + halves(q) * sin, repeated(k * cos + halves(k) * sin), repeated(heads(v, KV)) + 0


def backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, angle: torch.Tensor,
             *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(rotary(q, k, v, angle), (q, k, v), gradients)


def packed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Grouped packing, as litgpt's: [B, S, KV * (repeats + 2) * dim]."""
    b, s, _ = x.shape
    repeats = HEADS // KV
    q, k, v = x.view(b, s, KV, repeats + 2, DIM).permute(0, 2, 3, 1, 4).split((repeats, 1, 1), 2)
    q, k = q.reshape(b, HEADS, s, DIM), k.expand(b, KV, repeats, s, DIM).reshape(b, HEADS, s, DIM)
    return q * cos + halves(q) * sin, k * cos + halves(k) * sin


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x = heads(x, HEADS)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2) + 0


def interleaved_backward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(interleaved(x, cos, sin), x, g)[0] + 0


def rows(b: int, s: int) -> Tensors:
    return [torch.randn(b, s, n * DIM) for n in (HEADS, KV, KV)] + [torch.randn(b, s, DIM // 2)]


def rows_and_gradients(b: int, s: int) -> Tensors:
    leaves = [t.requires_grad_() for t in rows(b, s)[:3]]
    return leaves + [torch.randn(b, s, DIM // 2)] + [torch.randn(b, HEADS, s, DIM) for _ in range(3)]


def packed_rows(b: int, s: int) -> Tensors:
    return [torch.randn(b, s, (HEADS + 2 * KV) * DIM), torch.randn(s, DIM), torch.randn(s, DIM)]


def interleaved_rows(b: int, s: int) -> Tensors:
    return [torch.randn(b, s, HEADS * DIM, requires_grad=True), torch.randn(s, DIM // 2), torch.randn(s, DIM // 2)]


def interleaved_gradients(b: int, s: int) -> Tensors:
    return [*interleaved_rows(b, s), torch.randn(b, HEADS, s, DIM)]


CASES: dict[str, tuple[Callable[..., Any], Callable[[int, int], Tensors], list[tuple[int, ...]]]] = {
    "forward": (rotary, rows, [(0, 1)] * 4),
    "backward": (backward, rows_and_gradients, [(0, 1)] * 4 + [(0, 2)] * 3),
    "packed": (packed, packed_rows, [(0, 1), (0,), (0,)]),
    "interleaved": (interleaved, interleaved_rows, [(0, 1), (0,), (0,)]),
    "interleaved backward": (interleaved_backward, interleaved_gradients, [(0, 1), (0,), (0,), (0, 2)]),
}


@pytest.mark.parametrize("name", CASES)
def test_static_sizes(name: str) -> None:
    fn, make, _ = CASES[name]
    check(fn, make(1, 7))
    check(fn, make(3, 12))


@pytest.mark.parametrize("name", CASES)
def test_symbolic_batch_and_length(name: str) -> None:
    fn, make, dynamic = CASES[name]
    domain = check(fn, make(2, 12), dynamic, [make(3, 5), make(5, 31)])
    symbolic = [a for a in domain.axes if not isinstance(a.size, int)]
    assert symbolic and set(symbolic) <= set(domain.program)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_queries_and_keys_share_rows_and_columns(name: str) -> None:
    fn, make, _ = CASES[name]
    domain = check(fn, make(2, 12))
    assert DIM in [a.size for a in domain.program]
    assert sum(a.size == 12 for a in domain.axes) == 1


def program_sizes(fn: Callable[..., Any], args: Tensors) -> list[int]:
    """The sizes of the axes that lie over programs."""
    domain = trace(fn, args).resolve()
    assert isinstance(domain, Domain)
    return sorted(a.size for a in domain.program if isinstance(a.size, int))


def test_tables_are_read_once_for_all_heads() -> None:
    with FakeTensorMode():
        assert program_sizes(packed, packed_rows(2, 32768)) == [8, 32768]  # two halves of a head of 16
        # programs of positions alone would be too few
        assert program_sizes(packed, packed_rows(2, 512)) == [2, 2, 4, 8, 512]


def test_a_row_beside_each_element_stays_with_the_cache() -> None:
    """A quarter of what is moved may come from the cache, and a loop would only have longer strides."""
    with FakeTensorMode():
        args = [torch.randn(64, 1 << 18), torch.randn(64, 1 << 18), torch.randn(1 << 18)]
        assert program_sizes(lambda x, y, z: x + y + z, args) == [64, 1 << 18]
