"""Loops whose iterations fold what they hold load ahead; others do not."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from fxfuser.runtime.build import report

from .harness import check, compiled


def backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm's: a gradient of each row that needs the row's sums, and sums over all rows."""
    scaled = g.float() * w
    inner = (scaled * x).sum(1, keepdim=True)
    return scaled * x.shape[1] - x * inner - scaled.sum(1, keepdim=True), (g.float() * x).sum(0)


def inputs(rows: int, columns: int) -> list[Tensor]:
    return [torch.randn(rows, columns).bfloat16(), torch.randn(rows, columns), torch.randn(columns)]


def test_values() -> None:
    _, lowered = check(backward, inputs(300, 50), tolerance=1e-2)
    assert "num_stages=3 if R0BLOCK * R1BLOCK <= 4096 else 1" in lowered.kernel.source


def test_the_loads_of_several_iterations_are_under_way() -> None:
    _, _, lowered = compiled(backward, [torch.empty_like(t) for t in inputs(4096, 768)])
    found = report(lowered.kernel)
    assert "cp.async" in found.ptx and 0 < found.shared <= 64 << 10 and found.spills == 0


def test_long_rows_take_no_shared_memory_for_it() -> None:
    _, _, lowered = compiled(backward, [torch.empty_like(t) for t in inputs(4096, 8192)])
    assert "cp.async" not in report(lowered.kernel).ptx


@pytest.mark.parametrize(
    "fn", [lambda x: x.sum(1), lambda x: x.sum(0), lambda x: x - x.amax(1, True), lambda x: x.cumsum(1)])
def test_loops_that_nothing_waits_in_load_when_they_read(fn: Callable[..., Any]) -> None:
    _, _, lowered = compiled(fn, [torch.empty(2000, 30000)])
    assert "num_stages" not in lowered.kernel.source


def heads(x: Tensor, y: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Two loops beside each other: x: [S, heads, D], y: [S, fewer heads, D], table: [S, D]."""
    return x * table[:, None], y * table[:, None]


def test_loops_that_store_what_they_load() -> None:
    sizes = [(40, 6, 16), (40, 2, 16), (40, 16)]
    _, lowered = check(heads, [torch.randn(size) for size in sizes])
    assert lowered.kernel.source.count("num_stages=3") == 2
    _, _, large = compiled(heads, [torch.empty(s, dtype=torch.bfloat16) for s in ((8192, 32, 64), (8192, 8, 64),
                                                                                 (8192, 64))])
    found = report(large.kernel)
    assert "cp.async" in found.ptx and found.spills == 0
