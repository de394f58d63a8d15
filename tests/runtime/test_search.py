"""Searches, of tiles: what they measure, keep and remember, and when they stay away; device and clock are fakes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from fxfuser import observe
from fxfuser.cli import dump, explain, tunings
from fxfuser.config import Config, Mode
from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime import ahead, build_plan, executor, launcher, search, tune, workers
from fxfuser.runtime.assemble import Recipe
from fxfuser.runtime.binary import Binary
from fxfuser.runtime.build import Options
from fxfuser.runtime.launcher import Cuda
from fxfuser.runtime.search import ArgumentClass, Choice, Search, compare
from fxfuser.runtime.store import Store
from fxfuser.runtime.tune import best

from .graphs import lowered, pointwise, segment, segmentation, trace

BLOCKS = (64, 128, 256)


class FakeDevice:
    """Launches are noted as (block, addresses); blocks in `broken` cannot be loaded."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[int, ...]]] = []
        self.broken: set[int] = set()

    def load(self, recipe: Recipe, made: Binary) -> Any:
        block = dict(map(tuple, recipe["constants"]))["BLOCK"]
        if block in self.broken:
            raise RuntimeError("out of resources: shared memory")
        return FakeCompiled(block, self.launches)


class FakeCompiled:
    function, packed_metadata = 17, ()

    def __init__(self, block: int, launches: list[tuple[int, tuple[int, ...]]]) -> None:
        self.block, self.launches = block, launches

    def run(self, *args: Any) -> None:
        self.launches.append((self.block, args[9:12]))


class FakeClock:
    """Each run takes what `times` says of the block that it launches."""

    def __init__(self, device: FakeDevice, times: dict[int, float]) -> None:
        self.device, self.times = device, times
        self.measured: list[int] = []
        self.in_capture = False

    def name(self) -> str:
        return "fake"

    def capturing(self) -> bool:
        return self.in_capture

    def samples(self, run: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            run()
            block = self.device.launches[-1][0]
            self.measured.append(block)
            found.append(self.times[block])
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(launcher, "load", fake.load)
    monkeypatch.setattr(launcher, "obtain", lambda recipe, store: Binary("{}", b"cubin"))
    monkeypatch.setattr(launcher, "target_of", lambda device: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(launcher, "device_calls", lambda: {"current_device": lambda: 0, "stream": lambda device: 99})
    monkeypatch.setattr(workers, "worth_it", lambda builds: False)
    return fake


def searched(device: FakeDevice, times: dict[int, float], store: Store | None = None, kernel: Kernel | None = None,
             blocks: tuple[int, ...] = BLOCKS) -> Search:
    base = kernel or pointwise()
    kernels = [Cuda(replace(base, tile=Tile((("BLOCK", b),))), 0, Options()) for b in blocks]
    return tune.search(kernels, FakeClock(device, times), store)


def bound(tuned: Search) -> Any:
    def refuse(error: Exception) -> bool:
        raise error

    return tuned.bind(refuse, "segment0")


def tensors(n: int = 256) -> list[torch.Tensor]:
    return [torch.zeros(n) for _ in range(3)]


def measured(tuned: Search) -> list[int]:
    """The blocks that were measured since the last question."""
    assert isinstance(tuned.clock, FakeClock)
    found, tuned.clock.measured = sorted(set(tuned.clock.measured)), []
    return found


# ------------------------------------------------------------------ what wins


def test_the_default_wins_unless_another_is_clearly_faster() -> None:
    assert best([100.0, 98.0, 97.0]) == 0 and best([100.0, 96.9, 96.0]) == 2
    assert best([None, 50.0, 40.0]) == 2 and best([None, None]) == 0 and best([100.0, None]) == 0


def test_the_fastest_tile_runs(device: FakeDevice) -> None:
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0})
    launch, arguments = bound(tuned), tensors()
    assert launch(*arguments, 256)
    assert device.launches[-1] == (128, tuple(t.data_ptr() for t in arguments))
    assert measured(tuned) == list(BLOCKS)
    assert launch(*arguments, 256) and device.launches[-1][0] == 128 and measured(tuned) == []


