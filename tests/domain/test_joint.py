"""Online softmax: a looped row is read once for its maximum and its sum of exponentials."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from fxfuser.config import Config
from fxfuser.domain.roles import PERSISTENT_ELEMENTS
from fxfuser.runtime.build import report
from tests.lowering.harness import check, compiled, run

Tensor = torch.Tensor
LOOPED = 2 * PERSISTENT_ELEMENTS + 5


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 4


def softmax(a: Tensor) -> Tensor:
    e = (a - a.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def log_sum(a: Tensor) -> Tensor:
    m = a.amax(-1, keepdim=True)
    return (m + (a - m).exp().sum(-1, keepdim=True).log()).squeeze(-1)


def loops(source: str) -> int:
    """How often a row is walked; the rest of a way is part of it (see lowering/peeling.py)."""
    return len(re.findall(r"^ *for (?!.* in range\(R0WHOLE, )", source, re.M))


@pytest.mark.parametrize("columns, expected", [(LOOPED, 2), (300, 0)])
def test_softmax_reads_a_looped_row_twice(columns: int, expected: int) -> None:
    _, lowered = check(softmax, [x(3, columns)])
    assert loops(lowered.kernel.source) == expected


def test_the_logarithm_of_a_sum_reads_it_once() -> None:
    _, lowered = check(log_sum, [x(3, LOOPED)])
    assert loops(lowered.kernel.source) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_s_logsumexp_reads_it_once(dtype: torch.dtype) -> None:
    rows = x(6, LOOPED).to(dtype)
    rows[0], rows[1, 7], rows[2, 8], rows[3, 9] = float("-inf"), float("inf"), float("nan"), float("-inf")
    _, lowered = check(lambda a: a.logsumexp(-1), [rows])
    assert loops(lowered.kernel.source) == 1


def test_half_rows_and_symbolic_lengths() -> None:
    check(lambda a: softmax(a.float()).to(a.dtype), [x(3, LOOPED).bfloat16()])
    check(softmax, [x(3, 300)], [{0, 1}], [[x(5, 1031)], [x(2, 2)]])


def test_regions_fold_together() -> None:
    _, lowered = check(lambda a, b: softmax(torch.cat([a, b], 1)), [x(2, LOOPED), x(2, LOOPED)])
    assert "combine_softmax" in lowered.kernel.source


def test_infinities_and_nan_are_eager_s() -> None:
    rows = x(8, LOOPED)
    inf, nan = float("inf"), float("nan")
    rows[0, ::2] = -inf
    rows[1] = -inf
    rows[2, 7] = inf
    rows[3, 7] = nan
    rows[4, :LOOPED - 1] = -inf
    rows[5, 1:] = -inf
    rows[6] = 1e38
    rows[7, 5] = 3e38

    def sums(a: Tensor) -> tuple[Tensor, Tensor]:
        m = a.amax(-1, keepdim=True)
        return m, (a - m).exp().sum(-1)

    check(sums, [rows])


def test_another_shift_is_left_alone() -> None:
    _, lowered = check(lambda a: (a - a.amin(-1, keepdim=True) - 20).exp().sum(-1), [x(3, LOOPED)], tolerance=1e-5)
    assert loops(lowered.kernel.source) == 2
    _, lowered = check(lambda a, b: (a - b.amax(-1, keepdim=True)).exp().sum(-1), [x(3, LOOPED), x(3, LOOPED)],
                       tolerance=1e-5)
    assert loops(lowered.kernel.source) == 2


def test_eager_numerics_keep_both_folds() -> None:
    _, _, lowered = compiled(softmax, [x(3, LOOPED)], config=Config(numerics="eager"))
    assert "combine_softmax" not in lowered.kernel.source


def moments(a: Tensor) -> tuple[Tensor, Tensor]:
    wide = a.float()
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    return mean, (centred * centred).sum(-1, keepdim=True) / a.shape[-1]


def normalised(a: Tensor) -> Tensor:
    mean, variance = moments(a)
    return (a - mean) * (variance + 1e-5).rsqrt()


@pytest.mark.parametrize("columns, expected", [(LOOPED, 2), (300, 0)])
def test_a_norm_reads_a_looped_row_twice(columns: int, expected: int) -> None:
    _, lowered = check(normalised, [x(3, columns) + 7], tolerance=1e-5)
    assert loops(lowered.kernel.source) == expected


def test_moments_of_what_is_far_from_zero() -> None:
    rows = x(4, LOOPED) * 1e-3 + 100
    graph, segment, lowered = compiled(lambda a: moments(a)[1], [rows])
    got, = run(graph, lowered, segment, [rows])
    eager = moments(rows)[1]
    assert "combine_moments" in lowered.kernel.source
    exact = ((rows.double() - rows.double().mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
    assert (got - exact).abs().max() <= 4 * (eager - exact).abs().max() + 1e-7 * exact.max()


@pytest.mark.parametrize("columns, whole", [(4 * PERSISTENT_ELEMENTS, True), (LOOPED, False)])
def test_what_all_lanes_count_is_one_number(columns: int, whole: bool) -> None:
    """A weight that is divided for each element takes more instructions than all else."""
    _, lowered = check(normalised, [x(3, columns) + 7], tolerance=1e-5)
    first = re.split(r"^    for ", lowered.kernel.source, flags=re.M)[1]  # of whole steps
    assert "accumulator_1 = tl.full([], 0.0" in lowered.kernel.source
    assert "r0_mask" not in first
    assert whole == ("r0_mask" not in lowered.kernel.source)


@pytest.mark.parametrize("fn", [softmax, normalised])
def test_it_builds_for_sm_90(fn: Callable[[Tensor], Tensor]) -> None:
    _, _, lowered = compiled(fn, [x(256, LOOPED)])
    assert report(lowered.kernel).spills == 0


def test_moments_over_regions_halves_and_symbolic_lengths() -> None:
    _, lowered = check(lambda a, b: normalised(torch.cat([a, b], 1)), [x(2, LOOPED), x(2, LOOPED)], tolerance=1e-5)
    assert "combine_moments" in lowered.kernel.source
    check(lambda a: normalised(a).to(a.dtype), [x(3, LOOPED).bfloat16()])
    check(normalised, [x(3, 300)], [{0, 1}], [[x(5, 1031)], [x(2, 2)]], tolerance=1e-4)


def test_moments_of_infinities_and_nan_are_eager_s() -> None:
    rows = x(5, LOOPED)
    rows[0, 5] = float("inf")
    rows[1, 5], rows[1, 6] = float("inf"), -float("inf")
    rows[2, 7] = float("nan")
    rows[3] = -float("inf")
    check(moments, [rows], tolerance=1e-5)


def test_a_repeated_cast_is_one_value() -> None:
    """Late passes give each reader a cast of its own."""
    def fn(a: Tensor) -> Tensor:
        first, second = a.float(), torch.ops.aten._to_copy.default(a, dtype=torch.float32)
        return (second - first.amax(-1, keepdim=True)).exp().sum(-1)

    _, lowered = check(fn, [x(3, LOOPED).bfloat16()])
    assert loops(lowered.kernel.source) == 1
