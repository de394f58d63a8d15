"""Every boundary's advice, applied to a small model: the boundary goes.  And what fuse() and boundary() ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fxfuser
from fxfuser import ops
from fxfuser.ops import Row, table

torch.library.define("explained::cube", "(Tensor x) -> Tensor")
torch.library.impl("explained::cube", "CompositeExplicitAutograd", lambda x: x * x * x)
torch.library.register_fake("explained::cube", torch.empty_like)
Fn = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A model with a boundary of `rule`, words of its remedy, and the model after following it."""

    rule: str
    remedy: str
    before: Fn
    after: Fn
    shapes: tuple[tuple[int, ...], ...]


def fused(fn: Fn) -> Fn:
    def inside(*args: torch.Tensor) -> Any:
        with fxfuser.fuse():
            return fn(*args)

    return inside


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.mv(x.sin(), w[0]).cos()


def product_by_hand(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.sin() * w[0]).sum(-1).cos()


def smallest(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * x.sin().kthvalue(1, 0)[0]


def smallest_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * x.sin().amin(0)


def detour(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return y.sort(0)[0] * y


def no_detour(x: torch.Tensor) -> torch.Tensor:
    return x.sort(0)[0] * x.sin()


def gathered_late(x: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)[torch.arange(300) % 7 * 3] * 2


def gathered_first(x: torch.Tensor) -> torch.Tensor:
    return x[torch.arange(300) % 7 * 3].sum(-1) * 2


def distant(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = x.sin()
    for _ in range(40):
        w = w @ w
    return first, w, x.cos()


def one_program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y * x.sum()


def tree(count: int) -> Fn:
    """The sum of so many products, pairwise."""
    def f(x: torch.Tensor) -> torch.Tensor:
        terms = [x * (1 + i / 64) for i in range(count)]
        while len(terms) > 1:
            terms = [a + b for a, b in zip(terms[::2], terms[1::2])] + terms[len(terms) // 2 * 2:]
        return terms[0]

    return f


def forced(x: torch.Tensor) -> torch.Tensor:
    return fxfuser.boundary(x.sin()).cos()


CASES = (
    Case("lowerable", "(a[..., :, None] * b).sum(-2)", product, product_by_hand, ((4, 4), (4, 4))),
    Case("lowerable", "as pointwise ops", smallest, smallest_by_hand, ((8, 8),)),
    Case("order", "compute sort at", detour, no_detour, ((8, 8),)),
    Case("domain", "gather before the reduction", gathered_late, gathered_first, ((1000, 64),)),
    Case("near", "fxfuser.fuse()", distant, fused(distant), ((8, 8), (8, 8))),
    Case("parallelism", "fxfuser.fuse()", one_program, fused(one_program), ((16,), (512, 512))),
    Case("size", "do with 3 ops less", tree(130), tree(128), ((8,),)),
    Case("boundary", "remove fxfuser.boundary at", forced, lambda x: x.sin().cos(), ((8, 8),)),
)


def rules(fn: Fn, shapes: tuple[tuple[int, ...], ...]) -> dict[str, str]:
    found = fxfuser.explain(fn, *(torch.randn(s) for s in shapes))
    return {b.rule: b.remedy for b in found.boundaries}


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.rule}-{c.before.__name__}")
def test_advice_removes_its_boundary(case: Case) -> None:
    assert case.remedy in rules(case.before, case.shapes).get(case.rule, "no such boundary")
    torch.compiler.reset()
    assert case.rule not in rules(case.after, case.shapes)


def test_a_product_is_left_to_the_library_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).relu()

    monkeypatch.setenv("FXFUSER_GEMM", "library")
    assert '{"gemm": "auto"}' in rules(f, ((8, 8), (8, 8)))["gemm"]
    monkeypatch.setenv("FXFUSER_GEMM", "auto")
    torch.compiler.reset()
    assert rules(f, ((8, 8), (8, 8))) == {}


def test_an_op_of_a_library_takes_a_row() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.explained.cube(x.sin()).cos()

    assert "fxfuser.ops.add_row" in rules(f, ((8,),))["lowerable"]
    torch.compiler.reset()
    ops.add_row(torch.ops.explained.cube.default, Row(ops.Kind.POINTWISE, "{0} * {0} * {0}"))
    try:
        assert rules(f, ((8,),)) == {}
    finally:
        del table._ROWS[torch.ops.explained.cube.default]  # tests of every row know those of the package


def test_both_sides_have_tensors_costs_and_lines() -> None:
    (row,) = fxfuser.explain(forced, torch.randn(8, 8)).boundaries
    assert (row.producer, row.consumer, row.bytes) == ("sin", "cos", 2 * 8 * 8 * 4) and row.microseconds > 0
    name = Path(__file__).name
    assert all(name in where for where in row.locations) and f"{name}:" in row.remedy


# ---------------------------------------------------------------- fuse and boundary


def test_a_request_is_granted_and_computes_the_same() -> None:
    x, y = torch.randn(16), torch.randn(64, 64)
    (request,) = fxfuser.explain(fused(one_program), x, y).requests
    assert request.granted and request.segments == ("segment0",) and request.refusals == ()
    compiled = torch.compile(fused(one_program), backend="fxfuser", options={"executor": "interpret"}, fullgraph=True)
    torch.testing.assert_close(compiled(x, y), one_program(x, y))


def test_a_request_reaches_the_gradients() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sin()
        return y / y.sum(0)

    x, w = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    requests = fxfuser.explain(fused(f), x, w).requests
    assert [r.granted for r in requests] == [True, True], "forward and backward"
    assert x.grad is None


def test_a_refusal_has_its_reasons() -> None:
    found = fxfuser.explain(fused(detour), torch.randn(8, 8))
    (request,) = found.requests
    assert not request.granted and [r.rule for r in request.refusals] == ["lowerable", "order"]
    assert "refused, 3 segments" in str(found) and "sort depends on the first" in str(found)


def test_a_boundary_inside_a_request_wins() -> None:
    found = fxfuser.explain(fused(forced), torch.randn(8, 8))
    assert [r.rule for r in found.requests[0].refusals] == ["boundary"]


def test_each_entry_is_a_request_of_its_own() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            with fxfuser.fuse():
                x = (x * w).sin()
            x = x.sort(0)[0]
        return x

    found = fxfuser.explain(f, torch.randn(8, 8), torch.randn(8, 8))
    assert [r.segments for r in found.requests] == [("segment0",), ("segment2",)]


def test_neither_does_anything_in_eager() -> None:
    x = torch.randn(3)
    with fxfuser.fuse():
        assert fxfuser.boundary(x) is x


def test_a_boundary_copies_nothing_and_keeps_aliases() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.t() * 2
        z = fxfuser.boundary(y)
        z.add_(1)
        return y, fxfuser.boundary(z)

    x = torch.randn(4, 6)
    y, z = torch.compile(f, backend="fxfuser", fullgraph=True)(x)
    expected, _ = f(x)
    torch.testing.assert_close(y, expected)
    assert z.data_ptr() == y.data_ptr() and z.stride() == expected.stride()


def test_gradients_pass_a_boundary() -> None:
    x = torch.randn(5, requires_grad=True)
    compiled = torch.compile(forced, backend="fxfuser", options={"executor": "interpret"}, fullgraph=True)
    (got,) = torch.autograd.grad(compiled(x).sum(), x)
    (expected,) = torch.autograd.grad(x.sin().cos().sum(), x)
    torch.testing.assert_close(got, expected)
