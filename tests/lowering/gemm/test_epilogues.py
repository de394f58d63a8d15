"""Epilogues of products, in the interpreter against fp64: every port, every monoid, under every policy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.config import Config
from fxfuser.ops import MONOIDS
from tests.lowering.test_monoid_contract import OPS

from .harness import POLICIES, Blocks, check, made, run

Tensor = torch.Tensor
B = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, B, torch.float16], ids=lambda d: str(d)[6:])
M, N, K = 20, 24, 40  # two tiles in each direction, a border in each; three steps of k, the last in part


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def factors(dtype: torch.dtype, *more: tuple[int, ...]) -> list[Tensor]:
    """x [M, K], w [N, K], and tensors of these shapes."""
    return [rand(*shape, dtype=dtype) for shape in ((M, K), (N, K), *more)]


def integers(dtype: torch.dtype, most: int = 2) -> list[Tensor]:
    """Factors whose products are small integers, exact in every dtype, with many ties."""
    return [torch.randint(-most, most + 1, shape).to(dtype) for shape in ((M, K), (N, K))]


# ---------------------------------------------------------------- what comes in and goes out

PORTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "nothing": (lambda x, w: x @ w.t(), []),
    "numbers": (lambda x, w: ((x @ w.t()) * 0.5 - 1).tanh(), []),
    "a scalar": (lambda x, w, s: (x @ w.t()) * s, [()]),
    "a row": (lambda x, w, b: F.gelu(F.linear(x, w, b)), [(N,)]),
    "a column": (lambda x, w, c: (x @ w.t()) / (c.abs() + 1), [(M, 1)]),
    "a tile": (lambda x, w, r: r + F.silu(x @ w.t()), [(M, N)]),
    "a transposed tile": (lambda x, w, r: r.t() * (x @ w.t()), [(N, M)]),
    "all of these": (lambda x, w, s, b, c, r: torch.addmm(b, x, w.t()) * s + c * r, [(), (N,), (M, 1), (M, N)]),
    "indices": (lambda x, w: (x @ w.t()).masked_fill(torch.arange(N) > torch.arange(M)[:, None], -1.0), []),
    "a residual that is a factor": (lambda x, w: x[:, :N] + x @ w.t(), []),
    "several stores": (lambda x, w: ((h := x @ w.t()), h.relu(), h * 2), []),
    "a stored value that is read": (lambda x, w, b: ((h := torch.addmm(b, x, w.t())), h.exp() + h), [(N,)]),
    "stores of other dtypes": (lambda x, w: ((h := x @ w.t()) > 0, h.float(), h.half(), h.to(torch.int32)), []),
    "a transposed store": (lambda x, w: (x @ w.t()).relu().t().contiguous(), []),
    "heads": (lambda x, w: (x @ w.t()).view(2, M // 2, 3, N // 3).transpose(1, 2).contiguous() * 2, []),
    "rows of two dimensions": (lambda x, w: F.linear(x.view(4, M // 4, K), w).sigmoid(), []),
    "gated halves": (lambda x, w: F.silu((h := x @ w.t())[:, :N // 2]) * h[:, N // 2:], []),
    "gated halves with borders": (lambda x, w, v: F.silu((h := x @ v.t())[:, :20]) * h[:, 20:], [(40, K)]),
    "two of three thirds": (lambda x, w: F.silu((h := x @ w.t())[:, N // 3 * 2:]) * h[:, :N // 3], []),
    "gated halves of columns": (lambda x, w, v: F.silu((h := x @ v)[:, :20]) * h[:, 20:], [(K, 40)]),
    "gated halves of a batch": (lambda x, w, v: (h := torch.bmm(x.view(2, M // 2, K), v.transpose(1, 2)))[
        :, :, :20].relu() * h[:, :, 20:], [(2, 40, K)]),
    "gated neighbours": (lambda x, w: F.silu((h := x @ w.t())[:, ::2]) * h[:, 1::2], []),
    "gated neighbours of rows": (lambda x, w: (h := x @ w.t())[::2] * h[1::2], []),
    "two products": (lambda x, w, v: F.silu(x @ w.t()) * (x @ v.t()), [(N, K)]),
    "scaled and added": (lambda x, w, r: torch.addmm(r, x, w.t(), alpha=0.5, beta=-2).relu(), [(M, N)]),
    "added by nothing": (lambda x, w, r: torch.addmm(r, x, w.t(), beta=0).relu(), [(M, N)]),
}


@pytest.mark.parametrize("name", PORTS)
def test_ports(name: str) -> None:
    fn, shapes = PORTS[name]
    args = factors(B, *shapes)
    if name == "added by nothing":
        args[2].fill_(float("nan"))
    check(fn, args)


@DTYPES
@pytest.mark.parametrize("name", ["nothing", "a row", "all of these", "gated neighbours"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    fn, shapes = PORTS[name]
    check(fn, factors(dtype, *shapes))


def test_a_batch() -> None:
    def fn(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        h = torch.baddbmm(r, x, w.transpose(1, 2), beta=0.5, alpha=2)
        return h.relu(), h.transpose(1, 2).contiguous(), h.sum(1), h.amax(2), h.sum(0).sum()

    check(fn, [rand(3, M, K, dtype=B), rand(3, 9, K, dtype=B), rand(3, M, 9, dtype=B)])


# ---------------------------------------------------------------- reductions

FOLDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda h, d: h.sum(d), "mean": lambda h, d: h.mean(d), "prod": lambda h, d: (h / 4).prod(d),
    "amax": lambda h, d: h.amax(d), "amin": lambda h, d: h.amin(d), "argmax": lambda h, d: h.argmax(d),
    "argmin": lambda h, d: h.argmin(d), "any": lambda h, d: (h > 6).any(d), "all": lambda h, d: (h > -6).all(d),
}


def test_every_monoid_is_tested() -> None:
    assert set(FOLDS) == set(MONOIDS)


@pytest.mark.parametrize("name", FOLDS)
def test_monoids(name: str) -> None:
    """Over rows and over columns, beside a store and with what follows from the result."""
    fold = FOLDS[name]
    check(lambda x, w: ((h := x @ w.t()), fold(h, 1), fold(h, 0) * 3, fold(h.relu(), 1)), integers(B))


@pytest.mark.parametrize("fn", [
    lambda h: h.sum(), lambda h: h.mean(), lambda h: (h.amax(), h.amin()), lambda h: (h.argmax(), h.argmin()),
    lambda h: ((h > 20).any(), (h > -99).all()), lambda h: (h / 8).prod()])
def test_monoids_over_everything(fn: Callable[[Tensor], Any]) -> None:
    check(lambda x, w: fn(x @ w.t()), integers(B))


@pytest.mark.parametrize("op", OPS, ids=lambda op: str(op).split(".")[-1])
def test_a_monoid_that_only_a_test_defines(op: Callable[..., Tensor]) -> None:
    check(lambda x, w: ((h := (x @ w.t()).sigmoid()), op(h, [1]), op(h, [0], True)), factors(torch.float32))


COLUMN_SUMS: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "stored": (True, lambda h: ((g := F.gelu(h)), g.sum(0))),
    "in float": (True, lambda h: ((g := F.gelu(h)), g.sum(0, dtype=torch.float32), g.float().mean(0))),
    "rounded by a cast": (True, lambda h: h.float().to(h.dtype).sum(0)),
    "not rounded": (False, lambda h: F.gelu(h).sum(0)),
    "of floats": (False, lambda h: (h.float() + 1).sum(0)),
    "of rows": (False, lambda h: (h, h.sum(1))),
}


@pytest.mark.parametrize("dtype", [B, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", COLUMN_SUMS)
def test_tensor_cores_sum_columns_of_halves_and_of_nothing_else(name: str, dtype: torch.dtype) -> None:
    """A value that stays fp32 would be rounded on its way to them."""
    expected, fn = COLUMN_SUMS[name]
    found = check(lambda x, w: fn(x @ w.t()), factors(dtype))
    assert ("column_sums(" in found.source()) == expected


def lse(h: Tensor, d: int) -> Tensor:
    m = h.amax(d, keepdim=True)
    return (h - m).exp().sum(d).log() + m.squeeze(d)


def moments(h: Tensor, d: int) -> Tensor:
    return ((h - h.mean(d, keepdim=True)) ** 2).mean(d)


JOINT = {
    "logsumexp": lambda h: lse(h, 1), "logsumexp of columns": lambda h: lse(h, 0),
    "PyTorch's own": lambda h: (torch.logsumexp(h, 1), torch.logsumexp(h, 0, True)),
    "with the maximum": lambda h: (h.amax(1), lse(h, 1)),
    "variance": lambda h: ((h - h.mean(1, keepdim=True)) ** 2).sum(1) / 24,
    "mean and variance": lambda h: (h.mean(0), ((h - h.mean(0, keepdim=True)) ** 2).sum(0)),
    "beside others": lambda h: (h * 2, lse(h, 1), h.sum(0), h.amin(1)),
}


@DTYPES
@pytest.mark.parametrize("name", JOINT)
def test_joint_folds(name: str, dtype: torch.dtype) -> None:
    policies = POLICIES if dtype is B else POLICIES[:1]
    found = check(lambda x, w: JOINT[name](torch.mm(x, w.t()).float()), factors(dtype), policies=policies)
    assert found.domain.pairs()


INFINITE = float("inf")


@pytest.mark.parametrize("policy", POLICIES)
def test_infinities_and_nan(policy: str) -> None:
    """Rows that hold -inf in part, in whole tiles or alone; +inf; both; nan: what eager makes of each."""
    def fn(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        h = x @ w.t() + r
        own = torch.logsumexp(h, 1), torch.logsumexp(h, 0)
        return lse(h, 1), *own, h.amax(1), h.amin(0), h.sum(1), h.mean(0), h.argmax(1), h.argmin(0), h.argmin()

    x, w, r = factors(torch.float32, (M, N))
    r[0, 3], r[1, :16], r[2], r[9, 16:], r[4, 2] = [-INFINITE] * 5
    r[3, 5], r[4, 20], r[8, 3] = [INFINITE] * 3
    r[6, 7], r[7, 9], r[7, 17], r[8, 20] = [float("nan")] * 4
    check(fn, [x, w, r], policies=[policy])


def test_the_first_of_equal_elements_wins_across_tiles() -> None:
    """Ties within a tile, between tiles, of whole rows; a nan after larger elements."""
    x, w = torch.zeros(M, K), torch.zeros(N, K)
    x[:, 0], w[:, 0] = 1, torch.tensor([1, 3, 0, 3, *[2] * 12, 3, *[0] * 6, 3]).float()
    x[5] = 0
    x[6, 0] = float("nan")
    fn: Callable[..., Any] = lambda x, w: ((h := x @ w.t()).argmax(1), h.argmin(1), h.argmax(0), h.argmax())  # noqa: E731
    want = fn(x, w)
    assert want[0][0] == 1 and want[1][0] == 2 and want[0][5] == 0
    check(fn, [x, w])


def test_a_discrete_result_sees_the_rounded_product() -> None:
    """257 is 256 in bf16, a tie that the accumulator does not have."""
    x, w = torch.zeros(M, K, dtype=B), torch.zeros(N, K, dtype=B)
    x[:, 0], x[:, 1] = 256, 1
    w[3, 0] = w[7, 0] = w[7, 1] = 1
    found = check(lambda x, w: ((h := x @ w.t()).argmax(1), h > 256), [x, w])
    assert run(found, found.programs["persistent"], [x, w])[0].tolist() == [3] * M


def test_a_stored_half_is_read_as_stored_and_else_stays_wide() -> None:
    x, w = torch.zeros(M, K, dtype=B), torch.zeros(N, K, dtype=B)
    x[:, 0], x[:, 1], w[:, 0], w[:, 1] = 256, 1, 1, 1
    for fn, expected in ((lambda x, w: (x @ w.t()) - 256, 1), (lambda x, w: ((h := x @ w.t()) - 256, h), 0)):
        found = made(fn, [x, w])
        assert (run(found, found.programs["persistent"], [x, w])[0] == expected).all()


def test_eager_numerics_round_after_every_op() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return (x @ w.t() + b) * b

    args = [*integers(B), rand(N, dtype=B)]
    found = made(fn, args, config=Config(numerics="eager"))
    for program in found.programs.values():
        torch.testing.assert_close(run(found, program, args)[0], fn(*args), rtol=0, atol=0)


@DTYPES
@pytest.mark.parametrize("fn", [
    lambda h: (h.argmax(1), h.amax(1)), lambda h: (h.argmin(0), h.argmin()), lambda h: ((h > 20).any(1), h.amin())])
def test_the_last_tile_of_idempotent_folds_overlaps_the_one_before(
    fn: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    found = check(lambda x, w: fn(x @ w.t()), integers(dtype))
    assert not any(re.search(r"\b(m|n|strip)_mask", found.source(policy)) for policy in POLICIES)


@pytest.mark.parametrize("fn", [lambda h: h.sum(1), lambda h: (h.amax(1), h.mean(1)), lambda h: (h.amax(1), h)])
def test_other_tiles_do_not_overlap(fn: Callable[[Tensor], Any]) -> None:
    assert "strip_mask" in check(lambda x, w: fn(x @ w.t()), integers(B), policies=["persistent"]).source()


def test_columns_that_fill_no_tile_are_masked() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.t()).argmax(1)

    assert "strip_mask" in check(fn, [rand(M, K, dtype=B), rand(9, K, dtype=B)], policies=["persistent"]).source()
    _, narrow = args = [rand(M, K, dtype=B), rand(N, K, dtype=B)]
    dynamic = check(fn, args, [set(), {0}], [[args[0], narrow[:9]]], policies=["persistent"])
    assert "strip_mask" in dynamic.source()


# ---------------------------------------------------------------- programs and tiles

WHOLE = (lambda x, w, b: ((h := F.gelu(F.linear(x, w, b))), h.sum(0), lse(h.float(), 1)), [(N,)])


@pytest.mark.parametrize("blocks", [
    Blocks(32, 32, 64, 2, strips=4), Blocks(16, 32, 16, 5), Blocks(32, 16, 32, 7, group=1, strips=1),
    Blocks(16, 8, 8, 4, group=8, strips=1)], ids=str)
def test_tiles(blocks: Blocks) -> None:
    """Larger and smaller than the matrices, parts of several steps, and parts without any."""
    check(WHOLE[0], factors(B, *WHOLE[1]), blocks=blocks)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_bits_every_time(policy: str) -> None:
    args = factors(B, *WHOLE[1])
    found = made(WHOLE[0], args)
    first, second = (run(found, found.programs[policy], args) for _ in range(2))
    assert len(first) == 3 and all(map(torch.equal, first, second))


def test_a_reduction_stores_states_and_its_finaliser_combines_them() -> None:
    found = made(WHOLE[0], factors(B, *WHOLE[1]))
    for name, program in found.programs.items():
        assert len(program.launches) == 3, "one finaliser for rows, one for columns"
        parts = [] if name in ("persistent", "sliced") else [False, True]
        assert [s.kept for s in program.scratch] == [False, False, *parts]  # a sum; a maximum and its sum as one number
    stored = made(lambda x, w: F.relu(x @ w.t()), factors(B))
    assert [len(p.launches) for p in stored.programs.values()] == [1] * 4
    assert stored.programs["persistent"].scratch == ()


def test_policies_share_all_but_how_they_commit() -> None:
    """The epilogue's lines are the same text under each policy."""
    found = made(lambda x, w, b: F.gelu(F.linear(x, w, b)), factors(B, (N,)))
    lines = [next(line.strip() for line in found.source(p).splitlines() if "gelu_0 =" in line) for p in POLICIES]
    assert len(set(lines)) == 1
