from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch

from fxfuser.capture import scope_of
from fxfuser.passes import Fuel, run
from fxfuser.passes.expand import EXPANSIONS, expand
from tests.passes.bodies import GROUPS
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, trace

aten = torch.ops.aten
PASS = (expand,)


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean and the reciprocal deviation of each row, as layer norm's forward saves them."""
    mean = x.mean(-1, keepdim=True)
    return mean, (x - mean).square().mean(-1, keepdim=True).rsqrt()


SAMPLES = {
    aten._softmax.default: lambda x: aten._softmax.default(x, -1, False),
    aten._log_softmax.default: lambda x: aten._log_softmax.default(x, 1, False),
    aten.native_layer_norm.default: lambda x: aten.native_layer_norm.default(x, [6], x[0, 0], x[0, 1], 1e-5),
    aten.native_layer_norm_backward.default: lambda x: aten.native_layer_norm_backward.default(
        x.flip(0), x, [6], *statistics(x), x[0, 0], x[0, 1], [True, True, True]),
    aten.native_group_norm.default: lambda x: aten.native_group_norm.default(
        x, x[0, :, 0].clone(), None, 3, 4, 6, 2, 1e-5),
    aten._native_batch_norm_legit_functional.default: lambda x: aten._native_batch_norm_legit_functional.default(
        x, x[0, :, 0].float(), None, x[0, :, 1].float(), x[0, :, 2].abs().float(), True, 0.1, 1e-5),
    aten._native_batch_norm_legit.no_stats: lambda x: aten._native_batch_norm_legit.no_stats(
        x, None, None, True, 0.1, 1e-5),
    aten._native_batch_norm_legit.default: lambda x: aten._native_batch_norm_legit.default(
        x, None, None, x[0, :, 0], x[0, :, 0].abs() + 1, False, 0.1, 1e-5),
    aten._native_batch_norm_legit_no_training.default: lambda x: aten._native_batch_norm_legit_no_training.default(
        x, x[0, :, 0], None, x[0, :, 1], x[0, :, 2].abs(), 0.1, 1e-5),
    aten.linalg_vector_norm.default: lambda x: aten.linalg_vector_norm.default(x, 2, [0, 2], True),
    aten.max.dim: lambda x: aten.max.dim(x, 1),
    aten.min.dim: lambda x: aten.min.dim(x, -1, True),
    aten.cummax.default: lambda x: aten.cummax.default(x, 1),
    aten.cummin.default: lambda x: aten.cummin.default(x, -1),
    aten.frexp.Tensor: lambda x: aten.frexp.Tensor(x),
    aten.nll_loss_forward.default: lambda x: aten.nll_loss_forward.default(
        x[0], torch.tensor([5, 0, 2, 1]), x[1, 0].abs() + 1, 1, 2),
    aten.nll_loss2d_forward.default: lambda x: aten.nll_loss2d_forward.default(
        x[..., None].contiguous(), torch.tensor([[3, 0, 2, 1, 3, 1]] * 3)[..., None], None, 0, 3),
    aten.nll_loss_backward.default: lambda x: aten.nll_loss_backward.default(
        x[0, :, 0].clone(), x[0], torch.tensor([5, 0, 2, 1]), x[1, 0].clone(), 0, 2, x[1, 0, 0]),
    aten.nll_loss2d_backward.default: lambda x: aten.nll_loss2d_backward.default(
        x[0, 0, 0].clone(), x[..., None].contiguous(), torch.tensor([[3, 0, 2, 1, 3, 1]] * 3)[..., None], None, 1, 3,
        x[1, 0, 1].clone()),
    aten.var.correction: lambda x: aten.var.correction(x, [0, 2], correction=1, keepdim=True),
    aten.var_mean.correction: lambda x: aten.var_mean.correction(x, [-1], correction=0),
}


def test_every_expansion_has_a_sample() -> None:
    elsewhere = {call.op for group in GROUPS.values() for call in group()}
    assert SAMPLES.keys() | elsewhere == EXPANSIONS.keys() and not SAMPLES.keys() & elsewhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", SAMPLES, ids=str)
def test_body_computes_the_same(target, dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 6).to(dtype)
    module = trace(SAMPLES[target], [x])
    assert apply(module, PASS) == 1
    assert str(target).removeprefix("aten.") not in targets(module)
    assert_meta(module)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    # PyTorch's own meta of batch norm on half types names other dtypes for the statistics than its CPU kernel returns
    torch.testing.assert_close(module(x), SAMPLES[target](x), check_dtype=dtype is torch.float32, **tolerance)


def test_softmax_is_five_ops() -> None:
    module = trace(lambda x: aten._softmax.default(x, -1, False), [torch.randn(3, 5)])
    assert apply(module, PASS) == 1
    assert targets(module) == ["amax.default", "sub.Tensor", "exp.default", "sum.dim_IntList", "div.Tensor"]


def test_tags_come_from_the_whole_op() -> None:
    module = trace(lambda x: aten._softmax.default(x, -1, False), [torch.randn(3, 5)])
    whole = next(n for n in module.graph.nodes if n.op == "call_function")
    whole.meta |= {"seq_nr": 41, "partitioner_tag": "is_backward", "recompute": 2, "nn_module_stack": {"a": ("b", "c")}}
    trace_text = whole.meta["stack_trace"]
    apply(module, PASS)
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert node.meta["seq_nr"] == 41 and node.meta["partitioner_tag"] == "is_backward"
            assert node.meta["recompute"] == 2 and node.meta["stack_trace"] == trace_text


