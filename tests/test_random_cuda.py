"""Random numbers on a GPU: the bits of the other executors, CUDA graphs, autocast and attention's dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fxfuser.ops import philox

pytestmark = pytest.mark.gpu
EXECUTORS = ("triton", "reference", "interpret")
N = 1 << 20


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    return torch.compile(lambda *a: function(*a), backend="fxfuser", fullgraph=True, **settings)


def seeded(function: Callable[..., Any], *inputs: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return function(*inputs)


def noisy(x: Tensor) -> tuple[Tensor, ...]:
    return torch.native_dropout(x, 0.3, True)[1], torch.rand_like(x), torch.randint_like(x, 1000), torch.randn_like(x)


@pytest.mark.parametrize("shape", [(9, 33), (4, 128), (1,), (3, 5, 64)])
def test_executors_draw_equal_bits(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, device="cuda")
    made = [seeded(compiled(noisy, options={"executor": e}), x) for e in EXECUTORS]
    for other in made[1:]:
        torch.testing.assert_close(made[0][:3], other[:3], rtol=0, atol=0)
        torch.testing.assert_close(made[0][3], other[3], rtol=1e-3, atol=1e-3)


def test_the_prims_agree_with_the_cpu() -> None:
    seed, index = torch.tensor(-3), torch.arange(N // 16) * 0x123456789
    for prim in (philox.UNIFORM, philox.BITS):
        assert torch.equal(prim(seed.cuda(), index.cuda()).cpu(), prim(seed, index))


def test_indices_past_32_bits() -> None:
    mask = compiled(lambda x: F.dropout(x, 0.5))(torch.ones(2**31 + 64, dtype=torch.float16, device="cuda")) != 0
    assert not torch.equal(mask[:64], mask[-64:]) and 0.49 < mask[-N:].float().mean() < 0.51


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_distributions(dtype: torch.dtype) -> None:
    uniform, normals, exponentials = seeded(compiled(lambda: (
        torch.rand(N, device="cuda", dtype=dtype), torch.randn(N, device="cuda", dtype=dtype),
        torch.empty(N, device="cuda", dtype=dtype).exponential_())))
    assert uniform.min() >= 0 and uniform.max() < 1 and exponentials.min() > 0
    for made, mean, std in ((uniform, 0.5, math.sqrt(1 / 12)), (normals, 0.0, 1.0), (exponentials, 1.0, 1.0)):
        assert made.dtype == dtype
        assert abs(made.double().mean() - mean) < 5e-3 and abs(made.double().std() - std) < 5e-3


def dropped(x: Tensor) -> Tensor:
    return F.dropout(torch.sin(x), 0.5) * 3


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_forward_and_backward_share_the_mask(mode: str, dynamic: bool) -> None:
    function = compiled(dropped, dynamic=dynamic, mode=mode)
    masks = []
    for _ in range(5):  # with CUDA graphs: warm-up, capture and replays
        x = torch.randn(64, 96, device="cuda", requires_grad=True)
        y = function(x)
        y.sum().backward()
        masks.append((y != 0).clone())
        torch.testing.assert_close(x.grad, torch.where(masks[-1], 6 * x.cos(), 0.0).detach(), rtol=1e-4, atol=1e-5)
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i]), "each call draws anew"


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_manual_seed_reproduces(mode: str) -> None:
    x, function = torch.randn(40, 50, device="cuda"), compiled(noisy, mode=mode)
    for _ in range(4):
        function(x)
    first = [t.clone() for t in seeded(function, x)]
    following = [t.clone() for t in function(x)]
    again = [t.clone() for t in seeded(function, x)]
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first[0], following[0])


def test_checkpointed_regions_recompute_the_mask() -> None:
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: F.dropout(torch.tanh(x @ weight), 0.5), x, use_reentrant=False) * 2

    x = torch.randn(32, 64, device="cuda", requires_grad=True)
    y = compiled(function)(x)
    y.sum().backward()
    slope = torch.where(y != 0, 4 * (1 - torch.tanh(x @ weight) ** 2), 0.0)
    torch.testing.assert_close(x.grad, (slope @ weight.t()).detach(), rtol=1e-3, atol=1e-3)


def test_attention_with_dropout() -> None:
    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    function = compiled(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.2))
    first, again = seeded(function, q), seeded(function, q)
    assert torch.equal(first, again) and not torch.equal(first, function(q))
    first.float().sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_regions_recompute_attention(dropout: float, mode: str) -> None:
    """With dropout both halves are given generators, which draw the same; without it they are given none."""
    def function(q: Tensor, v: Tensor) -> Tensor:
        return checkpoint(lambda q: F.scaled_dot_product_attention(q, q, v, dropout_p=dropout), q, use_reentrant=False)

    q = torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    eye = torch.eye(64, 32, device="cuda", dtype=torch.bfloat16).expand(2, 4, 64, 32)
    run = torch.compile(function, backend="fxfuser", mode=mode)
    for _ in range(4):
        v = eye.clone().requires_grad_()
        y = run(q, v)
        y.backward(tangent := torch.randn_like(y))
        # of row i of v the gradient is the sum of the tangents, each with its weight: what y shows in column i
        want = (y.detach().float().mT @ tangent.float())
        torch.testing.assert_close(v.grad[..., :32, :].float(), want, rtol=2e-2, atol=2e-2)
