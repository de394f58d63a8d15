"""Scans: held rows and columns, loops that carry a state, both directions, several states, ties and nan."""

from __future__ import annotations

import re
from typing import Callable

import pytest
import torch
from torch import Tensor

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.domain.points import Reject
from fxfuser.domain.resolve import resolve
from fxfuser.domain.roles import PERSISTENT_ELEMENTS
from fxfuser.ops import Kind, kind_of
from fxfuser.ops.scans import CUMMAX, CUMMAX_PLACE, CUMMIN, CUMMIN_PLACE
from fxfuser.runtime.build import report
from tests.lowering.harness import check, compiled, trace

LOOPED = PERSISTENT_ELEMENTS + 300
inf, nan = float("inf"), float("nan")
SCANS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": lambda a, d: a.cumsum(d),
    "cumprod": lambda a, d: (1 + a / 100).cumprod(d),
    "logcumsumexp": lambda a, d: a.logcumsumexp(d),
    "cummax": lambda a, d: CUMMAX(a, d),
    "cummax place": lambda a, d: CUMMAX_PLACE(a, d),
    "cummin": lambda a, d: CUMMIN(a, d),
    "cummin place": lambda a, d: CUMMIN_PLACE(a, d),
}


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def loops(source: str) -> int:
    return len(re.findall(r"^ *for ", source, re.M))


@pytest.mark.parametrize("name", SCANS)
def test_held_rows_and_columns(name: str) -> None:
    scan = SCANS[name]
    _, lowered = check(lambda a: scan(a * 2, 1) + 1, [x(5, 70)], tolerance=2e-5)
    assert loops(lowered.kernel.source) == 0 and "tl.associative_scan" in lowered.kernel.source
    check(lambda a: scan(a, 0), [x(33, 6)], tolerance=2e-5)
    check(lambda a: scan(a, 1), [x(3, 17, 4)], tolerance=2e-5)
    check(lambda a: scan(a, -1), [x(4, 1)], tolerance=2e-5)
    check(lambda a: scan(a, 0), [x().reshape(())], tolerance=2e-5)


@pytest.mark.parametrize("name", SCANS)
def test_of_what_was_reduced(name: str) -> None:
    """The tile has no more dims than elements: a scan of sums in the layout of what was added does not compile."""
    scan = SCANS[name]
    _, lowered = check(lambda a: scan(a.sum(2), 1), [x(3, 16, 40)], tolerance=2e-5)
    (operand,) = re.findall(r"tl.associative_scan\((.*), combine", lowered.kernel.source)
    dense, axis = re.findall(r"tl.reshape\(\w+, \[([^]]*)\]\)", operand), int(operand.split(", ")[-1])
    assert dense and all(len(d.split(", ")) > axis and "1" not in d.split(", ") for d in dense)
    report(lowered.kernel)
    check(lambda a: scan(a.sum(1), 1) + 1, [x(3, 40, LOOPED)], tolerance=2e-4)


@pytest.mark.parametrize("name", SCANS)
def test_a_loop_carries_the_state(name: str) -> None:
    scan = SCANS[name]
    _, lowered = check(lambda a: scan(a, 1), [x(2, LOOPED)], tolerance=2e-4)
    assert loops(lowered.kernel.source) == 1


@pytest.mark.parametrize("name", SCANS)
def test_from_the_end(name: str) -> None:
    """flip, scan and flip again is one scan in the other direction, which is what the gradient of a scan needs."""
    scan = SCANS[name]
    domain, _ = check(lambda a: scan(a.flip(1), 1).flip(1), [x(5, 70)], tolerance=2e-5)
    assert len(domain.axes) == 2
    _, lowered = check(lambda a: scan(a.flip(1), 1).flip(1), [x(2, LOOPED)], tolerance=2e-4)
    assert "reverse=True" in lowered.kernel.source


@pytest.mark.parametrize("name", SCANS)
def test_symbolic_sizes(name: str) -> None:
    scan = SCANS[name]
    check(lambda a: scan(a, 1), [x(3, 300)], [{0, 1}], [[x(5, 1031)], [x(2, 2)], [x(1, 5000)]], tolerance=1e-4)
    check(lambda a: scan(a.flip(0), 0).flip(0), [x(300, 3)], [{0, 1}], [[x(1031, 5)], [x(2, 2)]], tolerance=1e-4)


