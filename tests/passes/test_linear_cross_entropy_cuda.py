"""Linear layers with cross entropy on a device: numbers beside eager's, peak memory, and the same bits again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxfuser import observe
from fxfuser.ops.products import add_product_
from fxfuser.passes import loss_plans

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROWS, INNER, COLUMNS = 4096, 512, 32000
MB = 1 << 20


def loss(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), y)


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, INNER, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(COLUMNS, INNER, device="cuda") / INNER ** 0.5).to(dtype).requires_grad_()
    return x, w, torch.randint(COLUMNS, (ROWS,), device="cuda")


def gradients(fn: Any, x: Tensor, w: Tensor, y: Tensor) -> list[Tensor]:
    value = fn(x, w, y)
    return [value.detach(), *torch.autograd.grad(value, (x, w))]


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def compiled(option: str) -> Any:
    return torch.compile(loss, backend="fxfuser", dynamic=False, options={"linear_cross_entropy": option})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_products_grow_in_float32_where_they_are(dtype: torch.dtype) -> None:
    a, b = (torch.randn(n, 256, device="cuda").to(dtype) for n in (384, 512))
    into = torch.randn(384, 512, device="cuda")
    want, address = into.double() + a.double() @ b.double().t(), into.data_ptr()
    got = add_product_(into, a, b.t(), torch.float32)
    assert got.data_ptr() == address
    assert error(got, want) < 1e-6


@pytest.mark.parametrize("option", ["off", "fast", "auto", "low_memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_as_good_as_eager_and_repeat(option: str, dtype: torch.dtype) -> None:
    given, fn = inputs(dtype), compiled(option)
    got, eager = gradients(fn, *given), gradients(loss, *given)
    exact = [t.detach().double().requires_grad_() for t in given[:2]]
    want = gradients(lambda x, w, y: F.cross_entropy(x @ w.t(), y), *exact, given[2])
    for a, e, b in zip(got, eager, want):
        assert error(a, b) <= 1.1 * error(e, b) + 1e-6
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(fn, *given)))


@pytest.mark.parametrize(("option", "most"), [
    ("fast", ROWS * COLUMNS * 2 + (ROWS + COLUMNS) * INNER * 2),
    ("auto", ROWS * COLUMNS * 2 // 4 + (ROWS + COLUMNS) * 4 * INNER),
    ("low_memory", loss_plans.BLOCK + (ROWS * 4 + COLUMNS * 2) * INNER),
])
def test_peak_memory(option: str, most: int) -> None:
    given, fn = inputs(), compiled(option)
    gradients(fn, *given)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = gradients(fn, *given)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= most + 4 * MB
    del kept


@pytest.mark.parametrize("option", ["auto", "low_memory"])
def test_logits_of_some_columns_are_kept(option: str) -> None:
    """In the memory of the weights' gradient and, under auto, beside it; gradients and peak memory."""
    rows, inner = 4096, 2048
    torch.manual_seed(0)
    x = torch.randn(rows, inner, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(COLUMNS, inner, device="cuda") / inner ** 0.5).bfloat16().requires_grad_()
    y = torch.randint(COLUMNS, (rows,), device="cuda")
    fn = compiled(option)
    with observe.recording() as recording:
        got = gradients(fn, x, w, y)
    plan = next(loss for graph in recording.graphs for loss in graph.losses)
    assert plan.plan == "mixed"
    eager = gradients(loss, x, w, y)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    want = gradients(lambda x, w, y: F.cross_entropy(x @ w.t(), y), *exact, y)
    for a, e, b in zip(got[1:], eager[1:], want[1:]):
        assert error(a, b) <= 1.1 * error(e, b) + 1e-6
    del eager, exact, want, e, b
    assert all(torch.equal(a, b) for a, b in zip(got, gradients(fn, x, w, y)))
    del got, a
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = gradients(fn, x, w, y)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= sum(count for _, count in plan.buffers) + 4 * MB
    del kept
