"""Random numbers in kernels: what they cost, as built for a GPU without one."""

from __future__ import annotations

import re

import torch

from fxfuser.ops import philox
from fxfuser.runtime.build import report

from . import harness

ROUNDS = 10
PRODUCT = re.compile(r"^\s*(?:mul|mad)\.(?:wide|hi|lo)\.[us](?:32|64)\b", re.MULTILINE)


def dropout(seed: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    index = torch.arange(x.numel(), dtype=torch.int64).view(x.shape)
    return x * (philox.UNIFORM(seed, index) >= 0.1)


def test_a_thread_computes_the_rounds_once_for_four_neighbours() -> None:
    _, _, lowered = harness.compiled(dropout, [torch.tensor(1), torch.randn(64, 256)])
    made = report(lowered.kernel)
    assert "v4" in made.ptx, "four elements a thread"
    products = len(PRODUCT.findall(made.ptx))
    assert 2 * ROUNDS <= products < 3 * 2 * ROUNDS, "each element for itself would take 80 and more"
    assert not made.spills


def test_the_mask_is_the_prims() -> None:
    inputs = [torch.tensor(-7), torch.ones(6, 70)]
    graph, segment, lowered = harness.compiled(dropout, inputs, [set(), {0, 1}])
    assert torch.equal(harness.run(graph, lowered, segment, inputs)[0], dropout(*inputs))
