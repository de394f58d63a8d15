"""Plans on a GPU: the launches that the fakes of test_launcher.py stand for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import fxfuser
from fxfuser.config import Config
from fxfuser.runtime import ahead, binary, cuda_graphs, workers
from fxfuser.runtime.build import Options
from fxfuser.runtime.build_plan import build
from fxfuser.runtime.launcher import Cuda
from fxfuser.runtime.store import Store

from .graphs import extern, lowered, node, pointwise, segment, segmentation, trace

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def two_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y) * 2


def compiled(x: torch.Tensor, y: torch.Tensor, symbolic: bool = False) -> Callable[[list[Any]], Any]:
    gm = trace(two_sums, x, y, symbolic=symbolic)
    val = node(gm, "mul").meta["val"]
    low = {0: lowered(pointwise(val.dtype, block=1024), [str(val.numel())])}
    seg = segmentation(segment(gm, 0, ["add", "mul"], ["x_1", "y_1"]))
    return build(gm, seg, low, Config(strict=True), "two_sums").compile()


@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype) -> None:
    x, y = (torch.randn(77, 130, device="cuda", dtype=dtype) for _ in range(2))
    assert torch.equal(compiled(x, y)([x, y]), ((x.float() + y.float()) * 2).to(dtype))


def test_alignment_and_sizes_that_change() -> None:
    x, y = (torch.randn(64, 32, device="cuda") for _ in range(2))
    call = compiled(x, y, symbolic=True)
    base = torch.randn(4096, device="cuda")
    for rows, columns, offset in ((64, 32, 0), (63, 31, 0), (16, 16, 1), (16, 16, 4), (7, 3, 3), (0, 32, 0)):
        a = base[offset:offset + rows * columns].view(rows, columns)
        b = torch.randn(rows, columns, device="cuda")
        torch.testing.assert_close(call([a, b]), two_sums(a, b))


def test_launches_on_the_current_stream() -> None:
    x, y = (torch.randn(1 << 24, device="cuda") for _ in range(2))
    call = compiled(x, y)
    call([x, y])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        z = x + 1
        out = call([z, y])
    stream.synchronize()
    torch.testing.assert_close(out, two_sums(x + 1, y))


def test_can_be_captured_in_a_cuda_graph() -> None:
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    call = compiled(x, y)
    call([x, y])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call([x, y])
    x.fill_(1)
    y.fill_(2)
    graph.replay()
    torch.testing.assert_close(out, torch.full_like(x, 6))


def test_a_pool_outlives_its_captures() -> None:
    """Else the allocator refuses every later capture, if a tensor of an earlier one lives: "use_count > 0"."""
    device = cuda_graphs.Cuda(torch.device("cuda"))
    pool = device.pool()
    replay, first = device.capture(pool, False, lambda: torch.ones(4, device="cuda") + 1)
    replay()
    del replay
    gc.collect()
    replay, second = device.capture(pool, False, lambda: torch.ones(4, device="cuda") + 2)
    replay()
    assert first.tolist() == [2.0] * 4 and second.tolist() == [3.0] * 4


@pytest.mark.parametrize("size", [1000, 3_000_000])
@pytest.mark.parametrize("replayed", [False, True])
def test_each_kernel_sees_all_that_the_one_before_it_wrote(size: int, replayed: bool) -> None:
    """Programs start while the kernel before them ends: each reads what its last programs write."""
    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(25):
            x = fxfuser.boundary(x.flip(0) + 1)
        return x

    call = torch.compile(chain, backend="fxfuser", dynamic=False)
    x = torch.randint(1 << 20, (size,), device="cuda").float()
    expected = x.flip(0) + 25
    assert torch.equal(call(x), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    for _ in range(200):
        out.fill_(-1)
        if replayed:
            graph.replay()
        else:
            out = call(x)
        assert torch.equal(out, expected)


def test_buffers_are_freed_at_their_last_use() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(torch.mm((x + y) * 2, y), y), y)

    size = 1024
    x, y = (torch.randn(size, size, device="cuda") for _ in range(2))
    gm = trace(chain, x, y)
    low = {0: lowered(pointwise(block=1024), [str(size * size)])}
    segments = segmentation(segment(gm, 0, ["add", "mul"], ["x_1", "y_1"]),
                            *(extern(gm, i + 1, n) for i, n in enumerate(("mm", "mm_1", "mm_2"))))
    call = build(gm, segments, low, Config(strict=True), "chain").compile()
    call([x, y])  # cuBLAS takes its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call([x, y])
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4 * size * size


def test_a_number_on_the_cpu_beside_cuda_tensors() -> None:
    x, scalar = torch.randn(40, device="cuda"), torch.tensor(3.0)

    def fn(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return (x + s) * 2

    gm = trace(fn, x, scalar)
    source = pointwise().source.replace("tl.load(in1 + i, mask=live)", "tl.load(in1)")
    seg = segmentation(segment(gm, 0, ["add", "mul"], ["x_1", "s_1"]))
    plan = build(gm, seg, {0: lowered(pointwise(source=source), ["40"])}, Config(strict=True), "fn")
    torch.testing.assert_close(plan.compile()([x, scalar]), fn(x, scalar))


def test_offsets_past_32_bits() -> None:
    n = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 4 * 2 * n:
        pytest.skip("needs 17 GB of device memory")
    x = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    x[-5:] = 1
    out = torch.empty_like(x)

    def refuse(error: Exception) -> bool:
        raise error

    assert Cuda(pointwise(torch.bfloat16, block=1024), x.device.index, Options()).bind(refuse)(x, x, out, n)
    assert out[-5:].tolist() == [4] * 5 and out[:1000].sum() == 0


def test_threads_and_their_streams() -> None:
    y = torch.randn(500, device="cuda")
    call = compiled(y, y)
    inputs = [torch.randn(500, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    results: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            results[i] = call([inputs[i], y])
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, x in enumerate(inputs):
        torch.testing.assert_close(results[i], two_sums(x, y))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_device_that_is_not_the_current_one() -> None:
    x, y = (torch.randn(100, device="cuda:1") for _ in range(2))
    torch.testing.assert_close(compiled(x, y)([x, y]), two_sums(x, y))
    assert torch.cuda.current_device() == 0


def test_a_stored_kernel_is_loaded_and_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    out = torch.empty_like(x)

    def refuse(error: Exception) -> bool:
        raise error

    def launched() -> torch.Tensor:
        out.zero_()
        kernel = Cuda(pointwise(block=256), x.device.index, Options(), Store(tmp_path / "kernels"))
        assert kernel.bind(refuse)(x, y, out, 1000)
        return out

    torch.testing.assert_close(launched(), two_sums(x, y))
    monkeypatch.setattr(binary, "assemble", lambda recipe: pytest.fail("built again"))
    torch.testing.assert_close(launched(), two_sums(x, y))


def test_kernels_that_workers_build(tmp_path: Path) -> None:
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    store = Store(tmp_path / "kernels")
    made = [Cuda(pointwise(block=b), x.device.index, Options(), store) for b in (32, 64, 128, 256, 512)]
    ahead.build_ahead(ahead.FirstCall(k, (1000,)) for k in made)
    if workers.cores() > 1:
        assert store.usage().entries == 5

    def refuse(error: Exception) -> bool:
        raise error

    for kernel in made:
        out = torch.zeros_like(x)
        assert kernel.bind(refuse)(x, y, out, 1000)
        torch.testing.assert_close(out, two_sums(x, y))


def test_profilers_see_launches() -> None:
    x, y = (torch.randn(1000, device="cuda") for _ in range(2))
    call, seen = compiled(x, y), []
    hook, chain = (lambda metadata: seen.append(metadata.get()["name"])), triton.knobs.runtime.launch_enter_hook
    call([x, y])
    chain.add(hook)
    try:
        torch.testing.assert_close(call([x, y]), two_sums(x, y))
    finally:
        chain.remove(hook)
    assert seen == ["pointwise"]


@pytest.mark.alone
def test_a_launch_costs_few_microseconds() -> None:
    x, y, out = (torch.randn(1024, device="cuda") for _ in range(3))

    def refuse(error: Exception) -> bool:
        raise error

    launch = Cuda(pointwise(block=1024), x.device.index, Options()).bind(refuse)
    for _ in range(100):
        launch(x, y, out, 1024)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        launch(x, y, out, 1024)
    each = (time.perf_counter() - start) / 500
    torch.cuda.synchronize()
    assert each < 10e-6, f"{each * 1e6:.1f} us"
