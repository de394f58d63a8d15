"""Functions of the prelude that loop compile where one operand is a single element and the other a tile."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from fxfuser.config import Config
from fxfuser.lowering.lower import lower, size_hints
from fxfuser.runtime.build import report

from .harness import segment_of, trace

aten = torch.ops.aten
WHOLE: dict[str, Any] = {"gcd": aten.gcd.default, "pow": aten.pow.Tensor_Tensor}
REAL: dict[str, Any] = {
    "igamma": aten.igamma.default, "zeta": aten.special_zeta.default,
    "chebyshev": aten.special_chebyshev_polynomial_t.default, "hermite": aten.special_hermite_polynomial_h.default}


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", [*WHOLE, *REAL])
def test_one_element_and_a_tile(name: str, swapped: bool) -> None:
    op: Callable[[Tensor, Tensor], Tensor] = (WHOLE | REAL)[name]
    inputs = [torch.arange(1, 1001), torch.tensor([3])] if name in WHOLE else [torch.rand(1000), torch.tensor([1.5])]
    graph = trace(lambda a, b: op(b, a) if swapped else op(a, b), inputs)
    assert report(lower(segment_of(graph), Config(), size_hints(graph.graph)).kernel).spills == 0
