"""Dims of a kernel: which axes each walks, in an order that every process finds."""

from __future__ import annotations

import torch
from torch import Tensor

from fxfuser.lowering.schedule import schedule
from tests.lowering.harness import check

TURNS = ((0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2))


def turned(*xs: Tensor) -> tuple[Tensor, ...]:
    """Four tensors of equal sizes, added up and stored in four turns: each axis has each stride once; and a sum."""
    total = sum(x.permute(turn) for x, turn in zip(xs, TURNS))
    assert isinstance(total, Tensor)
    return (*(total.permute(turn).contiguous() for turn in TURNS), total.sum())


def test_axes_that_strides_do_not_tell_apart_are_in_the_order_of_their_names() -> None:
    domain, _ = check(turned, [torch.randn(3, 3, 3, 3) for _ in TURNS])
    (inner,) = schedule(domain).inner
    assert len(inner.axes) == 4
    assert [a.name for a in inner.axes] == sorted(a.name for a in inner.axes)
