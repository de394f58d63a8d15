"""Checks of float8: casts to the bit, quantised rows and caches, weights that are only stored so, packed nibbles.

Results are bytes, or halves that eager has too: one step of float8 more or less shows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import BF16, F32, add, draw, large, short

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3fn", E5M2: "e5m2"}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _hard(dtype: torch.dtype, device: torch.device) -> tuple[Tensor]:
    """All numbers of float8, what lies just between two of them, its neighbours, and what is too large or no number."""
    every = torch.arange(256, dtype=torch.uint8)
    steps = torch.cat([every.view(kind).float() for kind in (E4M3, E5M2)])
    steps = steps[steps.isfinite()].sort().values
    between = (steps[1:] + steps[:-1]) / 2
    near = torch.cat([between * (1 + s) for s in (0.0, 2e-7, -2e-7)])
    random = torch.randn(large(device, 500, 20000)) * torch.exp2(torch.randint(-24, 18, (large(device, 500, 20000),)))
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 464.0, 465.0, 61440.0])
    return (torch.cat([steps, near, random, special]).to(dtype).to(device),)


def _every(device: torch.device) -> tuple[Tensor]:
    return (torch.arange(256, dtype=torch.uint8).repeat(large(device, 1, 33)).to(device),)


def _from(kind: torch.dtype, dtype: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(kind).to(dtype), x.view(kind).float() * 3


def _quantised(kind: torch.dtype, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-6) / LARGEST[kind]
    return bits((wide / scale).to(kind)), scale


def _linear(kind: torch.dtype, x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x @ (w.view(kind).to(x.dtype) * scale).t() + bias)


def _cache(kind: torch.dtype, cache: Tensor, x: Tensor, scale: Tensor, positions: Tensor) -> Tensor:
    cache.index_copy_(1, positions, bits((x.float() / scale).clamp(-400, 400).to(kind)))
    return cache.view(kind).float() * scale


def _nibbles(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    low, high = (packed & 15).to(x.dtype) - 8, (packed >> 4).to(x.dtype) - 8
    return x @ (torch.stack((low, high), -1).flatten(-2) * scale).t()


def _by_bits(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """The same by the mantissa of a bfloat16 at 128, and scales that are exponents."""
    wide = packed.to(torch.int16)
    low, high = ((n | 0x4300).view(BF16) - 136 for n in (wide & 15, wide >> 4))
    exponents = (scale.abs().float() * 20).to(torch.int32).clamp(0, 3) + 124
    return x @ (torch.stack((low, high), -1).flatten(-2) * (exponents << 23).view(F32).to(BF16)).t()


def register() -> None:
    for kind, name in NAMES.items():
        for dtype in (F32, BF16, torch.float16):
            add(f"float8/to/{name}/{short(dtype)}", lambda x, kind=kind: bits(x.to(kind)), partial(_hard, dtype),
                reference=False)
            add(f"float8/from/{name}/{short(dtype)}", partial(_from, kind, dtype), _every, reference=False)
        add(f"float8/quantised/{name}", partial(_quantised, kind), lambda d: (draw(d, 37, 515, dtype=F32),),
            reference=False)
        for rows in (1, 5, 70):
            add(f"float8/linear/{name}/{rows}", partial(_linear, kind), partial(_layer, kind, rows))
        add(f"float8/cache/{name}", partial(_cache, kind), partial(_caches, kind), reference=False)
    for rows in (1, 5, 70):
        add(f"float8/nibbles/{rows}", _nibbles, partial(_packed, rows))
        add(f"float8/by_bits/{rows}", _by_bits, partial(_packed, rows), reference=False)
    for dtype, integer in ((F32, torch.int32), (BF16, torch.int16), (torch.float16, torch.int16)):
        add(f"float8/bits/{short(dtype)}", lambda x, d=dtype, i=integer: ((x * 3).view(i) & ~1).view(d) + 1,
            partial(_hard, dtype), reference=False)


def _layer(kind: torch.dtype, rows: int, device: torch.device) -> tuple[Any, ...]:
    columns, inner = large(device, 24, 1000), large(device, 40, 1048)
    weights = bits(draw(device, columns, inner).to(kind))
    return (draw(device, rows, inner, dtype=BF16), weights, draw(device, columns, 1, dtype=BF16) / 32,
            draw(device, columns, dtype=BF16))


def _caches(kind: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    length, count = large(device, 16, 512), 5
    return (bits(draw(device, 3, length, 64).to(kind)), draw(device, 3, count, 64, dtype=BF16),
            draw(device, 3, 1, 64).abs() + 0.5, torch.randperm(length)[:count].to(device))


def _packed(rows: int, device: torch.device) -> tuple[Any, ...]:
    columns, inner = large(device, 24, 1000), large(device, 40, 1048)
    packed = torch.randint(0, 256, (columns, inner // 2), dtype=torch.uint8).to(device)
    return draw(device, rows, inner, dtype=BF16), packed, draw(device, columns, 1, dtype=BF16) / 128
