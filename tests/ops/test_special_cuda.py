"""Special functions on a GPU, where the interpreter's stand-ins for libdevice are not what runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
INF, NAN = float("inf"), float("nan")
FUNCTIONS = (torch.special.bessel_j0, torch.special.bessel_j1, torch.special.bessel_y0, torch.special.bessel_y1)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_functions_end(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1.0, -1.0, 0.5, 3.5, -3.5], device="cuda", dtype=dtype)
    got = torch.compile(function, backend="fxfuser", dynamic=False)(x)
    torch.testing.assert_close(got, function(x), equal_nan=True)