def test_the_hopeless_are_measured_no_further_but_the_default_is(device: FakeDevice) -> None:
    clock = FakeClock(device, {64: 100.0, 128: 20.0, 256: 90.0})
    tuned = searched(device, clock.times)
    times = compare(clock, [search._run(r, (*tensors(), 256)) for r in tuned.routes])
    assert times == [100.0, 20.0, 90.0]
    assert clock.measured.count(256) == 1 + search.FIRST
    assert clock.measured.count(64) == clock.measured.count(128) > 2 * search.FIRST


def test_a_slow_kernel_is_measured_few_times(device: FakeDevice) -> None:
    clock = FakeClock(device, dict.fromkeys(BLOCKS, 1e6))
    compare(clock, [search._run(r, (*tensors(), 256)) for r in searched(device, clock.times).routes])
    assert clock.measured.count(64) == 1 + search.FIRST + search.ROUNDS


class HeatingClock(FakeClock):
    """Each sample takes longer than the one before."""

    def samples(self, run: Any, count: int) -> list[float]:
        found = super().samples(run, count)
        start = len(self.measured) - count
        return [t * (1 + 0.005 * (start + i)) for i, t in enumerate(found)]


@pytest.mark.parametrize("microseconds", [1000.0, 300.0])
def test_what_is_measured_later_is_no_slower_for_it(device: FakeDevice, microseconds: float) -> None:
    clock = HeatingClock(device, {64: microseconds, 128: 0.99 * microseconds, 256: 0.995 * microseconds})
    times = compare(clock, [search._run(r, (*tensors(), 256)) for r in searched(device, clock.times).routes])
    ratios = [t / times[0] for t in times if t is not None and times[0] is not None]
    assert ratios == pytest.approx([1.0, 0.99, 0.995], abs=0.001)


def test_a_failure_costs_a_candidate_alone(device: FakeDevice) -> None:
    device.broken = {128}
    tuned = searched(device, {64: 50.0, 128: 1.0, 256: 30.0})
    assert bound(tuned)(*tensors(), 256) and device.launches[-1][0] == 256
    device.broken = {64, 128}
    tuned = searched(device, {256: 30.0})
    assert bound(tuned)(*tensors(), 256) and device.launches[-1][0] == 256


def test_where_all_fail_the_launch_says_why(device: FakeDevice, tmp_path: Path) -> None:
    device.broken = set(BLOCKS)
    store = Store(tmp_path / "tiles")
    told: list[str] = []
    launch = searched(device, {}, store).bind(lambda error: bool(told.append(str(error))), "segment0")
    assert not launch(*tensors(), 256)
    assert told == ["out of resources: shared memory"] and store.usage().entries == 0


def test_out_of_memory_before_the_search_leaves_the_default(device: FakeDevice, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(search, "_apart", full)
    store = Store(tmp_path / "tiles")
    assert bound(searched(device, dict.fromkeys(BLOCKS, 1.0), store))(*tensors(), 256)
    assert device.launches == [(64, device.launches[0][1])] and store.usage().entries == 0


# ------------------------------------------------------------------ classes and records


def test_a_class_is_searched_once(device: FakeDevice) -> None:
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0})
    launch, base = bound(tuned), torch.zeros(4096)
    for n, offset, new in ((256, 0, True), (255, 0, False), (129, 0, False), (128, 0, True), (2048, 0, True),
                                (1025, 0, False), (200, 1, True), (250, 2, False), (1, 0, True), (0, 0, False)):
        count = len(device.launches)
        assert launch(base[offset:offset + n], *tensors()[1:], n)
        assert bool(measured(tuned)) is new, n
        assert len(device.launches) > count or n == 0


