"""Which variant of a kernel runs: decided by pointers and sizes, checked with a fake device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime import launcher
from fxfuser.runtime.binary import Binary
from fxfuser.runtime.build import Options, Variant, build, constants, report
from fxfuser.runtime.launcher import Cuda

from .graphs import pointwise
from .products import LARGE, SMALL, gemm


class FakeTensor:
    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class FakeCompiled:
    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, variant: Variant, calls: list[Any]) -> None:
        self.variant, self.calls = variant, calls

    def launch_metadata(self, grid: Any, stream: int) -> str:
        return "seen"

    def run(self, *args: Any) -> None:
        self.calls.append((self.variant, args))


class FakeDevice:
    """Records builds and launches; stands in for Triton's compiler and the CUDA driver."""

    def __init__(self) -> None:
        self.builds: list[Variant] = []
        self.calls: list[tuple[Variant, tuple[Any, ...]]] = []
        self.current = 0

    def load(self, recipe: dict[str, Any], binary: Any) -> FakeCompiled:
        return FakeCompiled(variant_of(recipe), self.calls)

    def obtain(self, recipe: dict[str, Any], store: Any) -> Binary:
        self.builds.append(variant_of(recipe))
        return Binary("{}", b"cubin")


def variant_of(recipe: dict[str, Any]) -> Variant:
    """The variant that a recipe was written for."""
    types = {n: t for n, t in recipe["signature"] if t != "constexpr"}
    aligned = tuple(n in recipe["divisible"] for n in types if n[0] != "n")
    sizes = tuple(t + "d" * (n in recipe["divisible"]) for n, t in types.items() if n[0] == "n")
    return Variant(aligned, sizes, dict(map(tuple, recipe["constants"]))["INDEX"] == {"dtype": "int64"})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    monkeypatch.setattr(launcher, "load", fake.load)
    monkeypatch.setattr(launcher, "obtain", fake.obtain)
    monkeypatch.setattr(launcher, "target_of", lambda device: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(launcher, "device_calls",
                        lambda: {"current_device": lambda: fake.current, "stream": lambda device: 99})
    return fake


def launch_of(kernel: Kernel, failed: Any = None) -> Any:
    def refuse(error: Exception) -> bool:
        raise error

    return launcher.Cuda(kernel, 0, Options()).bind(failed or refuse)


def pointers(*addresses: int) -> Sequence[FakeTensor]:
    return [FakeTensor(a) for a in addresses]


def test_arguments_reach_the_kernel(device: FakeDevice) -> None:
    assert launch_of(pointwise())(*pointers(16, 32, 48), 130)
    variant, args = device.calls[0]
    assert args[:6] == (3, 1, 1, 99, 17, (4, 1, 0))  # three programs of 64
    assert args[6:9] == (None, None, None)
    assert args[9:13] == (16, 32, 48, 130)
    assert args[-1] == 64
    assert variant == Variant((True, True, True), ("i32",), False)


def test_variants_follow_alignment_divisibility_and_range(device: FakeDevice) -> None:
    launch = launch_of(pointwise())
    for addresses, n in (((16, 32, 48), 64), ((16, 36, 48), 64), ((16, 32, 48), 65), ((16, 32, 48), 2**31),
                         ((16, 32, 48), 64), ((16, 32, 48), 2**31 - 64)):
        launch(*pointers(*addresses), n)
    assert [v for v, _ in device.calls] == [
        Variant((True, True, True), ("i32d",), False),
        Variant((True, False, True), ("i32d",), False),
        Variant((True, True, True), ("i32",), False),
        Variant((True, True, True), ("i64d",), True),
        Variant((True, True, True), ("i32d",), False),
        Variant((True, True, True), ("i32d",), True),  # the offset of the last lane needs 64 bits
    ]
    assert len(device.builds) == 5


def test_past_the_limit_the_general_variant_runs(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "MOST_VARIANTS", 2)
    launch = launch_of(pointwise())
    for addresses in ((16, 16, 16), (4, 16, 16), (16, 4, 16), (16, 16, 4), (4, 16, 16)):
        launch(*pointers(*addresses), 5)
    general = Variant((False, False, False), ("i64",), True)
    assert [v for v, _ in device.calls][2:4] == [general, general]
    assert device.calls[4][0] == Variant((False, True, True), ("i32",), False)
    assert len(device.builds) == 3


def test_a_kernel_without_sizes_is_decided_when_it_is_bound(device: FakeDevice, monkeypatch: pytest.MonkeyPatch,
                                                            ) -> None:
    kernel = replace(pointwise(), sizes=0, grid="3", extent="100")
    launch = launch_of(kernel)
    assert launch(*pointers(16, 32, 48)) and launch(*pointers(16, 32, 49))
    assert [v.aligned for v, _ in device.calls] == [(True, True, True), (True, True, False)]
    assert device.calls[0][1][0] == 3
    with monkeypatch.context() as during:
        during.setattr(Cuda, "shape", lambda *_: pytest.fail("looked up at a launch"))
        assert launch(*pointers(16, 32, 48))
    assert launch_of(replace(kernel, grid="0"))(*pointers(16, 32, 48)) and len(device.calls) == 3


def test_one_device_needs_no_check(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_only_device", lambda: True)
    launch = launch_of(pointwise())
    monkeypatch.setattr(torch.cuda, "device", lambda index: pytest.fail("switched"))
    device.current = 3
    assert launch(*pointers(16, 16, 16), 8)


def test_hooks_see_a_launch(device: FakeDevice) -> None:
    launch, chain = launch_of(pointwise()), launcher.triton.knobs.runtime.launch_enter_hook
    launch(*pointers(16, 32, 48), 130)

    def hook(metadata: Any) -> None:
        pass

    chain.add(hook)
    try:
        launch(*pointers(16, 32, 48), 130)
    finally:
        chain.remove(hook)
    launch(*pointers(16, 32, 48), 130)
    assert [args[6] for _, args in device.calls] == [None, "seen", None]
    assert device.calls[1][1][7] is chain and device.calls[1][1][9:13] == (16, 32, 48, 130)


def test_no_programs_no_launch(device: FakeDevice) -> None:
    assert launch_of(pointwise())(*pointers(0, 0, 0), 0)
    assert device.calls == [] and device.builds == []


def test_another_current_device_is_switched(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Guard:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            device.current = self.index

        def __exit__(self, *_: object) -> None:
            device.current = 3

    monkeypatch.setattr(torch.cuda, "device", Guard)
    device.current = 3
    assert launch_of(pointwise())(*pointers(16, 16, 16), 8)
    assert entered == [0] and device.current == 3 and len(device.calls) == 1


def test_a_failure_is_built_once_and_answered_by_the_caller(device: FakeDevice, monkeypatch: pytest.MonkeyPatch,
                                                            ) -> None:
    def broken(*_: Any) -> None:
        device.builds.append(Variant((), (), False))
        raise RuntimeError("out of registers")

    monkeypatch.setattr(launcher, "obtain", broken)
    errors: list[str] = []
    launch = launch_of(pointwise(), lambda error: bool(errors.append(str(error))))
    assert not launch(*pointers(16, 16, 16), 8)
    assert not launch(*pointers(16, 16, 16), 8)
    assert errors == ["out of registers"] * 2 and len(device.builds) == 1


def test_threads_build_once(device: FakeDevice) -> None:
    launch = launch_of(pointwise())
    threads = [threading.Thread(target=launch, args=(*pointers(16, 16, 16), 8)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(device.builds) == 1 and len(device.calls) == 8


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("variant", ["usual", "general"])
def test_kernels_build_without_a_gpu(arch: int, variant: str) -> None:
    kernel = pointwise(torch.bfloat16, block=1024)
    made = report(kernel, arch, getattr(Variant, variant)(kernel))
    assert made.spills == 0 and made.shared == 0 and 0 < made.registers < 64
    wide = "ld.global.v4" in made.ptx or "ld.global.v2" in made.ptx
    assert wide == (variant == "usual")


def test_a_kernel_that_does_not_match_its_description() -> None:
    kernel = pointwise()
    with pytest.raises(ValueError, match="takes"):
        report(Kernel(kernel.name, kernel.source, kernel.inputs, kernel.outputs, 2, kernel.grid, kernel.extent,
                      kernel.tile))


# ------------------------------------------------------------------ tensor descriptors and persistent kernels


@pytest.mark.parametrize("arch, addresses, sizes, expected", [
    (90, (16, 32, 48), (7, 64, 32), True), (100, (16, 32, 48), (7, 64, 32), True),
    (80, (16, 32, 48), (7, 64, 32), False), (89, (16, 32, 48), (7, 64, 32), False),
    (90, (16, 36, 48), (7, 64, 32), False), (90, (16, 32, 48), (16, 64, 40), False),
    (90, (16, 32, 48), (16, 65, 32), False), (90, (16, 32, 48), (2**31, 64, 32), True)])
def test_descriptors_need_hopper_alignment_and_divisible_sizes(
        arch: int, addresses: tuple[int, ...], sizes: tuple[int, ...], expected: bool) -> None:
    variant = Variant.of(addresses, sizes, 0)
    assert dict(constants(gemm(), variant, arch))["DESCRIPTORS"] is expected
    assert [n for n, _ in constants(gemm(), variant, arch)][:3] == ["INDEX", "DESCRIPTORS", "MBLOCK"]
    assert "DESCRIPTORS" not in dict(constants(pointwise(), Variant.usual(pointwise()), arch))


def test_the_kernel_is_told_of_its_descriptors(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "processors_of", lambda device: 5)
    launch = launch_of(gemm())
    assert launch(*pointers(16, 32, 48), 640, 64, 32) and launch(*pointers(16, 32, 56), 64, 16, 32)
    assert [args[0] for _, args in device.calls] == [5, 2]  # no more programs than multiprocessors
    assert [args[16] for _, args in device.calls] == [True, False]


class Scratch:
    def __init__(self, taken: list[int], size: int) -> None:
        taken.append(size)

    def data_ptr(self) -> int:
        return 512


def hopper_launcher(calls: list[Any], scratch: int) -> Any:
    """Triton's launcher as it is made of a kernel's metadata, but its function in C."""
    made = object.__new__(launcher.CudaLauncher)
    vars(made).update(
        launch=lambda *a: calls.append(a), global_scratch_size=scratch, profile_scratch_size=0, num_ctas=1,
        launch_cooperative_grid=False, launch_pdl=True, arg_annotations="notes", kernel_signature=b"s")
    return made


@pytest.mark.parametrize("one_tuple", [False, True])
@pytest.mark.parametrize("scratch", [0, 384])
def test_scratch_memory_is_per_program_and_goes_where_triton_puts_it(one_tuple: bool, scratch: int,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    taken: list[int] = []
    monkeypatch.setattr(launcher, "_ONE_TUPLE", one_tuple)
    monkeypatch.setattr(launcher, "TRITON", (3, 7) if one_tuple else (3, 6))
    monkeypatch.setattr(launcher, "_scratch", lambda size: Scratch(taken, size))
    compiled: Any = FakeCompiled(Variant((), (), False), [])
    compiled.run = hopper_launcher(calls, scratch)
    run, head = launcher._direct(compiled)
    run(7, 1, 1, 99, *head, "arguments")
    assert taken == ([7 * 384] if scratch else [])
    where, flags = 512 if scratch else None, (7, 1, 1, 99, 17, False, True)
    metadata = ((4, 1, 0), None, None, None)
    expected = (*flags, *metadata, where, None, "notes", b"s", "arguments") if one_tuple else (
        *flags, where, None, *metadata, "arguments")
    assert calls == [expected]


def test_an_observed_launch_finds_an_allocator_and_leaves_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    allocators: list[Any] = []
    current = launcher.triton.runtime._allocation._allocator
    compiled: Any = FakeCompiled(Variant((), (), False), [])
    compiled.run = lambda *args: allocators.append(current.get())
    before = current.get()
    launcher._observed(compiled, 7, 99, 16, 32)
    assert allocators == [launcher._scratch] and current.get() is before


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("of", [SMALL, LARGE], ids=str)
def test_products_build_without_a_gpu(arch: int, of: Tile) -> None:
    kernel = gemm(of=of)
    metadata = build(kernel, Variant.usual(kernel), GPUTarget("cuda", arch, 32)).metadata
    assert metadata.global_scratch_size == (3 * 128 if arch == 90 else 0)  # a descriptor each
    made = report(kernel, arch)
    assert made.spills == 0 and ("cp.async.bulk.tensor" in made.ptx) == (arch == 90)
    assert ("wgmma" in made.ptx) == (arch == 90 and of is LARGE)


def test_more_shared_memory_than_there_is_fails() -> None:
    with pytest.raises(ValueError, match="shared memory, sm_80 has"):
        report(gemm(of=replace(LARGE, num_stages=5)), 80)
