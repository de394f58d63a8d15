"""Masks whose rows are no rows of memory, in the graph that Dynamo hands over."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import fxfuser
from fxfuser.attention_masks import dense_rows, lay_out_masks

B, H, S, D = 2, 3, 5, 8
Q, K, V = (torch.randn(B, H, S, D) for _ in range(3))


def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def by_position(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, m)


def again(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return checkpoint(attend, q, k, v, m, use_reentrant=False)


def laid_out(fn: Callable[..., Tensor], *args: Tensor | None, device: str = "cpu") -> tuple[int, Tensor]:
    """How many masks were laid out, and what the graph then computes."""
    counts: list[int] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        counts.append(lay_out_masks(module, device))
        return module

    torch.compiler.reset()
    found = torch.compile(fn, backend=backend, dynamic=False)(*args)
    return counts[0], found


REPEATED = {
    "along keys": torch.rand(S, 1).expand(S, S), "a bool": (torch.rand(S, 1) < 2).expand(B, 1, S, S),
    "by heads": torch.rand(1, S, S, H).permute(0, 3, 1, 2), "turned": torch.rand(S, S).t(),
}


@pytest.mark.parametrize("mask", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("fn", [attend, by_position, again])
def test_rows_are_laid_out(fn: Callable[..., Tensor], mask: Tensor) -> None:
    count, found = laid_out(fn, Q, K, V, mask)
    assert count == 1
    torch.testing.assert_close(found, attend(Q, K, V, mask))


@pytest.mark.parametrize("mask", [None, torch.rand(S, S), torch.rand(1, S).expand(S, S), torch.rand(S, 1)])
def test_rows_that_are_rows_stay(mask: Tensor | None) -> None:
    assert laid_out(attend, Q, K, V, mask)[0] == 0


def test_other_devices_take_any_mask() -> None:
    assert laid_out(attend, Q, K, V, REPEATED["turned"], device="cuda")[0] == 0


def test_what_is_repeated_is_not_copied() -> None:
    mask = torch.rand(1, 1, S, 1).expand(B, H, S, 64)
    dense = dense_rows(mask)
    assert dense.stride() == (0, 0, 64, 1) and torch.equal(dense, mask)
    assert dense.untyped_storage().nbytes() == 4 * 64 * S


def test_gradients_of_a_bias() -> None:
    bias = torch.rand(1, S, S, H, requires_grad=True)

    def loss(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, K, V, dense_rows(bias.permute(0, 3, 1, 2))).square().sum()

    got, = torch.autograd.grad(torch.compile(loss, backend="fxfuser")(Q, bias), bias)
    want, = torch.autograd.grad(attend(Q, K, V, bias.permute(0, 3, 1, 2)).square().sum(), bias)
    torch.testing.assert_close(got, want)


def test_the_backend_lays_masks_out_unless_numerics_are_eager_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(fxfuser.capture, "lay_out_masks", seen.append)
    for numerics in ("default", "eager"):
        torch.compiler.reset()
        torch.compile(attend, backend="fxfuser", options={"numerics": numerics})(Q, K, V, REPEATED["turned"])
    assert len(seen) == 1
