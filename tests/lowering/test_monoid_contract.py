"""A monoid that only this file knows works, unmodified, in every kind of kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fxfuser import observe
from fxfuser.domain.roles import PERSISTENT_ELEMENTS
from fxfuser.ops import Folds, Kind, Monoid, Promotion, Row, add_row
from fxfuser.ops.monoids import function, highest, lowest
from fxfuser.runtime.build import report
from tests.lowering.harness import check, compiled

LOOPED = 2 * PERSISTENT_ELEMENTS + 5

# one state, whose results fold again
LOGADD = Monoid(
    "logadd", "combine_logadd", function(
        "combine_logadd", "a, b",
        "high = tl.where((a > b) | (a != a), a, b)",
        "low = tl.where((a > b) | (a != a), b, a)",
        "return tl.where(tl.abs(high) < float('inf'), high + tl.log(1.0 + tl.exp(low - high)), high)"),
    lambda dtype: (float("-inf"),), splits=True)
# two states of the operand's dtype, one result of both
SPREAD = Monoid(
    "spread", "combine_spread", function(
        "combine_spread", "a_low, a_high, b_low, b_high",
        "return tl.where(a_low < b_low, a_low, b_low), tl.where(a_high > b_high, a_high, b_high)"),
    lambda dtype: (highest(dtype), lowest(dtype)), lambda dtype: (dtype, dtype), ("{x}", "{x}"), ("{1} - {0}",),
    Folds.OPERAND)
# a lift of value and position, a finish with the count
CENTRE = Monoid(
    "centre", "combine_centre", function("combine_centre", "a, a_at, b, b_at", "return a + b, a_at + b_at"),
    lambda dtype: (0, 0), lambda dtype: (dtype, dtype), ("{x}", "{x} * {at}"), ("{1} / ({0} * {count})",))


def _logadd(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    return torch.logsumexp(x, tuple(dim), keepdim)


def _spread(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    return x.amax(tuple(dim), keepdim) - x.amin(tuple(dim), keepdim)


def _centre(x: Tensor, dim: Sequence[int], keepdim: bool = False) -> Tensor:
    axis, = dim
    at = torch.arange(x.shape[axis], dtype=x.dtype).view([-1] + [1] * (x.dim() - 1 - axis % x.dim()))
    return (x * at).sum(axis, keepdim) / (x.sum(axis, keepdim) * x.shape[axis])


LIBRARY = torch.library.Library("fxfuser_contract", "DEF")
for monoid, reference in ((LOGADD, _logadd), (SPREAD, _spread), (CENTRE, _centre)):
    LIBRARY.define(f"{monoid.name}(Tensor x, int[] dim, bool keepdim=False) -> Tensor")
    LIBRARY.impl(monoid.name, reference, "CPU")
    torch.library.register_fake(f"fxfuser_contract::{monoid.name}", lambda x, dim, keepdim=False: x.sum(dim, keepdim))
    add_row(getattr(torch.ops.fxfuser_contract, monoid.name).default,
            Row(Kind.REDUCTION, promote=Promotion.RESULT, monoid=monoid))
OPS = [torch.ops.fxfuser_contract.logadd, torch.ops.fxfuser_contract.spread, torch.ops.fxfuser_contract.centre]
Op = Callable[..., Tensor]


@pytest.fixture(params=OPS, ids=lambda op: str(op).split(".")[-1])
def op(request: pytest.FixtureRequest) -> Iterator[Op]:
    yield request.param


def x(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5)) + 0.5


def loops(source: str) -> int:
    return len(re.findall(r"^ *for ", source, re.M))


def test_persistent_rows(op: Op) -> None:
    _, lowered = check(lambda a: a * op(a, [-1], True), [x(7, 100)], tolerance=1e-5)
    assert loops(lowered.kernel.source) == 0


def test_columns_and_a_dropped_dimension(op: Op) -> None:
    check(lambda a: op(a + 1, [0]), [x(33, 40)], tolerance=1e-5)


def test_looped_rows(op: Op) -> None:
    _, lowered = check(lambda a: a * op(a, [-1], True), [x(2, LOOPED)], tolerance=3e-5)
    assert loops(lowered.kernel.source) == 2


def test_symbolic_lengths(op: Op) -> None:
    check(lambda a: op(a, [-1]), [x(3, 300)], [{0, 1}], [[x(5, 1031)], [x(2, 2)]], tolerance=1e-5)


@pytest.mark.parametrize("length", [64, PERSISTENT_ELEMENTS + 64])
def test_one_state_per_region(op: Op, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuser.domain.resolve.may_pay", lambda whole: True)
    monkeypatch.setattr("fxfuser.domain.resolve.pays", lambda whole, pieces: True)
    domain, _ = check(lambda a, b: op(torch.cat([a.exp(), b.sin()], 1), [1]), [x(4, length), x(4, 2 * length)],
                      tolerance=1e-4)
    assert [len(p.operands) for p in domain.reductions()] == [2]


def test_halves_fold_in_float32(op: Op) -> None:
    check(lambda a: op(a, [-1]), [x(4, 500).bfloat16()])


def test_beside_the_other_reductions(op: Op) -> None:
    _, _, lowered = compiled(lambda a: (op(a, [-1]), a.sum(-1), a.amax(-1)), [x(4, 500)])
    assert lowered.kernel.source.count("tl.load(") == 1


@pytest.mark.parametrize("op", [torch.ops.fxfuser_contract.logadd])
@pytest.mark.parametrize("length", [65536, 65536 + 13])
def test_split_rows_and_their_finaliser(op: Op, length: int) -> None:
    """Two kernels from one backend call; a length that chunks divide, and one that is padded."""
    run = torch.compile(lambda a: op(a, [-1]), backend="fxfuser", options={"executor": "interpret", "strict": True})
    given = x(2, length)
    with observe.recording() as recording:
        got = run(given)
    torch.testing.assert_close(got, op(given, [-1]), rtol=1e-5, atol=1e-5)
    kernels = [k for trace in recording.graphs for k in trace.of(observe.KernelRecord)]
    assert ["combine_logadd" in k.source for k in kernels] == [True, True]


@pytest.mark.parametrize("length", [500, LOOPED])
def test_it_builds_for_sm_90(op: Op, length: int) -> None:
    _, _, lowered = compiled(lambda a: a * op(a, [-1], True), [x(256, length)])
    assert report(lowered.kernel).spills == 0


def test_an_op_has_one_row() -> None:
    with pytest.raises(ValueError, match="has a row"):
        add_row(torch.ops.aten.sum.dim_IntList, Row(Kind.REDUCTION))
