"""Programs on a GPU: what the fakes of test_programs.py and test_choice.py stand for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.lowering.kernel import Program
from fxfuser.runtime import programs
from fxfuser.runtime.choice import Alternatives, choose
from fxfuser.runtime.counters import Counters
from fxfuser.runtime.executor import OnCuda
from fxfuser.runtime.launcher import Failed, Launch
from fxfuser.runtime.programs import Arity, cuda_program
from fxfuser.runtime.timing import busy_clock

from .products import LARGE, SMALL, lowered, maxima, plain, split, static, tile

pytestmark = pytest.mark.gpu
ARITY = Arity(2, 1)
MIDDLE = tile(64, 64, 64)


def refuse(error: Exception) -> bool:
    raise error


def launch_of(program: Program) -> Launch:
    return cuda_program(program, ARITY, None).bind(refuse)


def factors(rows: int, columns: int, depth: int, dtype: torch.dtype = torch.bfloat16,
            offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B as contiguous tensors that begin `offset` elements into their storages."""
    def made(size: int, other: int) -> torch.Tensor:
        return torch.randn(size * other + offset, device="cuda").to(dtype)[offset:].view(size, other)

    return made(rows, depth), made(columns, depth)


def exact(program: Callable[..., Program], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    product = a.double() @ b.double().T
    return product.amax(1) if program is maxima else product


def poisoned(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.full_like(like, float("nan"), dtype=dtype)


@pytest.mark.parametrize("program", [plain, maxima, split])
@pytest.mark.parametrize("of", [SMALL, MIDDLE, LARGE], ids=str)
@pytest.mark.parametrize("rows, columns, depth, offset", [
    (512, 768, 256, 0), (300, 528, 272, 0), (300, 525, 271, 0), (256, 256, 256, 1), (1, 16, 16, 0)])
def test_values(program: Callable[..., Program], of: Any, rows: int, columns: int, depth: int, offset: int) -> None:
    a, b = factors(rows, columns, depth, torch.float16, offset)
    expected = exact(program, a, b)
    for made, sizes in ((program(torch.float16, of), (rows, columns, depth)),
                        (static(program(torch.float16, of), rows, columns, depth), ())):
        out = poisoned(expected, torch.float16)
        assert launch_of(made)(a, b, out, *sizes)
        torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-2)


def test_a_hook_sees_a_kernel_with_scratch_memory() -> None:
    a, b = factors(256, 256, 256)
    launch, out = launch_of(plain(of=MIDDLE)), poisoned(exact(plain, a, b), torch.bfloat16)
    seen: list[str] = []
    hook, chain = (lambda metadata: seen.append(metadata.get()["name"])), triton.knobs.runtime.launch_enter_hook
    chain.add(hook)
    try:
        assert launch(a, b, out, 256, 256, 256)
    finally:
        chain.remove(hook)
    assert seen == ["gemm"]
    torch.testing.assert_close(out.double(), exact(plain, a, b), rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("program", [plain, maxima, split])
def test_captures_replay_with_their_own_counters(program: Callable[..., Program], warm: bool,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = factors(320, 256, 512)
    launch, sizes = launch_of(program(of=MIDDLE)), (320, 256, 512)
    expected = poisoned(exact(program, a, b), torch.bfloat16)
    launch(a, b, expected, *sizes)
    if not warm:  # nothing is in reserve, so each graph clears its own
        fresh = Counters(expected.device)
        monkeypatch.setattr(programs, "counters_on", lambda device: fresh)
    outs, graphs = [torch.empty_like(expected) for _ in range(4)], [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    for graph, mine in zip(graphs, (outs[:2], outs[2:])):
        with torch.cuda.graph(graph):
            for out in mine:
                assert launch(a, b, out, *sizes)
    streams, plainly = [torch.cuda.Stream() for _ in range(3)], torch.empty_like(expected)
    for _ in range(50):
        for out in (*outs, plainly):
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs):
            with torch.cuda.stream(stream):
                graph.replay()
        with torch.cuda.stream(streams[2]):
            assert launch(a, b, plainly, *sizes)
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in (*outs, plainly))


def test_streams_do_not_share_counters() -> None:
    pairs = [factors(192, 128, 1024) for _ in range(8)]
    launch, sizes = launch_of(split(of=MIDDLE, parts=8)), (192, 128, 1024)
    expected = [poisoned(exact(split, a, b), torch.bfloat16) for a, b in pairs]
    for (a, b), out in zip(pairs, expected):
        assert launch(a, b, out, *sizes)
    outs, streams = [torch.empty_like(e) for e in expected], [torch.cuda.Stream() for _ in pairs]
    for _ in range(100):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        for (a, b), out, stream in zip(pairs, outs, streams):
            with torch.cuda.stream(stream):
                assert launch(a, b, out, *sizes)
        torch.cuda.synchronize()
        assert all(map(torch.equal, outs, expected))


def test_counters_are_never_cleared_at_a_launch() -> None:
    a, b = factors(192, 128, 1024)
    launch, out = launch_of(split(of=MIDDLE, parts=4)), torch.empty(192, 128, device="cuda", dtype=torch.bfloat16)
    launch(a, b, out, 192, 128, 1024)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(a, b, out, 192, 128, 1024)
    for run in (lambda: launch(a, b, out, 192, 128, 1024), graph.replay):
        assert list(busy_clock([run], out.device).kernels) == ["split"]


def test_the_choice_of_a_route(tmp_path: Path) -> None:
    a, b = factors(2048, 2048, 2048)
    out = torch.full((2048, 2048), float("nan"), device="cuda", dtype=torch.bfloat16)

    def bind(failed: Failed) -> Launch:
        def launch(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *sizes: int) -> bool:
            torch.mm(x, w.T, out=target)
            return True

        return launch

    routes = lowered(*(static(p, 2048, 2048, 2048) for p in (plain(of=LARGE), split(of=MIDDLE))))
    wanted = Alternatives("segment0", routes, OnCuda((), bind), out.device.index, (), True)
    with observe.recording() as recording, observe.graph("inference", 0):
        launch = choose(wanted, Config(cache_dir=tmp_path)).bind(refuse)
    assert launch(a, b, out)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=1e-2, atol=1e-1)
    (record,) = recording.graphs[0].tunings
    times = dict(record.times)
    assert set(times) == {"library", f"plain: {LARGE}", f"split_k: {MIDDLE}"} and None not in times.values()
    # 17 GFLOP at no more than a petaflop, and at no less than a tenth of what the card does
    assert all(us is not None and 17 < us < 1000 for us in times.values()), times


@pytest.mark.alone
@pytest.mark.parametrize("program, kernels", [(plain, 1), (maxima, 2), (split, 1)])
def test_a_program_costs_few_microseconds(program: Callable[..., Program], kernels: int) -> None:
    a, b = factors(64, 64, 64)
    launch = launch_of(static(program(of=MIDDLE), 64, 64, 64))
    out = poisoned(exact(program, a, b), torch.bfloat16)
    for _ in range(100):
        launch(a, b, out)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        launch(a, b, out)
    each = (time.perf_counter() - start) / 500 / kernels
    torch.cuda.synchronize()
    assert each < 15e-6, f"{each * 1e6:.1f} us a kernel"
