"""What needs a whole row's result at its elements: statistics in the product's kernel, the rest behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxfuser.domain import gemm
from fxfuser.lowering.kernel import Place

from .harness import POLICIES, check, made, run

Tensor = torch.Tensor
B = torch.bfloat16
M, N, K = 20, 24, 40


def softmax(x: Tensor, w: Tensor) -> Tensor:
    logits = (x @ w.t()).float()
    exponents = (logits - logits.amax(1, keepdim=True)).exp()
    return (exponents / exponents.sum(1, keepdim=True)).to(x.dtype)


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    h = (x @ w.t()).float()
    return (h * torch.rsqrt((h * h).mean(1, keepdim=True) + 1e-5)).to(x.dtype)


def loss_gradient(x: Tensor, w: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = (x @ w.t()).float()
    largest = logits.amax(1, keepdim=True)
    logsumexp = (logits - largest).exp().sum(1, keepdim=True).log() + largest
    label = torch.arange(N)[None, :] == labels[:, None]
    picked = torch.where(label, logits, 0.0).sum(1, keepdim=True)
    return ((logits - logsumexp).exp() - label.float()).to(x.dtype), (logsumexp - picked)[:, 0]


def with_logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    logits = x @ w.t()
    return logits, logits.float() / logits.float().abs().amax(1, True)


def lse_and_own_sum(x: Tensor, w: Tensor) -> Tensor:
    """Behind the product stands a sum over a dimension that its tiles lack; no element of the product is read there."""
    logits = (x @ w.t()).float()
    largest = logits.amax(1, keepdim=True)
    logsumexp = (logits - largest).exp().sum(1, keepdim=True).log() + largest
    return logsumexp - (x.float() * 2).sum(1, keepdim=True)


@pytest.fixture(autouse=True)
def short_rows_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "PERSISTENT_ELEMENTS", 16)


def factors(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, B], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("fn", [softmax, rms_norm, with_logits], ids=lambda f: f.__name__)
def test_values(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    found = check(fn, factors(dtype), policies=(*POLICIES, "sliced"))
    assert found.domain.tail is not None
    assert all(len(p.launches) == 3 for p in found.programs.values())  # the tiles, the rows' results, the rest


@pytest.mark.parametrize("dtype", [torch.float32, B], ids=lambda d: str(d)[6:])
def test_a_gradient_takes_the_place_of_its_logits(dtype: torch.dtype) -> None:
    found = check(loss_gradient, [*factors(dtype), torch.randint(N, (M,))])
    program = found.programs["persistent"]
    tiles, tail = program.launches[0], program.launches[-1]
    wide = (Place.OUTPUT, 0)
    assert wide in tiles.pointers and tail.pointers.count(wide) == 2
    assert all(M * N > eval(s.size, {"cdiv": lambda a, b: -(-a // b), "NBLOCK": 16, "MBLOCK": 16, "STRIPBLOCK": 8})
               for s in program.scratch)


def scaled_by_own_sum(x: Tensor, w: Tensor) -> Tensor:
    """The tail folds something else than the product's row."""
    return (softmax(x.float(), w.float()) * (x.float() * 2).sum(1, keepdim=True)).to(x.dtype)


def test_a_tail_that_folds_takes_the_place_of_what_it_reads() -> None:
    found = check(scaled_by_own_sum, factors(torch.float32))
    tail = found.domain.tail
    assert tail is not None and any(True for _ in tail.folds())
    assert found.programs["persistent"].launches[-1].pointers.count((Place.OUTPUT, 0)) == 2


def test_logits_that_are_wanted_are_kept() -> None:
    found = made(with_logits, factors(B))
    assert found.segment.outputs[0] in found.domain.passed
    assert not any(s.size == str(M * N) for s in found.programs["persistent"].scratch)


def test_runs_are_equal_bit_for_bit() -> None:
    args = factors(B)
    found = made(softmax, args)
    for name in POLICIES:
        first, second = (run(found, found.programs[name], args)[0] for _ in range(2))
        assert torch.equal(first, second)


def test_a_row_that_one_program_holds_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "PERSISTENT_ELEMENTS", N)
    with pytest.raises(AssertionError, match="whole row"):
        made(softmax, factors(B))


def test_a_tail_of_few_programs_is_none() -> None:
    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x @ w.t()).float()
        logsumexp = logits.exp().sum(1, keepdim=True).log()
        return (logits - logsumexp).exp().to(x.dtype), logsumexp.sum()  # the sum over all rows keeps one program

    with pytest.raises(AssertionError, match="whole row"):
        made(both, factors(B))


def test_a_product_that_a_second_output_reads_is_not_overwritten() -> None:
    def two(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        logits = (x @ w.t()).float()
        scaled = logits - logits.amax(1, keepdim=True)
        return scaled.to(x.dtype), torch.where(torch.arange(N) > 3, scaled.exp(), 0.0).to(x.dtype)

    found = check(two, factors(B))
    tail = found.programs["persistent"].launches[-1].pointers
    assert found.domain.tail is not None and tail.count((Place.OUTPUT, 0)) == tail.count((Place.OUTPUT, 1)) == 1


def test_elements_that_nothing_reads_are_not_passed() -> None:
    found = check(lse_and_own_sum, factors(B))
    assert found.domain.tail is not None and not [n for n in found.domain.passed if "mm" in n.name]
    assert not any(s.size == str(M * N) for s in found.programs["persistent"].scratch)
