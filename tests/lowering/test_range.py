"""Steep functions of float16 are infinite where eager's are, although kernels hold them as float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser import observe


def run(function: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, str]:
    """The result of one kernel, and its text."""
    with observe.recording() as recording:
        found = torch.compile(function, backend="fxfuser", options={"executor": "interpret", "strict": True})(*args)
    (kernel,) = recording.graphs[0].kernels
    return found, kernel.source


STEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "sinh": torch.sinh, "cosh": torch.cosh,
    "i0": torch.special.i0, "digamma": torch.digamma, "reciprocal": torch.reciprocal, "trigamma":
    lambda x: torch.polygamma(1, x), "square": lambda x: x ** 2, "power": lambda x: 3.0 ** x,
    "powers": lambda x: x[:, None].abs() ** x, "quotient": lambda x: x[:, None] / x,
}


def inputs(dtype: torch.dtype) -> Tensor:
    """Both sides of where each leaves float16's range, and far beyond."""
    values = [0.0, 1e-7, 2e-6, 7.6e-6, 2e-5, 3e-3, 1.0, 6.0, 9.5, 10.5, 11.0, 11.5, 12.5, 14.5, 16.5, 17.0, 30.0, 250.0,
              260.0, 3e4, 65504.0, float("inf")]
    x = torch.tensor(values, dtype=torch.float64)
    return torch.cat([x, -x, torch.tensor([float("nan")], dtype=torch.float64)]).to(dtype)


@pytest.mark.parametrize("name", STEEP)
def test_infinities_are_those_of_eager(name: str) -> None:
    function, x = STEEP[name], inputs(torch.float16)
    found, text = run(lambda x: function(x) * 2.0 ** -12, x)
    expected = function(x) * 2.0 ** -12
    assert "within_float16(" in text and expected.isinf().any()
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_with_the_range_of_float32_are_left_alone(dtype: torch.dtype) -> None:
    assert "within_float16(" not in run(lambda x: torch.exp(x) * 0.5, inputs(dtype))[1]


def test_what_is_only_stored_is_left_alone() -> None:
    assert "within_float16(" not in run(lambda x: torch.exp(x * 0.5), inputs(torch.float16))[1]


def test_no_digits_are_lost() -> None:
    x = torch.linspace(-3, 3, 101).half()
    found, _ = run(lambda x: torch.exp(x) * 3.0, x)
    exact = x.double().exp() * 3
    assert ((found.double() - exact).abs() <= 0.501 * 2.0 ** -10 * exact).all()


@pytest.mark.parametrize("function", [torch.tan, torch.digamma], ids=["tan", "digamma"])
def test_gradients(function: Callable[[Tensor], Tensor]) -> None:
    """Of which eager has the steep part as a half: the square of a tangent, the pole of a trigamma."""
    x = torch.tensor([1.5703, 7.855, 0.002, 0.003, 0.0039, 0.004, 0.5, 51.84], dtype=torch.float16)
    x, tangent = torch.cat([x, -x]), torch.full((16,), 2.0 ** -6, dtype=torch.float16)

    def gradient(call: Callable[[Tensor], Tensor]) -> Tensor:
        leaf = x.clone().requires_grad_()
        return torch.autograd.grad(call(leaf), leaf, tangent)[0]

    expected = gradient(function)
    found = gradient(torch.compile(function, backend="fxfuser", options={"executor": "interpret", "strict": True}))
    assert expected.isinf().any() and not expected.isinf().all()
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize("numerics", ["default", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ldexp_multiplies_by_a_power_that_was_stored(dtype: torch.dtype, numerics: str) -> None:
    exponent = torch.tensor([0.3, 5.17, 15.9, 16.0, 17.0, -8.7, -24.4, -26.0, 100.7], dtype=dtype)
    x = torch.tensor([2.0 ** -12, 1.37, -3.3, 0.0], dtype=dtype)[:, None]
    call = torch.compile(torch.ldexp, backend="fxfuser",
                         options={"executor": "interpret", "strict": True, "numerics": numerics})
    torch.testing.assert_close(call(x, exponent), torch.ldexp(x, exponent), rtol=0, atol=0, equal_nan=True)
