"""Programs: their scratch buffers, counters and launches, with a fake device and in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fxfuser.errors import VerificationError
from fxfuser.lowering.kernel import Program
from fxfuser.runtime import counters, programs
from fxfuser.runtime.build import Options, report
from fxfuser.runtime.counters import LEAST, RESERVE, Counters
from fxfuser.runtime.programs import Arity, CudaProgram, InterpretedProgram, cuda_program, tiles_of, with_tile

from .fakes import FakeDevice
from .products import LARGE, SMALL, maxima, plain, split, static, tile

ARITY = Arity(2, 1)
PROGRAMS: list[Callable[..., Program]] = [plain, maxima, split]


def refuse(error: Exception) -> bool:
    raise error


def expected(program: Callable[..., Program], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    exact = a.double() @ b.double().T
    return exact.amax(1) if program is maxima else exact


# ------------------------------------------------------------------ in the interpreter


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rows, columns, depth", [(64, 48, 160), (70, 33, 45), (1, 1, 1)])
def test_programs_in_the_interpreter(program: Callable[..., Program], rows: int, columns: int, depth: int) -> None:
    a, b = torch.randn(rows, depth).half(), torch.randn(columns, depth).half()
    exact = expected(program, a, b)
    for made, sizes in ((program(torch.float16), (rows, columns, depth)),
                        (static(program(torch.float16), rows, columns, depth), ())):
        out = torch.full(exact.shape, float("nan"), dtype=torch.float16)
        assert InterpretedProgram(made, ARITY).bind(refuse)(a, b, out, *sizes)
        torch.testing.assert_close(out, exact.half(), rtol=2e-3, atol=1e-3)


def test_scratch_follows_the_tile() -> None:
    a, b, out = torch.randn(40, 64).half(), torch.randn(100, 64).half(), torch.empty(40).half()
    made = with_tile(maxima(torch.float16), tile(16, 32, 16))
    assert made.launches[0].kernel.tile != SMALL and made.launches[1] == maxima(torch.float16).launches[1]
    InterpretedProgram(made, ARITY).run([a, b, out, 40, 100, 64])
    torch.testing.assert_close(out, expected(maxima, a, b).half(), rtol=2e-3, atol=1e-3)


def test_a_program_that_reads_scratch_nobody_wrote_is_found() -> None:
    made = maxima(torch.float16)
    finish = replace(made.launches[1], sizes=("n0", "2"))
    a, b, out = torch.randn(40, 64).half(), torch.randn(32, 64).half(), torch.zeros(40).half()
    unwritten = replace(made, launches=(finish,), scratch=(replace(made.scratch[0], size="n0 * 2"),))
    InterpretedProgram(unwritten, ARITY).run([a, b, out, 40, 32, 64])
    assert out.isnan().all()


def test_counters_that_are_left_behind_are_an_error() -> None:
    a, b, out = torch.randn(40, 64).half(), torch.randn(32, 64).half(), torch.empty(40, 32).half()
    with pytest.raises(VerificationError, match="split_k leaves counters"):
        InterpretedProgram(split(torch.float16, reset=1), ARITY).run([a, b, out, 40, 32, 64])


# ------------------------------------------------------------------ on a fake device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return FakeDevice.install(monkeypatch)


def on_device(program: Program) -> CudaProgram:
    return CudaProgram(program, ARITY, 0, Options())


def tensors() -> list[torch.Tensor]:
    return [torch.zeros(64, 64) for _ in range(3)]


@pytest.mark.parametrize("fixed", [False, True])
def test_launches_get_their_pointers_and_sizes(device: FakeDevice, fixed: bool) -> None:
    a, b, out = tensors()
    made = static(maxima(), 70, 33, 45) if fixed else maxima()
    assert on_device(made).bind(refuse)(a, b, out, *(() if fixed else (70, 33, 45)))
    (partial, first), (finish, second) = device.launches
    assert (partial, finish) == ("maxima", "finish")
    assert first[:2] == (a.data_ptr(), b.data_ptr()) and first[3:] == (70, 33, 45)
    assert second == (first[2], out.data_ptr(), 70, 3) and first[2] not in (0, out.data_ptr())


def test_a_launch_that_fails_is_answered_and_ends_the_program(device: FakeDevice) -> None:
    told: list[str] = []

    def failed(error: Exception) -> bool:
        told.append(str(error))
        return False

    device.broken = {"maxima 32"}
    assert not on_device(maxima()).bind(failed)(*tensors(), 70, 33, 45)
    assert told == ["out of resources"] and device.launches == []


def test_memory_that_is_not_there_is_a_failure_too(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(torch, "empty", full)
    told: list[str] = []
    launch = on_device(maxima()).bind(lambda error: bool(told.append(str(error))))
    assert not launch(*[torch.zeros(64, 64) for _ in range(3)], 70, 33, 45)
    assert told == ["full"] and device.launches == []


def counter_of(device: FakeDevice) -> int:
    """The address of the counters of the last launch."""
    name, arguments = device.launches[-1]
    assert name == "split"
    found: int = arguments[4]
    return found


@pytest.mark.parametrize("fixed", [False, True])
def test_counters_belong_to_a_stream(device: FakeDevice, fixed: bool) -> None:
    made, sizes = (static(split(), 64, 48, 99), ()) if fixed else (split(), (64, 48, 99))
    launch, again, seen = on_device(made).bind(refuse), on_device(made).bind(refuse), []
    for run, stream in ((launch, 1), (launch, 1), (launch, 2), (launch, 1), (again, 1), (again, 2)):
        device.stream = stream
        assert run(*tensors(), *sizes)
        seen.append(counter_of(device))
    assert seen[0] == seen[1] == seen[3] == seen[4] != seen[2] == seen[5]


def test_each_captured_launch_has_counters_of_its_own(device: FakeDevice) -> None:
    launch = on_device(split()).bind(refuse)
    launch(*tensors(), 64, 48, 99)
    seen = [counter_of(device)]
    device.capturing = True
    for _ in range(3):
        launch(*tensors(), 64, 48, 99)
        seen.append(counter_of(device))
    device.capturing = False
    launch(*tensors(), 64, 48, 99)
    assert counter_of(device) == seen[0] and len(set(seen)) == 4
    assert all(p % counters.ALIGNMENT == seen[1] % counters.ALIGNMENT for p in seen[1:])


def test_a_capture_before_any_call_clears_its_own(device: FakeDevice) -> None:
    device.capturing = True
    assert on_device(split()).bind(refuse)(*tensors(), 64, 48, 99)
    assert len(device.launches) == 1


def test_more_tiles_need_more_counters(device: FakeDevice) -> None:
    launch = on_device(split()).bind(refuse)
    launch(*tensors(), 64, 48, 99)
    small = counter_of(device)
    launch(*tensors(), 320 * 32, 32 * 16, 99)  # 320 x 32 counters of 4 bytes
    assert counter_of(device) != small
    assert len(programs.counters_on(torch.device("cpu"))._streams) == 1


def test_first_calls_are_those_of_all_launches(device: FakeDevice) -> None:
    made = on_device(maxima())
    first, second = made.first_calls((70, 33, 48))
    assert (first.kernel.kernel.name, first.sizes, first.pointers) == ("maxima", (70, 33, 48), None)
    assert (second.kernel.kernel.name, second.sizes) == ("finish", (70, 3))
    first, second = made.first_calls((70, 33, 48), (16, 24, 40))
    assert first.pointers == (16, 24, 0) and second.pointers == (0, 40)
    assert made.empty(0, 5, 5) and not made.empty(1, 5, 5)


def test_equal_programs_are_one(device: FakeDevice) -> None:
    noted = with_tile(plain(), SMALL)
    first = noted.launches[0]
    noted = replace(noted, launches=(replace(first, kernel=replace(first.kernel, candidates=(LARGE, SMALL))),))
    assert tiles_of(noted) == (SMALL, LARGE)
    assert cuda_program(plain(), ARITY, 0) is cuda_program(noted, ARITY, 0)
    assert cuda_program(plain(), ARITY, 0) is not cuda_program(with_tile(plain(), LARGE), ARITY, 0)


# ------------------------------------------------------------------ counters


def test_counters_grow_and_what_was_given_stays() -> None:
    made = Counters(torch.device("cpu"))
    small = made.on_stream(5, 100)
    assert made.on_stream(5, LEAST) is small and small.numel() == LEAST
    large = made.on_stream(5, LEAST + 1)
    assert large.numel() == 2 * LEAST and not large.any() and large.data_ptr() != small.data_ptr()
    assert made.on_stream(5, 10) is large


def test_the_reserve_is_cleared_before_anything_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(counters, "_synchronize", waited.append)
    made = Counters(torch.device("cpu"))
    made.on_stream(1, 8)
    assert len(waited) == 1
    spans = [(t.data_ptr(), t.data_ptr() + t.numel()) for t in (made.captured(100) for _ in range(5000))]
    assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
    made.on_stream(1, 8)
    assert len(waited) == 2  # more than half was gone
    assert made.captured(2 * RESERVE).numel() == 2 * RESERVE


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("arch", [80, 90])
def test_programs_build_without_a_gpu(program: Callable[..., Program], arch: int) -> None:
    for launch in program(of=tile(64, 64, 64)).launches:
        assert report(launch.kernel, arch).spills == 0