def backward_of_layer_norm(mask: list[bool]):
    def function(x, weight):
        found = aten.native_layer_norm_backward.default(x.cos(), x, [5], *statistics(x), weight, weight, mask)
        return tuple(g for g in found if g is not None)

    return function


@pytest.mark.parametrize("mask", [[True, True, False], [False, False, True], [True, False, False]])
def test_a_gradient_that_nobody_asks_for(mask: list[bool]) -> None:
    inputs = [torch.randn(3, 5), torch.randn(5)]
    module = trace(backward_of_layer_norm(mask), inputs)
    assert apply(module, PASS) == 1 and "native_layer_norm_backward.default" not in targets(module)
    assert_meta(module)
    for got, want in zip(module(*inputs), backward_of_layer_norm(mask)(*inputs), strict=True):
        torch.testing.assert_close(got, want)


def test_an_absent_gradient_that_is_read_keeps_the_op_whole() -> None:
    module = trace(backward_of_layer_norm([True, True, False]), [torch.randn(3, 5), torch.randn(5)])
    whole = next(n for n in module.graph.nodes if n.target is aten.native_layer_norm_backward.default)
    absent = next((n for n in whole.users if n.args[1] == 2), None)
    if absent is None:
        with module.graph.inserting_after(whole):
            absent = module.graph.call_function(operator.getitem, (whole, 2))
    absent.meta["val"] = None
    output = module.graph.output_node()
    output.args = ((*output.args[0], absent),)
    assert apply(module, PASS) == 0


def test_equal_calls_are_traced_once() -> None:
    def function(x, weight):
        for _ in range(3):
            x = aten.native_layer_norm_backward.default(
                x, x, [5], *statistics(x), weight, weight, [True, False, False])[0]
        return x

    module = trace(function, [torch.randn(3, 5), torch.randn(5)])
    scope = scope_of(module, Fuel())
    traced: list[object] = []
    counting = replace(scope, trace=lambda f, values: traced.append(f) or scope.trace(f, values))
    assert run(module, PASS, counting) == 3 and len(traced) == 1


def test_symbolic_sizes_stay_symbolic() -> None:
    def function(x):
        return aten.native_layer_norm.default(x, [x.shape[-1]], None, None, 1e-5)

    module = trace(function, [torch.randn(3, 5)], dynamic=True)
    assert apply(module, PASS) == 1
    for shape in ((3, 5), (7, 2), (4, 9)):
        x = torch.randn(shape)
        assert_same(module(x), function(x), exact=False)


def test_strides_of_the_whole_op_are_kept() -> None:
    x = torch.randn(5, 3).t()
    module = trace(lambda x: aten._softmax.default(x, -1, False), [x])
    old = module.graph.output_node().args[0].meta["val"].stride()
    apply(module, PASS)
    assert module.graph.output_node().args[0].meta["val"].stride() == old


def test_variance_of_too_few() -> None:
    """No degree of freedom left gives nan or inf, never a negative divisor."""
    x = torch.randn(4, 1)
    for correction in (1, 2):
        def function(x, correction=correction):
            return aten.var.correction(x, [1], correction=correction)
        module = trace(function, [x])
        apply(module, PASS)
        assert_same(module(x), function(x))


def test_a_body_that_cannot_be_traced_leaves_the_op_whole() -> None:
    def broken(function, values):
        raise NotImplementedError("no meta kernel")

    module = trace(lambda x: aten._softmax.default(x, -1, False), [torch.randn(3, 5)])
    scope = replace(scope_of(module, Fuel()), trace=broken)
    assert run(module, PASS, replace(scope, strict=False)) == 0
    with pytest.raises(NotImplementedError):
        run(module, PASS, scope)


def test_loss_gradient_with_every_label_ignored() -> None:
    def function(x):
        return aten.nll_loss_backward.default(x[0, 0], x, torch.tensor([1, 1]), None, 1, 1, x[0, 0] * 0)

    x = torch.randn(2, 3)
    module = trace(function, [x])
    assert apply(module, PASS) == 1 and "scatter.value" not in targets(module)
    assert_same(module(x), torch.zeros(2, 3))


def test_complex_values_and_other_ops_stay() -> None:
    assert_untouched(lambda x: aten.var.correction(x, [0]), [torch.randn(3, dtype=torch.complex64)], PASS)
    assert_untouched(lambda x: aten.sum.dim_IntList(x, [0]), [torch.randn(3)], PASS)


def test_equal_calls_are_traced_once_and_others_by_themselves() -> None:
    def function(x, y):
        whole = [aten._softmax.default(t, d, False) for t, d in ((x, -1), (x + 1, -1), (x, 0), (y, -1), (x.t(), -1))]
        return tuple(whole)

    inputs = [torch.randn(3, 5), torch.randn(3, 5, dtype=torch.float64)]
    module = trace(function, inputs)
    scope, traced = scope_of(module, Fuel()), []

    def counted(body, values):
        traced.append(values)
        return scope.trace(body, values)

    assert run(module, PASS, replace(scope, trace=counted)) == 5
    assert len(traced) == 4
    assert_meta(module)
    for made, whole in zip(module(*inputs), function(*inputs)):
        torch.testing.assert_close(made, whole)


def test_calls_on_symbolic_sizes_are_traced_each() -> None:
    def function(x, y):
        return aten._softmax.default(x, -1, False), aten._softmax.default(y, -1, False)

    module = trace(function, [torch.randn(3, 5), torch.randn(4, 7)], dynamic=True)
    assert apply(module, PASS) == 2
    inputs = [torch.randn(2, 9), torch.randn(6, 3)]
    for made, whole in zip(module(*inputs), function(*inputs)):
        torch.testing.assert_close(made, whole)
