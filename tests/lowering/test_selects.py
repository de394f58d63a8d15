"""What all operands of a select read is loaded once, and a byte needs no rounding to be a half: packed weights."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser.ops import FLOAT8
from tests.lowering.gemm.harness import check as check_product
from tests.lowering.harness import check

PACKED = torch.randint(0, 256, (24, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def stacked(w: Tensor) -> Tensor:
    return torch.stack((w & 15, w >> 4), -1).view(w.shape[0], -1).float() - 8


def pairs(w: Tensor) -> Tensor:
    return torch.stack([(w >> s) & 3 for s in (0, 2, 4, 6)], -1).flatten(1).float()


def loads(source: str, pointer: str = "in0") -> int:
    return len(re.findall(rf"tl\.load\({pointer}\b", source))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("unpack", [stacked, pairs])
def test_a_byte_is_loaded_once_for_all_its_parts(unpack: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    _, lowered = check(unpack, (PACKED,), [{0}] if dynamic else (), [(PACKED[:7],)] if dynamic else ())
    assert loads(lowered.kernel.source) == 1, lowered.kernel.source


def test_other_places_are_loaded_where_they_are_read() -> None:
    def shifted(w: Tensor) -> Tensor:
        return torch.stack((w[:-1], w[1:] >> 4), -1)

    def one_of_two(w: Tensor, v: Tensor) -> Tensor:
        return torch.stack((w & 15, v >> 4), -1)

    def beside(w: Tensor) -> Tensor:
        return torch.cat((w & 15, w >> 4), -1).float()

    for fn in (shifted, beside):
        _, lowered = check(fn, (PACKED,))
        assert loads(lowered.kernel.source) == 2
    _, lowered = check(one_of_two, (PACKED, PACKED.flip(0)))
    source = lowered.kernel.source
    assert all("inside" in line for line in source.splitlines() if "tl.load" in line), source


def test_a_part_that_reads_the_byte_only_within_a_border() -> None:
    def bordered(w: Tensor) -> Tensor:
        low = torch.nn.functional.pad(w & 15, (1, 1), value=3)
        return torch.stack((low, torch.cat((w >> 4, w[:, :2]), 1)), -1).float()

    check(bordered, (PACKED,))


def test_a_product_loads_a_byte_once() -> None:
    def product(h: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        weights = torch.stack((w & 15, w >> 4), -1).view(w.shape[0], 4, -1).to(h.dtype) - 8
        return h @ (weights * scale[..., None]).view(w.shape[0], -1).t()

    made = check_product(product, [torch.randn(5, 32).bfloat16(), PACKED, torch.randn(24, 4).bfloat16()],
                         policies=["persistent"])
    assert loads(made.source(), "in1") == 1


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.int8, torch.uint8, torch.bool, torch.int16, torch.float32, *FLOAT8])
def test_bytes_are_not_rounded_to_halves(source: torch.dtype, half: torch.dtype) -> None:
    def scaled(w: Tensor, scale: Tensor) -> Tensor:
        return w.to(half) * scale

    def added(w: Tensor, scale: Tensor) -> Tensor:
        return w + scale

    every = torch.arange(256, dtype=torch.uint8)
    w = (torch.arange(256) * 129 - 999).to(source) if source.itemsize > 1 else (
        every.view(source) if source is not torch.bool else every % 2 == 0)
    for fn in (scaled, added) if source not in (torch.float32, *FLOAT8) else (scaled,):
        _, lowered = check(fn, (w, torch.full((256,), 0.5, dtype=half)))
        rounds = re.search(r"through_bfloat16|\.to\(tl\.float16\)\.to\(tl\.float32\)", lowered.kernel.source)
        assert bool(rounds) == (source.itemsize > 1), lowered.kernel.source
