"""Which route runs: by the cost model or by times, with a fake device and a fake clock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fxfuser import observe
from fxfuser.cli import tunings
from fxfuser.config import Config, Mode
from fxfuser.errors import VerificationError
from fxfuser.lowering.kernel import LoweredPrograms, Program, Tile
from fxfuser.runtime import choice, workers
from fxfuser.runtime.choice import FEW, Alternatives, choose, winner
from fxfuser.runtime.executor import OnCuda
from fxfuser.runtime.launcher import Failed, Launch

from .fakes import FakeDevice
from .products import LARGE, SMALL, lowered, plain, split, tile

TILES = (SMALL, tile(64, 16, 32), tile(16, 16, 32), tile(128, 16, 32), tile(256, 16, 32))


class FakeClock:
    """A run takes what `times` says of the last thing that it launches."""

    def __init__(self, device: FakeDevice, times: dict[str, float]) -> None:
        self.device, self.times = device, times
        self.measured: list[str] = []

    def name(self) -> str:
        return "fake"

    def capturing(self) -> bool:
        return self.device.capturing

    def samples(self, run: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            run()
            self.measured.append(self.device.ran[-1])
            found.append(self.times[self.device.ran[-1]])
        return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    monkeypatch.setattr(workers, "worth_it", lambda builds: False)
    choice._choices.cache_clear()
    return FakeDevice.install(monkeypatch)


@pytest.fixture
def clock(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock(device, {"library": 100.0, **{f"{name} {t.blocks[0][1]}": 101.0 for name in ("gemm", "split")
                                                   for t in TILES}})
    monkeypatch.setattr(choice, "CudaClock", lambda index: made)
    return made


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "CudaClock", lambda index: pytest.fail("measures"))


def refuse(error: Exception) -> bool:
    raise error


def with_tiles(program: Program, tiles: tuple[Tile, ...] = TILES) -> Program:
    (first,) = program.launches
    kernel = replace(first.kernel, tile=tiles[0], candidates=tiles[1:])
    return replace(program, launches=(replace(first, kernel=kernel),))


def well(failed: Failed) -> bool:
    return True


def library(device: FakeDevice, answer: Callable[[Failed], bool] = well, label: str = "library") -> OnCuda:
    def bind(failed: Failed) -> Launch:
        def launch(*arguments: Any) -> bool:
            device.ran.append(label)
            return answer(failed)

        return launch

    return OnCuda((), bind)


def alternatives(route: OnCuda | None, fused: bool = True, programs: LoweredPrograms | None = None) -> Alternatives:
    return Alternatives("segment3", programs or lowered(with_tiles(plain())), route, 0, (64, 64, 64), fused)


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(64, 64) for _ in range(3)]


def config(folder: Path, mode: Mode = Mode.DEFAULT, **options: Any) -> Config:
    return Config(mode=mode, cache_dir=folder, **options)


def ran(device: FakeDevice, found: OnCuda, *sizes: int) -> str:
    """What a call runs in the end."""
    assert found.bind(refuse)(*tensors(), *(sizes or (64, 64, 64)))
    return device.ran[-1]


# ------------------------------------------------------------------ what wins


def test_a_program_wins_unless_the_library_is_clearly_faster() -> None:
    none = (0, 0, 0)
    assert winner([100.0, 101.0], none, 0) == 1 and winner([100.0, 101.1], none, 0) == 0
    assert winner([110.0, 100.0, 101.0], none, 1) == 2 and winner([110.0, 100.0, 101.5], none, 1) == 1
    assert winner([None, 500.0], none, 0) == 1 and winner([100.0, None], none, 0) == 0
    assert winner([None, 100.0], none, 1) == 1 and winner([None, None], none, 1) == 0
    assert winner([3.0, 2.0], none, None) == 1 and winner([None, None], none, None) == 0


def test_of_equally_fast_programs_the_one_wins_that_needs_least_memory() -> None:
    assert winner([101.9, 100.0], (8, 16), None) == 0 and winner([102.1, 100.0], (8, 16), None) == 1
    assert winner([101.0, 100.5, 100.0], (8, 8, 16), None) == 1  # of equal memory, the fastest
    assert winner([100.0, None, 101.0], (8, 0, 4), None) == 2
    assert winner([103.0, 101.5, 100.0], (0, 8, 16), 0) == 1  # the library's memory is not known


@pytest.mark.parametrize("slower, expected", [(1.0, "gemm 32"), (5.0, "split 32")])
def test_scratch_memory_counts_where_times_do_not(device: FakeDevice, clock: FakeClock, tmp_path: Path, slower: float,
                                                  expected: str) -> None:
    programs = lowered(with_tiles(plain(), TILES[:1]), with_tiles(split(), TILES[:1]))
    clock.times |= {"gemm 32": 100.0 + slower, "split 32": 100.0}
    assert ran(device, choose(alternatives(None, True, programs), config(tmp_path))) == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("times, expected", [
    ({"gemm 64": 100.5}, "gemm 64"), ({"gemm 64": 104.0, "gemm 32": 104.0, "gemm 16": 104.0}, "library"),
    ({"gemm 16": 50.0}, "gemm 16"), ({"library": 20.0}, "library")])
def test_the_measured_route_runs(device: FakeDevice, clock: FakeClock, tmp_path: Path, times: dict[str, float],
                                 expected: str, fused: bool) -> None:
    clock.times |= {"gemm 32": 120.0, "gemm 64": 120.0, "gemm 16": 120.0, **times}
    found = choose(alternatives(library(device), fused), config(tmp_path))
    assert ran(device, found) == expected
    assert set(clock.measured) == {"library", "gemm 32", "gemm 64", "gemm 16"}
    count = len(clock.measured)
    assert ran(device, found) == expected and len(clock.measured) == count


def test_max_autotune_measures_all_tiles_and_others_few(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    found = alternatives(library(device), programs=lowered(with_tiles(plain()), with_tiles(split())))
    ran(device, choose(found, config(tmp_path)))
    assert set(clock.measured) == {"library", *(f"{n} {b}" for n in ("gemm", "split") for b in (32, 64, 16))}
    assert len({b for b in clock.measured if b.startswith("gemm")}) == FEW
    ran(device, choose(found, config(tmp_path, Mode.MAX_AUTOTUNE)))
    assert set(clock.measured) == set(clock.times)


def test_all_routes_are_built_before_the_first_call(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    found = choose(alternatives(library(device)), config(tmp_path))
    assert [c.kernel.kernel.tile for c in found.first_calls] == list(TILES[:FEW])
    assert {c.sizes for c in found.first_calls} == {(64, 64, 64)}
    ran(device, found)
    later = choose(alternatives(library(device)), config(tmp_path)).first_calls
    assert [c.kernel.kernel.tile for c in later] == [SMALL]


def test_without_a_library_the_programs_are_measured(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    clock.times["gemm 64"] = 30.0
    assert ran(device, choose(alternatives(None), config(tmp_path, gemm="fused"))) == "gemm 64"


@pytest.mark.usefixtures("no_clock")
def test_one_route_is_no_choice(device: FakeDevice, tmp_path: Path) -> None:
    only = lowered(with_tiles(plain(), (SMALL,)))
    assert ran(device, choose(alternatives(None, programs=only), config(tmp_path))) == "gemm 32"


def test_programs_need_names_of_their_own(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    twice = lowered(plain(), replace(split(), name="plain"))
    with pytest.raises(VerificationError, match="share a name"):
        choose(alternatives(library(device), programs=twice), config(tmp_path))


# ------------------------------------------------------------------ the cost model alone


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize("mode", [Mode.DEFAULT, Mode.MAX_AUTOTUNE])
def test_deterministic_takes_what_the_cost_model_says(device: FakeDevice, tmp_path: Path, mode: Mode) -> None:
    settings, other = config(tmp_path, mode, deterministic=True), library(device)
    fused = choose(alternatives(other, True, lowered(with_tiles(plain()), with_tiles(split()))), settings)
    assert ran(device, fused) == "gemm 32" and device.built == ["gemm 32"]
    assert [c.kernel.kernel.tile for c in fused.first_calls] == [SMALL]
    assert choose(alternatives(other, False), settings) is other
    assert ran(device, choose(alternatives(None, False), settings)) == "gemm 32"


@pytest.mark.parametrize("fused, expected", [(True, "gemm 32"), (False, "library")])
def test_a_capture_runs_what_the_cost_model_says(device: FakeDevice, clock: FakeClock, tmp_path: Path, fused: bool,
                                                 expected: str) -> None:
    clock.times["gemm 16"] = 20.0
    found, device.capturing = choose(alternatives(library(device), fused), config(tmp_path)), True
    launch = found.bind(refuse)
    assert launch(*tensors(), 64, 64, 64) and device.ran == [expected] and clock.measured == []
    device.capturing = False
    assert launch(*tensors(), 64, 64, 64) and device.ran[-1] == "gemm 16"
    device.capturing = True
    assert launch(*tensors(), 64, 64, 64) and device.ran[-1] == "gemm 16"


@pytest.mark.parametrize("fused, expected", [(True, []), (False, ["library"])])
def test_nothing_to_compute_is_not_measured(device: FakeDevice, clock: FakeClock, tmp_path: Path, fused: bool,
                                            expected: list[str]) -> None:
    found = choose(alternatives(library(device), fused), config(tmp_path))
    assert found.bind(refuse)(*tensors(), 0, 64, 64) and device.ran == expected and clock.measured == []


# ------------------------------------------------------------------ failures


def out_of_memory(failed: Failed) -> bool:
    return failed(torch.OutOfMemoryError("full"))


def unwell(failed: Failed) -> bool:
    return False


@pytest.mark.parametrize("answer", [out_of_memory, unwell])
def test_a_library_that_fails_costs_a_route(device: FakeDevice, clock: FakeClock, tmp_path: Path,
                                            answer: Callable[[Failed], bool]) -> None:
    clock.times["library"] = 1.0
    assert ran(device, choose(alternatives(library(device, answer), False), config(tmp_path))) == "gemm 32"


def test_programs_that_fail_cost_routes(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    device.broken = {"gemm 32", "gemm 16"}
    found = choose(alternatives(library(device)), config(tmp_path))
    with observe.recording() as recording, observe.graph("inference", 0):
        launch = found.bind(refuse)
    assert launch(*tensors(), 64, 64, 64) and device.ran[-1] == "gemm 64"
    (record,) = recording.graphs[0].tunings
    assert {name: us is None for name, us in record.times} == {
        "library": False, f"plain: {TILES[0]}": True, f"plain: {TILES[1]}": False, f"plain: {TILES[2]}": True}


def test_where_all_fail_the_launch_says_why(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    device.broken = {"gemm 32", "gemm 16", "gemm 64"}
    told: list[str] = []
    found = choose(alternatives(library(device, out_of_memory)), config(tmp_path))
    assert not found.bind(lambda error: bool(told.append(str(error))))(*tensors(), 64, 64, 64)
    assert told == ["out of resources"]


# ------------------------------------------------------------------ what is remembered and told


def test_classes_of_arguments_are_measured_once_each(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    launch, base = choose(alternatives(library(device)), config(tmp_path)).bind(refuse), torch.zeros(5000)
    for m, offset, new in ((64, 0, True), (60, 0, False), (33, 0, False), (65, 0, True), (64, 1, True), (64, 3, False)):
        clock.measured.clear()
        a = base[offset:offset + 4096]
        assert launch(a, *tensors()[1:], m, 64, 64) and bool(clock.measured) is new, (m, offset)


def test_equal_segments_share_times_and_run_their_own_library(device: FakeDevice, clock: FakeClock,
                                                              tmp_path: Path) -> None:
    clock.times |= {"library": 10.0, "other": 10.0}
    first, second = (choose(alternatives(library(device, label=label)), config(tmp_path))
                     for label in ("library", "other"))
    assert ran(device, first) == "library"
    clock.measured.clear()
    assert ran(device, second) == "other" and clock.measured == []


def test_a_second_process_measures_nothing(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    clock.times["gemm 16"] = 20.0
    assert ran(device, choose(alternatives(library(device)), config(tmp_path))) == "gemm 16"
    choice._choices.cache_clear()
    clock.measured.clear()
    with observe.recording() as recording, observe.graph("inference", 0):
        found = choose(alternatives(library(device)), config(tmp_path))
        launch = found.bind(refuse)
    assert [c.kernel.kernel.tile.blocks[0][1] for c in found.first_calls] == [16]
    assert launch(*tensors(), 64, 64, 64) and device.ran[-1] == "gemm 16" and clock.measured == []
    assert recording.graphs[0].tunings[0].remembered
    choice._choices.cache_clear()
    changed = alternatives(library(device), programs=lowered(with_tiles(plain(torch.float16))))
    assert ran(device, choose(changed, config(tmp_path))) and clock.measured  # another dtype, the same text


def test_threads_measure_once(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    found = choose(alternatives(library(device)), config(tmp_path))
    launch = found.bind(refuse)
    threads = [threading.Thread(target=launch, args=(*tensors(), 64, 64, 64)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(device.ran) - len(clock.measured) == 4


def test_times_are_recorded_and_shown(device: FakeDevice, clock: FakeClock, tmp_path: Path) -> None:
    device.broken = {"gemm 16"}
    clock.times |= {"gemm 32": 104.0, "gemm 64": 105.0}
    with observe.recording() as recording, observe.graph("inference", 0):
        found = choose(alternatives(library(device)), config(tmp_path))
        launch = found.bind(refuse)
    launch(*tensors(), 64, 64, 64)
    (graph,) = recording.graphs
    (told,) = graph.tunings
    assert (told.segment, told.kernel, told.tile, told.subject) == ("segment3", "gemm", "library", "route")
    line = ("route for n0 <= 64, n1 <= 64, n2 <= 64: library 100.0 us (others: "
            f"plain: {TILES[0]} 104.0 us; plain: {TILES[1]} 105.0 us; plain: {TILES[2]} failed)")
    assert tunings.lines("gemm", graph) == [line]
    assert tunings.summary(graph) == f"gemm: {line}"


def test_large_tiles_have_other_names() -> None:
    assert len({str(t) for t in (*TILES, LARGE, replace(LARGE, num_stages=4))}) == len(TILES) + 2
