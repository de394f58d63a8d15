from __future__ import annotations

import pytest
import torch

from fxfuser.passes.dce import remove_dead_nodes
from fxfuser.passes.duplicate import duplicate_cheap_producers
from fxfuser.passes.fold import fold_constants
from tests.passes.rewriting import apply, assert_meta, assert_rewrites, assert_same, assert_untouched, targets, trace

aten = torch.ops.aten
PASS = (fold_constants, remove_dead_nodes)
EDGES = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -1.5])


def around(op, number):
    """The op between two negations: neither an input nor an output."""
    return lambda a: aten.neg.default(op(aten.neg.default(a), number))


@pytest.mark.parametrize(("op", "number"), [
    (aten.mul.Tensor, 1), (aten.mul.Tensor, 1.0), (aten.div.Tensor, 1), (aten.sub.Tensor, 0),
    (aten.pow.Tensor_Scalar, 1),
])
def test_exact_identities_go(op, number) -> None:
    module = assert_rewrites(around(op, number), lambda a: aten.neg.default(aten.neg.default(a)), [EDGES], PASS)
    assert_same(torch.signbit(module(EDGES)), torch.signbit(around(op, number)(EDGES)))


@pytest.mark.parametrize(("op", "number"), [
    (aten.add.Tensor, 0), (aten.sub.Tensor, -0.0), (aten.mul.Tensor, 0), (aten.mul.Tensor, 2),
    (aten.pow.Tensor_Scalar, 2),
])
def test_inexact_identities_stay(op, number) -> None:
    assert_untouched(around(op, number), [EDGES], PASS)


def test_promotion_is_not_lost() -> None:
    x = torch.arange(4)
    assert_rewrites(around(aten.add.Tensor, 0), lambda a: aten.neg.default(aten.neg.default(a)), [x], PASS)
    assert_untouched(around(aten.mul.Tensor, 1.0), [x], PASS)
    assert_untouched(around(aten.div.Tensor, 1), [x], PASS)


def test_results_that_reach_the_caller_stay() -> None:
    assert_untouched(lambda a: aten.mul.Tensor(aten.neg.default(a), 1), [EDGES], PASS)
    assert_untouched(lambda a: aten.neg.default(aten.mul.Tensor(a, 1)), [EDGES], PASS)


def test_constants_lose_their_views_and_casts() -> None:
    def before(a):
        c = torch.ops.aten.full.default([8], 0.1, dtype=torch.float32, device="cpu", pin_memory=False)
        d = aten._to_copy.default(c, dtype=torch.float64)
        return aten.add.Tensor(a, aten.expand.default(d, [4, 8]))

    rounded = torch.tensor(0.1).double().item()

    def expected(a):
        return aten.add.Tensor(a, aten.full.default([4, 8], rounded, dtype=torch.float64, device=torch.device("cpu"),
                                                    pin_memory=False))

    assert_rewrites(before, expected, [torch.randn(4, 8)], PASS)


def test_full_like_reads_no_tensor() -> None:
    def before(a):
        return aten.add.Tensor(a, aten.full_like.default(aten.exp.default(a), 2.0))

    module = trace(before, [torch.randn(4, 3).t()])
    assert apply(module, PASS) > 0
    assert targets(module) == ["full.default", "add.Tensor"]
    full = next(n for n in module.graph.nodes if n.target is aten.full.default)
    assert full.meta["val"].stride() == (1, 3)


def test_every_reader_gets_its_own_constant() -> None:
    def function(a, b):
        c = aten.expand.default(aten.full.default([1], 2.0), [3])
        return aten.mul.Tensor(a, c), aten.mul.Tensor(b, c)

    inputs = [torch.randn(3), torch.randn(3)]
    module = trace(function, inputs)
    assert apply(module, (duplicate_cheap_producers,)) == 2
    assert sorted(targets(module)) == ["expand.default"] * 2 + ["full.default"] * 2 + ["mul.Tensor"] * 2
    assert all(len(n.users) == 1 for n in module.graph.nodes if n.op == "call_function")
    assert_meta(module)
    assert_same(module(*inputs), function(*inputs))


def test_what_reads_a_tensor_is_not_cheap() -> None:
    def function(a, b):
        c = aten.expand.default(aten.exp.default(a), [3, 3])
        return aten.mul.Tensor(b, c), aten.neg.default(c)

    assert_untouched(function, [torch.randn(3), torch.randn(3)], (duplicate_cheap_producers,))


def test_a_constant_is_dense_unless_the_caller_sees_that_it_is_not() -> None:
    def inside(a: torch.Tensor) -> torch.Tensor:
        return aten.add.Tensor(a, aten.expand.default(aten.full.default([8], 2.0), [4, 8]))

    def outside(a: torch.Tensor) -> torch.Tensor:
        return aten.expand.default(aten.full.default([8], 2.0), [4, 8])

    a = torch.randn(4, 8)
    module = trace(inside, [a])
    apply(module, PASS)
    assert [n.meta["val"].stride() for n in module.graph.nodes if n.target is aten.full.default] == [(8, 1)]
    module = trace(outside, [a])
    apply(module, PASS)
    assert module(a).stride() == (0, 1)
