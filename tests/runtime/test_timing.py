"""The clocks' arithmetic on the CPU; the device clocks themselves on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from fxfuser.runtime import timing
from fxfuser.runtime.timing import Clock

CPU = torch.device("cpu")


def test_quantiles_lie_between_the_samples() -> None:
    assert timing.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert timing.quantile([0.0, 10.0], 0.25) == 2.5
    assert timing.quantile([4.0], 0.9) == 4.0


def test_a_clock_keeps_its_samples_and_gives_their_median() -> None:
    clock = Clock((5.0, 1.0, 100.0))
    assert clock.median == 5.0
    assert clock.to_json()["samples"] == [5.0, 1.0, 100.0]
    assert Clock((2.0,) * 9).spread == 0.0


def test_geometric_mean() -> None:
    assert timing.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert math.isnan(timing.geometric_mean([]))


def test_only_device_work_counts_as_kernels() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "fused", "dur": 10.0},
        {"ph": "X", "cat": "kernel", "name": "fused", "dur": 14.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "dur": 4.0},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "region", "dur": 99.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 7.0},
        {"ph": "i", "cat": "kernel", "name": "instant"},
    ]
    busy = timing.kernels_of({"traceEvents": events}, calls=2)
    assert busy.kernels == {"fused": (1.0, 12.0), "Memcpy DtoD": (0.5, 2.0)}
    assert busy.count == 1.5 and busy.microseconds == 14.0


def test_the_cpu_has_no_device_clocks() -> None:
    calls: list[int] = []
    measured = timing.measure([lambda: calls.append(0), lambda: calls.append(1)], CPU, 0.0)
    assert measured.graph is None and measured.busy is None and measured.device_us is None
    assert len(measured.call.samples) == 3
    # warm-up of each, then bursts that rotate
    assert len(calls) == 2 + 3 * timing.CALLS_PER_BURST and calls.count(0) == calls.count(1)


@pytest.mark.gpu
def test_three_clocks_of_a_cuda_call() -> None:
    device = torch.device("cuda")
    with timing.stream(device):
        x = torch.randn(1 << 22, device=device)
        measured = timing.measure([lambda: x * 2], device, 0.02)
        copy = timing.copy_clock(2 * x.numel() * 4, device, 0.02)
    assert measured.graph is not None and measured.busy is not None
    assert measured.busy.count == 1
    assert measured.peak_bytes == x.numel() * 4
    assert 0.3 < copy.median / measured.graph.median < 3


@pytest.mark.gpu
def test_a_copy_is_measured_on_the_default_stream_too() -> None:
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert timing.copy_clock(1 << 20, torch.device("cuda", 0), 0.01).median > 0


@pytest.mark.gpu
def test_work_that_cannot_be_captured_has_no_graph_clock() -> None:
    device = torch.device("cuda")
    with timing.stream(device):
        x = torch.randn(16, device=device)
        measured = timing.measure([lambda: x.sum().item()], device, 0.01)
    assert measured.graph is None and measured.notes
