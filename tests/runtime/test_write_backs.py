"""Mutated inputs take their new values where these are computed, and only where nobody can tell."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from fxfuser import observe
from fxfuser.backend import compile_graph
from fxfuser.config import Config
from fxfuser.passes.saved import SHARED
from tests.runtime.graphs import trace

Function = Callable[..., Any]


def run(fn: Function, *args: Any, executor: str = "interpret", dynamic: bool = False) -> str:
    """The plans of a call, which leaves its arguments and results as eager does."""
    torch.compiler.reset()
    ours, eager = ([a.clone() for a in args] for _ in range(2))
    options = {"executor": executor, "strict": executor == "interpret"}
    with observe.recording() as recording, torch.no_grad():
        found = torch.compile(fn, backend="fxfuser", options=options, dynamic=dynamic)(*ours)
        expected = fn(*eager)
    torch.testing.assert_close((ours, found), (eager, expected))
    return "\n".join(str(g.plan) for g in recording.graphs)


def copies(plan: str) -> int:
    return plan.count("aten.copy_.default")


def test_an_optimizer_step_is_one_kernel_in_place() -> None:
    def adam(p: Tensor, m: Tensor, v: Tensor, g: Tensor) -> None:
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.99).addcmul_(g, g, value=0.01)
        p.addcdiv_(m, v.sqrt().add(1e-8), value=-0.1)

    plan = run(adam, *(torch.rand(64, 33) for _ in range(4)))
    assert copies(plan) == 0 and "new_empty" not in plan and "1 kernel launch" in plan


def test_a_cache_is_written_at_its_positions() -> None:
    def step(cache: Tensor, k: Tensor, position: Tensor, q: Tensor) -> Tensor:
        cache.index_copy_(1, position, k)
        return torch.softmax(q @ cache.transpose(-1, -2), -1)

    plan = run(step, torch.randn(2, 16, 8), torch.randn(2, 1, 8), torch.tensor([3]), torch.randn(2, 4, 8))
    assert "scatter_into" in plan and copies(plan) == 0

    def accumulate(cache: Tensor, k: Tensor, position: Tensor) -> None:
        cache.index_put_((position,), k, accumulate=True)

    plan = run(accumulate, torch.randn(16, 8), torch.randn(2, 8), torch.tensor([3, 3]))
    assert "index_put_.default(" in plan and copies(plan) == 0


def test_running_statistics() -> None:
    def track(mean: Tensor, x: Tensor) -> Tensor:
        mean.lerp_(x.mean(0), 0.1)
        return x - mean

    assert copies(run(track, torch.randn(40), torch.randn(17, 40))) == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_that_vary(dynamic: bool) -> None:
    assert copies(run(lambda x, y: x.add_(y), torch.randn(7, 5), torch.randn(7, 5), dynamic=dynamic)) == 0


def test_a_value_that_the_caller_gets_has_memory_of_its_own() -> None:
    def both(x: Tensor) -> Tensor:
        new = x * 2
        x.copy_(new)
        return new

    run(both, torch.randn(16, 8))
    x = torch.ones(4)
    result = torch.compile(both, backend="fxfuser", options={"executor": "interpret"})(x)
    x.zero_()
    assert result.eq(2).all()


def test_elements_that_others_still_read_are_copied() -> None:
    """A shift, a transpose, a row's sum and a matrix product read elements that another program may have written."""
    for fn in (lambda x: x.copy_(torch.roll(x, 1, 0)), lambda x: x.copy_(x.t() * 2), lambda x: x.copy_(x @ x),
               lambda x: x.sub_(x.sum(0))):
        run(fn, torch.randn(16, 16))
    assert copies(run(lambda x: x.copy_(torch.roll(x, 1, 0)), torch.randn(16, 16))) == 1


@pytest.mark.parametrize("function", [
    lambda x: x.copy_(torch.as_strided(x, (128, 128), (1, 128)) * 2),
    lambda x: x.copy_(torch.as_strided(x, (128, 128), (1, 128)) * 2 + x),
    lambda x: x.copy_(x.view(torch.int32).flip(0).float()),
    lambda x: x.copy_(x.view(torch.int32).t() * 1.0 + x)])
def test_views_that_the_host_makes_of_the_old_value(function: Function) -> None:
    """A kernel sees no more than a tensor of its own there; more than one program, so that the order shows."""
    run(function, torch.randn(128, 128))


