"""Functions of the prelude that no op's row is the whole of."""

from __future__ import annotations

import pytest
import torch

from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.ops import TRITON_NAMES
from fxfuser.runtime.interpret import interpreted

from .harness import module

INFINITE = float("inf")


def just_below(of: torch.Tensor) -> torch.Tensor:
    """The prelude's function, of numbers of a dtype held as kernels hold it."""
    held = of.to(torch.promote_types(of.dtype, torch.float32))
    lines = ["x = tl.load(in0 + i)", f"tl.store(out + i, just_below(x, {TRITON_NAMES[of.dtype]}))"]
    kernel = Kernel("kernel", module("in0, out", lines), (held.dtype,), (held.dtype,), 0, "1", "1",
                    Tile((("N", of.numel()),)))
    found = torch.empty_like(held)
    interpreted(kernel).run([held, found])
    return found


def above(x: torch.Tensor) -> torch.Tensor:
    """The next larger number."""
    return torch.nextafter(x, torch.tensor(INFINITE, dtype=x.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_rounds_to_a_half_is_above_what_is_just_below(dtype: torch.dtype) -> None:
    """Of every half: the number found rounds to less, and the one after it to the half."""
    halves = torch.arange(-2**15, 2**15).to(torch.int16).view(dtype)
    edges = just_below(halves)
    assert (edges[halves.isnan()] == INFINITE).all() and edges[halves == -INFINITE].isnan().all()
    usual = ~halves.isnan() & (halves != -INFINITE)
    halves, edges = halves[usual], edges[usual]
    assert len(halves) > 60000
    assert (edges.to(dtype) < halves).all() and (above(edges).to(dtype) == halves).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_just_below_a_wide_float_is_the_number_before_it(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, info.max, info.min, info.tiny, -info.tiny, INFINITE,
                            info.smallest_normal / 2, -info.smallest_normal / 2, 1 / 3, -1 / 3, 0, 0, 0], dtype=dtype)
    assert torch.equal(above(just_below(numbers)), numbers)
    assert (just_below(numbers) < numbers).all()
    others = just_below(torch.tensor([float("nan"), -INFINITE], dtype=dtype))
    assert others[0] == INFINITE and others[1].isnan()