@pytest.mark.parametrize("name", SCANS)
def test_infinities_and_nan(name: str) -> None:
    rows = x(6, 40)
    rows[0, 5], rows[1, 5], rows[2, 5] = inf, -inf, nan
    rows[3, 0], rows[4, 7], rows[4, 9] = -inf, inf, -inf
    rows[5, 3], rows[5, 8] = nan, nan
    check(lambda a: SCANS[name](a, 1), [rows], tolerance=2e-5)


@pytest.mark.parametrize("scan", [CUMMAX_PLACE, CUMMIN_PLACE])
def test_the_place_of_equal_extrema_is_the_last(scan: Callable[[Tensor, int], Tensor]) -> None:
    rows = torch.tensor([[1, 1, 0, 1, 2, 2], [3, 3, 3, 2, 3, 1]])
    check(lambda a: scan(a, 1), [rows])
    check(lambda a: scan(a.flip(1), 1), [rows])
    check(lambda a: scan(a, 1), [rows > 1])


def test_dtypes() -> None:
    check(lambda a: a.cumsum(1), [x(3, 50).bfloat16()])
    check(lambda a: a.cumsum(1), [torch.randint(-100, 100, (3, 50), dtype=torch.int8)])
    check(lambda a: a.cumsum(1), [x(3, 50) > 0])
    check(lambda a: a.cumsum(1, dtype=torch.float64), [x(3, 50)])
    check(lambda a: a.cumsum(1, dtype=torch.int32), [torch.randint(-100, 100, (3, 50))])
    check(lambda a: CUMMAX(a, 1), [torch.randint(-100, 100, (3, 50), dtype=torch.int8)])
    check(lambda a: CUMMIN(a, 1), [x(3, 50) > 0])
    check(lambda a: a.cumprod(1), [1 + x(3, 50).double() / 10])


def test_beside_reductions_and_in_them() -> None:
    check(lambda a: a.cumsum(1) / a.exp().sum(1, keepdim=True), [x(4, 100)], tolerance=1e-5)
    check(lambda a: a.cumsum(1).amax(1), [x(4, 100)], tolerance=1e-5)
    check(lambda a: (a / a.sum(1, keepdim=True)).cumsum(1), [x(4, 100)], tolerance=1e-5)
    check(lambda a: a.cumsum(1) - a.cumsum(1).amax(1, keepdim=True), [x(2, LOOPED)], tolerance=1e-4)
    check(lambda a: a.cumsum(1).cumsum(1), [x(2, 60)], tolerance=1e-4)
    check(lambda a: a.cumsum(0).cumsum(1), [x(12, 20)], tolerance=1e-4)


def test_a_scan_of_a_constant() -> None:
    check(lambda a: a + torch.ones_like(a).cumsum(1), [x(3, 20)])


def test_what_is_read_out_of_order_is_materialised() -> None:
    for fn in (lambda a: a.cumsum(1)[:, 3:] + 0, lambda a: torch.cat([a.cumsum(1), a], 1),
               lambda a: a.cumsum(0).roll(1, 0) + 0):
        graph = trace(fn, [x(8, 8)])
        nodes = [n for n in graph.graph.nodes if n.op == "call_function" and kind_of(n) not in (None, Kind.VIEW)]
        output = graph.graph.output_node().args[0]
        assert isinstance(resolve(nodes, [output]), Reject)


@pytest.mark.parametrize("fn", [
    lambda a: a.cumsum(1)[:, 3:] * 2, lambda a: torch.cat([a.cumsum(1), a], 1) + 1, lambda a: a.cumsum(1).tril(),
    lambda a: a.cumsum(0).view(4, 2, 8).sum(1), lambda a: a.cummax(1)[0] + a.cummin(0)[1],
    lambda a: (a.cumsum(1) + a.flip(1).cumsum(1).flip(1)) * 2])
def test_through_the_backend_with_gradients(fn: Callable[[Tensor], Tensor]) -> None:
    given, same = x(8, 8).requires_grad_(), x(8, 8).requires_grad_()
    run = torch.compile(fn, backend="fxfuser", options={"executor": "interpret", "strict": True}, fullgraph=True)
    with observe.recording() as recording:
        got, want = run(given), fn(same)
        got.sin().sum().backward()
        want.sin().sum().backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(given.grad, same.grad)
    assert not any("cum" in e.op for trace in recording.graphs for e in trace.externs)


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("length", [500, LOOPED])
def test_it_builds_for_sm_90(name: str, length: int) -> None:
    scan = SCANS[name]
    for fn in (lambda a: scan(a, 1), lambda a: scan(a.flip(1), 1).flip(1)):
        _, _, lowered = compiled(fn, [x(64, length)], config=Config())
        made = report(lowered.kernel)
        assert made.spills == 0
