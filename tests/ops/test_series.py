"""Incomplete gammas against mpmath, where eager's own error is larger than a test could admit."""

from __future__ import annotations

import pytest
import torch

from .harness import interpret

mpmath = pytest.importorskip("mpmath")
aten = torch.ops.aten

ORDERS = (0.3, 1.0, 5.0, 9.0, 30.0, 120.0, 199.0, 201.0, 1000.0)
RATIOS = (0.01, 0.5, 0.69, 0.71, 0.9, 0.999, 1.0, 1.001, 1.02, 1.25, 1.31, 2.0)


def _exact(a: float, x: float, upper: bool) -> float:
    with mpmath.workdps(40):
        bounds = (x, mpmath.inf) if upper else (0, x)
        return float(mpmath.gammainc(a, *bounds, regularized=True))


@pytest.mark.parametrize("op", [aten.igamma.default, aten.igammac.default], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 3e-5)])
def test_incomplete_gammas(op: torch._ops.OpOverload, dtype: torch.dtype, tolerance: float) -> None:
    points = torch.tensor([(a, a * r) for a in ORDERS for r in RATIOS], dtype=torch.float64).to(dtype)
    a, x = points[:, 0].contiguous(), points[:, 1].contiguous()
    exact = torch.tensor([_exact(*p, upper=op is aten.igammac.default) for p in points.tolist()], dtype=torch.float64)
    ours = interpret(op, (a, x), {}, op(a, x)).double()
    smallest = 1e-30 if dtype == torch.float64 else 1e-12
    error = (ours - exact).abs() / exact.clamp(min=smallest)
    assert error.max() < tolerance, points[error.argmax()]


def test_orders_differ_from_element_to_element() -> None:
    """Each lane stops at its own order, and one that is none or negative gives 0."""
    x = torch.tensor([0.5, 0.5, 0.5, 0.5, 1.5, 2.0, float("nan"), -1.0])
    n = torch.tensor([0.0, 1.0, 2.0, -1.0, 3.9, float("nan"), 0.0, 5.0])
    for op in (aten.special_legendre_polynomial_p.default, aten.special_hermite_polynomial_he.default):
        torch.testing.assert_close(interpret(op, (x, n), {}, op(x, n)), op(x, n))
