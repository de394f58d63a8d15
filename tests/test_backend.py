"""The whole spine on the CPU: reference executor and Triton's interpreter."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.scan import scan

from fxfuser import backend, capture, observe
from fxfuser.errors import InvalidOption, UnknownOption
from fxfuser.runtime import in_place

EXECUTORS = ("reference", "interpret")


def compiled(function, executor: str = "reference", **options):
    return torch.compile(function, backend="fxfuser", options={"executor": executor, **options})


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.LayerNorm(10), torch.nn.Linear(10, 4),
                               torch.nn.Softmax(-1))


def test_the_spine_fits_on_one_screen() -> None:
    assert len(inspect.getsource(backend).splitlines()) <= 60


@pytest.mark.parametrize("executor", EXECUTORS)
def test_training_step(executor: str) -> None:
    net, x = model(), torch.randn(5, 6)
    want = torch.autograd.grad(net(x).square().sum(), net.parameters())
    got = torch.autograd.grad(compiled(net, executor)(x).square().sum(), net.parameters())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sizes_vary(executor: str) -> None:
    net = model()
    call = torch.compile(net, backend="fxfuser", dynamic=True, options={"executor": executor})
    for rows in (3, 8, 1, 0, 5):
        x = torch.randn(rows, 6)
        torch.testing.assert_close(call(x), net(x))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k1_product_joins_its_reader(executor: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(9, 1, dtype=dtype), torch.randn(1, 11, dtype=dtype)
    with observe.recording() as records:
        got = compiled(lambda a, b: torch.cos(a @ b), executor)(a, b)
    assert len(records.graphs[0].segmentation.segments) == 1 and len(records.graphs[0].kernels) == 1
    torch.testing.assert_close(got, torch.cos(a @ b), rtol=2e-2, atol=2e-2)


def test_records_of_every_stage() -> None:
    with observe.recording() as records:
        compiled(lambda x: (x * 2).sum(-1).sort())(torch.randn(4, 5))
    graph, = records.graphs
    assert graph.passes and graph.segmentation is not None and graph.plan.startswith('"""Plan of region')
    assert len(graph.kernels) == 1 and "@triton.jit" in graph.kernels[0].source
    extern, = graph.externs
    assert extern.op == "aten.sort.default" and extern.reason and "test_backend.py" in extern.location


def test_equal_layers_share_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = []
    lower = backend.lower_segments.__globals__["lower_kernel"]
    monkeypatch.setitem(backend.lower_segments.__globals__, "lower_kernel",
                        lambda *args: lowered.append(args[0]) or lower(*args))
    weights = [torch.randn(8, 8) for _ in range(6)]

    def function(x):
        for w in weights:
            x = torch.tanh(x @ w) * 2
        return x

    x = torch.randn(4, 8)
    with observe.recording() as records:
        torch.testing.assert_close(compiled(function, "interpret")(x), function(x))
    whole = [k.name for k in records.graphs[0].kernels if "_" not in k.segment]
    parts = [k.name for k in records.graphs[0].kernels if "_" in k.segment]
    assert len(whole) == len(parts) == 6 and len(set(whole)) == len(set(parts)) == len(lowered) == 1


def test_mode_and_options_are_checked() -> None:
    x = torch.randn(3)
    with pytest.raises(Exception, match="max-autotune-no-cudagraphs") as error:
        torch.compile(lambda x: x + 1, backend="fxfuser", mode="fastest")(x)
    assert isinstance(error.value, UnknownOption) or isinstance(error.value.inner_exception, UnknownOption)
    with pytest.raises(Exception, match="executor") as error:
        torch.compile(lambda x: x + 1, backend="fxfuser", options={"executer": "triton"})(x)
    assert isinstance(error.value, UnknownOption) or isinstance(error.value.inner_exception, UnknownOption)
    with pytest.raises(Exception, match="one of auto") as error:
        torch.compile(lambda x: x + 1, backend="fxfuser", options={"executor": "gpu"})(x)
    assert isinstance(error.value, InvalidOption) or isinstance(error.value.inner_exception, InvalidOption)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode_compiles(mode: str) -> None:
    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(lambda x: x.exp() + 1, backend="fxfuser", mode=mode)(x), x.exp() + 1)


def test_a_lowering_that_fails_warns_once_and_leaves_a_repro(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*args):
        raise ValueError("no such loop")

    monkeypatch.setitem(backend.lower_segments.__globals__, "lower_kernel", broken)
    x = torch.randn(4)
    options = {"strict": False, "cache_dir": str(tmp_path)}
    with pytest.warns(UserWarning, match="no such loop") as seen:
        got = torch.compile(lambda x: x.exp() + 1, backend="fxfuser", options=options)(x)
    torch.testing.assert_close(got, x.exp() + 1)
    assert len(seen) == 1
    repro, = tmp_path.rglob("*.py")
    monkeypatch.undo()
    exec(compile(repro.read_text(), str(repro), "exec"), {"__name__": "__main__"})


