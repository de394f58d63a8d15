"""The cut recomputes what follows from little, and saves what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser import observe
from fxfuser.passes import JOINT
from tests.passes.rewriting import apply, trace

MARK = next(p for p in JOINT if p.__name__ == "recompute_from_less")


def saved_shapes(fn: object, *args: Tensor) -> list[tuple[int, ...]]:
    """Shapes of what the compiled forward keeps for the backward."""
    kept: list[tuple[int, ...]] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        torch.compile(fn, backend="fxfuser")(*args).sum().backward()  # type: ignore[operator]
    return kept


def test_a_table_of_angles_is_not_saved() -> None:
    x = torch.randn(256, 64, requires_grad=True)

    def fn(x: Tensor, position: Tensor, frequency: Tensor) -> Tensor:
        return x * (position[:, None] * frequency).cos()

    shapes = saved_shapes(fn, x, torch.arange(256.0), torch.randn(64))
    assert (256, 64) not in shapes and shapes


def test_a_mask_from_indices_is_not_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        mask = torch.arange(64)[:, None] >= torch.arange(64)
        return torch.where(mask, x.exp(), 0.0)

    assert all(shape == (64, 64) for shape in saved_shapes(fn, x))
    assert len(saved_shapes(fn, x)) == 1  # x or its exponential


def test_positions_are_kept_as_they_came() -> None:
    x, positions = torch.randn(256, 64, requires_grad=True), torch.arange(256, dtype=torch.int32)

    def fn(x: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
        return x * (positions[:, None].float() * frequency).cos()

    with observe.recording() as recording:
        saved_shapes(fn, x, positions, torch.randn(64))
    forward = next(g for g in recording.graphs if g.name.endswith("forward"))
    stored = [n.name for s in forward.segmentation.segments for n in s.outputs]
    assert len(stored) == 1  # the result, and no copy of the positions as float


@pytest.mark.parametrize("mask", [
    lambda ids: ids != 0, lambda ids: (ids == 1).float(), lambda ids: ids == ids[:1],
    lambda ids: ids[:, :1].float().cos()])
def test_what_follows_from_an_input_that_is_written_to_afterwards(mask: Callable[[Tensor], Tensor]) -> None:
    """Eager and AOTAutograd save the mask, not the positions: the next batch may take their place."""
    x, ids = torch.randn(16, 16, requires_grad=True), torch.arange(256).view(16, 16) % 3
    want = mask(ids).expand(16, 16).to(x.dtype)
    result = torch.compile(lambda x, ids: x * mask(ids), backend="fxfuser")(x, ids)
    ids.zero_()
    result.sum().backward()
    torch.testing.assert_close(x.grad, want)


def test_a_normalised_copy_is_not_saved_beside_the_tensor() -> None:
    x, w = torch.randn(256, 128, requires_grad=True), torch.randn(128, requires_grad=True)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (128,), w).exp()

    assert saved_shapes(fn, x, w).count((256, 128)) <= 2  # x and the exponential


def test_what_a_product_reads_in_the_backward_is_saved() -> None:
    def fn(x: Tensor, s: Tensor, w: Tensor) -> Tensor:
        return (x * s) @ w

    x, s, w = torch.randn(64, 64), torch.randn(64, 1), torch.randn(64, 64, requires_grad=True)
    assert (64, 64) in saved_shapes(fn, x, s, w)


def test_what_a_kernel_of_the_backward_can_write_again_is_not_saved() -> None:
    def fn(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (128,), g) @ w

    x, g, w = (torch.randn(s, requires_grad=True) for s in ((256, 128), (128,), (128, 32)))
    assert saved_shapes(fn, x, g, w).count((256, 128)) == 1  # x, from which the backward makes the product's operand
    got = torch.autograd.grad(torch.compile(fn, backend="fxfuser")(x, g, w).square().sum(), (x, g, w))
    want = torch.autograd.grad(fn(x, g, w).square().sum(), (x, g, w))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("fn", [
    lambda a: a.cos(),  # as large as its source
    lambda a: a.sum(0).cos().expand(64, 64) + 0,  # behind a reduction
    lambda a: (a @ a).cos(),  # behind a product
])
def test_left_alone(fn: object) -> None:
    module = trace(fn, [torch.randn(64, 64)])  # type: ignore[arg-type]
    assert apply(module, [MARK]) == 0


def test_the_gradient_is_right() -> None:
    def fn(x: Tensor, position: Tensor, frequency: Tensor) -> Tensor:
        angle = position[:, None] * frequency
        return x * angle.cos() + x.square() * angle.sin()

    given = [torch.randn(32, 16, requires_grad=True), torch.arange(32.0), torch.randn(16)]
    with observe.recording() as recording:
        got, = torch.autograd.grad(torch.compile(fn, backend="fxfuser")(*given).sum(), given[:1])
    want, = torch.autograd.grad(fn(*given).sum(), given[:1])
    torch.testing.assert_close(got, want)
    assert any(t.graph.kind == "backward" for t in recording.graphs)
