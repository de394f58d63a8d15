"""Numbers that the user passes and that vary: unlike sizes they may be negative."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

Function = Callable[[torch.Tensor, int], Any]

CASES: dict[str, tuple[Function, Sequence[int]]] = {
    "roll": (lambda x, k: x.roll(k, 0) * 2, (2, 5, 0, 8, 11, -3, -19)),
    "roll of all": (lambda x, k: x.roll(k) * 2, (2, -100, 71)),
    "roll by a quotient": (lambda x, k: x.view(-1, k).roll(k // 2, 1) * 2, (4, 6, 9)),
    "roll by a fixed number": (lambda x, k: x[:k].roll(200000, 0) * 2, (4, 6, 7)),
    "pad": (lambda x, k: F.pad(x, (k, 1)).relu(), (3, -3, -8, 4)),
    "pads that cancel": (lambda x, k: F.pad(F.pad(x, (k, 2)), (2 - k, 0)) * 2, (3, -3, 2)),
    "slice from": (lambda x, k: x[k:] * 2, (3, -3, 5, -5)),
    "slice to": (lambda x, k: x[:k] * 2, (3, -3, 5, -5)),
    "select": (lambda x, k: x[k] * x[:, k - 1].sum(), (3, -3, 5, -5)),
    "write to a slice": (lambda x, k: x.clone().slice_scatter(x[k:] * 2, 0, k), (3, -3, 5, -5)),
    "arange": (lambda x, k: torch.arange(k, k + 8) // 3 * x[:, 0], (3, -3, -30)),
    "halves joined": (lambda x, k: torch.cat([x[:, k // 2:], x[:, :k // 2]], 1) * 2, (4, 6, 9)),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_any_sign(name: str) -> None:
    """Results and gradients, each kernel in the interpreter, which refuses a read outside of a tensor."""
    fn, numbers = CASES[name]
    run = torch.compile(fn, backend="fxfuser", dynamic=True, options={"executor": "interpret", "strict": True})
    for k in numbers:
        x = torch.arange(72.).view(8, 9).sin().requires_grad_()
        y = x.detach().clone().requires_grad_()
        got, want = run(x, k), fn(y, k)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def test_a_position_that_only_a_tensor_holds() -> None:
    """No guard is put on its sign."""
    def fn(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x.select(0, i.item()) * 2  # type: ignore[arg-type]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = torch.compile(fn, backend="fxfuser", options={"executor": "interpret", "strict": True})
        for k in (3, -2, 0, -8):
            x, i = torch.randn(8, 9), torch.tensor(k)
            torch.testing.assert_close(run(x, i), fn(x, i))
