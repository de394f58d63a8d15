"""Cheap producers are no boundary: each reader has its own; what is dear or does not lie in memory stays one."""

from __future__ import annotations

import torch
from torch import Tensor

from fxfuser.passes.duplicate import duplicate_cheap_producers
from tests.passes.rewriting import apply, assert_untouched, targets, trace

aten = torch.ops.aten
PASS = (duplicate_cheap_producers,)


def test_a_widening_cast_behind_a_view() -> None:
    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        wide = aten.unsqueeze.default(aten._to_copy.default(a, dtype=torch.float32), 0)
        return aten.exp.default(wide), aten.sin.default(wide)

    module = trace(function, [torch.randn(8, dtype=torch.bfloat16)])
    assert apply(module, PASS) == 2
    assert targets(module).count("_to_copy.default") == 2


def test_a_narrowing_cast_stays_one() -> None:
    def function(a: Tensor) -> tuple[Tensor, Tensor]:
        narrow = aten._to_copy.default(a, dtype=torch.bfloat16)
        return aten.exp.default(narrow), aten.sin.default(narrow)

    assert_untouched(function, [torch.randn(8)], PASS)


def test_arithmetic_of_a_tensor_in_memory_and_a_row() -> None:
    def function(a: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        centred = aten.sub.Tensor(a, mean)
        return aten.exp.default(centred), aten.sum.dim_IntList(centred, [1])

    module = trace(function, [torch.randn(64, 64), torch.randn(64, 1)])
    assert apply(module, PASS) == 1
    assert targets(module).count("sub.Tensor") == 2


def test_two_large_operands_a_transcendental_and_a_computed_operand_stay_one() -> None:
    def two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = aten.add.Tensor(a, b)
        return aten.exp.default(total), aten.sin.default(total)

    def dear(a: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        power = aten.pow.Tensor_Tensor(a, row)
        return aten.neg.default(power), aten.abs.default(power)

    def computed(a: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        scaled = aten.mul.Tensor(aten.exp.default(a), row)
        return aten.neg.default(scaled), aten.abs.default(scaled)

    assert_untouched(two, [torch.randn(64, 64), torch.randn(64, 64)], PASS)
    assert_untouched(dear, [torch.rand(64, 64), torch.rand(64, 1)], PASS)
    assert_untouched(computed, [torch.randn(64, 64), torch.randn(64, 1)], PASS)
