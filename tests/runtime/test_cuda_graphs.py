"""CUDA graphs, with a fake that records a call and replays it in the same memory; and on a GPU the real thing."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fxfuser import observe
from fxfuser.backend import fxfuser
from fxfuser.runtime import capturable, cuda_graphs
from fxfuser.runtime.capturable import Boundary, Facts, NotCapturable, facts
from fxfuser.runtime.cuda_graphs import MOST_SHAPES, PATIENCE, Graphed, Pool, Shared

from .graphs import trace

CPU = torch.device("cpu")


class FakeDevice:
    """A capture keeps the function; a replay runs it again and writes into the tensors that the capture returned."""

    def __init__(self) -> None:
        self.captures: list[Any] = []  # ids of their pools
        self.replays = 0
        self.pools = 0
        self.busy = False
        self.current: object = "main"
        self.waits: list[object] = []
        self.failure: Exception | None = None

    def pool(self) -> Pool:
        self.pools += 1
        return Pool(self.pools)

    def capturing(self) -> bool:
        return self.busy

    def stream(self) -> object:
        return self.current

    def wait(self, stream: object) -> None:
        self.waits.append(stream)

    def capture(self, pool: Pool, random: bool, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.busy = True
        try:
            if self.failure is not None:
                raise self.failure
            read = [t for t in inspect.getclosurevars(run).nonlocals["inputs"] if isinstance(t, torch.Tensor)]
            before = [t.clone() for t in read]
            outputs = run()
            for tensor, old in zip(read, before):  # a capture records, and does nothing
                if not torch.equal(tensor, old):
                    cuda_graphs.fill(tensor, old)
        finally:
            self.busy = False
        self.captures.append(pool.id)

        def replay() -> None:
            self.replays += 1
            for old, new in zip(outputs, run()):
                if isinstance(old, torch.Tensor) and old is not new:
                    cuda_graphs.fill(old, new)

        return replay, outputs


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    fake = FakeDevice()
    shared = Shared(fake, fake.pool())
    monkeypatch.setattr(capturable, "_device", lambda module, nodes: CPU)
    monkeypatch.setattr(cuda_graphs, "shared_on", lambda device: shared)
    yield fake


def graphed(device: FakeDevice, call: Any, static: tuple[int, ...] = (), results: int | None = None,
            varying: tuple[int, ...] = (), mutated: tuple[int, ...] = ()) -> Graphed:
    known = Facts(CPU, Boundary(frozenset(static), results), varying, frozenset(mutated), False)
    return Graphed("plan", call, known, Shared(device, device.pool()))


def boxed(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        mine = tuple(args)
        args.clear()
        return function(*mine)

    return call


# ------------------------------------------------------------------ one capture


def test_the_first_call_runs_the_second_is_captured_later_ones_replay(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda x: (x + 1, 7, None)))
    for i in range(4):
        x = torch.full((3,), float(i))
        args = [x]
        out, seven, none = call(args)
        assert out.tolist() == [i + 1] * 3 and seven == 7 and none is None and args == []
    assert len(device.captures) == 1 and device.replays == 3


def test_results_of_earlier_calls_stay(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda x: (x + 1, x.t())))
    kept = [call([torch.full((2, 3), float(i))]) for i in range(5)]
    assert [int(a[0, 0]) for a, _ in kept] == [1, 2, 3, 4, 5]
    assert [int(b[0, 0]) for _, b in kept] == [0, 1, 2, 3, 4]
    assert {b.stride() for _, b in kept} == {(1, 3)}


def test_strides_of_results(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda x: ((x + 1)[:, ::2], (x + 1)[:1].expand(4, 3))))
    for i in range(3):
        a, b = call([torch.full((2, 3), float(i))])
        assert a.stride() == (3, 2) and b.stride() == (0, 1) and b.shape == (4, 3)
        assert a.unique().item() == b.unique().item() == i + 1


def test_static_inputs_stay_in_place_and_others_are_copied(device: FakeDevice) -> None:
    seen: list[tuple[int, int]] = []

    def f(w: torch.Tensor, x: torch.Tensor) -> Any:
        seen.append((w.data_ptr(), x.data_ptr()))
        return (w * x,)

    call = graphed(device, boxed(f), static=(0,))
    w = torch.full((2,), 3.0)
    inputs = [torch.full((2,), float(i)) for i in range(4)]
    assert [call([w, x])[0][0].item() for x in inputs] == [0, 3, 6, 9]
    w.fill_(5)
    assert call([w, inputs[3]])[0][0].item() == 15
    assert all(a == w.data_ptr() for a, _ in seen)
    assert len({b for _, b in seen[1:]}) == 1 and seen[1][1] not in [x.data_ptr() for x in inputs]


def test_autograd_is_told_what_a_backward_writes_to(device: FakeDevice) -> None:
    known = Facts(CPU, Boundary(frozenset({0}), retained=lambda: False), (), frozenset({0}), False)
    call = Graphed("plan", boxed(lambda total, x: (total.data.add_(x) * 0,)), known, Shared(device, device.pool()))
    total = torch.zeros(2)
    for i in range(4):
        before = total._version
        call([total, torch.ones(2)])
        assert total.tolist() == [i + 1] * 2 and (total._version > before or i < 1)
    assert device.replays == 3


def test_a_static_input_that_moves(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda w: (w + 1,)), static=(0,))
    w = torch.zeros(2)
    call([w]), call([w])
    held = [torch.full((2,), float(i)) for i in range(PATIENCE + 4)]
    assert [call([h])[0][0].item() for h in held] == [i + 1 for i in range(PATIENCE + 4)]
    assert len(device.captures) == 2 and device.replays == 1 + 3  # captured anew, with the input copied


@pytest.mark.parametrize("static", [(), (0,)])
def test_a_moving_input_that_is_written_to_is_copied_back(device: FakeDevice, static: tuple[int, ...]) -> None:
    call = graphed(device, boxed(lambda w: (w.add_(1),)), static=static, mutated=(0,))
    held = [torch.full((2,), float(i)) for i in range(PATIENCE + 8)]
    for h in held:
        call([h])
    assert [h[0].item() for h in held] == [i + 1 for i in range(PATIENCE + 8)]
    assert device.replays > 2


def test_a_written_input_in_place(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda w, x: (w.add_(x), x + 0)), static=(0,), mutated=(0,))
    w = torch.zeros(2)
    for _ in range(5):
        out, _ = call([w, torch.ones(2)])
        assert out is w
    assert w.tolist() == [5, 5] and device.replays == 4


def test_an_input_that_is_returned_is_the_callers(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda x: (x, x + 1)))
    for i in range(4):
        x = torch.full((2,), float(i))
        same, _ = call([x])
        assert same is x


def test_shapes_have_captures_of_their_own(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda n, x: (x * n,)), varying=(0, 1))
    for _ in range(3):
        for n in (2, 5):
            assert call([n, torch.ones(n)])[0].tolist() == [n] * n
    assert len(device.captures) == 2 and device.replays == 4


def test_too_many_shapes(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    call = graphed(device, boxed(lambda n: (torch.ones(1) * n,)), varying=(0,))
    for _ in range(2):
        for n in range(MOST_SHAPES + 3):
            assert call([n])[0].item() == n
    assert len(device.captures) == MOST_SHAPES
    assert len(caplog.records) == 1 and "shapes" in caplog.text


def test_expanded_inputs(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda t: (t * 2,)))
    for i in range(3):
        assert call([torch.tensor(float(i)).expand(2, 3)])[0].tolist() == [[2.0 * i] * 3] * 2
    whole = torch.arange(6.0).view(2, 3)
    assert torch.equal(call([whole])[0], whole * 2)  # not one element for all


def test_a_capture_that_fails(device: FakeDevice, caplog: pytest.LogCaptureFixture) -> None:
    call = graphed(device, boxed(lambda x: (x + 1,)))
    device.failure = RuntimeError("operation not permitted when stream is capturing")
    for i in range(4):
        assert call([torch.full((2,), float(i))])[0][0].item() == i + 1
    assert len(caplog.records) == 1 and "not permitted" in caplog.text and device.replays == 0


def test_inside_a_capture_of_the_users(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda x: (x + 1,)))
    device.busy = True
    for _ in range(3):
        call([torch.ones(2)])
    assert device.captures == [] and device.replays == 0


def test_streams_are_ordered(device: FakeDevice) -> None:
    call = graphed(device, boxed(lambda x: (x + 1,)))
    for stream in ("main", "main", "side", "side", "main"):
        device.current = stream
        call([torch.ones(2)])
    assert device.waits == ["main", "side"]


# ------------------------------------------------------------------ forward and backward


def test_what_is_saved_stays_in_place_while_it_is_not_needed_twice(device: FakeDevice,
                                                                   caplog: pytest.LogCaptureFixture) -> None:
    call = graphed(device, boxed(lambda x: (x + 1, x * 2)), results=1)
    saved = None
    for i in range(4):
        result, saved = None, None
        result, saved = call([torch.full((2,), float(i))])
        assert result[0].item() == i + 1 and saved[0].item() == 2 * i
    assert device.replays == 3 and not caplog.records
    again, more = call([torch.full((2,), 9.0)])  # `saved` still lives
    assert more[0].item() == 18 and saved[0].item() == 6 and device.replays == 3
    assert "still needed" in caplog.text


def test_a_backward_reads_what_was_saved_in_place_and_joins_its_pool(device: FakeDevice) -> None:
    device.pools = 0
    shared = Shared(device, device.pool())
    seen = []

    def back(saved: torch.Tensor, tangent: torch.Tensor) -> Any:
        seen.append(saved.data_ptr())
        return (saved * tangent,)

    def one(call: Any, results: int | None, retained: Callable[[], bool] | None = None) -> Graphed:
        known = Facts(CPU, Boundary(frozenset(), results, retained), (), frozenset(), False)
        return Graphed("plan", boxed(call), known, shared)

    forward, backward = one(lambda x: (x + 1, x * 2), 1), one(back, None, lambda: False)
    for i in range(5):
        _, saved = forward([torch.full((2,), float(i))])
        assert backward([saved, torch.full((2,), 10.0)])[0][0].item() == 20 * i  # `saved` is done with, and lives
    assert device.captures == [2, 2] and len(set(seen[1:])) == 1
    inference = one(lambda x: (x,), None)
    inference([torch.ones(2)]), inference([torch.ones(2)])
    other = one(lambda x: (x, x + 1), 1)
    other([torch.ones(2)]), other([torch.ones(2)])
    assert device.captures == [2, 2, 1, 3]


def test_a_saved_view_of_a_parameter_is_no_memory_of_the_capture(device: FakeDevice) -> None:
    shared = Shared(device, device.pool())

    def one(call: Any, results: int | None, retained: Callable[[], bool] | None = None) -> Graphed:
        known = Facts(CPU, Boundary(frozenset((0,)), results, retained), (), frozenset(), False)
        return Graphed("plan", boxed(call), known, shared)

    w = torch.ones(2, 3)
    forward = one(lambda w, x: (w + x, w.t(), x * 2), 1)
    other = one(lambda w: (w * 2,), None, lambda: False)  # the backward of another region reads the same parameter
    for i in range(3):
        _, view, saved = forward([w, torch.full((1,), float(i))])
        assert view.data_ptr() == w.data_ptr()
        other([w])
    assert device.replays == 1 + 2  # `saved` still lives: the third forward runs plainly, whatever `other` did
    assert saved.item() == 4


def test_a_backward_does_not_copy_all_that_a_plain_forward_saved(
        device: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    known = Facts(CPU, Boundary(retained=lambda: False), (), frozenset(), False)
    backward = Graphed("plan", boxed(lambda s: (s * 2,)), known, Shared(device, device.pool()))
    monkeypatch.setattr(cuda_graphs, "MOST_COPIED", 100)
    for i in range(3):
        assert backward([torch.full((50,), float(i))])[0][0].item() == 2 * i
    assert device.captures == [] and "its forward is not captured" in caplog.text and len(caplog.records) == 1
    small = Graphed("plan", boxed(lambda s: (s * 2,)), known, Shared(device, device.pool()))
    for i in range(3):
        assert small([torch.full((5,), float(i))])[0][0].item() == 2 * i
    assert len(device.captures) == 1


def test_a_backward_waits_for_its_forward_to_be_replayed_again(device: FakeDevice) -> None:
    shared = Shared(device, device.pool())

    def one(call: Any, results: int | None, retained: Callable[[], bool] | None = None) -> Graphed:
        return Graphed("plan", boxed(call), Facts(CPU, Boundary(frozenset(), results, retained), (), frozenset(),
                                                  False), shared)

    forward, backward = one(lambda x: (x + 1, x * 2), 1), one(lambda s: (s * 10,), None, lambda: False)
    x = torch.ones(2)
    for _ in range(2):
        backward([forward([x])[1]])
    assert (len(device.captures), device.replays) == (2, 2)
    plain = [torch.full((2,), float(i)) for i in range(PATIENCE + 3)]
    assert [backward([p])[0][0].item() for p in plain] == [10.0 * i for i in range(PATIENCE + 3)]
    assert backward([forward([x])[1]])[0].tolist() == [20, 20]
    assert (len(device.captures), device.replays) == (2, 4)


def test_what_nothing_reads_is_not_copied(device: FakeDevice) -> None:
    known = facts(trace(lambda x, y: x + 1, torch.ones(3), torch.ones(3)), Boundary())
    assert known.unread == {1}
    call = Graphed("plan", boxed(lambda x, y: (x + 1,)), known, Shared(device, device.pool()))
    for i in range(3):
        assert call([torch.full((3,), float(i)), torch.ones(i)])[0][0].item() == i + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.norm(self.one(x))))


def train(net: nn.Module, call: Any, device: str = "cpu", steps: int = 6, accumulate: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        batches = [torch.randn(5, 6, generator=generator).to(device) for _ in range(accumulate)]
        outs = [call(b) for b in batches]  # all forwards before the first backward
        loss = sum((o.square().mean() for o in outs), torch.zeros((), device=device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pair(device: str = "cpu") -> tuple[Net, Net]:
    torch.manual_seed(0)
    first = Net().to(device)
    second = Net().to(device)
    second.load_state_dict(first.state_dict())
    return first, second


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_with_a_fake(device: FakeDevice, accumulate: int) -> None:
    eager, mine = pair()
    torch.compiler.reset()
    compiled = torch.compile(mine, backend=fxfuser, mode="reduce-overhead")
    expected, actual = train(eager, eager, accumulate=accumulate), train(mine, compiled, accumulate=accumulate)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected))
    for a, b in zip(mine.buffers(), eager.buffers()):
        torch.testing.assert_close(a, b)
    assert len(device.captures) == 2 and device.replays >= 8
    if accumulate == 1:
        assert device.replays == 10


def test_a_retained_graph_keeps_what_was_saved(device: FakeDevice) -> None:
    eager, mine = pair()
    compiled = torch.compile(mine, backend=fxfuser, mode="reduce-overhead")
    inputs = [torch.randn(5, 6) for _ in range(4)]

    def gradients(net: nn.Module, call: Any) -> list[torch.Tensor]:
        found = []
        for x, y in zip(inputs, inputs[1:]):
            first = call(x).square().mean()
            found += torch.autograd.grad(first, list(net.parameters()), retain_graph=True)
            second = call(y).square().mean()
            found += torch.autograd.grad(second, list(net.parameters()))
            found += torch.autograd.grad(first, list(net.parameters()))
        return found

    for a, b in zip(gradients(mine, compiled), gradients(eager, eager), strict=True):
        torch.testing.assert_close(a, b)
    assert device.replays > 0


def test_inference_with_a_fake(device: FakeDevice) -> None:
    _, net = pair()
    net.eval()
    compiled = torch.compile(net, backend=fxfuser, mode="reduce-overhead")
    with torch.no_grad():
        inputs = [torch.randn(4, 6) for _ in range(5)]
        outs = [compiled(x) for x in inputs]
        for x, out in zip(inputs, outs):
            torch.testing.assert_close(out, net(x))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(inputs[0]), net(inputs[0]))
    assert device.replays == 4 or device.replays == 5


def test_a_mode_without_graphs(device: FakeDevice) -> None:
    _, net = pair()
    for mode in ("default", "max-autotune-no-cudagraphs"):
        train(net, torch.compile(net, backend=fxfuser, mode=mode), steps=3)
        torch.compiler.reset()
    assert device.captures == []


# ------------------------------------------------------------------ what cannot be captured


def reason(function: Callable[..., Any], *inputs: Any, static: tuple[int, ...] = ()) -> str:
    module = trace(function, *inputs)
    try:
        facts(module, Boundary(frozenset(static)))
    except NotCapturable as error:
        return str(error)
    return ""


def test_cpu_tensors_cannot(caplog: pytest.LogCaptureFixture) -> None:
    assert reason(lambda x: x + 1, torch.ones(2)) == "x_1 is on cpu"
    with observe.recording() as recording, caplog.at_level(logging.WARNING):
        torch.compile(lambda x: x + 1, backend=fxfuser, mode="reduce-overhead")(torch.ones(2))
    (record,) = recording.graphs[-1].of(observe.CudaGraphRecord)
    assert "is on cpu" in record.refusal and caplog.text.count("without a CUDA graph") == 1


@pytest.mark.parametrize(("function", "said"), [
    (lambda x: torch.nonzero(x), "nonzero"),
    (lambda x: x[x > 0], "index"),
    (lambda x: torch.repeat_interleave(x.long()), "repeat_interleave"),
])
def test_ops_that_ask_the_host_cannot(device: FakeDevice, function: Any, said: str) -> None:
    found = reason(function, torch.ones(3))
    assert said in found and "the host wait for a number" in found


def test_what_can(device: FakeDevice) -> None:
    index = torch.tensor([0, 1])
    assert reason(lambda x, i: x[i] + 1, torch.ones(3), index) == ""
    assert reason(lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], torch.ones(3)) == ""
    known = facts(trace(lambda x: torch.rand_like(x), torch.ones(3)), Boundary())
    assert known.random and known.varying == ()
    symbolic = facts(trace(lambda x, y: x + y, torch.ones(3, 5), torch.ones(5), symbolic=True), Boundary())
    assert symbolic.varying == (0, 1) and not symbolic.random


def test_a_written_input_is_known(device: FakeDevice) -> None:
    def f(w: torch.Tensor, x: torch.Tensor) -> Any:
        w.view(-1).add_(x)
        return w * 2

    assert reason(f, torch.ones(3), torch.ones(3)) == ""
    assert facts(trace(f, torch.ones(3), torch.ones(3)), Boundary(frozenset((0,)))).mutated == {0}


# ------------------------------------------------------------------ the real thing


@pytest.mark.gpu
@pytest.mark.parametrize("accumulate", [1, 2])
def test_training(accumulate: int) -> None:
    eager, mine = pair("cuda")
    compiled = torch.compile(mine, backend=fxfuser, mode="reduce-overhead")
    before = cuda_graphs.shared_on(torch.device("cuda", 0)).kept.copy()
    expected = train(eager, eager, "cuda", accumulate=accumulate)
    actual = train(mine, compiled, "cuda", accumulate=accumulate)
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert cuda_graphs.shared_on(torch.device("cuda", 0)).kept != before, "nothing was captured"


@pytest.mark.gpu
def test_random_numbers_are_those_of_plain_calls() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.ones(1000, device="cuda")

    def draws(mode: str) -> list[torch.Tensor]:
        torch.compiler.reset()
        call = torch.compile(f, backend=fxfuser, mode=mode)
        torch.manual_seed(7)
        return [call(x) for _ in range(5)]

    plain, replayed = draws("default"), draws("reduce-overhead")
    for a, b in zip(plain, replayed):
        assert torch.equal(a, b)
    assert not torch.equal(replayed[3], replayed[4])


@pytest.mark.gpu
def test_several_shapes_and_inputs_that_move() -> None:
    call = torch.compile(lambda x, y: torch.softmax(x * y, -1), backend=fxfuser, mode="reduce-overhead", dynamic=True)
    held = []
    for _ in range(4):
        for n in (8, 17, 64):
            x, y = torch.randn(n, 33, device="cuda"), torch.randn(33, device="cuda")
            held.append((call(x, y), torch.softmax(x * y, -1)))
    for actual, expected in held:
        torch.testing.assert_close(actual, expected)


@pytest.mark.gpu
def test_streams() -> None:
    call = torch.compile(lambda x: (x * 2).cos(), backend=fxfuser, mode="reduce-overhead")
    x = torch.randn(1 << 20, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = []
    torch.cuda.synchronize()
    for i in range(6):
        with torch.cuda.stream(streams[i % 2]):
            outs.append((call(x + i), i))
    torch.cuda.synchronize()
    for out, i in outs:
        torch.testing.assert_close(out, ((x + i) * 2).cos())


@pytest.mark.gpu
def test_a_call_that_synchronises_runs_plainly() -> None:
    call = torch.compile(lambda x: torch.nonzero(x).sum() + x.sum(), backend=fxfuser, mode="reduce-overhead")
    for i in range(4):
        x = torch.arange(10, device="cuda") % (i + 2)
        assert torch.equal(call(x), torch.nonzero(x).sum() + x.sum())