def test_a_lowering_that_fails_raises_under_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args):
        raise ValueError("no such loop")

    monkeypatch.setitem(backend.lower_segments.__globals__, "lower_kernel", broken)
    with pytest.raises(Exception, match="no such loop"):
        compiled(lambda x: x.exp() + 1, strict=True)(torch.randn(4))


def test_threads_and_several_functions() -> None:
    functions = [lambda x, k=k: (x * k).softmax(-1) + k for k in range(4)]
    calls = [compiled(f) for f in functions]
    wrong: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for rows in (2, 5):
                x = torch.randn(rows, 6)
                torch.testing.assert_close(calls[k](x), functions[k](x))
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_what_is_compiled_is_called_while_another_thread_compiles() -> None:
    """Before PyTorch 2.13 such a call takes itself for traced: the flag of a trace is the process's."""
    x, seen = torch.randn(4, 3), list[torch.Tensor | BaseException]()
    ready = compiled(torch.cos)
    ready(x)

    def call() -> None:
        try:
            seen.append(ready(x))
        except BaseException as error:  # noqa: BLE001
            seen.append(error)

    @torch.library.custom_op("fxfuser_tests::meanwhile", mutates_args=())
    def meanwhile(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @meanwhile.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return torch.empty_like(x)

    torch.testing.assert_close(compiled(lambda x: meanwhile(x).softmax(-1))(x), x.softmax(-1))
    assert len(seen) > 1  # Dynamo asks the op once, AOTAutograd at least once
    for found in seen:
        torch.testing.assert_close(found, x.cos())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_loss_of_a_linear(executor: str) -> None:
    x, w, y = torch.randn(7, 6, requires_grad=True), torch.randn(9, 6, requires_grad=True), torch.randint(0, 9, (7,))

    def function(x, w, y):
        return F.cross_entropy(F.linear(x, w), y, ignore_index=3)

    want = torch.autograd.grad(function(x, w, y), (x, w))
    got = torch.autograd.grad(compiled(function, executor)(x, w, y), (x, w))
    torch.testing.assert_close(got, want)


def test_rows_are_kept_apart_from_the_columns_that_are_summed() -> None:
    """Two rows of three in one program, beside a sum over all rows: the row's sum must not run over both rows."""
    x, y = torch.randn(2, 3, requires_grad=True), torch.tensor([0, 0])
    want, = torch.autograd.grad(F.cross_entropy(x, y), x)
    got, = torch.autograd.grad(compiled(F.cross_entropy, "interpret")(x, y), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [5, 50, 140_000])  # the last in two kernels
@pytest.mark.parametrize("function", [torch.xlogy, lambda x, y: x * torch.pow(2.0, y)], ids=["xlogy", "ldexp"])
def test_the_gradient_of_a_number_is_rounded_once(function, length: int, dtype: torch.dtype) -> None:
    """Terms that almost cancel: a rounding of any of them, or of a part of their sum, would show."""
    tangent = torch.cos(torch.arange(length) * 0.37 + 0.1).to(dtype)
    x, y = (torch.rand(length) * 18 - 9).to(dtype), torch.tensor(1.7, dtype=dtype).requires_grad_()
    terms, largest = tangent.double() * x.double(), int(tangent.abs().argmax())
    pairs = length // 2 * 2
    x[1:pairs:2] = (-terms[0:pairs:2] / tangent[1:pairs:2].double()).clamp(-9, 9).to(dtype)
    x[largest] = (x[largest] - (tangent.double() * x.double()).sum() / tangent[largest].double()).clamp(-9, 9)

    def gradient(call, *values: torch.Tensor) -> torch.Tensor:
        number = values[1].detach().requires_grad_()
        return torch.autograd.grad(call(values[0], number), number, values[2])[0]

    got = gradient(compiled(function, "interpret"), x, y, tangent).double()
    exact = gradient(function, x.double(), y.double(), tangent.double())
    size = gradient(function, x.double().abs(), y.double(), tangent.double().abs()).abs()
    assert (got - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-6 * size


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("once_before", [False, True])
def test_a_graph_that_is_retained_gives_its_gradients_again(dynamic: bool, once_before: bool) -> None:
    """Whatever the backward was compiled for: saved tensors are overwritten only in calls that say they may be."""
    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x * w, -1)
        return (y.exp() * x).sum(-1)

    call = torch.compile(fn, backend="fxfuser", dynamic=dynamic, options={"executor": "interpret"})
    leaves = torch.randn(6, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    if once_before:
        torch.autograd.grad(call(*leaves).sum(), leaves)
    out = call(*leaves).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    torch.testing.assert_close(first, torch.autograd.grad(out, leaves))
    torch.testing.assert_close(first, torch.autograd.grad(fn(*leaves).sum(), leaves))


KEEPS = {"the tensor": lambda t: t, "a view": lambda t: t.detach(), "its memory": lambda t: t.untyped_storage(),
         "an array": lambda t: t.numpy(), "nothing": lambda t: None}


@pytest.mark.parametrize("kept", KEEPS)
def test_what_a_hook_on_saved_tensors_keeps_is_not_overwritten(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward writes over what was saved for it alone, and only where nobody else has it."""
    monkeypatch.setattr(in_place, "LEAST", 0)
    count, found, seen = capture._holders, [], []
    monkeypatch.setattr(capture, "_holders", lambda t: found.append(count(t)) or found[-1])

    def pack(t: torch.Tensor) -> torch.Tensor:
        seen.append((t.clone(), KEEPS[kept](t)))
        return t

    x, w = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    call = compiled(lambda x, w: F.cross_entropy(x @ w, torch.arange(6)), "interpret")
    for _ in range(2):
        call(x, w).backward()
    assert len(found) == 4 and found[::2] == found[1::2]  # as many as hold a tensor that nobody else has
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = call(x, w)
    loss.backward()
    assert (found[4] == found[5]) == (kept == "nothing")
    for before, held in seen if kept in ("the tensor", "a view") else ():
        assert torch.equal(held.flatten(), before.flatten())


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [
    lambda x: torch.nn.functional.linear(x[None], x), lambda x: (x * 2).t().reshape(-1), lambda x: x.t().reshape(-1),
    lambda x: x.to(torch.complex64) * 2])
def test_a_result_may_be_mutated_and_trained_through(function, trained: bool) -> None:
    """Of a plan's buffers a result may be a view, which autograd would not have mutated."""
    def gradients(call) -> tuple[torch.Tensor, ...]:
        x, w = torch.arange(16.0).view(4, 4).requires_grad_(trained), torch.tensor(3.0, requires_grad=True)
        y = call(x)
        y.mul_(w)
        return torch.autograd.grad(y.abs().sum(), (x, w) if trained else (w,))

    for executor in EXECUTORS:
        torch.testing.assert_close(gradients(compiled(function, executor)), gradients(function))


def test_results_that_share_memory_stay_views_of_it() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.linear(x[None], x)
        return y[0], y.view(-1), x.t()

    x = torch.randn(4, 4)
    a, b, c = compiled(function, "interpret")(x)
    a.zero_()
    assert not b.any() and c.data_ptr() == x.data_ptr()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("found", [0, 3])
@pytest.mark.parametrize("function", [
    lambda x, mask: x[mask] * 2, lambda x, mask: torch.nonzero(mask) * 2, lambda x, mask: x[mask].sum(0)])
def test_sizes_that_only_the_run_tells(function, found: int, executor: str) -> None:
    """Nobody asks whether they are 0."""
    x, mask = torch.randn(8, 4), torch.arange(8) < found
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(compiled(function, executor, strict=True)(x, mask), function(x, mask))


def attend(x):
    heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads * 2, heads).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [
    lambda x: torch.softmax(x, -1) * 2, lambda x: torch.nested.to_padded_tensor(x * 2, 0.0), attend],
    ids=["rows", "padded", "attention"])
def test_ragged_dimensions(function, trained: bool, executor: str) -> None:
    """The size of a ragged dimension comes as an input that is the name of one, no number."""
    def results(call, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=trained)
        result = call(nested)
        result = result.values() if result.is_nested else result
        gradients = torch.autograd.grad(result.square().sum(), nested) if trained else ()
        return [result, *(x.values() for x in gradients)]

    call = compiled(function, executor)
    for lengths in ((3, 2), (1, 4, 2), (3, 2)):
        parts = [torch.randn(n, 4) for n in lengths]
        torch.testing.assert_close(results(call, parts), results(function, parts))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("function", [
    lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)), lambda x: F.smooth_l1_loss(x, -x.detach(), "sum", beta=0.3),
    torch.logit, lambda x: torch.logit(x, eps=0.1), lambda x: F.huber_loss(x, torch.zeros_like(x))])
def test_nan_reaches_the_gradient(function, executor: str) -> None:
    """Where it is lost on the way, loss scaling does not see it and the step is taken."""
    def gradient(call) -> torch.Tensor:
        x = torch.tensor([float("nan"), 0.0, -0.0, 1.0, -1.0, 0.3, 2.0, float("inf")], requires_grad=True)
        return torch.autograd.grad(call(x).sum(), x)[0]

    got = gradient(compiled(function, executor))
    assert got[0].isnan() and torch.equal(got.isnan(), gradient(function).isnan())
    torch.testing.assert_close(got, gradient(function), equal_nan=True)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_scan_may_save_what_it_returns(executor: str) -> None:
    """The gradients of tanh and of exp are made of their results."""
    def function(x, w):
        return scan(lambda carry, row: ((carry @ w + row).tanh(), (carry * row).exp()), x.new_zeros(4), x)

    def gradients(call) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        x, w = torch.randn(5, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        last, rows = call(x, w)
        return last, rows, *torch.autograd.grad(last.sum() + rows.square().sum(), (x, w))

    torch.testing.assert_close(gradients(compiled(function, executor)), gradients(function))
