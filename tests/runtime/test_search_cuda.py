"""Tile search on a GPU: what the fake clock of test_search.py stands for."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxfuser import observe
from fxfuser.backend import fxfuser
from fxfuser.lowering.kernel import Tile
from fxfuser.runtime import tune
from fxfuser.runtime.build import Options
from fxfuser.runtime.device_clock import CudaClock
from fxfuser.runtime.launcher import Cuda
from fxfuser.runtime.search import Search
from fxfuser.runtime.store import Store

from .graphs import pointwise

pytestmark = pytest.mark.gpu


def refuse(error: Exception) -> bool:
    raise error


def search(blocks: tuple[int, ...], records: Store | None = None) -> Search:
    device = torch.cuda.current_device()
    kernels = [Cuda(replace(pointwise(), tile=Tile((("BLOCK", b),))), device, Options()) for b in blocks]
    return tune.search(kernels, CudaClock(device), records)


def searching(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that are measured from now on."""
    found: list[str] = []
    original = Search._measure

    def counted(self: Search, *args: Any) -> Any:
        found.append(self.subject.name)
        return original(self, *args)

    monkeypatch.setattr(Search, "_measure", counted)
    return found


def column_sums(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.softmax(x, -1), (x * 2).sum(0)


def compiled(fn: Callable[..., Any], folder: Path, mode: str = "max-autotune-no-cudagraphs", **options: Any) -> Any:
    backend = functools.partial(fxfuser, mode=mode, options={"cache_dir": str(folder), **options})
    torch.compiler.reset()
    tune._tuned.cache_clear()  # as in a new process
    return torch.compile(fn, backend=functools.update_wrapper(backend, fxfuser), dynamic=False)


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_results_and_the_second_process(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, x = searching(monkeypatch), torch.randn(4096, 768, device="cuda")
    expected = column_sums(x)
    with observe.recording() as recording:
        call = compiled(column_sums, tmp_path, mode)
        for _ in range(4):
            torch.testing.assert_close(call(x), expected, rtol=1e-4, atol=1e-3)
    tunings = [t for graph in recording.graphs for t in graph.tunings]
    assert searched and len(tunings) == len(searched)
    assert all(us is None or us > 0 for t in tunings for _, us in t.times) and all(len(t.times) > 2 for t in tunings)
    again = searching(monkeypatch)
    torch.testing.assert_close(compiled(column_sums, tmp_path, mode)(x), expected, rtol=1e-4, atol=1e-3)
    assert again == []


def test_a_deterministic_run_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched, x = searching(monkeypatch), torch.randn(512, 768, device="cuda")
    torch.testing.assert_close(compiled(column_sums, tmp_path, deterministic=True)(x), column_sums(x),
                               rtol=1e-4, atol=1e-3)
    assert searched == []


def test_a_capture_before_any_plain_call(tmp_path: Path) -> None:
    tuned = search((256, 512, 1024), Store(tmp_path / "tiles"))
    x, y, out = (torch.randn(5000, device="cuda") for _ in range(3))
    tuned.routes[0].bind(refuse)(x, y, out, 5000)  # loads the default
    launch, graph = tuned.bind(refuse, "segment0"), torch.cuda.CUDAGraph()
    out.zero_()
    with torch.cuda.graph(graph):
        launch(x, y, out, 5000)
    assert tuned.choices == {}
    graph.replay()
    torch.testing.assert_close(out, (x + y) * 2)


def test_in_place_arguments_are_written_once(tmp_path: Path) -> None:
    tuned = search((64, 256, 1024))
    x, y = (torch.randn(5000, device="cuda") for _ in range(2))
    expected = (x + y) * 2
    assert tuned.bind(refuse, "segment0")(x, y, x, 5000)
    torch.testing.assert_close(x, expected)


def test_what_cannot_be_built_is_dropped(tmp_path: Path) -> None:
    tuned = search((256, 1 << 21, 96), Store(tmp_path / "tiles"))  # too many elements; no power of two
    x, y, out = (torch.randn(5000, device="cuda") for _ in range(3))
    assert tuned.bind(refuse, "segment0")(x, y, out, 5000)
    torch.testing.assert_close(out, (x + y) * 2)
    (choice,) = tuned.choices.values()
    assert [us is None for _, us in choice.times] == [False, True, True]


def test_the_clock_sees_memory_and_not_the_cache() -> None:
    clock = CudaClock(None)
    x, y = (torch.randn(1 << 22, device="cuda") for _ in range(2))  # 16 MB each: they would stay in L2
    large = torch.randn(1 << 26, device="cuda")
    small, big = (sorted(clock.samples(run, 11))[5] for run in (lambda: y.copy_(x), lambda: large.mul_(1.0)))
    assert 32e6 / 8e6 < small < big, f"{small:.1f} us for 32 MB"  # no card reads and writes 8 TB/s
    assert 512e6 / 8e6 < big < 512e6 / 0.1e6


@pytest.mark.alone
def test_a_chosen_tile_costs_little_more_than_a_plain_launch() -> None:
    tuned = search((256, 1024))
    x, y, out = (torch.randn(1024, device="cuda") for _ in range(3))
    launch = tuned.bind(refuse, "segment0")
    for _ in range(100):
        launch(x, y, out, 1024)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):
        launch(x, y, out, 1024)
    each = (time.perf_counter() - start) / 500
    torch.cuda.synchronize()
    assert each < 12e-6, f"{each * 1e6:.1f} us"
