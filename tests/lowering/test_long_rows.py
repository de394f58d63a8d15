"""Rows that no program holds: folded by groups of lanes, and read again from the cache."""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from .harness import check, compiled, run

LENGTH = 17000


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def logsumexp_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    top = x.amax(-1, keepdim=True)
    return (x - top).exp().sum(-1).log() + top.squeeze(-1), x.sum(-1)


def total(x: Tensor) -> Tensor:
    return x.sum(-1)


def outputs(fn: Callable[..., Any], x: Tensor, dynamic: bool = False) -> tuple[list[Tensor], str]:
    graph, segment, lowered = compiled(fn, [x], [{1}] if dynamic else ())
    return run(graph, lowered, segment, [x]), lowered.kernel.source


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("fn", [softmax, logsumexp_and_sum])
def test_groups_of_lanes_fold_as_lanes_do(
    fn: Callable[..., Any], dtype: torch.dtype, tolerance: float, dynamic: bool
) -> None:
    x = (torch.randn(3, LENGTH) * 5).to(dtype)
    x[1, 100] = float("-inf")
    results, source = outputs(fn, x, dynamic)
    assert "tl.reshape" in source
    expected = fn(x.double())
    for result, wanted in zip(results, expected if isinstance(expected, tuple) else (expected,)):
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * 1e-2)


def test_groups_of_lanes_keep_infinities_and_nans() -> None:
    x = torch.randn(4, LENGTH)
    x[0] = float("-inf")
    x[1, 16999] = float("inf")
    x[2, 5000] = float("nan")
    (result,), _ = outputs(softmax, x)
    torch.testing.assert_close(result, softmax(x), equal_nan=True)


def test_plain_sums_are_not_grouped() -> None:
    x = torch.randn(2, LENGTH)
    (result,), source = outputs(total, x)
    assert "tl.reshape" not in source
    torch.testing.assert_close(result, x.sum(-1), rtol=1e-4, atol=1e-3)


def test_a_row_that_is_read_twice_stays_in_the_cache() -> None:
    _, source = outputs(softmax, torch.randn(2, LENGTH))
    loads = [line for line in source.splitlines() if "tl.load(" in line]
    assert ["evict_last" in line for line in loads] == [True, True, False, False]  # whole steps, then the rest
    assert ["evict_first" in line for line in loads] == [False, False, True, True]
    assert all("evict_first" in line for line in source.splitlines() if "tl.store(" in line)


def test_what_is_read_once_leaves_the_cache_to_itself() -> None:
    assert "evict" not in outputs(total, torch.randn(2, LENGTH))[1]
    assert "evict" not in outputs(softmax, torch.randn(2, 4096))[1]  # a program holds the row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lanes_past_the_end_are_loaded_as_what_folds_want(dtype: torch.dtype) -> None:
    """Rows that are above, below and beside what another fold would want there."""
    for fn, fill in ((lambda x: x.amax(1), '-inf'), (lambda x: x.amin(1), '"inf'), (total, "0.0"),
                     (lambda x: x.prod(1), "1.0")):
        x = (torch.rand(3, LENGTH) * 1e-4 + 1).to(dtype)
        for rows in (x, -x):
            results, source = outputs(fn, rows)
            assert re.search(rf"r0_mask, .*{re.escape(fill)}", source), source
            torch.testing.assert_close(results[0].double(), fn(rows.double()), rtol=2e-2, atol=0)
            assert "padded" not in source


def test_folds_that_want_different_lanes_share_a_load() -> None:
    x = -torch.rand(3, LENGTH) - 1
    results, source = outputs(lambda x: (x.amax(1), x.sum(1), x.prod(1)), x)
    for result, wanted in zip(results, (x.amax(1), x.sum(1), x.prod(1))):
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-4)
    assert source.count("tl.load") == 1


@pytest.mark.parametrize("length", [100, LENGTH])
def test_what_does_not_move_along_a_row_is_padded_all_the_same(length: int) -> None:
    """An expanded tensor is loaded once, under no mask of the row's: the row's last lanes hold it too."""
    check(lambda x, y: ((x + 0 * y[0, 0]).sum(1), x.amin(1)), [torch.randn(5, 1).expand(5, length), torch.randn(2, 2)],
          tolerance=1e-4)
    check(lambda x: x.sum(1), [torch.randn(length)[None].expand(4, length)], tolerance=1e-3)
    check(lambda x: x.sum((0, 2)), [torch.randn(3, 5, 1).expand(3, 5, length)], tolerance=1e-3)
    # under a mask of the rows
    check(lambda x: x.sum(1), [torch.randn(1001, 1).expand(1001, length)], tolerance=1e-3)