def test_an_old_value_that_is_read_later_survives() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        old = x @ w
        x.mul_(2)
        return old + x

    run(step, torch.randn(8, 8), torch.randn(8, 8))

    def twice(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        old = x[index]
        x.index_fill_(0, index, 0.0)
        return old, x.sum()

    run(twice, torch.randn(8, 8), torch.tensor([1, 2]))


def test_layouts_and_types_that_differ() -> None:
    run(lambda x, y: x.copy_(y.t() * 2), torch.randn(6, 9), torch.randn(9, 6))
    run(lambda x, y: x.copy_(y * 2), torch.randn(6, 9).bfloat16(), torch.randn(6, 9))
    run(lambda x, y: x.add_(y), torch.randn(9, 6).t(), torch.randn(6, 9))
    run(lambda x, y: x[1:3].mul_(y), torch.randn(6, 9), torch.randn(9))
    run(lambda x, y: x[:, ::2].add_(y), torch.randn(6, 10), torch.randn(5))


def test_an_operand_that_is_the_target_itself() -> None:
    def onto_itself(x: Tensor, index: Tensor) -> None:
        x.index_copy_(0, index, x[:2].clone() * 1)

    run(onto_itself, torch.randn(8, 8), torch.tensor([1, 2]))
    run(lambda x, index: x.index_put_((index,), x[:2].clone()), torch.randn(8, 8), torch.tensor([1, 2]))


def test_inputs_that_are_one_tensor_or_share_memory() -> None:
    def step(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return x * y

    for executor in ("interpret", "reference"):
        compiled = torch.compile(step, backend="fxfuser", options={"executor": executor})
        base = torch.randn(8, 8)
        for pair in (lambda b: (b, b), lambda b: (b[1:], b[:-1]), lambda b: (b.t(), b)):
            ours, eager = base.clone(), base.clone()
            torch.testing.assert_close(compiled(*pair(ours)), step(*pair(eager)))
            torch.testing.assert_close(ours, eager)


def test_a_buffer_that_training_updates() -> None:
    """What the backward reads of a buffer is what it held before the update."""
    def loss(x: Tensor, buffer: Tensor) -> Tensor:
        y = (x * buffer.clone()).sin().sum()
        with torch.no_grad():
            buffer.mul_(0.5).add_(1)
        return y

    x, buffer = torch.randn(12, requires_grad=True), torch.randn(12)
    ours = buffer.clone()
    torch.compile(loss, backend="fxfuser", options={"executor": "interpret"})(x, ours).backward()
    found, x.grad = x.grad, None
    loss(x, buffer).backward()
    torch.testing.assert_close((found, ours), (x.grad, buffer))


Values = tuple[Tensor, ...]


class Counted(torch.autograd.Function):
    """Its backward adds to a buffer, as one does that accumulates gradients or statistics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, twice: bool, reads: bool) -> Tensor:
        ctx.total, ctx.reads = total, reads
        if twice:
            total.mul_(0.5)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, before = gradients[0], ctx.total.clone()
        ctx.total.add_(gradient.sum(0))
        return gradient * (before if ctx.reads else 3), None, None, None


@pytest.mark.parametrize("executor", ["interpret", "reference"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_a_buffer_that_the_backward_updates(executor: str, twice: bool, reads: bool) -> None:
    """The backward writes to the caller's tensor, of which it may read what it held before, and autograd is told."""
    def losses(function: Function, total: Tensor) -> Values:
        results = []
        for _ in range(2):
            x = torch.arange(48.0).view(6, 8).requires_grad_()
            y = function(x, total)
            before = total._version
            y.sum().backward()
            assert total._version > before and x.grad is not None
            results += [y.detach(), x.grad, total.clone()]
        return tuple(results)

    def function(x: Tensor, total: Tensor) -> Tensor:
        y: Tensor = Counted.apply(x, total, twice, reads)
        return y.sin()

    expected = losses(function, torch.ones(8))
    torch.compiler.reset()
    found = losses(torch.compile(function, backend="fxfuser", options={"executor": executor}), torch.ones(8))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shared", [False, True])
def test_an_input_whose_memory_another_input_shares_is_written_last(shared: bool) -> None:
    """As where a backward mutates a buffer and reads a view of it that was saved beside it."""
    def step(x: Tensor, view: Tensor, y: Tensor) -> Values:
        new, result = y.sin(), torch.softmax(y @ y, 0) @ view
        x.copy_(new)
        return result,

    graph = trace(step, torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8))
    for node in graph.graph.find_nodes(op="placeholder")[:2] if shared else ():
        node.meta[SHARED] = True
    with observe.recording() as recording, observe.graph("inference", 0, graph.graph, ""):
        call = compile_graph(graph, Config(executor="interpret", strict=True), "plan")
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    expected = torch.softmax(y @ y, 0) @ x.t()
    if shared:
        torch.testing.assert_close(call([x, x.t(), y])[0], expected)
    assert copies(str(recording.graphs[0].plan)) == shared


def test_a_lazily_negated_input_is_written_to_itself() -> None:
    def step(x: Tensor) -> Tensor:
        x.mul_(2.0)
        return x + 1

    for executor in ("interpret", "reference"):
        torch.compiler.reset()
        ours, eager = (torch.arange(12.0).view(3, 4).to(torch.complex64) * (1 + 2j) for _ in range(2))
        compiled = torch.compile(step, backend="fxfuser", options={"executor": executor})
        torch.testing.assert_close(compiled(ours.conj().imag), step(eager.conj().imag))
        torch.testing.assert_close(ours, eager)


def test_batch_norm_keeps_its_statistics() -> None:
    ours = torch.nn.BatchNorm1d(6)
    eager = torch.nn.BatchNorm1d(6)
    compiled = torch.compile(ours, backend="fxfuser", options={"executor": "interpret"})
    for _ in range(3):
        x = torch.randn(20, 6)
        torch.testing.assert_close(compiled(x), eager(x))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


def test_a_gradient_is_accumulated_by_the_product_itself() -> None:
    def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
        total.add_(a.t() @ b, alpha=0.5)

    operands = torch.randn(32, 16).bfloat16(), torch.randn(32, 24).bfloat16()
    exact = 0.5 * (operands[0].double().t() @ operands[1].double())
    total = torch.zeros(16, 24)
    with observe.recording() as recording:
        torch.compile(accumulate, backend="fxfuser", options={"executor": "interpret"})(total, *operands)
    plan = str(recording.graphs[0].plan)
    assert "add_product_(" in plan and copies(plan) == 0
    assert (total - exact).abs().max() < 1e-4
