"""Linear layers whose loss keeps the logits of some columns: numbers of each option, what qualifies, what it needs.

Logits of 12 of 50 columns lie in the memory of the weights' gradient; under `auto` those of others have their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxfuser
from fxfuser.passes import loss_plans
from fxfuser.passes.kept_logits import overwritten_rows
from fxfuser.passes.loss_plans import Head, choose
from tests.passes import test_linear_cross_entropy as forms
from tests.passes.test_linear_cross_entropy import COLUMNS, ONE_NUMBER, Inputs, Loss, cross_entropy, error, flat
from tests.runtime.test_rooms import poisoned  # noqa: F401  what is read before it is written, or after, is NaN

TANGENTS_OF_ROWS: dict[str, Loss] = {
    "none": lambda i: cross_entropy(i, reduction="none"),
    "none, weights": lambda i: cross_entropy(i, reduction="none", weight=i.c),
    "none, bias": lambda i: F.cross_entropy(flat(F.linear(i.x, i.w, i.b)), i.y.view(-1), reduction="none"),
    "none, softcap": lambda i: F.cross_entropy(5 * torch.tanh(flat(F.linear(i.x, i.w)) / 5), i.y.view(-1),
                                               reduction="none")}
LOSSES = {**ONE_NUMBER, **TANGENTS_OF_ROWS}
NOT_KEPT = {"smoothed", "smoothed weights", "padded columns"}
INSIDE, BESIDE = 12, 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 columns, and no plan that needs fewer bytes than those with blocks."""
    for name, value in {"BLOCK": 1, "BLOCKS": 4, "FIRST": 2, "WHOLE_TILES": 2, "LEAST": 0, "SMALL": 0, "AGAIN": 1,
                        "FEWEST": 1}.items():
        monkeypatch.setattr(loss_plans, name, value)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` has memory for the logits of BESIDE columns."""
    pieces, original = loss_plans._pieces, loss_plans._mixed
    monkeypatch.setattr(loss_plans, "_pieces", lambda head, option: replace(pieces(head, option), kind="recompute"))

    def mixed(head: Head, budget: int) -> loss_plans.LossPlan | None:
        return original(head, max(head.sums + BESIDE * head.rows * head.dtype.itemsize, head.sums + head.rounded))

    monkeypatch.setattr(loss_plans, "_mixed", mixed)


def judged(fn: Loss, inputs: Inputs, option: str, plan: str, limit: float = 2e-6, **options: Any) -> None:
    """The form gets this plan, and numbers like those of float64."""
    got, found = forms.run(fn, inputs, option, **options)
    assert {loss.plan for loss in found} == {plan}
    for a, b in zip(got, forms.gradients(fn, inputs.to(torch.float64))):
        assert error(a, b) < limit


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - NOT_KEPT - {"autocast"}))
def test_numbers_of_each_option(name: str, beside: None) -> None:
    judged(LOSSES[name], Inputs.make(), "auto", "mixed")


@pytest.mark.parametrize("name", ["mean", "none, bias", "two heads"])
def test_logits_in_the_memory_of_the_gradient_alone(name: str) -> None:
    judged(LOSSES[name], Inputs.make(), "low_memory", "mixed")


@pytest.mark.parametrize("name", ["mean", "none, bias", "z-loss"])
def test_kernels_compute_the_same(name: str, beside: None) -> None:
    judged(LOSSES[name], Inputs.make(), "auto", "mixed", executor="interpret", gemm="fused")


@pytest.mark.parametrize("name", sorted(NOT_KEPT))
def test_forms_that_need_more_than_maxima_and_sums_of_exponentials(name: str) -> None:
    judged(LOSSES[name], Inputs.make(), "low_memory", "chunks" if name == "padded columns" else "columns")


def test_the_library_s_products_keep_none() -> None:
    """It would write all logits first."""
    judged(cross_entropy, Inputs.make(), "low_memory", "columns", gemm="library")


@pytest.mark.parametrize("option", ["auto", "low_memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_good_as_eager(dtype: torch.dtype, option: str, beside: None) -> None:
    """Under low_memory sums over columns are rounded in parts of the rows."""
    inputs = Inputs.make(dtype)
    got, found = forms.run(forms.module, inputs, option, executor="interpret")
    assert [loss.plan for loss in found] == ["mixed"]
    eager, exact = forms.gradients(forms.module, inputs), forms.gradients(forms.module, inputs.to(torch.float64))
    for a, e, b in zip(got[1:], eager[1:], exact[1:]):
        assert error(a, b) <= 1.1 * error(e, b) + 1e-6
    assert error(got[0], exact[0]) <= 2 * error(eager[0], exact[0]) + 1e-6  # a mean of few roundings


def test_infinite_logits_and_ignored_labels(beside: None) -> None:
    inputs = Inputs.make()
    inputs.y.fill_(-100)
    got, _ = forms.run(cross_entropy, inputs, "auto")
    for a, b in zip(got, forms.gradients(cross_entropy, inputs)):
        torch.testing.assert_close(a, b, equal_nan=True)
    masked: Loss = lambda i: F.cross_entropy(  # noqa: E731
        flat(F.linear(i.x, i.w)).masked_fill(torch.arange(COLUMNS) < 30, -torch.inf), i.y.view(-1).clamp(min=30))
    got, found = forms.run(masked, Inputs.make(), "auto")
    assert [loss.plan for loss in found] == ["mixed"]
    for a, b in zip(got, forms.gradients(masked, Inputs.make())):
        torch.testing.assert_close(a, b)


def test_a_label_out_of_range_is_refused(beside: None) -> None:
    inputs = Inputs.make()
    inputs.y[1, 1] = COLUMNS
    with pytest.raises(Exception, match="out of bounds|out of range"):
        forms.run(cross_entropy, inputs, "auto")


def test_a_second_backward_finds_the_logits(beside: None) -> None:
    inputs = Inputs.make()
    loss = forms.compiled(cross_entropy, "auto", executor="interpret")(inputs)
    first = torch.autograd.grad(loss, (inputs.x, inputs.w), torch.tensor(2.0), retain_graph=True)
    second = torch.autograd.grad(loss, (inputs.x, inputs.w), torch.tensor(4.0))
    again = torch.autograd.grad(forms.compiled(cross_entropy, "auto", executor="interpret")(inputs),
                                (inputs.x, inputs.w), torch.tensor(4.0))
    for a, b, c in zip(first, second, again):
        torch.testing.assert_close(2 * a, b)
        assert torch.equal(b, c)  # bit for bit


def test_it_is_told(beside: None) -> None:
    with fxfuser.observe.recording() as recording:
        forms.compiled(cross_entropy, "auto")(Inputs.make()).backward()
    text = fxfuser.rewrites.text(recording.graphs[0])
    assert f"the logits of {INSIDE + BESIDE} of {COLUMNS} columns are kept" in text
    assert "logits in memory of their own: 2.5 KB" in text and "gradients and their sums" in text


@pytest.mark.parametrize("rows, columns, shape", [(64, 12, (50, 16)), (8, 40, (50, 16)), (16, 32, (50, 16))])
def test_rows_are_written_over_what_has_been_read(rows: int, columns: int, shape: tuple[int, int]) -> None:
    written, first = 0, shape[0] * shape[1] - columns * rows
    for start, stop in overwritten_rows(columns, rows, shape):
        assert start == written < stop and stop * shape[1] <= first + start * rows
        written = stop
    assert written == columns


def plan(rows: int, inner: int, columns: int, option: str) -> loss_plans.LossPlan:
    return choose(Head(rows, inner, columns, torch.bfloat16, True, columns_apart=True, obstacle=""), option)


def test_plans_of_large_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mib = 1 << 20
    auto = plan(8192, 4096, 32000, "auto")
    assert auto.kind == "mixed" and auto.bytes <= 450 * mib and auto.kept >= 0.6 * 32000
    assert auto.size <= auto.beside  # a block takes the place of logits that are no longer needed
    large = plan(8192, 4096, 128256, "auto")
    assert large.kind == "mixed" and large.bytes <= 1800 * mib and large.kept >= 0.75 * 128256
    sparing = plan(8192, 4096, 32000, "low_memory")
    assert sparing.kind == "mixed" and sparing.bytes <= 400 * mib and sparing.parts > 1
    assert plan(12288, 768, 50304, "auto").kind == "chunks"
    assert plan(12288, 768, 50304, "low_memory").kind == "columns"  # a sixteenth of the logits would fit
    assert plan(8192, 4096, 32000, "fast").kind == "whole"
