"""Split-K on a GPU: thousands of launches at random, on concurrent streams, from graphs, with more programs than are
resident and with other work beside them; not one bit may differ, and no counter may be left."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.runtime.counters import counters_on
from fxfuser.runtime.launcher import Launch
from fxfuser.runtime.programs import Arity, cuda_program

from .harness import Blocks, Made, made, results

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]
Tensor = torch.Tensor
B = torch.bfloat16
DEVICE = "cuda"
SECONDS, LEAST = 10.0, 2000  # of launches at random, and how many these must be at least
STREAMS = 4
BLOCKS = Blocks(64, 64, 64, splits=7, group=4, warps=4, stages=2)
# rows, columns, depth; multiples of 16, so that one build serves all.  The last has more programs than are resident
SHAPES = ((64, 64, 1024), (192, 128, 2048), (80, 144, 4112), (1024, 768, 1024))


def gradient(dy: Tensor, x: Tensor) -> Tensor:
    return (dy.t() @ x).float()


def reduced(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    h = F.relu(torch.addmm(b, x, w.t()))
    f = h.float()
    m = f.amax(1, keepdim=True)
    return h, f.sum(0), (f - m).exp().sum(1, keepdim=True).log() + m


def batched(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.bmm(a.transpose(1, 2), b)
    return h * 0.5, h.amax(2)


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its arguments and which of their sizes are symbolic."""

    fn: Callable[..., Any]
    shapes: Callable[[int, int, int], list[tuple[int, ...]]]
    dynamic: tuple[set[int], ...]

    def arguments(self, shape: tuple[int, int, int], device: str) -> list[Tensor]:
        return [(torch.randn(s, device=device) / 8).to(B) for s in self.shapes(*shape)]


CASES = (
    Case(gradient, lambda m, n, k: [(k, m), (k, n)], ({0, 1}, {0, 1})),
    Case(reduced, lambda m, n, k: [(m, k), (n, k), (n,)], ({0, 1}, {0, 1}, {0})),
    Case(batched, lambda m, n, k: [(3, k, m), (3, k, n)], ({1, 2}, {1, 2})),
)


@dataclass(eq=False)
class Job:
    """One program with its inputs, and the bits that it gives."""

    launch: Launch
    inputs: list[Tensor]
    sizes: list[int]
    expected: list[Tensor] = field(default_factory=list)

    def __call__(self, outputs: list[Tensor]) -> None:
        assert self.launch(*self.inputs, *outputs, *self.sizes)

    def outputs(self) -> list[Tensor]:
        return [torch.empty_like(e) for e in self.expected]


def refuse(error: Exception) -> bool:
    raise error


def job(of: Made, launch: Launch, case: Case, shape: tuple[int, int, int]) -> Job:
    """The job, after its first launch, whose results are near those in float64."""
    args = case.arguments(shape, DEVICE)
    placeholders = [n for n in of.graph.graph.nodes if n.op == "placeholder"]
    given, symbols = dict(zip(placeholders, args)), {}
    for node, arg in given.items():
        symbols |= {str(s.node.expr): n for s, n in zip(node.meta["val"].shape, arg.shape) if not isinstance(s, int)}
    sizes = [eval(s, {}, symbols) for s in of.lowered.sizes]
    made = Job(launch, [given[of.segment.inputs[i]] for i in of.lowered.inputs], sizes)
    wide = results(case.fn, [a.double() for a in args])
    made.expected = [torch.full_like(w, float("nan"), dtype=n.meta["val"].dtype)
                     for w, n in zip(wide, of.segment.outputs)]
    made(made.expected)
    for got, want in zip(made.expected, wide):
        torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=2e-2)
    return made


