"""Products with what is fused around them on a GPU: every way to compute them, and what a measurement leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fxfuser import observe
from fxfuser.report import segment_rows
from fxfuser.runtime import programs

pytestmark = pytest.mark.gpu

Fn = Callable[..., Any]


def epilogue(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w.t())


def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w.t()
    return y, torch.relu(y)


def columns(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.gelu(x @ w.t())
    return y, y.sum(0)


def place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w.t()).float().amax(-1)


FUNCTIONS = [epilogue, both, columns, place]


def results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


def inputs(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 256, device="cuda", dtype=dtype), torch.randn(768, 256, device="cuda", dtype=dtype)


def check(function: Fn, call: Fn, x: torch.Tensor, w: torch.Tensor) -> None:
    for actual, eager, exact in zip(*(results(v) for v in (
            call(x, w), function(x, w), function(x.double(), w.double())))):
        error, allowed = ((v.double() - exact).abs().max() for v in (actual, eager))
        assert error <= 2 * allowed + 1e-3 * exact.abs().max()
        assert actual.stride() == eager.stride() and actual.dtype == eager.dtype


@pytest.mark.parametrize("options", [{"gemm": g, "deterministic": d} for g in ("auto", "library", "fused")
                                     for d in (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_every_option_computes_the_same(function: Fn, dtype: torch.dtype, options: dict[str, Any],
                                        tmp_path: Path) -> None:
    call = torch.compile(function, backend="fxfuser", options={**options, "cache_dir": str(tmp_path)})
    for _ in range(2):
        check(function, call, *inputs(1000, dtype))


def test_sizes_that_change_are_measured_in_their_classes(tmp_path: Path) -> None:
    call = torch.compile(epilogue, backend="fxfuser", dynamic=True, options={"cache_dir": str(tmp_path)})
    for rows in (1000, 33, 4096, 1000, 17):
        check(epilogue, call, *inputs(rows, torch.bfloat16))


def test_a_measurement_names_both_routes(tmp_path: Path) -> None:
    with observe.recording() as recording:
        call = torch.compile(columns, backend="fxfuser", options={"cache_dir": str(tmp_path)})
        check(columns, call, *inputs(4096, torch.bfloat16))
    (trace,) = recording.graphs
    (row,) = segment_rows(trace)
    assert row.kind == "gemm" and [p.kind for p in row.alternatives[0]][0] == "extern"
    routes = [t for t in trace.tunings if t.subject == "route"]
    assert len(routes) == 1 and routes[0].segment == row.name and routes[0].kernel == row.kernel
    assert "library" in dict(routes[0].times) and all(us is not None for _, us in routes[0].times)


def test_a_program_that_cannot_be_built_leaves_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, failed: Any) -> Any:
        return lambda *arguments: failed(RuntimeError("no tile"))

    monkeypatch.setattr(programs.CudaProgram, "bind", broken)
    x, w = inputs(1000, torch.bfloat16)
    call = torch.compile(epilogue, backend="fxfuser", options={"cache_dir": str(tmp_path)})
    check(epilogue, call, x, w)


def test_the_step_of_a_small_network_is_repeatable(tmp_path: Path) -> None:
    """Bitwise, forward and backward, with what was measured."""
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
    x = torch.randn(512, 256, device="cuda")

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return net(x).float().square().mean()

    call = torch.compile(loss, backend="fxfuser", options={"cache_dir": str(tmp_path)})
    found = []
    for _ in range(3):
        net.zero_grad(set_to_none=True)
        value = call(x)
        value.backward()
        found.append([value.detach().clone(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)])
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], one))