def test_an_empty_call_comes_first(device: FakeDevice) -> None:
    tuned = searched(device, dict.fromkeys(BLOCKS, 1.0))
    launch = bound(tuned)
    assert launch(*tensors(), 0) and device.launches == [] and measured(tuned) == []
    assert launch(*tensors(), 2) and measured(tuned) == list(BLOCKS)


def test_a_kernel_without_sizes(device: FakeDevice) -> None:
    static = replace(pointwise(), sizes=0, grid="cdiv(256, BLOCK)", extent="256")
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0}, kernel=static)
    launch = bound(tuned)
    assert launch(*tensors()) and launch(*tensors()) and device.launches[-1][0] == 128
    assert list(tuned.choices) == [ArgumentClass((), ())]


def test_a_second_process_does_not_search(device: FakeDevice, tmp_path: Path) -> None:
    times = {64: 50.0, 128: 21.0, 256: 30.0}
    first = searched(device, times, Store(tmp_path / "tiles"))
    assert bound(first)(*tensors(), 256) and measured(first)
    second = searched(device, times, Store(tmp_path / "tiles"))
    assert [call.kernel.kernel.tile.blocks for call in second.likely((200,))] == [(("BLOCK", 128),)]
    assert len(second.likely((2000,))) == 3
    assert bound(second)(*tensors(), 256) and measured(second) == [] and device.launches[-1][0] == 128
    (choice,) = second.choices.values()
    assert choice.remembered and dict(choice.times)["BLOCK=64, 4 warps"] == 50.0


def test_what_a_record_depends_on(device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = dict.fromkeys(BLOCKS, 1.0)
    usual = searched(device, times)
    kind = ArgumentClass((8,), ())
    keys = [usual._key(kind), usual._key(ArgumentClass((9,), ())), usual._key(ArgumentClass((8,), (1,))),
            searched(device, times, kernel=replace(pointwise(), source=pointwise().source + "\n"))._key(kind),
            searched(device, times, kernel=replace(pointwise(), grid="cdiv(n0, BLOCK) + 1"))._key(kind),
            searched(device, times, kernel=replace(pointwise(), inputs=(torch.float16, torch.float32)))._key(kind),
            searched(device, times, blocks=BLOCKS[:2])._key(kind)]
    monkeypatch.setattr(FakeClock, "name", lambda self: "another")
    keys.append(usual._key(kind))
    monkeypatch.setattr(search.binary, "installation", lambda: {"triton": "4"})
    keys.append(usual._key(kind))
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"route": 3, "times": []}', b'{"route": {}, "times": 1}'])
def test_a_damaged_record_is_no_record(device: FakeDevice, tmp_path: Path, data: bytes) -> None:
    whole = Choice("b", (("a", 3.0), ("b", None)))
    assert Choice.decode(whole.encode(), "abc") == replace(whole, remembered=True)
    assert Choice.decode(data, "abc") is None and Choice.decode(whole.encode(), "a") is None
    store = Store(tmp_path / "tiles")
    tuned = searched(device, dict.fromkeys(BLOCKS, 1.0), store)
    store.put(tuned._key(ArgumentClass((8,), ())), data)
    assert bound(tuned)(*tensors(), 256) and measured(tuned) == list(BLOCKS)


# ------------------------------------------------------------------ where it must not disturb


def test_a_capture_measures_nothing(device: FakeDevice, tmp_path: Path) -> None:
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0}, Store(tmp_path / "tiles"))
    assert isinstance(tuned.clock, FakeClock)
    launch, tuned.clock.in_capture = bound(tuned), True
    assert launch(*tensors(), 256) and [b for b, _ in device.launches] == [64]
    tuned.clock.in_capture = False
    assert launch(*tensors(), 256) and measured(tuned) == list(BLOCKS)
    tuned.clock.in_capture = True
    assert launch(*tensors(), 256) and device.launches[-1][0] == 128
    later = searched(device, {}, Store(tmp_path / "tiles"))  # a record of an earlier process serves in a capture
    later.clock.in_capture = True  # type: ignore[attr-defined]
    assert bound(later)(*tensors(), 256) and device.launches[-1][0] == 128


