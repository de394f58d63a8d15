"""Bools beside a product: no tensor descriptor can move them, on a GPU that has descriptors either."""

from __future__ import annotations

import pytest
import torch

from fxfuser.runtime.build import report

from .harness import check, made

X, W = torch.randn(32, 64).bfloat16(), torch.randn(64, 48).bfloat16()
MASK = torch.rand(32, 48) < 0.5
CASES = {
    "stored": (lambda x, w: (x @ w > 0, torch.relu(x @ w)), (X, W)),
    "loaded": (lambda x, w, m: torch.where(m, x @ w, 0.0), (X, W, MASK)),
}


@pytest.mark.parametrize("name", CASES)
def test_bools_are_moved_by_pointers_and_the_rest_by_descriptors(name: str) -> None:
    fn, args = CASES[name]
    check(fn, args)
    kernel = made(fn, args).programs["persistent"].launches[0].kernel
    assert kernel.source.count("make_tensor_descriptor") == 3  # x, w and the result in bf16
    assert "tensormap" in report(kernel).ptx
