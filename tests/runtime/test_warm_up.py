"""Libraries are called ahead on a thread that nobody notices; here on the CPU, in the place of a device."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fxfuser.backend import fxfuser
from fxfuser.runtime import warm_up
from fxfuser.runtime.warm_up import Sample, libraries, samples


@dataclass
class Device:
    """What `warm_up` asks CUDA; `calls` are the threads that called each sample."""

    initialized: bool = True
    capturing: bool = False
    freed: int = 0
    calls: list[tuple[Sample, threading.Thread]] = field(default_factory=list)

    def run(self, sample: Sample) -> None:
        self.calls.append((sample, threading.current_thread()))

    @property
    def called(self) -> list[Sample]:
        return [sample for sample, _ in self.calls]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: made.initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {
        "allocation.all.freed": made.freed, "allocation.all.current": 100})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(warm_up, "_on_cuda", lambda value: True)
    monkeypatch.setattr(warm_up, "_called", set())
    yield made
    assert not [t for t in threading.enumerate() if t.name == "fxfuser-warm-up"]


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph that Dynamo hands a backend."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        found.append(module)
        return module.forward

    torch.compile(function, backend=keep)(*inputs)
    return found[0]


def graph_with(*dtypes: torch.dtype) -> fx.GraphModule:
    """A graph of one product for each dtype."""
    graph = fx.Graph()
    for number, dtype in enumerate(dtypes):
        x = graph.placeholder(f"x{number}")
        node = graph.call_function(torch.mm, (x, x))
        node.meta["example_value"] = torch.zeros(2, 2, dtype=dtype)
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


def product(trained: bool = False) -> Sample:
    return Sample(warm_up._product, torch.device("cpu"), torch.float32, trained)


# ---------------------------------------------------------------- which


@pytest.mark.parametrize("function", [
    lambda x: F.linear(x, x), lambda x: x @ x, lambda x: x.mm(x), lambda x: torch.mm(x, x), lambda x: x.matmul(x),
    lambda x: torch.einsum("ij,jk->ik", x, x), lambda x: torch.addmm(x, x, x), lambda x: F.linear(x, x, x[0])])
def test_products_are_found_however_they_are_called(device: Device, function: Callable[..., Any]) -> None:
    assert samples(graph_of(function, torch.randn(4, 4))) == (product(),)


def test_a_model_has_one_sample_of_each_kind(device: Device) -> None:
    """With the dtype that autocast gives, lengths cut, and only what is trained is trained."""
    weight, image = torch.randn(64, 64, requires_grad=True), torch.randn(1, 3, 8, 8)

    def model(x: Tensor, weight: Tensor, image: Tensor, filters: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                x = F.linear(x, weight)
                heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
                x = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
        return x.sum() + F.conv2d(image, filters).sum()

    found = samples(graph_of(model, torch.randn(2, 300, 64), weight, image, torch.randn(5, 3, 3, 3)))
    cpu, half = torch.device("cpu"), torch.bfloat16
    assert found == (
        Sample(warm_up._product, cpu, half, True), Sample(warm_up._attention, cpu, half, True, (256, 16), True),
        Sample(warm_up._convolution, cpu, torch.float32, False, (16, 16)))


def test_what_a_checkpoint_recomputes_is_found(device: Device) -> None:
    x = torch.randn(4, 4, requires_grad=True)
    found = samples(graph_of(lambda x: checkpoint(lambda x: (x @ x).sin(), x, use_reentrant=False), x))
    assert found == (product(trained=True),)


def test_what_runs_on_the_cpu_is_left_alone() -> None:
    assert not samples(graph_of(lambda x: x @ x, torch.randn(4, 4)))


def test_dynamic_lengths_and_integers(device: Device) -> None:
    def model(x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return F.scaled_dot_product_attention(x, x, x, None, 0.0, True), numbers @ numbers

    x = torch.randn(1, 2, 24, 8)
    torch._dynamo.mark_dynamic(x, 2)
    sample, = samples(graph_of(model, x, torch.ones(2, 2, dtype=torch.long)))
    assert sample.sizes == (256, 8) and sample.causal


# ---------------------------------------------------------------- what is called


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("make", "sizes"), [
    (warm_up._product, ()), (warm_up._attention, (256, 64)), (warm_up._convolution, (16,)),
    (warm_up._convolution, (16, 16)), (warm_up._convolution, (16, 16, 16))])
def test_every_kind_runs_on_its_thread_and_draws_no_number(
        make: Callable[..., Any], sizes: tuple[int, ...], trained: bool) -> None:
    """A backward too: autograd's threads may be busy with the graph's."""
    state, threads, results = torch.get_rng_state(), list[threading.Thread](), list[tuple[Tensor, Any]]()

    def made(sample: Sample) -> warm_up.Made:
        result, leaves = make(sample)
        if trained:
            result.register_hook(lambda gradient: threads.append(threading.current_thread()))
        results.append((result, leaves))
        return result, leaves

    with torch.no_grad():
        Sample(made, torch.device("cpu"), torch.float32, trained, sizes).call()
    (result, leaves), = results
    assert result.requires_grad is trained and threads == [threading.current_thread()] * trained
    assert torch.equal(torch.get_rng_state(), state)
    assert sum(t.nbytes for t in (result, *leaves)) <= 1 << 20


def test_the_block_ends_when_the_thread_has(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    started, free = threading.Event(), threading.Event()

    def slow(sample: Sample) -> None:
        started.set()
        assert free.wait(10)
        device.run(sample)

    monkeypatch.setattr(Sample, "call", slow)
    with libraries(graph_with(torch.float32, torch.bfloat16)):
        assert started.wait(10) and not device.calls  # it runs beside what stands here
        free.set()
    assert [sample.dtype for sample in device.called] == [torch.float32, torch.bfloat16]
    assert {thread.name for _, thread in device.calls} == {"fxfuser-warm-up"}


def test_no_error_leaves_the_thread_nor_is_one_lost(
        device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(sample: Sample) -> None:
        device.run(sample)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Sample, "call", fail)
    with caplog.at_level(logging.INFO, "fxfuser"), pytest.raises(ValueError), \
            libraries(graph_with(torch.float32, torch.float16)):
        raise ValueError
    assert len(device.calls) == 2 and caplog.text.count("is not made ready: RuntimeError: out of memory") == 2


def test_a_device_that_does_not_answer_costs_nothing(
        device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: 1 / 0)
    with caplog.at_level(logging.INFO, "fxfuser"), libraries(graph_with(torch.float32)):
        pass
    assert "ZeroDivisionError" in caplog.text


# ---------------------------------------------------------------- when


def test_a_library_is_called_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread would take another handle, with a workspace of its own."""
    monkeypatch.setattr(Sample, "call", lambda sample: device.run(sample))
    for dtype in (torch.float32, torch.float32, torch.float16):
        with libraries(graph_with(dtype)):
            pass
    assert [sample.dtype for sample in device.called] == [torch.float32]