def test_an_output_in_the_memory_of_an_input_is_not_written_by_the_search(device: FakeDevice) -> None:
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0})
    base = torch.zeros(1024)
    x, y, out = base[:256], torch.zeros(256), base[257:513]
    assert bound(tuned)(x, y, out, 256)
    *trials, (_, last) = device.launches
    assert {addresses[:2] for _, addresses in trials} == {(x.data_ptr(), y.data_ptr())}
    assert out.data_ptr() not in {addresses[2] for _, addresses in trials}
    assert {addresses[2] % 16 for _, addresses in trials} == {out.data_ptr() % 16} != {0}
    assert last == (x.data_ptr(), y.data_ptr(), out.data_ptr())


def test_threads_search_once(device: FakeDevice) -> None:
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0})
    launch, arguments = bound(tuned), tensors()
    threads = [threading.Thread(target=launch, args=(*arguments, 256)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert isinstance(tuned.clock, FakeClock)
    assert tuned.clock.measured.count(256) == 1 + search.FIRST  # hopeless in one search
    assert [b for b, _ in device.launches].count(128) - tuned.clock.measured.count(128) == 8


def test_candidates_are_built_together(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[tuple[int, tuple[bool, ...]]] = []
    original = Cuda.recipe

    def recipe(self: Cuda, variant: Any) -> Recipe:
        wanted.append((dict(self.kernel.tile.blocks)["BLOCK"], variant.aligned))
        return original(self, variant)

    monkeypatch.setattr(Cuda, "recipe", recipe)
    tuned, base = searched(device, dict.fromkeys(BLOCKS, 1.0)), torch.zeros(512)
    monkeypatch.setattr(search, "compare", lambda clock, runs: [1.0] * len(runs) if len(wanted) == 3 else 1 / 0)
    bound(tuned)(base[1:257], *tensors()[1:], 256)
    assert wanted[:3] == [(b, (False, True, True)) for b in BLOCKS]


# ------------------------------------------------------------------ when there is a search at all


def two_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y) * 2


def on_cuda(config: Config, monkeypatch: pytest.MonkeyPatch, candidates: bool = True) -> list[Any]:
    """What `tuned` was asked for."""
    asked: list[Any] = []

    class Asked:
        def likely(self, sizes: tuple[int, ...]) -> tuple[()]:
            return ()

        def bind(self, failed: Any, segment: str) -> None:
            pytest.fail("bound")

    def tuned(*args: Any) -> Asked:
        asked.append(args)
        return Asked()

    monkeypatch.setattr(executor, "tuned", tuned)
    gm = trace(two_sums, torch.zeros(40), torch.zeros(40))
    kernel = replace(pointwise(), candidates=(Tile((("BLOCK", 128),)),) if candidates else ())
    executor.on_cuda(segment(gm, 0, ["add", "mul"], ["x_1", "y_1"]), lowered(kernel, ["40"]), config, {})
    return asked


def test_only_max_autotune_searches_and_never_a_deterministic_run(device: FakeDevice,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_cuda(Config.resolve("max-autotune-no-cudagraphs", {}, {}), monkeypatch)
    assert on_cuda(Config.resolve("max-autotune", {}, {}), monkeypatch)
    assert not on_cuda(Config.resolve("max-autotune", {"deterministic": True}, {}), monkeypatch)
    assert not on_cuda(Config.resolve("reduce-overhead", {}, {}), monkeypatch)
    assert not on_cuda(Config.resolve("max-autotune", {}, {}), monkeypatch, candidates=False)


@pytest.mark.parametrize("run", ["reference", "interpret"])
def test_no_search_on_a_cpu(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "tuned", lambda *_: pytest.fail("searches"))
    monkeypatch.setattr(tune, "CudaClock", lambda *_: pytest.fail("measures"))
    monkeypatch.setenv("FXFUSER_EXECUTOR", run)
    fn = torch.compile(two_sums, backend="fxfuser", mode="max-autotune-no-cudagraphs")
    torch.testing.assert_close(fn(torch.ones(9), torch.ones(9)), torch.full((9,), 4.0))


@pytest.mark.parametrize("mode, blocks", [(Mode.MAX_AUTOTUNE_NO_CUDAGRAPHS, set(BLOCKS)), (Mode.DEFAULT, {64})])
def test_a_plan_searches_at_its_first_call(mode: Mode, blocks: set[int], device: FakeDevice, tmp_path: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(device, {64: 50.0, 128: 21.0, 256: 30.0})
    monkeypatch.setattr(tune, "CudaClock", lambda index: clock)
    monkeypatch.setattr(build_plan, "executor_of", lambda device, config: "triton")
    x, y = torch.zeros(40), torch.zeros(40)
    gm = trace(two_sums, x, y)
    kernel = replace(pointwise(), candidates=tuple(Tile((("BLOCK", b),)) for b in BLOCKS[1:]))
    segments = segmentation(segment(gm, 0, ["add", "mul"], ["x_1", "y_1"]))
    with observe.recording() as recording, observe.graph("inference", 0):
        plan = build_plan.build(gm, segments, {0: lowered(kernel, ["40"])},
                                Config(mode=mode, strict=True, cache_dir=tmp_path), "two_sums")
    call = plan.compile()
    assert device.launches == []
    call([x, y])
    assert {b for b, _ in device.launches} == blocks
    assert ("unless a tile is measured" in plan.source) is bool(recording.graphs[0].tunings) is (len(blocks) > 1)
    count = len(device.launches)
    call([x, y])
    assert [b for b, _ in device.launches[count:]] == [128 if len(blocks) > 1 else 64]


# ------------------------------------------------------------------ what is told of it


def test_a_choice_is_recorded_and_shown(device: FakeDevice) -> None:
    device.broken = {256}
    tuned = searched(device, {64: 50.0, 128: 21.0})
    gm = trace(two_sums, torch.zeros(40), torch.zeros(40))
    with observe.recording() as recording:
        with observe.graph("inference", 0):
            launch, other = bound(tuned), bound(tuned)
            observe.record(observe.SegmentationRecord(segmentation(segment(gm, 0, ["add", "mul"], ["x_1", "y_1"]))))
            observe.record(observe.KernelRecord("segment0", "pointwise", pointwise().source))
        launch(*tensors(), 256)
        launch(*tensors(), 200)
        other(*tensors(), 256)
    (graph,) = recording.graphs
    assert [(t.segment, t.tile, t.arguments) for t in graph.tunings] == [
        ("segment0", "BLOCK=128, 4 warps", "n0 <= 256")] * 2
    (line,) = tunings.lines("pointwise", graph)
    assert line == ("tile for n0 <= 256: BLOCK=128, 4 warps 21.0 us (others: BLOCK=64, 4 warps 50.0 us; "
                    "BLOCK=256, 4 warps failed)")
    assert tunings.lines("another", graph) == []
    assert f"# {line}\n" in dump.kernels_text(graph, {})
    assert f"\n\npointwise: {line}" in explain._all(graph)


def test_builds_ahead_are_those_of_the_search(device: FakeDevice, tmp_path: Path) -> None:
    tuned = searched(device, {64: 50.0, 128: 21.0, 256: 30.0}, Store(tmp_path / "tiles"))
    builds = ahead.Builds()
    for call in tuned.likely((256,)):
        builds.begin(*call)
    assert len(builds.waiting) == 3
    bound(tuned)(*tensors(), 256)
    assert [call.kernel.kernel.tile.blocks for call in tuned.likely((256,))] == [(("BLOCK", 128),)]
