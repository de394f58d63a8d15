"""Linear layers with their cross entropy: the plan that each form gets, its numbers, and what stays as it is and why.

Gradients in half types are judged against float64 with eager's own error as the yardstick.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fxfuser
from fxfuser import observe, rewrites
from fxfuser.observe import LossRecord
from fxfuser.passes import loss_plans, picks

ROWS, INNER, COLUMNS = 64, 16, 50
Loss = Callable[..., Any]


@dataclass(frozen=True)
class Inputs:
    """Hidden states [4, 16, K], weights [N, K], bias [N], labels [4, 16] of which some are -100, class weights [N]."""

    x: Tensor
    w: Tensor
    b: Tensor
    y: Tensor
    c: Tensor

    @staticmethod
    def make(dtype: torch.dtype = torch.float32) -> Inputs:
        generator = torch.Generator().manual_seed(1)
        normal = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
                  for s in ((4, 16, INNER), (COLUMNS, INNER), (COLUMNS,))]
        labels = torch.randint(COLUMNS, (4, 16), generator=generator)
        labels[0, :3] = -100
        return Inputs(*normal, labels, torch.rand(COLUMNS, generator=generator) + 0.5)

    def to(self, dtype: torch.dtype) -> Inputs:
        x, w, b = (t.detach().to(dtype).requires_grad_() for t in (self.x, self.w, self.b))
        return Inputs(x, w, b, self.y, self.c.to(dtype))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.w, self.b


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, COLUMNS)


def cross_entropy(i: Inputs, **options: Any) -> Tensor:
    return F.cross_entropy(flat(F.linear(i.x, i.w)), i.y.view(-1), **options)


def with_bias(i: Inputs) -> Tensor:
    return F.cross_entropy(flat(F.linear(i.x, i.w, i.b)), i.y.view(-1))


def module(i: Inputs) -> Tensor:
    return torch.nn.CrossEntropyLoss()(flat(F.linear(i.x, i.w)).float(), i.y.view(-1))


def log_softmax(i: Inputs) -> Tensor:
    return F.nll_loss(F.log_softmax(flat(i.x @ i.w.t()), -1), i.y.view(-1))


def logsumexp(i: Inputs) -> Tensor:
    logits = flat(F.linear(i.x, i.w))
    picked = logits.gather(1, i.y.view(-1, 1).clamp(min=0)).squeeze(1)
    return (logits.logsumexp(-1) - picked).mean()


def z_loss(i: Inputs) -> Tensor:
    logits = flat(F.linear(i.x, i.w)).float()
    return F.cross_entropy(logits, i.y.view(-1)) + 1e-2 * logits.logsumexp(-1).square().mean()


def softcap(i: Inputs) -> Tensor:
    return F.cross_entropy(5 * torch.tanh(flat(F.linear(i.x, i.w)) / 5), i.y.view(-1))


def masked_mean(i: Inputs) -> Tensor:
    rows = cross_entropy(i, reduction="none")
    mask = (i.y.view(-1) > 5).float()
    return (rows * mask).sum() / mask.sum()


def padded_columns(i: Inputs) -> Tensor:
    return F.cross_entropy(F.linear(i.x, i.w)[..., :40].reshape(-1, 40), i.y.view(-1).clamp(max=39))


def shifted_labels(i: Inputs) -> Tensor:
    labels = F.pad(i.y, (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(flat(F.linear(i.x, i.w)), labels.view(-1))


def shifted_logits(i: Inputs) -> Tensor:
    return F.cross_entropy(flat(F.linear(i.x, i.w)[:, :-1].float()), i.y[:, 1:].reshape(-1))


def autocast(i: Inputs) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return cross_entropy(i)


def tied(i: Inputs) -> Tensor:
    hidden = F.embedding(i.y.clamp(min=0), i.w) + i.x
    return F.cross_entropy(flat(F.linear(hidden, i.w)), i.y.view(-1))


def two_heads(i: Inputs) -> Tensor:
    return cross_entropy(i) + 0.5 * F.cross_entropy(flat(F.linear(torch.tanh(i.x), i.w)), i.y.view(-1))


def accumulated(i: Inputs) -> Tensor:
    return cross_entropy(i) / 8


ONE_NUMBER: dict[str, Loss] = {
    "mean": cross_entropy, "sum": lambda i: cross_entropy(i, reduction="sum"), "module": module, "bias": with_bias,
    "ignored": lambda i: F.cross_entropy(flat(F.linear(i.x, i.w)), i.y.view(-1).clamp(min=7), ignore_index=7),
    "weights": lambda i: cross_entropy(i, weight=i.c),
    "smoothed": lambda i: cross_entropy(i, label_smoothing=0.1),
    "smoothed weights": lambda i: cross_entropy(i, label_smoothing=0.1, weight=i.c),
    "log_softmax": log_softmax, "logsumexp": logsumexp, "z-loss": z_loss, "softcap": softcap, "masked": masked_mean,
    "padded columns": padded_columns, "shifted labels": shifted_labels, "autocast": autocast, "tied": tied,
    "shifted logits": shifted_logits, "accumulated": accumulated, "two heads": two_heads,
}


def gradients(fn: Loss, inputs: Inputs, tangent: float = 3.0) -> list[Tensor]:
    """The loss and the gradients of the leaves for this tangent, zeros where there is none."""
    loss = fn(inputs)
    weights = torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape) * tangent
    found = torch.autograd.grad(loss, inputs.leaves, weights, allow_unused=True)
    return [loss.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(inputs.leaves, found))]


def compiled(fn: Loss, option: str, **options: Any) -> Loss:
    return torch.compile(fn, backend="fxfuser", dynamic=False, options={"linear_cross_entropy": option, **options})


def run(
    fn: Loss, inputs: Inputs, option: str, tangent: float = 3.0, **options: Any
) -> tuple[list[Tensor], list[LossRecord]]:
    with observe.recording() as recording:
        values = gradients(compiled(fn, option, **options), inputs, tangent)
    return values, [loss for graph in recording.graphs for loss in graph.losses]


def error(got: Tensor, want: Tensor) -> float:
    scale = want.double().norm().item()
    return (got.double() - want.double()).norm().item() / scale if scale else got.double().norm().item()


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_gradients_are_computed_in_the_forward(name: str) -> None:
    inputs, fn = Inputs.make(), ONE_NUMBER[name]
    got, found = run(fn, inputs, "low_memory")
    assert [loss.plan for loss in found] == ["chunks"] * (2 if name == "two heads" else 1)
    assert {(loss.size, loss.rows) for loss in found} == {(16, 60 if name == "shifted logits" else ROWS)}
    want = gradients(fn, inputs.to(torch.float64)) if name != "autocast" else gradients(fn, inputs)
    for a, b in zip(got, want):
        assert error(a, b) < (2e-2 if name == "autocast" else 2e-6)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 columns, which need less than pieces of 16 rows."""
    monkeypatch.setattr(loss_plans, "BLOCK", 1)
    monkeypatch.setattr(loss_plans, "BLOCKS", 4)


