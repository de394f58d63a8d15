"""Tensors that plans and programs allocate: by the cheaper call where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxfuser.runtime import allocation, build_plan
from fxfuser.runtime.allocation import FAST, empty_on, fast_empty

CPU = "_empty_strided_cpu"  # the same for tensors that every machine has


def test_the_function_is_there() -> None:
    """That of CUDA exists in builds without it; what it is called may change in a later version of torch."""
    assert callable(getattr(allocation._functions(), FAST)) and callable(getattr(allocation._functions(), CPU))


@pytest.mark.parametrize("devices, given", [(1, True), (2, False), (0, False)])
def test_only_where_no_other_device_could_be_the_current_one(
        monkeypatch: pytest.MonkeyPatch, devices: int, given: bool) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert (fast_empty(torch.device("cuda", 0)) is not None) == given
    assert fast_empty(torch.device("cpu")) is None


def test_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "_functions", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert fast_empty(torch.device("cuda")) is None
    made = empty_on(torch.device("cpu"))((2, 3), (1, 4), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == ((2, 3), (1, 4), torch.float16)


@pytest.mark.parametrize("dynamic", [False, True])
def test_plans_call_it(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    calls: list[Any] = []

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        calls.append((tuple(size), tuple(stride), dtype))
        made: torch.Tensor = getattr(allocation._functions(), CPU)(size, stride, dtype)
        return made

    monkeypatch.setattr(build_plan, "fast_empty", lambda device: empty)

    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x).t().contiguous() * 2, x.sum(-1).half()

    torch.compiler.reset()
    compiled = torch.compile(fn, backend="fxfuser", dynamic=dynamic, options={"executor": "interpret", "strict": True})
    for rows in (5, 7) if dynamic else (5,):
        x = torch.randn(rows, 6)
        for got, want in zip(compiled(x), fn(x), strict=True):
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride()
        assert {((6, rows), (rows, 1), torch.float32), ((rows,), (1,), torch.float16)} <= set(calls)
