from __future__ import annotations

import torch

from fxfuser.passes.cse import merge_equal_expressions
from fxfuser.passes.dce import remove_dead_nodes
from tests.passes.rewriting import apply, assert_rewrites, assert_untouched, targets, trace

aten = torch.ops.aten
PASS = (merge_equal_expressions,)


def test_equal_expressions_merge() -> None:
    def before(a):
        return aten.add.Tensor(aten.exp.default(a), aten.neg.default(aten.exp.default(a)))

    def expected(a):
        e = aten.exp.default(a)
        return aten.add.Tensor(e, aten.neg.default(e))

    assert_rewrites(before, expected, [torch.randn(3)], PASS)


def test_numbers_of_other_types_do_not_merge() -> None:
    def function(a):
        return aten.add.Tensor(aten.mul.Tensor(a, 1), 2), aten.add.Tensor(aten.mul.Tensor(a, 1.0), 2)

    assert_untouched(function, [torch.arange(3)], PASS)
    assert_untouched(lambda a: (aten.neg.default(aten.mul.Tensor(a, 0.0)), aten.neg.default(aten.mul.Tensor(a, -0.0))),
                     [torch.randn(3)], PASS)


def test_outputs_keep_their_storages() -> None:
    assert_untouched(lambda a: (aten.add.Tensor(a, 1), aten.add.Tensor(a, 1)), [torch.randn(4)], PASS)
    assert_untouched(lambda a: (aten.view.default(aten.add.Tensor(a, 1), [2, 2]), aten.add.Tensor(a, 1)),
                     [torch.randn(4)], PASS)


def test_an_output_merges_with_an_inner_value() -> None:
    module = trace(lambda a: (aten.neg.default(aten.add.Tensor(a, 1)), aten.add.Tensor(a, 1)), [torch.randn(4)])
    assert apply(module, PASS) == 1
    assert targets(module) == ["add.Tensor", "neg.default"]


def test_random_numbers_and_unseen_memory_do_not_merge() -> None:
    assert_untouched(lambda a: aten.add.Tensor(aten.rand_like.default(a), aten.rand_like.default(a)),
                     [torch.randn(4)], PASS)
    assert_untouched(lambda a: aten.add.Tensor(aten.empty_like.default(a), aten.empty_like.default(a)),
                     [torch.randn(4)], PASS)


def test_checkpointed_twins_do_not_merge() -> None:
    module = trace(lambda a: aten.add.Tensor(aten.exp.default(a), aten.exp.default(a)), [torch.randn(4)])
    next(n for n in module.graph.nodes if n.target is aten.exp.default).meta["recompute"] = 1
    assert apply(module, PASS) == 0


def test_dead_nodes_go() -> None:
    def before(a):
        aten.mul.Tensor(aten.exp.default(a), 2)
        return aten.neg.default(a)

    assert_rewrites(before, lambda a: aten.neg.default(a), [torch.randn(3)], (remove_dead_nodes,))


def test_side_effects_stay() -> None:
    def function(a):
        aten.rand_like.default(a)
        aten._assert_async.msg(aten.gt.Scalar(aten.sum.default(a), 0), "positive")
        return aten.neg.default(a)

    assert_untouched(function, [torch.ones(3)], (remove_dead_nodes,))


def test_custom_ops_stay() -> None:
    @torch.library.custom_op("fxfuser_tests::announce", mutates_args=())
    def announce(a: torch.Tensor) -> torch.Tensor:
        return a.clone()

    announce.register_fake(lambda a: torch.empty_like(a))

    def function(a):
        torch.ops.fxfuser_tests.announce.default(a)
        return aten.neg.default(a)

    assert_untouched(function, [torch.ones(3)], (remove_dead_nodes,))
