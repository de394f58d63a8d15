"""Random numbers that follow from a seed and an index: the prims `fxfuser::random_*`, in ATen and in Triton.

Enters: a seed (int64, no dimensions) and indices (int64, any shape).  Leaves: one number per index, of its shape.
Invariant: ATen's and the kernels' bits are equal, so that a mask is the same wherever it is computed; normal numbers
are equal up to the rounding of their logarithm and cosine.

    random_uniform  float32 in [0, 1), of 24 bits
    random_bits     int64, all 64 bits
    random_normal   float32 of mean 0 and variance 1, up to 6.7 from it

The generator is Philox-4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3,
2011).  Four indices that follow each other share a counter and read one of its words each, two where a number needs
two words: a thread that computes neighbours computes the rounds once.
"""

from __future__ import annotations

import math
from typing import Callable

import torch
from torch._ops import OpOverload

Draw = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of a seed and indices

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF  # torch has no unsigned arithmetic: words are int64 between 0 and this

PHILOX_SOURCES = (f'''
@triton.jit
def philox(seed, counter):
    """Four random words for each 64-bit counter."""
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    a = counter.to(tl.uint32)
    b = (counter >> 32).to(tl.uint32)
    c = a * 0
    d = a * 0
    for _ in tl.static_range({_ROUNDS}):
        first = a.to(tl.uint64) * {_MULTIPLIERS[0]}
        second = c.to(tl.uint64) * {_MULTIPLIERS[1]}
        a = (second >> 32).to(tl.uint32) ^ b ^ key0
        b = second.to(tl.uint32)
        c = (first >> 32).to(tl.uint32) ^ d ^ key1
        d = first.to(tl.uint32)
        key0 = key0 + {_INCREMENTS[0]}
        key1 = key1 + {_INCREMENTS[1]}
    return a, b, c, d
''', '''
@triton.jit
def random_uniform(seed, index):
    """fp32 in [0, 1), of 24 bits."""
    a, b, c, d = philox(seed, index >> 2)
    word = tl.where((index & 2) == 0, tl.where((index & 1) == 0, a, b), tl.where((index & 1) == 0, c, d))
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
''', '''
@triton.jit
def random_bits(seed, index):
    """64 random bits."""
    a, b, c, d = philox(seed, index >> 1)
    low = tl.where((index & 1) == 0, a, c)
    high = tl.where((index & 1) == 0, b, d)
    return (high.to(tl.uint64) << 32 | low.to(tl.uint64)).to(tl.int64, bitcast=True)
''', f'''
@triton.jit
def random_normal(seed, index):
    """Box and Muller's method; the uniform under the logarithm is in (0, 1]."""
    a, b, c, d = philox(seed, index >> 1)
    low = tl.where((index & 1) == 0, a, c)
    high = tl.where((index & 1) == 0, b, d)
    uniform = low.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    angle = (high >> 8).to(tl.int32).to(tl.float32) * {2 * math.pi / 2**24!r}
    # the device's logarithm of what is nearly 1 may be above 0
    return tl.sqrt(tl.maximum(tl.log(uniform) * -2.0, 0.0)) * tl.cos(angle)
''')


def _philox(seed: torch.Tensor, counter: torch.Tensor) -> tuple[torch.Tensor, ...]:
    key0, key1 = seed & _WORD, (seed >> 32) & _WORD
    a, b = counter & _WORD, (counter >> 32) & _WORD
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    for _ in range(_ROUNDS):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # the bits of the unsigned product
        a, b = ((second >> 32) & _WORD) ^ b ^ key0, second & _WORD
        c, d = ((first >> 32) & _WORD) ^ d ^ key1, first & _WORD
        key0, key1 = (key0 + _INCREMENTS[0]) & _WORD, (key1 + _INCREMENTS[1]) & _WORD
    return a, b, c, d


def _pair(seed: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a, b, c, d = _philox(seed, index >> 1)
    even = (index & 1) == 0
    return torch.where(even, a, c), torch.where(even, b, d)


def random_uniform(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    a, b, c, d = _philox(seed, index >> 2)
    even = (index & 1) == 0
    word = torch.where((index & 2) == 0, torch.where(even, a, b), torch.where(even, c, d))
    return (word >> 8).to(torch.float32) * 2.0**-24


def random_bits(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    low, high = _pair(seed, index)
    return high << 32 | low


def random_normal(seed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    low, high = _pair(seed, index)
    uniform = low.to(torch.float32) * 2.0**-32 + 2.0**-33
    angle = (high >> 8).to(torch.float32) * (2 * math.pi / 2**24)
    return (uniform.log() * -2.0).sqrt() * angle.cos()


def _define(name: str, function: Draw, dtype: torch.dtype) -> OpOverload:
    qualified = f"fxfuser::{name}"
    torch.library.define(qualified, "(Tensor seed, Tensor index) -> Tensor")
    torch.library.impl(qualified, "default", function)
    torch.library.register_fake(qualified, lambda seed, index: torch.empty_like(index, dtype=dtype))
    prim: OpOverload = getattr(torch.ops.fxfuser, name).default
    return prim


UNIFORM = _define("random_uniform", random_uniform, torch.float32)
BITS = _define("random_bits", random_bits, torch.int64)
NORMAL = _define("random_normal", random_normal, torch.float32)
PRIMS = (UNIFORM, BITS, NORMAL)
