"""Mutated inputs on a GPU, called plainly and as replays of a CUDA graph: what test_write_backs.py asks of one call in
the interpreter, over several calls, with tensors that stay and tensors that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxfuser.runtime.cuda_graphs import Graphed

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
MODES = ("default", "reduce-overhead")
CALLS = 5  # with graphs: a plain call, a capture and replays


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each graph, once a replay."""
    seen: list[str] = []
    replay = Graphed._replay

    def counted(self: Graphed, capture: Any, args: list[Any]) -> tuple[Any, ...]:
        seen.append(self.name)
        return replay(self, capture, args)

    monkeypatch.setattr(Graphed, "_replay", counted)
    return seen


def compiled(function: Callable[..., Any], mode: str) -> Callable[..., Any]:
    return torch.compile(function, backend="fxfuser", mode=mode, dynamic=False)


def drawn(*shape: int) -> Tensor:
    """Numbers whose sums are exact in whatever order atomics take them."""
    return torch.randint(-8, 9, shape, device=DEVICE).float()


def positions(*shape: int, below: int) -> Tensor:
    return torch.randint(below, shape, device=DEVICE)


def apart(count: int, below: int) -> Tensor:
    return torch.randperm(below, device=DEVICE)[:count]


# name: what is done to the first argument, and fresh arguments
Case = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]
CASES: dict[str, Case] = {
    "kernel": (lambda x, y: x.mul_(0.5).add_(y), lambda: (drawn(300, 257), drawn(257))),
    "view": (lambda x, y: x[:, 1::2].add_(y), lambda: (drawn(64, 96), drawn(48))),
    "and a result": (lambda x, y: x.add_(y) * 2, lambda: (drawn(64, 96), drawn(96))),
    "index_put_": (lambda x, i, y: x.index_put_((i,), y * 2),
                   lambda: (drawn(128, 40), apart(16, 128), drawn(16, 40))),
    "index_put_ accumulate": (lambda x, i, y: x.index_put_((i,), y * 2, accumulate=True),
                              lambda: (drawn(128, 40), positions(300, below=128), drawn(300, 40))),
    "scatter_add_": (lambda x, i, y: x.scatter_add_(0, i, y * 2),
                     lambda: (drawn(50, 40), positions(300, 40, below=50), drawn(300, 40))),
    "as_strided": (lambda x: x.copy_(torch.as_strided(x, (128, 128), (1, 128)) * 2), lambda: (drawn(128, 128),)),
    "as_strided beside itself": (lambda x: x.copy_(torch.as_strided(x, (128, 128), (1, 128)) * 2 + x),
                                 lambda: (drawn(128, 128),)),
    "reinterpreted": (lambda x: x.copy_(x.view(torch.int32).flip(0).bitwise_and(255).float()),
                      lambda: (drawn(128, 128),)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_an_input(name: str, mode: str, replays: list[str]) -> None:
    function, fresh = CASES[name]
    call, staying, others = compiled(function, mode), fresh(), fresh()
    eagerly = staying[0].clone()
    for _ in range(CALLS):
        held = others[0].clone()  # memory of its own at each call
        for ours, eager in ((staying, (eagerly, *staying[1:])), ((held, *others[1:]), (held.clone(), *others[1:]))):
            found, expected = call(*ours), function(*eager)
            torch.testing.assert_close((ours[0], found), (eager[0], expected), rtol=0, atol=0)
    assert bool(replays) == (mode == "reduce-overhead")


class Cached(nn.Module):
    """One step of attention over a cache of fixed length, written where `position` says."""

    keys: Tensor
    values: Tensor

    def __init__(self, put: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.put = put
        self.register_buffer("keys", torch.zeros(2, 4, 24, 32))
        self.register_buffer("values", torch.zeros(2, 4, 24, 32))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        self.put(self.keys, position, x.sin())
        self.put(self.values, position, x)
        score = x @ self.keys.transpose(-1, -2) / 32 ** 0.5
        past = torch.arange(24, device=x.device) <= position
        return torch.softmax(score.masked_fill(~past, -torch.inf), -1) @ self.values


def copied(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache.index_copy_(2, position, new)


def assigned(cache: Tensor, position: Tensor, new: Tensor) -> None:
    cache[:, :, position] = new


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("put", [copied, assigned])
def test_a_cache(put: Callable[[Tensor, Tensor, Tensor], Any], mode: str, replays: list[str]) -> None:
    ours, eager = Cached(put).to(DEVICE), Cached(put).to(DEVICE)
    call, before = compiled(ours, mode), ours.keys.data_ptr()
    with torch.no_grad():
        for i in range(2 * CALLS):
            x, position = torch.randn(2, 4, 1, 32, device=DEVICE), torch.tensor([i], device=DEVICE)
            torch.testing.assert_close(call(x, position), eager(x, position), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()), rtol=1e-5, atol=1e-6)
    assert ours.keys.data_ptr() == before
    assert bool(replays) == (mode == "reduce-overhead")


@pytest.mark.parametrize("mode, capturable", [("default", False), ("default", True), ("reduce-overhead", True)])
def test_steps_of_an_optimizer(mode: str, capturable: bool, replays: list[str]) -> None:
    def trained(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 8)).to(DEVICE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True, capturable=capturable)
        step = wrap(optimizer.step)
        for p in net.parameters():
            p.grad = torch.empty_like(p)
        for _ in range(CALLS + 1):  # the first makes the state
            for p in net.parameters():
                p.grad.normal_()
            step()
        state = (v for p in net.parameters() for v in optimizer.state[p].values())
        return [*(p.detach() for p in net.parameters()), *state]

    found = trained(lambda step: torch.compile(step, backend="fxfuser", mode=mode))
    # Dynamo moves the number of steps to the GPU, where eager leaves it on the CPU unless `capturable`
    torch.testing.assert_close(found, trained(lambda step: step), rtol=1e-4, atol=1e-6, check_device=False)
    assert bool(replays) == (mode == "reduce-overhead")


def test_one_element_beside_a_tile() -> None:
    """Functions with loops, whose operands have the shapes of different tiles."""
    def function(x: Tensor, narrow: Tensor, one: Tensor) -> tuple[Tensor, ...]:
        small = one.to(narrow.dtype)
        return (torch.gcd(x, one), torch.gcd(one, x), torch.lcm(x, one), torch.lcm(small, narrow),
                torch.pow(x, one % 5), torch.pow(one, x.clamp(-2, 7)), torch.pow(narrow, small % 3))

    x = torch.randint(-1000, 1000, (129, 33), device=DEVICE)
    one = torch.tensor([[36]], device=DEVICE)
    for narrow in (x.short(), x.int()):
        found, expected = compiled(function, "default")(x, narrow, one), function(x, narrow, one)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
