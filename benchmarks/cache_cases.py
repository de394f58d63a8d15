"""Checks of writes into tensors that the program mutates: caches of keys and values, pages, slices, and their readers.

What has been written is compared with the results: a kernel that stores at a wrong place shows there, and so does one
that reads before another has stored.  Positions are different from each other, so that one value belongs to each place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.checks import BF16, F32, Inputs, add, draw, large, short


def _turned(k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = k.shape[-1] // 2
    return k * cos + torch.cat((-k[..., half:], k[..., :half]), -1) * sin


def _layer(keys: Tensor, values: Tensor, h: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor,
           positions: Tensor) -> Tensor:
    """The attention of one step of decoding: heads of 64, four queries' heads for each of keys."""
    batch = h.shape[0]
    q, k, v = ((h @ w.t()).view(batch, -1, w.shape[0] // 64, 64).transpose(1, 2) for w in (wq, wk, wv))
    keys.index_copy_(2, positions, _turned(k, cos, sin))
    values.index_copy_(2, positions, v)
    mask = torch.arange(keys.shape[2], device=h.device) <= positions[-1]
    repeated = (c.repeat_interleave(wq.shape[0] // wk.shape[0], 1) for c in (keys, values))
    return F.scaled_dot_product_attention(_turned(q, cos, sin), *repeated, attn_mask=mask[None, None, None])


def _layer_inputs(dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    batch, width, length = large(device, 2, 8), large(device, 128, 1024), large(device, 16, 1024)
    heads, key_heads = width // 64, max(1, width // 256)
    caches = [draw(device, batch, key_heads, length, 64, dtype=dtype) for _ in range(2)]
    weights = [draw(device, n * 64, width, dtype=dtype) / width**0.5 for n in (heads, key_heads, key_heads)]
    tables = [draw(device, 1, 1, 1, 64, dtype=dtype) for _ in range(2)]
    return (*caches, draw(device, batch, width, dtype=dtype), *weights, *tables,
            torch.tensor([length // 2 + 1], device=device))


def _shuffled(count: int, of: int, device: torch.device) -> Tensor:
    return torch.randperm(of)[:count].to(device)


def _rows(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c.index_copy_(0, i, torch.tanh(k) * 2)
    return c.sum(0)


def _heads(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c.index_copy_(2, i, k * 2)
    return c.amax(2)


def _pages(c: Tensor, k: Tensor, block: Tensor, offset: Tensor) -> None:
    c[block, :, offset] = k * 2


def _normalised(c: Tensor, h: Tensor, i: Tensor) -> None:
    c.index_copy_(0, i, F.layer_norm(h, h.shape[-1:]))


def _twice(c: Tensor, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    before = c.sum(1)
    c.index_copy_(1, i, a * 2)
    between = c.sum(1)
    c.index_copy_(1, j, b + before[:, None])
    return before, between


def _part(c: Tensor, k: Tensor, i: Tensor) -> Tensor:
    c[:, 8:].index_copy_(1, i, k * 2)
    return c + 1


def _slices(c: Tensor, a: Tensor) -> None:
    c[:, 3:5] = a * 2
    c[:, 9] = 1.5


def _prompt(c: Tensor, h: Tensor, w: Tensor, i: Tensor) -> None:
    c.index_copy_(0, i, F.silu(h @ w.t()))


def _inputs(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], Inputs]]:
    def rows(device: torch.device) -> tuple[Any, ...]:
        total, width, count = large(device, 40, 8192), large(device, 24, 1031), large(device, 7, 517)
        return (draw(device, total, width, dtype=dtype), draw(device, count, width, dtype=dtype),
                _shuffled(count, total, device))

    def heads(device: torch.device) -> tuple[Any, ...]:
        length, count = large(device, 20, 2048), large(device, 5, 129)
        cache = draw(device, 2, length, 3, 64, dtype=dtype).transpose(1, 2)
        return cache, draw(device, 2, 3, count, 64, dtype=dtype), _shuffled(count, length, device)

    def pages(device: torch.device) -> tuple[Any, ...]:
        count = large(device, 10, 700)
        slots = _shuffled(count, 64 * 16, device)
        return (draw(device, 64, 3, 16, 64, dtype=dtype), draw(device, count, 3, 64, dtype=dtype), slots // 16,
                slots % 16)

    def twice(device: torch.device) -> tuple[Any, ...]:
        length = large(device, 16, 512)
        return (draw(device, 3, length, 40, dtype=dtype), *(draw(device, 3, 5, 40, dtype=dtype) for _ in range(2)),
                _shuffled(5, length, device), _shuffled(5, length, device))

    def part(device: torch.device) -> tuple[Any, ...]:
        return (draw(device, 3, large(device, 16, 512), 40, dtype=dtype), draw(device, 3, 5, 40, dtype=dtype),
                _shuffled(5, 8, device))

    def slices(device: torch.device) -> tuple[Any, ...]:
        return draw(device, 8, 1 << 15, 16, dtype=dtype), draw(device, 8, 2, 16, dtype=dtype)

    def prompt(device: torch.device) -> tuple[Any, ...]:
        total, count, width = large(device, 60, 4096), large(device, 33, 2001), large(device, 48, 1024)
        return (draw(device, total, width, dtype=dtype), draw(device, count, width, dtype=dtype),
                draw(device, width, width, dtype=dtype) / width**0.5, _shuffled(count, total, device))

    return {"rows": (_rows, rows), "heads": (_heads, heads), "pages": (_pages, pages),
            "normalised": (_normalised, rows), "twice": (_twice, twice), "part": (_part, part),
            "slices": (_slices, slices), "prompt": (_prompt, prompt),
            "layer": (_layer, lambda d: _layer_inputs(dtype, d))}


def register() -> None:
    for dtype in (F32, BF16):
        for name, (step, make) in _inputs(dtype).items():
            for dynamic in (False, True):
                add(f"caches/{name}/{short(dtype)}{'/dynamic' * dynamic}", step, make, dynamic=dynamic)
