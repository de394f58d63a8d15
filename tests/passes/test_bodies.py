"""Ops that expand into windows, gathers and broadcasts: each call on the graph and in kernels, against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxfuser import observe
from fxfuser.passes import distances, fractional_pooling, grid_sampling, pooling, resampling
from fxfuser.passes.expand import EXPANSIONS, expand
from fxfuser.report import segment_rows
from tests.passes.bodies import GROUPS, INF, NAN, SPECIAL, Call, X, drawn, whole
from tests.passes.rewriting import apply, assert_meta, assert_untouched, targets, trace

aten = torch.ops.aten
PASS = (expand,)
LEAST = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}  # what any rounding may do


def results(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def assert_as_good(got: Any, eager: Any, exact: Any, strides: bool = True) -> None:
    """Floats within twice eager's own distance from float64, everything else equal."""
    for mine, theirs, true in zip(results(got), results(eager), results(exact), strict=True):
        assert mine.dtype is theirs.dtype and mine.shape == theirs.shape
        assert not strides or mine.stride() == theirs.stride()
        if not mine.is_floating_point():
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
            continue
        assert mine.isfinite().equal(theirs.isfinite()) and mine.isnan().equal(theirs.isnan())
        finite = theirs.isfinite()
        mine, theirs, true = (t.double()[finite] for t in (mine, theirs, true))
        limit = 2 * (theirs - true).abs() + LEAST[results(got)[0].dtype] * (1 + true.abs())
        assert ((mine - true).abs() <= limit).all()


def in_double(call: Call) -> Any:
    return call.function(*(t.double() if t.is_floating_point() else t for t in call.inputs))


def test_every_body_has_a_call() -> None:
    called = {call.op for group in GROUPS.values() for call in group()}
    files = (pooling, fractional_pooling, resampling, grid_sampling, distances)
    assert {op for file in files for op in file.BODIES} <= called
    from_others = {op for op in EXPANSIONS if op in called}
    assert called == from_others


@pytest.mark.parametrize("name", GROUPS)
def test_a_body_computes_what_its_op_does(name: str) -> None:
    for call in GROUPS[name]():
        module = trace(call.function, call.inputs)
        assert apply(module, PASS) == 1, (call.op, call.arguments)
        assert str(call.op).removeprefix("aten.") not in targets(module)
        assert_meta(module)
        assert_as_good(module(*call.inputs), call.function(*call.inputs), in_double(call), strides=False)


@pytest.mark.parametrize("name", GROUPS)
def test_kernels_compute_it(name: str) -> None:
    """The first of each eight calls, so that every op has its turn: the interpreter is slow."""
    seen: dict[Any, int] = {}
    for call in GROUPS[name]():
        seen[call.op] = seen.get(call.op, 0) + 1
        if seen[call.op] % 8 != 1:
            continue
        with observe.recording() as recording:
            got = torch.compile(lambda *a: call.function(*a), backend="fxfuser",  # noqa: B023
                                options={"executor": "interpret"})(*call.inputs)
        torch.compiler.reset()
        assert_as_good(got, call.function(*call.inputs), in_double(call))
        rows = [row for graph in recording.graphs for row in segment_rows(graph)]
        assert all(row.kernel or row.kind == "gemm" for row in rows), (call.op, [row.reason for row in rows])


POOLS = {
    "average": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "maximum": lambda x: F.max_pool2d(x, 3, 2, 1),
    "average of parts": lambda x: F.adaptive_avg_pool2d(x, (4, 3)),
    "maximum of parts": lambda x: F.adaptive_max_pool2d(x, (4, 3)),
    "maximum of a volume": lambda x: F.max_pool3d(x.unsqueeze(0), 2).squeeze(0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", POOLS)
def test_gradients_are_eagers_and_no_scatter(name: str, dtype: torch.dtype) -> None:
    def gradient(fn: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = X.clone().to(dtype).requires_grad_()
        y = fn(x)
        y.backward(drawn(*y.shape, seed=5).to(dtype))
        assert x.grad is not None
        return y.detach(), x.grad

    with observe.recording() as recording:
        got = gradient(torch.compile(POOLS[name], backend="fxfuser", options={"executor": "interpret"}), dtype)
    assert_as_good(got, gradient(POOLS[name], dtype), gradient(POOLS[name], torch.float64))
    rows = [row for graph in recording.graphs for row in segment_rows(graph)]
    assert [row.kind for row in rows] == ["reduction"] * 2


def test_the_index_of_a_maximum_is_of_the_first_or_of_the_last_nan() -> None:
    for values, place in (([1.0, 3.0, 3.0], 1), ([NAN, 3.0, NAN], 2), ([-INF, -INF, -INF], 0), ([-INF, NAN, 1.0], 1)):
        x = torch.tensor(values).reshape(1, 1, 1, 3)
        _, eager = aten.max_pool2d_with_indices(x, [1, 3])
        module = trace(lambda x: aten.max_pool2d_with_indices(x, [1, 3]), [x])
        apply(module, PASS)
        assert eager.item() == module(x)[1].item() == place


def test_nothing_is_copied_for_a_window() -> None:
    """No tensor is larger than the input with its padding, but for those that only show it."""
    module = trace(lambda x: aten.avg_pool2d(x, [3, 3], [1, 1], [1, 1]), [X])
    apply(module, PASS)
    assert "unfold.default" in targets(module) and "clone.default" not in targets(module)


def test_what_stays_whole() -> None:
    def sizes_vary(x: Tensor) -> Tensor:
        return aten.avg_pool2d.default(x, [2, 2])

    assert_untouched(sizes_vary, [X], PASS, dynamic=True)
    assert_untouched(lambda x: aten.max_pool2d_with_indices(x, [2, 2]), [SPECIAL], PASS, dynamic=True)
    pixels = whole(1, 3, 6, 6, low=0, high=200).to(torch.uint8)
    assert_untouched(lambda x: aten._upsample_bilinear2d_aa(x, [3, 3], False), [pixels], PASS)
    assert_untouched(lambda a, b: aten._cdist_forward(a, b, 1.0, None), [torch.empty(3, 0), torch.empty(2, 0)], PASS)
    assert_untouched(lambda x: aten._pdist_forward(x, 2.0), [drawn(1, 3)], PASS)
    assert_untouched(lambda s, x: aten.searchsorted(s, x), [drawn(5), drawn(3)], PASS, dynamic=True)
    assert_untouched(lambda x: aten.unfold(x, 2, 2, 2).sum([-1]), [X], PASS)
