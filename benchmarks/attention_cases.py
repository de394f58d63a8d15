"""Checks of attention of few queries: heads that share keys, numbers of keys that are no multiple of anything, masks
that hide whole pieces, operands that lie with positions before heads, at odd addresses, or for all sequences at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.checks import BF16, Inputs, add, draw, large, shift, short

F16 = torch.float16
IN_GROUPS = ("group", "seven", "for_all", "draft")  # cases whose keys are also given as they are, not repeated


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + 1


def _in_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True) + 1


def _cached(q: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
    return _attention(q, cache[0], cache[1], mask)


def _operands(device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], turned: bool = False) -> list[Tensor]:
    """q, k and v of B, heads of keys, heads of a group, queries, keys and width."""
    batch, heads, group, queries, keys, width = sizes

    def heads_of(count: int, rows: int) -> Tensor:
        if turned:
            return draw(device, batch, rows, count, width, dtype=dtype).transpose(1, 2)
        return draw(device, batch, count, rows, width, dtype=dtype)

    return [heads_of(heads * group, queries), heads_of(heads, keys), heads_of(heads, keys)]


def _hidden(device: torch.device, keys: int) -> Tensor:
    """Keys past the first third are hidden, as those of a cache that is not full."""
    return (torch.arange(keys, device=device) < keys // 3 + 1)[None, None, None]


def _cases(dtype: torch.dtype) -> Iterator[tuple[str, Inputs]]:
    def of(change: Callable[..., tuple[Any, ...]], sizes: tuple[int, ...], big: int, turned: bool = False) -> Inputs:
        def make(device: torch.device) -> tuple[Any, ...]:
            batch, heads, group, queries, keys, width = sizes
            scaled = (batch, heads, group, queries, large(device, keys, big), width)
            return change(*_operands(device, dtype, scaled, turned))
        return make

    def with_mask(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return q, k, v, _hidden(q.device, k.shape[2])

    def with_bias(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return q, k, v, draw(q.device, q.shape[0], q.shape[1], q.shape[2], k.shape[2], dtype=dtype)

    def for_all(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
        return q, *(x[:1].expand(q.shape[0], -1, -1, -1) for x in (k, v))

    yield "plain", of(lambda *x: x, (2, 3, 1, 1, 200, 64), 4097)
    yield "group", of(with_mask, (2, 2, 4, 1, 200, 64), 1031)
    yield "seven", of(with_mask, (1, 4, 7, 1, 131, 128), 1032)
    yield "draft", of(with_mask, (2, 2, 4, 3, 200, 64), 1031)
    yield "queries", of(with_bias, (2, 2, 1, 5, 150, 32), 777)
    yield "turned", of(with_mask, (3, 2, 4, 1, 192, 64), 2048, True)
    yield "narrow", of(with_bias, (2, 3, 1, 3, 130, 24), 643)
    yield "wide", of(with_mask, (1, 2, 2, 1, 140, 256), 999)
    yield "for_all", of(for_all, (4, 2, 2, 1, 130, 64), 1500)
    yield "shifted", of(lambda *x: tuple(map(shift, x)), (2, 2, 1, 2, 200, 64), 1025)
    yield "long", of(with_mask, (1, 8, 4, 1, 256, 128), 16384)


def _varying(dtype: torch.dtype, batch: int, keys: int, big: int) -> Inputs:
    """A cache of so many sequences and keys; from the second of several makers on, these are no constants."""
    def make(device: torch.device) -> tuple[Any, ...]:
        length = large(device, keys, big)
        q, k, v = _operands(device, dtype, (batch, 2, 4, 1, length, 64))
        return q, torch.stack((k, v)), _hidden(device, length)

    return make


def register() -> None:
    for dtype in (BF16, F16):
        for name, make in _cases(dtype):
            add(f"attention/{name}/{short(dtype)}", _attention, make, repeatable=True)
            if name in IN_GROUPS:
                add(f"attention/{name}_in_groups/{short(dtype)}", _in_groups, make, repeatable=True)
        varying = (_varying(dtype, *sizes) for sizes in ((2, 200, 1031), (3, 260, 2050), (5, 50, 60)))
        add(f"attention/varies/{short(dtype)}", _cached, *varying, dynamic=None, repeatable=True)