@pytest.mark.parametrize("state", [{"initialized": False}, {"capturing": True}, {"freed": 51}])
def test_nothing_is_called_where_there_is_no_need_or_it_would_be_noticed(
        device: Device, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No context, a capture, a process that has run a model."""
    monkeypatch.setattr(Sample, "call", lambda sample: device.run(sample))
    vars(device).update(state)
    with libraries(graph_with(torch.float32)):
        pass
    assert not device.calls
    device.initialized, device.capturing, device.freed = True, False, 50
    with libraries(graph_with(torch.float32)):
        pass
    assert len(device.calls) == (0 if state == {"freed": 51} else 1)


def test_the_thread_is_in_none_of_the_modes_around_it(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(threading.current_thread())
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(threading.current_thread())
            return func(*args, **(kwargs or {}))

    seen: list[threading.Thread] = []
    results: list[Tensor] = []

    def made(sample: Sample) -> warm_up.Made:
        result, leaves = warm_up._product(sample)
        results.append(result)
        return result, leaves

    monkeypatch.setitem(warm_up.MAKERS, torch.mm, made)
    graph = graph_with(torch.float32)
    with FakeTensorMode(), Dispatch(), Function(), torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), \
            libraries(graph):
        torch.zeros(2)
    assert set(seen) == {threading.main_thread()}
    assert type(results[0]) is Tensor and results[0].dtype is torch.float32 and not results[0].is_inference()


# ---------------------------------------------------------------- a compilation


@pytest.mark.parametrize("broken", [False, True])
def test_a_compilation_calls_them(device: Device, broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(sample: Sample) -> None:
        device.run(sample)
        if broken:
            raise RuntimeError

    monkeypatch.setattr(Sample, "call", call)
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    compiled = torch.compile(lambda x, w: (x @ w).relu().sum(), backend=fxfuser, options={"executor": "reference"})
    gradient, = torch.autograd.grad(compiled(x, w), w)
    torch.testing.assert_close(gradient, torch.autograd.grad((x @ w).relu().sum(), w)[0])
    assert device.called == [product(trained=True)]


@pytest.mark.gpu
def test_on_a_device_nothing_is_left_behind() -> None:
    """In this process libraries are ready, so the samples are called as a thread would."""
    where, state = torch.device("cuda"), torch.cuda.get_rng_state()
    for make, sizes in ((warm_up._product, ()), (warm_up._attention, (256, 64)), (warm_up._convolution, (16, 16))):
        sample = Sample(make, where, torch.bfloat16, True, sizes, causal=True)
        sample.call()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        sample.call()
        assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() < before + (48 << 20)
    assert torch.equal(torch.cuda.get_rng_state(), state)
