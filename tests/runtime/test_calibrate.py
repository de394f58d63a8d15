"""Calibration: the arithmetic with a device of known rates, what is kept, and who uses it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton
from torch import fx
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fxfuser.config import Config
from fxfuser.runtime import rate_kernels, rates
from fxfuser.runtime.calibrate import CudaBench, measure
from fxfuser.runtime.rates import keep_rates, known_rates, rates_for
from fxfuser.runtime.store import store
from fxfuser.segmenter.cost import DeviceRates

KNOWN = DeviceRates(bandwidth=2e6, launch=3.5, processors=80, program_bandwidth=2e4, operations=3e7)


class Known:
    """A device that does everything at `KNOWN` rates; a replay of a graph costs 9 us on top."""

    def name(self) -> str:
        return "known"

    def processors(self) -> int:
        return KNOWN.processors

    def launched(self, count: int) -> float:
        return 9 + KNOWN.launch * count

    def copied(self, count: int, programs: int) -> float:
        return KNOWN.launch + 2 * count / min(KNOWN.bandwidth, programs * KNOWN.program_bandwidth)

    def computed(self, count: int) -> float:
        return KNOWN.launch + count / KNOWN.operations


class Clock:
    def __init__(self, device: int | None) -> None:
        self.device = device

    def name(self) -> str:
        return "known"


def test_measuring_recovers_the_rates_of_a_device() -> None:
    found = measure(Known())
    assert [getattr(found, n) for n in rates.NAMES] == pytest.approx([getattr(KNOWN, n) for n in rates.NAMES])


def test_rates_are_kept_by_the_name_of_the_device(tmp_path: Path) -> None:
    assert known_rates("known", tmp_path) is None
    assert keep_rates("known", KNOWN, tmp_path)
    assert known_rates("known", tmp_path) == KNOWN and known_rates("another", tmp_path) is None


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"bandwidth": 1}'])
def test_what_makes_no_sense_is_not_used(tmp_path: Path, payload: bytes) -> None:
    store(tmp_path, "rates").put(rates._key("known"), payload)
    assert known_rates("known", tmp_path) is None


def test_a_rate_of_nothing_is_not_used(tmp_path: Path) -> None:
    keep_rates("known", replace(KNOWN, launch=0.0), tmp_path)
    assert known_rates("known", tmp_path) is None


def on(device: str) -> fx.Graph:
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        graph.placeholder("x").meta["val"] = torch.empty(4, device=device)
    return graph


def test_graphs_of_the_device_are_priced_with_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "CudaClock", Clock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = Config(cache_dir=tmp_path)
    assert rates_for(on("cuda"), config) == DeviceRates()
    keep_rates("known", KNOWN, tmp_path)
    assert rates_for(on("cuda"), config) == KNOWN
    assert rates_for(on("cpu"), config) == DeviceRates()
    assert rates_for(on("cuda"), replace(config, deterministic=True)) == DeviceRates()


@pytest.mark.parametrize(("kernel", "signature", "block"), [
    (rate_kernels.nothing, {"target": "*i32"}, None),
    (rate_kernels.copy, {"source": "*i32", "target": "*i32", "steps": "i32"}, rate_kernels.COPY_BLOCK),
    (rate_kernels.compute, {"target": "*fp32", "steps": "i32"}, rate_kernels.COMPUTE_BLOCK),
])
def test_the_kernels_build_for_a_gpu(kernel, signature: dict[str, str], block: int | None) -> None:
    constants = {} if block is None else {"BLOCK": block}
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    built = triton.compile(ASTSource(kernel, types, constants), GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert built.asm["cubin"]
    if kernel is rate_kernels.compute:
        assert built.asm["ptx"].count("fma.rn.f32") >= 8


@pytest.mark.gpu
def test_a_device_is_measured() -> None:
    found = measure(CudaBench())
    assert 1e4 < found.bandwidth < 1e8 and 0.1 < found.launch < 20 and found.processors > 0
    assert found.program_bandwidth < found.bandwidth and found.operations > 1e5