def normed(x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x @ w.t()
    f = h.float()
    return h, f * torch.rsqrt((f * f).mean(1, keepdim=True) + 1e-6)


def few_rows(m: int, n: int, k: int) -> list[tuple[int, ...]]:
    return [(m, 4096), (512, 4096), (m, 512)]


DECODE = Case(normed, few_rows, ({0}, set(), {0}))


def jobs() -> Iterator[Job]:
    of = made(normed, DECODE.arguments((64, 0, 0), "cpu"), DECODE.dynamic, BLOCKS)
    for policy in ("parts", "one_grid"):
        launch = cuda_program(of.programs[policy], Arity.of(of.lowered), None).bind(refuse)
        yield from (job(of, launch, DECODE, (rows, 0, 0)) for rows in (16, 64, 128))
    for case in CASES:
        of = made(case.fn, case.arguments((64, 80, 96), "cpu"), case.dynamic, BLOCKS)
        for policy in ("last_arriver", "turnstile"):
            launch = cuda_program(of.programs[policy], Arity.of(of.lowered), None).bind(refuse)
            yield from (job(of, launch, case, shape) for shape in SHAPES)


def poison(outputs: list[Tensor]) -> None:
    for out in outputs:
        out.fill_(float("nan"))


def dirty(stream: Any) -> None:
    """Leaves nan in the memory from which a stream's next launches take their scratch buffers."""
    with torch.cuda.stream(stream):
        held = [torch.full((size,), float("nan"), device=DEVICE) for size in (1 << 12, 1 << 18, 1 << 20, 1 << 22)]
        del held


def captured(chosen: list[Job]) -> tuple[Any, list[tuple[Job, list[Tensor]]]]:
    """A graph of these launches, and where each writes."""
    graph, written = torch.cuda.CUDAGraph(), [(j, j.outputs()) for j in chosen]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for each, outputs in written:
            each(outputs)
    return graph, written


def check(written: list[tuple[Job, list[Tensor]]]) -> None:
    for done, outputs in written:
        assert all(map(torch.equal, outputs, done.expected)), f"other bits for {done.sizes}"


def test_launches_at_random() -> None:
    """Rounds of launches on all streams at once, half of them replayed, each round compared bit for bit."""
    draw, every = random.Random(0), list(jobs())
    streams, noise = [torch.cuda.Stream() for _ in range(STREAMS)], torch.randn(2048, 2048, device=DEVICE, dtype=B)
    beside = torch.cuda.Stream()
    graphs = [captured(draw.choices(every, k=8)) for _ in range(STREAMS)]
    plain = [(j, j.outputs()) for j in every for _ in range(2)]
    end, launches = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        for _, outputs in (*plain, *(w for _, written in graphs for w in written)):
            poison(outputs)
        for stream in streams:
            dirty(stream)
        torch.cuda.synchronize()
        replays = draw.sample(graphs, k=draw.randint(0, STREAMS))
        chosen = draw.sample(plain, k=len(plain) // 2)
        steps: list[Any] = [*replays, *chosen, *[None] * draw.randint(0, 4)]
        draw.shuffle(steps)
        for step in steps:
            with torch.cuda.stream(beside if step is None else draw.choice(streams)):
                if step is None:
                    noise @ noise
                elif step in replays:
                    step[0].replay()
                else:
                    step[0](step[1])
        torch.cuda.synchronize()
        check(chosen)
        for _, written in replays:
            check(written)
        launches += len(chosen) + sum(len(written) for _, written in replays)
    assert launches >= LEAST, f"{launches} launches in {SECONDS} s"
    for stream in streams:
        with torch.cuda.stream(stream):
            assert not counters_on(torch.device(DEVICE, torch.cuda.current_device())).on_stream(
                stream.cuda_stream, 4).any(), "a counter is left"


@pytest.mark.parametrize("policy", ["last_arriver", "turnstile"])
def test_the_same_bits_a_thousand_times(policy: str) -> None:
    """One shape, back to back on one stream: a launch finds the counters as the last one left them."""
    case = CASES[1]
    of = made(case.fn, case.arguments((64, 80, 96), "cpu"), case.dynamic, BLOCKS)
    launch = cuda_program(of.programs[policy], Arity.of(of.lowered), None).bind(refuse)
    one = job(of, launch, case, SHAPES[2])
    outputs = [one.outputs() for _ in range(50)]
    for _ in range(20):
        for each in outputs:
            poison(each)
        for each in outputs:
            one(each)
        check([(one, each) for each in outputs])
