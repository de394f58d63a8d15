"""Loops over whole steps without masks, and behind them the rest."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Callable

import pytest
import torch
from torch import Tensor

from fxfuser.lowering.kernel import Lowered, Tile
from fxfuser.runtime.build import report
from fxfuser.runtime.in_place import element_by_element

from .harness import compiled, run

STEP = 1024  # of the tiles below, a rest of a quarter
LENGTHS = (17 * STEP - 1, 17 * STEP, 17 * STEP + 1, 17 * STEP + STEP // 4, 17389, 17 * STEP + 5 * STEP // 8)
PEELED = "range(R0WHOLE, "


def softmax(x: Tensor) -> Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def logsumexp(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    return (x - top).exp().sum(-1).log() + top.squeeze(-1)


def total(x: Tensor) -> Tensor:
    return x.sum(-1)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def centred(x: Tensor) -> Tensor:
    x = x.float() if x.dtype is torch.bfloat16 else x
    return x - x.mean(-1, keepdim=True)


def var(x: Tensor) -> Tensor:
    distance = centred(x)
    return (distance * distance).sum(-1) / x.shape[-1]


def layer_norm(x: Tensor) -> Tensor:
    distance = centred(x)
    return distance * ((distance * distance).sum(-1, keepdim=True) / x.shape[-1] + 1e-5).rsqrt()


def chosen(x: Tensor, label: Tensor) -> Tensor:
    """x: [rows, n]; label: [rows]; how far each row's own logit lies below logsumexp."""
    top = x.amax(-1, keepdim=True)
    here = torch.arange(x.shape[1], device=x.device)[None] == label[:, None]
    return (x - top).exp().sum(-1).log() + top.squeeze(-1) - torch.where(here, x, 0.0).sum(-1)


def results(fn: Callable[..., Any], *args: Tensor, step: int = 0, dynamic: bool = False) -> tuple[Tensor, Lowered]:
    graph, segment, lowered = compiled(fn, args, [{1}] if dynamic else ())
    if step:
        blocks = {**dict(lowered.kernel.tile.blocks), "R0BLOCK": step}
        lowered = replace(lowered, kernel=replace(lowered.kernel, tile=Tile(tuple(blocks.items()), 1)))
    first, again = (run(graph, lowered, segment, args) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) for a, b in zip(first, again))
    return first[0], lowered


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 3e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("fn", [softmax, logsumexp, total, argmax, var, layer_norm])
def test_rows_of_every_length(fn: Callable[..., Any], length: int, dtype: torch.dtype, tolerance: float) -> None:
    """Whole steps and rests of no, one, some and nearly all lanes, by short steps and by the default's."""
    x = (torch.randn(2, length) * 3 + 1).to(dtype)
    x[0, [5, length - 1]] = 40.0  # the first of two that are equal, one in each part
    x[1, length - 1] = 50.0
    wanted = fn(x) if fn is argmax else fn(x.double())
    for step in (0, STEP):
        result, _ = results(fn, x, step=step)
        if fn is argmax:
            assert torch.equal(result, wanted)
        else:
            torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * 1e-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [softmax, logsumexp, var, layer_norm])
def test_the_rest_keeps_infinities_and_nans(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    x = torch.randn(5, 17389).to(dtype)
    x[0] = float("-inf")
    x[1, 17388] = float("inf")
    x[2, 17388] = float("nan")
    x[3, 17 * STEP:] = float("-inf")
    x[4, :17 * STEP] = float("-inf")
    rows = x[:3] if fn in (var, layer_norm) else x  # one infinity is as good as two there
    result, lowered = results(fn, rows, step=STEP)
    assert PEELED in lowered.kernel.source
    torch.testing.assert_close(result.double(), fn(rows.double()), rtol=2e-2, atol=1e-2, equal_nan=True)


def test_whole_steps_have_no_masks() -> None:
    _, lowered = results(softmax, torch.randn(2, 17389))
    loops = lowered.kernel.source.split("    for ")[1:]
    assert [PEELED in loop for loop in loops] == [False, True, False, True]
    assert ["r0_mask" in loop for loop in loops] == [False, True, False, True]
    assert ["R0REST)" in loop for loop in loops] == [False, True, False, True]


def test_whole_steps_count_in_one_number() -> None:
    """The rest, some of whose lanes do not exist, counts lane by lane, and is no shorter than its accumulators."""
    _, lowered = results(var, torch.randn(2, 17389))
    source = lowered.kernel.source
    assert "tl.full([], 0.0, tl.float32)" in source
    first, rest = re.findall(r"for r0_start in range\((.*)\):", source)
    assert (first, rest) == ("0, R0WHOLE, R0BLOCK", "R0WHOLE, 17389, R0BLOCK")
    assert source.index(rest) > source.index("count_0 = tl.broadcast_to(")


def test_what_is_not_peeled() -> None:
    """Unknown lengths, lengths that steps divide, folds lane by lane, and last steps that waste little."""
    for fn, x, dynamic in ((softmax, torch.randn(2, 17389), True), (softmax, torch.randn(2, 1 << 15), False),
                           (total, torch.randn(2, 17389), False), (softmax, torch.randn(2, 5 * 4096 - 64), False)):
        assert "WHOLE" not in results(fn, x, dynamic=dynamic)[1].kernel.source


@pytest.mark.parametrize("step", [0, STEP])
def test_a_lane_is_found_in_the_rest(step: int) -> None:
    """Where positions are compared with a label, lanes are counted from where a step begins."""
    x, label = torch.randn(4, 17389), torch.tensor([0, 17 * STEP - 1, 17 * STEP, 17388])
    result, lowered = results(chosen, x, label, step=step)
    assert PEELED in lowered.kernel.source
    torch.testing.assert_close(result, chosen(x, label), rtol=1e-5, atol=1e-4)


def test_rows_of_a_vocabulary_fit_their_registers() -> None:
    graph, segment, lowered = compiled(softmax, [torch.empty_strided((10673, 50304), (50304, 1), dtype=torch.bfloat16)])
    assert lowered.kernel.tile == Tile((("XBLOCK", 1), ("R0BLOCK", 16384)), 16)  # 27 MB of rows under way
    found = report(lowered.kernel)
    assert found.spills == 0 and found.registers <= 64
    # lanes of one group are registers of one thread
    assert all(dict(t.blocks)["R0BLOCK"] >= 32 * 32 * t.num_warps for t in lowered.kernel.candidates)


def test_a_result_may_take_the_memory_of_its_operand() -> None:
    """The rest writes behind what the whole steps have written; a loop that began elsewhere would read that again."""
    kernel = results(softmax, torch.randn(2, 17389))[1].kernel
    assert PEELED in kernel.source
    assert element_by_element(kernel, 0, 0)
    again = kernel.source.replace(PEELED, "range(0, ")
    assert not element_by_element(replace(kernel, source=again), 0, 0)
    loops = kernel.source.split("    for ")
    repeated = "    for ".join([*loops[:4], loops[3], *loops[4:]])  # all of the whole steps twice
    assert not element_by_element(replace(kernel, source=repeated), 0, 0)