@pytest.mark.parametrize("name", ONE_NUMBER)
def test_blocks_of_columns(name: str, small_blocks: None) -> None:
    inputs, fn = Inputs.make(), ONE_NUMBER[name]
    got, found = run(fn, inputs, "low_memory")
    plan = "chunks" if name == "padded columns" else "columns"
    assert [loss.plan for loss in found] == [plan] * (2 if name == "two heads" else 1)
    want = gradients(fn, inputs.to(torch.float64)) if name != "autocast" else gradients(fn, inputs)
    for a, b in zip(got, want):
        assert error(a, b) < (2e-2 if name == "autocast" else 2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_of_columns_are_as_good_as_eager(dtype: torch.dtype, small_blocks: None) -> None:
    inputs = Inputs.make(dtype)
    got, found = run(module, inputs, "low_memory")
    assert [(loss.plan, loss.size, loss.rows) for loss in found] == [("columns", 8, COLUMNS)]
    for a, e, b in zip(got, gradients(module, inputs), gradients(module, inputs.to(torch.float64))):
        assert error(a, b) <= 1.1 * error(e, b) + 1e-6


def test_blocks_compare_labels_as_int32(small_blocks: None) -> None:
    """A label that is no column's, though its last 32 bits are, chooses none."""
    def chosen(i: Inputs) -> Tensor:
        logits, far = flat(F.linear(i.x, i.w)), i.y.view(-1).clamp(min=0)
        far = torch.where(far == 3, far + 2 ** 32, far)
        one_hot = torch.arange(COLUMNS)[None] == far[:, None]
        return (torch.logsumexp(logits, -1) - torch.where(one_hot, logits, 0.0).sum(-1)).mean()

    for fn in (cross_entropy, chosen):
        inputs = Inputs.make()
        with observe.recording() as recording:
            got = gradients(compiled(fn, "low_memory"), inputs)
        for a, b in zip(got, gradients(fn, inputs.to(torch.float64))):
            assert error(a, b) < 2e-6
        backward = next(g.passes[-1].after for g in recording.graphs if g.graph.kind == "backward")
        assert "dtype: torch.int32" in backward and [p.plan for g in recording.graphs for p in g.losses] == ["columns"]


@pytest.mark.parametrize("name", ["mean", "smoothed weights", "z-loss", "softcap", "bias"])
def test_kernels_of_blocks_compute_the_same(name: str, small_blocks: None) -> None:
    inputs, fn = Inputs.make(), ONE_NUMBER[name]
    got, found = run(fn, inputs, "low_memory", executor="interpret")
    assert [loss.plan for loss in found] == ["columns"]
    for a, b in zip(got, gradients(fn, inputs.to(torch.float64))):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize("name", ["mean", "smoothed weights", "z-loss", "softcap", "bias", "masked"])
def test_kernels_compute_the_same(name: str) -> None:
    inputs, fn = Inputs.make(), ONE_NUMBER[name]
    got, found = run(fn, inputs, "low_memory", executor="interpret")
    assert [loss.plan for loss in found] == ["chunks"]
    for a, b in zip(got, gradients(fn, inputs.to(torch.float64))):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize("name", ["mean", "weights", "smoothed", "softcap"])
def test_tangents_of_rows_compute_the_logits_again(name: str) -> None:
    fns: dict[str, Loss] = {
        "mean": lambda i: cross_entropy(i, reduction="none"),
        "weights": lambda i: cross_entropy(i, reduction="none", weight=i.c),
        "smoothed": lambda i: cross_entropy(i, reduction="none", label_smoothing=0.1),
        "softcap": lambda i: F.cross_entropy(5 * torch.tanh(flat(F.linear(i.x, i.w)) / 5), i.y.view(-1),
                                             reduction="none")}
    inputs = Inputs.make()
    with observe.recording() as recording:
        got = gradients(compiled(fns[name], "low_memory"), inputs)
    assert [loss.plan for graph in recording.graphs for loss in graph.losses] == ["recompute"]
    forward = next(g for g in recording.graphs if g.name.endswith("forward"))
    saved = forward.plan.rpartition("return (")[2]
    assert not any(f"mm_default_{k}" in saved or "exp" in saved for k in range(4)), saved
    for a, b in zip(got, gradients(fns[name], inputs.to(torch.float64))):
        assert error(a, b) < 2e-6


@pytest.mark.parametrize("option", ["off", "fast", "low_memory", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tangent", "ratio"), [(2.0, 1.1), (3.0, 1.25)])  # 3 * gradient rounds once more, 2 * does not
def test_half_types_are_as_good_as_eager(option: str, dtype: torch.dtype, tangent: float, ratio: float) -> None:
    inputs = Inputs.make(dtype)
    got, _ = run(module, inputs, option, tangent)
    eager, exact = gradients(module, inputs, tangent), gradients(module, inputs.to(torch.float64), tangent)
    for a, e, b in zip(got, eager, exact):
        assert error(a, b) <= ratio * error(e, b) + 1e-6


def test_small_float16_gradients_do_not_underflow() -> None:
    """A mean over many rows makes each gradient tiny; only the tangent, a loss scale, makes it large enough."""
    inputs = Inputs.make(torch.float16)
    fn: Loss = lambda i: module(i) * 1e-4  # noqa: E731
    with observe.recording():
        loss = compiled(fn, "low_memory")(inputs)
        got = torch.autograd.grad(loss, (inputs.x, inputs.w), torch.tensor(65536.0))
    exact = inputs.to(torch.float64)
    want = torch.autograd.grad(fn(exact), (exact.x, exact.w), torch.tensor(65536.0))
    for a, b in zip(got, want):
        assert error(a, b) < 2e-3


def test_all_labels_ignored_is_nan_as_in_eager() -> None:
    inputs = Inputs.make()
    inputs.y.fill_(-100)
    got, found = run(cross_entropy, inputs, "low_memory")
    assert found[0].plan == "chunks"
    for a, b in zip(got, gradients(cross_entropy, inputs)):
        torch.testing.assert_close(a, b, equal_nan=True)
    assert got[0].isnan()


def test_a_label_out_of_range_is_refused() -> None:
    inputs = Inputs.make()
    inputs.y[1, 1] = COLUMNS
    with pytest.raises(Exception, match="out of bounds|out of range"):
        run(cross_entropy, inputs, "low_memory")


def test_a_second_backward() -> None:
    inputs = Inputs.make()
    loss = compiled(cross_entropy, "low_memory", executor="interpret")(inputs)
    first = torch.autograd.grad(loss, (inputs.x, inputs.w), torch.tensor(2.0), retain_graph=True)
    second = torch.autograd.grad(loss, (inputs.x, inputs.w), torch.tensor(4.0))
    for a, b in zip(first, second):
        torch.testing.assert_close(2 * a, b)


def test_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_plans.PIECES, "low_memory", ROWS // 2 * COLUMNS * 4)
    inputs = Inputs.make()
    with torch.no_grad(), observe.recording() as recording:
        got = compiled(cross_entropy, "low_memory")(inputs)
    assert [(loss.plan, loss.size) for graph in recording.graphs for loss in graph.losses] == [("chunks", 32)]
    assert error(got, cross_entropy(inputs.to(torch.float64))) < 1e-6


PICKED_APART = ("mean", "ignored", "bias", "softcap", "weights", "smoothed", "logsumexp", "autocast")


@pytest.mark.parametrize("executor", ["auto", "interpret"])
@pytest.mark.parametrize("name", PICKED_APART)
def test_a_label_s_logit_apart_from_the_product(name: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in two: the product's kernel compares no column with a label."""
    monkeypatch.setitem(loss_plans.PIECES, "low_memory", ROWS // 2 * COLUMNS * 4)
    monkeypatch.setattr(picks, "APART", 3)
    inputs, fn = Inputs.make(), ONE_NUMBER[name]
    for option, pieces in (("fast", 1), ("low_memory", 1 if name == "autocast" else 2)):
        torch.compiler.reset()
        with torch.no_grad(), observe.recording() as recording:
            got = compiled(fn, option, executor=executor)(inputs)
        want = fn(inputs.to(torch.float64) if name != "autocast" else inputs)
        assert error(got, want) < (2e-2 if name == "autocast" else 1e-6)
        after = recording.graphs[0].passes[-1].after
        assert after.count("aten.index_select.default") == pieces and "aten.eq.Tensor" not in after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_logit_apart_is_as_good_as_eager(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks, "APART", 3)
    inputs = Inputs.make(dtype)

    def rows(i: Inputs) -> Tensor:
        return F.cross_entropy(flat(F.linear(i.x, i.w)).float(), i.y.view(-1), reduction="none")

    with torch.no_grad():
        got, eager, exact = (f(i) for f, i in (
            (compiled(rows, "fast", executor="interpret"), inputs), (rows, inputs), (rows, inputs.to(torch.float64))))
    assert error(got, exact) <= 1.1 * error(eager, exact) + 1e-6


@pytest.mark.parametrize("gemm", ["fused", "library"])
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_logit_apart_is_the_number_that_its_row_sums(
    dtype: torch.dtype, pieces: int, gemm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where labels dominate their rows a loss is a difference of nearly equal numbers."""
    monkeypatch.setitem(loss_plans.PIECES, "low_memory", ROWS // 2 * COLUMNS * 4)
    monkeypatch.setattr(picks, "APART", 3)
    inputs = Inputs.make(dtype)
    labelled = (1.7 * inputs.w.detach().float()[inputs.y.clamp(0)]).to(dtype)
    inputs = Inputs(labelled, *inputs.leaves[1:], inputs.y, inputs.c)

    def rows(i: Inputs) -> Tensor:
        return F.cross_entropy(flat(F.linear(i.x, i.w)).float(), i.y.view(-1), reduction="none")

    plan = "fast" if pieces == 1 else "low_memory"
    with torch.no_grad():
        got, eager, exact = (f(i) for f, i in (
            (compiled(rows, plan, executor="interpret", gemm=gemm), inputs), (rows, inputs),
            (rows, inputs.to(torch.float64))))
    assert error(got, exact) <= 1.1 * error(eager, exact) + 1e-6 and got.min() >= -1e-5


def biased_module(i: Inputs) -> Tensor:
    return torch.nn.CrossEntropyLoss()(flat(F.linear(i.x, i.w, i.b)).float(), i.y.view(-1))


def read_twice(i: Inputs) -> Tensor:
    """The second time behind the label's logit."""
    logits = F.linear(i.x, i.w)
    rows = F.cross_entropy(flat(logits).float(), i.y.view(-1), reduction="none")
    return (rows + torch.where(rows > 0.5, logits.float().logsumexp(-1).view(-1), rows)).mean()


def read_as_a_half_too(i: Inputs) -> Tensor:
    logits = flat(F.linear(i.x, i.w))
    rows = F.cross_entropy(logits.float(), i.y.view(-1), reduction="none")
    return (rows + torch.where(rows > 0.5, torch.tanh(logits).float().logsumexp(-1), rows)).mean()


def capped(i: Inputs) -> Tensor:
    """The product is read as a half, and rounded then."""
    return F.cross_entropy(torch.tanh(flat(F.linear(i.x, i.w))).float(), i.y.view(-1))


@pytest.mark.parametrize("fn, options, wide", [
    (module, {}, True), (biased_module, {}, True), (read_twice, {}, True),
    (module, {"gemm": "fused"}, True), (capped, {}, False), (read_as_a_half_too, {}, False),
    (module, {"gemm": "library"}, False), (module, {"numerics": "eager"}, False)])
def test_a_half_product_is_float32_where_kernels_of_ours_read_it_as_such(
    fn: Loss, options: dict[str, str], wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one product in any case, and one for each of two pieces."""
    monkeypatch.setitem(loss_plans.PIECES, "low_memory", ROWS // 2 * COLUMNS * 2)
    monkeypatch.setattr(picks, "APART", 3)
    for plan, pieces in (("fast", 1), ("low_memory", 2)):
        torch.compiler.reset()
        with torch.no_grad(), observe.recording() as recording:
            got = compiled(fn, plan, **options)(Inputs.make(torch.bfloat16))
        after = recording.graphs[0].passes[-1].after
        products = [after.count(f"torch.ops.{op}") for op in ("fxfuser.wide_product", "aten.mm.", "aten.addmm.")]
        assert sum(products) == pieces and (products[0] == pieces) is wide
        assert after.count("aten.index_select.default") == pieces and ("torch.bfloat16}" in after) is not wide
        exact = fn(Inputs.make(torch.bfloat16).to(torch.float64))
        assert error(got, exact) <= 1.1 * error(fn(Inputs.make(torch.bfloat16)), exact) + 1e-3


def test_a_logit_is_at_hand_where_products_round_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks, "APART", 3)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.compiler.reset()
            torch.set_float32_matmul_precision(precision)
            with torch.no_grad(), observe.recording() as recording:
                compiled(cross_entropy, "fast")(Inputs.make())
            assert ("aten.index_select" in recording.graphs[0].passes[-1].after) is (precision == "highest")
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_logit_is_picked_where_it_is_at_hand_or_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 50 columns for 16 inner elements; logits that a gradient needs; weights whose columns lie apart."""
    def turned(i: Inputs) -> Tensor:
        return F.cross_entropy(flat(i.x @ i.w.t().contiguous()), i.y.view(-1))

    def indexed(fn: Loss, grad: bool) -> bool:
        inputs = Inputs.make()
        torch.compiler.reset()
        with torch.set_grad_enabled(grad), observe.recording() as recording:
            compiled(fn, "fast")(inputs)
        return "aten.index_select" in recording.graphs[0].passes[-1].after

    assert not indexed(cross_entropy, False)
    monkeypatch.setattr(picks, "APART", 3)
    assert indexed(cross_entropy, False)
    assert not indexed(cross_entropy, True) and not indexed(turned, False)


@pytest.mark.parametrize("label", [COLUMNS, -1])
def test_a_label_out_of_range_is_refused_apart_too(label: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks, "APART", 3)
    inputs = Inputs.make()
    inputs.y[1, 1] = label
    with torch.no_grad(), pytest.raises(Exception, match="out of bounds|out of range"):
        compiled(cross_entropy, "fast")(inputs)


def test_dump_names_the_plan_and_its_bytes() -> None:
    with observe.recording() as recording:
        gradients(compiled(cross_entropy, "low_memory"), Inputs.make())
    text = rewrites.text(recording.graphs[0])
    assert "16 of 64 rows at a time" in text and f"logits of a piece: {16 * COLUMNS * 4 / 1024:.1f} KB" in text


def test_frozen_weights() -> None:
    inputs = Inputs.make()
    inputs.w.requires_grad_(False)
    with observe.recording() as recording:
        loss = compiled(cross_entropy, "low_memory")(inputs)
        (got,) = torch.autograd.grad(loss, (inputs.x,))
    assert [loss.plan for graph in recording.graphs for loss in graph.losses] == ["chunks"]
    exact = inputs.to(torch.float64)
    assert error(got, torch.autograd.grad(cross_entropy(exact), (exact.x,))[0]) < 2e-6


# ---------------------------------------------------------------- what stays


def probabilities(i: Inputs) -> Tensor:
    return F.cross_entropy(flat(F.linear(i.x, i.w)), torch.softmax(i.c.expand(ROWS, COLUMNS), -1))


def returned(i: Inputs) -> Tensor:
    logits = F.linear(i.x, i.w)
    return torch.cat([F.cross_entropy(flat(logits), i.y.view(-1)).view(1), logits.view(-1)])


def normalised(i: Inputs) -> Tensor:
    """A row's gradient depends on the losses of all rows."""
    rows = cross_entropy(i, reduction="none")
    return (rows * rows.sum()).sum()


@pytest.mark.parametrize(("fn", "reason"), [
    (probabilities, "the targets are probabilities"),
    (returned, "reads the logits or their gradient as a whole"),
])
def test_what_stays_whole_and_why(fn: Loss, reason: str) -> None:
    inputs = Inputs.make()
    got, found = run(fn, inputs, "low_memory")
    assert [loss.plan for loss in found] == ["whole"]
    assert reason in found[0].reason
    for a, b in zip(got, gradients(fn, inputs.to(torch.float64))):
        assert error(a, b) < 2e-6


def test_gradients_that_need_all_losses_first_are_computed_in_the_backward() -> None:
    inputs = Inputs.make()
    got, found = run(normalised, inputs, "low_memory")
    assert [loss.plan for loss in found] == ["recompute"]
    for a, b in zip(got, gradients(normalised, inputs.to(torch.float64))):
        assert error(a, b) < 2e-6


def test_explain_says_what_became_of_a_loss() -> None:
    inputs = Inputs.make()
    found = fxfuser.explain(lambda x, w: F.cross_entropy(flat(F.linear(x, w)), inputs.y.view(-1)), inputs.x, inputs.w)
    assert [loss.plan for loss in found.losses] == ["whole"]
    assert str(found).startswith("linear + cross entropy at ") and "logits: 12.5 KB" in str(found)


def test_returned_logits_stay() -> None:
    inputs = Inputs.make()

    def fn(i: Inputs) -> tuple[Tensor, Tensor]:
        logits = F.linear(i.x, i.w)
        return logits, F.cross_entropy(flat(logits), i.y.view(-1))

    with observe.recording() as recording:
        logits, loss = compiled(fn, "low_memory")(inputs)
    assert [loss.plan for graph in recording.graphs for loss in graph.losses] == ["whole"]
    record = recording.graphs[0].losses[0]
    assert "are returned" in record.reason and record.returned == 4 * ROWS * COLUMNS
    assert "12.5 KB, and as much again for their tangent" in rewrites.text(recording.graphs[0])
    torch.testing.assert_close(logits, fn(inputs)[0])
    torch.testing.assert_close(loss, fn(inputs)[1])


@pytest.mark.parametrize("option", ["off", "fast", "auto"])
def test_options_that_leave_small_logits_whole(option: str) -> None:
    got, found = run(cross_entropy, inputs := Inputs.make(), option)
    assert [loss.plan for loss in found] == ([] if option == "off" else ["whole"])
    for a, b in zip(got, gradients(cross_entropy, inputs.to(torch.float64))):
        assert error(a, b) < 2e-6


def test_a_softmax_that_is_no_loss_is_left_alone() -> None:
    def attention_like(i: Inputs) -> Tensor:
        return torch.softmax(flat(F.linear(i.x, i.w)), -1) @ i.w

    for fn in (attention_like, lambda i: torch.softmax(flat(F.linear(i.x, i.w)), -1)):
        _, found = run(lambda i, fn=fn: fn(i).square().sum(), Inputs.make(), "low_memory")
        assert not found


def test_symbolic_rows_stay_whole() -> None:
    inputs = Inputs.make()
    with observe.recording() as recording:
        fn = torch.compile(cross_entropy, backend="fxfuser", dynamic=True,
                           options={"linear_cross_entropy": "low_memory"})
        got = gradients(fn, inputs)
    assert not [loss for graph in recording.graphs for loss in graph.losses if loss.plan != "whole"]
    for a, b in zip(got, gradients(cross_entropy, inputs)):
        torch.testing.assert_close(a, b)
