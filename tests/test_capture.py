"""What reaches `compile_graph`: the graphs after AOTAutograd, the passes and the cut, run here as their ATen calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from fxfuser import observe
from fxfuser.capture import capture, decompositions
from fxfuser.config import Config
from fxfuser.decompositions import is_kept
from fxfuser.fuel import Fuel
from fxfuser.passes import JOINT, LATE
from fxfuser.runtime.capturable import Boundary


@dataclass
class Captured:
    """A backend that compiles nothing and keeps each graph under its kind."""

    graphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    config: Config = Config()

    def __call__(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return capture(gm, inputs, self.config, self.keep)

    def keep(
        self, graph: fx.GraphModule, config: Config, name: str, boundary: Boundary, fuel: Fuel
    ) -> Callable[..., Any]:
        self.graphs[name.split(".")[1]] = graph
        return lambda args: graph.forward(*args)

    def ops(self, kind: str) -> list[str]:
        return [str(n.target).removeprefix("aten.") for n in self.graphs[kind].graph.nodes if n.op == "call_function"]


def agree(function: Callable[..., Any], *inputs: Any, training: bool = False, **options: Any) -> Captured:
    """Compiled and eager agree in values, strides and, in training, gradients."""
    captured = Captured()
    compiled = torch.compile(function, backend=captured, **options)
    leaves = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    want, got = function(*inputs), compiled(*inputs)
    torch.testing.assert_close(got, want)
    for a, b in zip(tensors(got), tensors(want)):
        assert a.stride() == b.stride()
    if training:
        gradients = [torch.autograd.grad(sum(t.sum() for t in tensors(r) if t.requires_grad), leaves)
                     for r in (got, want)]
        torch.testing.assert_close(*gradients)
    return captured


def test_composites_that_are_not_named_are_taken_apart_by_tracing() -> None:
    """Where no device has a kernel of its own, tracing asks no table; and to collect composites takes long."""
    named, devices = decompositions(), ("CPU", "CUDA", "CompositeExplicitAutograd")
    wanted = {op for op in core_aten_decompositions() if isinstance(op, OpOverload) and not is_kept(op)}
    kernels = torch._C._dispatch_has_kernel_for_dispatch_key
    assert len(wanted - set(named)) > 400
    assert not [op for op in wanted - set(named) if any(kernels(op.name(), device) for device in devices)]


@pytest.mark.parametrize(("function", "shape", "op"), [
    (lambda x: x.transpose(0, 2), (2, 3, 4), "permute"), (lambda x: x.transpose(-1, 0), (2, 3, 4), "permute"),
    (lambda x: x.t(), (2, 3), "permute"), (lambda x: x.t(), (3,), "alias"), (lambda x: x.t(), (), "alias"),
    (lambda x: x.transpose(1, 1), (2, 3), "alias"), (lambda x: x.transpose(0, -1), (3,), "alias")])
@pytest.mark.parametrize("training", [False, True])
def test_a_transpose_is_one_permutation(function: Callable[..., Any], shape: tuple[int, ...], op: str, training: bool,
                                        ) -> None:
    agree(lambda x: function(x).sin() * 2, torch.randn(shape, requires_grad=training), training=training)
    made = make_fx(function, decompositions())(torch.randn(shape))
    assert [n.target.name() for n in made.graph.nodes if n.op == "call_function"] == [f"aten::{op}"]


@pytest.mark.parametrize("function", [
    lambda x: F.channel_shuffle(x, 2), lambda x: F.interpolate(x, scale_factor=2), lambda x: F.linear(x, x[0, 0]),
    lambda x: F.interpolate(x[0], 7, mode="nearest-exact")])
@pytest.mark.parametrize("training", [False, True])
def test_composites(function: Callable[..., Any], training: bool) -> None:
    captured = agree(function, torch.randn(2, 4, 3, 3, requires_grad=training), training=training)
    found = {op for kind in captured.graphs for op in captured.ops(kind)}
    assert not {op for op in found if any(word in op for word in ("shuffle", "nearest", "linear", "interpolate"))
                and "backward" not in op}, found


def tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, torch.Tensor)]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def test_training_is_cut_after_the_joint_passes() -> None:
    with observe.recording() as records:
        captured = agree(lambda a, b: torch.tanh(a @ b).softmax(-1), leaf(5, 1), leaf(1, 4), training=True)
    assert set(captured.graphs) == {"forward", "backward"}
    assert [t.graph.kind for t in records.graphs] == ["joint", "forward", "backward"]
    assert [p.name for p in records.graphs[0].passes] == [p.__name__ for p in JOINT]
    assert [p.name for p in records.graphs[1].passes] == [p.__name__ for p in LATE]
    assert "mm.default" not in captured.ops("forward") and "_softmax.default" not in captured.ops("forward")


def test_inference_runs_the_same_passes() -> None:
    with observe.recording() as records, torch.no_grad():
        captured = agree(lambda a, b: torch.tanh(a @ b).softmax(-1), torch.randn(5, 1), torch.randn(1, 4))
    assert set(captured.graphs) == {"inference"}
    assert [p.name for p in records.graphs[0].passes] == [p.__name__ for p in (*JOINT, *LATE)]
    assert captured.ops("inference")[0] == "mul.Tensor"


def test_k1_product_is_recomputed_not_saved() -> None:
    """Left as a GEMM, the cut would save its [M, N] result instead of its operands."""
    captured = agree(lambda a, b: torch.sin(torch.cos(a @ b)), leaf(64, 1), leaf(1, 64), training=True)
    saved = captured.graphs["forward"].graph.output_node().args[0][1:]
    assert all(n.meta["val"].numel() == 64 for n in saved)
    assert len(agree(lambda a, b: torch.sin(torch.cos(a @ b)), leaf(64, 2), leaf(2, 64), training=True)
               .graphs["forward"].graph.output_node().args[0]) > 2


def test_new_nodes_say_where_they_come_from() -> None:
    captured = agree(lambda a, b: F.layer_norm(a @ b, (4,)), leaf(5, 1), leaf(1, 4), training=True)
    for kind in ("forward", "backward"):
        for node in captured.graphs[kind].graph.nodes:
            if node.op == "call_function":
                assert "val" in node.meta and "test_capture.py" in (node.stack_trace or ""), node


def test_sizes_come_from_run_time_inputs() -> None:
    captured = Captured()
    compiled = torch.compile(lambda x: (F.layer_norm(x, x.shape[-1:]).softmax(0), x.reshape(-1)), backend=captured,
                             dynamic=True)
    for shape in ((4, 5), (7, 3), (2, 9)):
        x = leaf(*shape)
        torch.testing.assert_close(compiled(x)[0], F.layer_norm(x, x.shape[-1:]).softmax(0))
    first = next(iter(captured.graphs["forward"].graph.nodes))
    assert isinstance(first.meta["val"], torch.SymInt)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2)])
def test_scalars_and_empty_tensors(shape: tuple[int, ...]) -> None:
    agree(lambda x: (x * 2 + 1, x.sum(), x.reshape(-1)), leaf(*shape), training=True)


def test_exact_strides() -> None:
    x = torch.randn(3, 4, 5)
    agree(lambda x: (x.permute(2, 0, 1) * 2, x.t() if x.dim() == 2 else x.mT + 1, x.softmax(1)), x.transpose(0, 2))
    agree(lambda x: (x.contiguous(memory_format=torch.channels_last) * 2,), torch.randn(2, 3, 4, 5))


def test_mutated_inputs() -> None:
    def function(x, buffer):
        buffer.mul_(0.5).add_(x.detach().sum())
        return x * 2

    ours, theirs = torch.ones(3), torch.ones(3)
    x = leaf(3)
    torch.compile(function, backend=Captured())(x, ours)
    function(x, theirs)
    torch.testing.assert_close(ours, theirs)


def test_a_copy_taken_before_an_update_is_what_the_backward_sees() -> None:
    def function(x, buffer):
        before = buffer.clone()
        buffer.add_(1)
        return x * before

    x, buffer = leaf(3), torch.full((3,), 4.0)
    torch.compile(function, backend=Captured())(x, buffer).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 4.0))
    torch.testing.assert_close(buffer, torch.full((3,), 5.0))


def test_a_value_that_eager_refuses_to_lose_is_refused() -> None:
    def function(x, buffer):
        y = x * buffer
        buffer.add_(1)
        return y

    with pytest.raises(Exception, match="modified by an inplace operation"):
        torch.compile(function, backend=Captured())(leaf(3), torch.ones(3)).sum().backward()


def test_aliases_of_inputs_and_of_each_other() -> None:
    def function(x):
        y = x + 1
        return x, x.view(-1), y, y.t(), y[0]

    x = torch.randn(3, 4)
    out = torch.compile(function, backend=Captured())(x)
    assert out[0] is x and out[1].data_ptr() == x.data_ptr()
    assert len({t.untyped_storage().data_ptr() for t in out[2:]}) == 1


def test_equal_outputs_are_two_tensors() -> None:
    y, z, w = torch.compile(lambda x: (x + 1, x + 1, x * 1), backend=Captured())(torch.zeros(4))
    y.add_(5)
    assert z.tolist() == [1.0] * 4 and w.tolist() == [0.0] * 4


def test_autocast_around_does_not_reach_the_passes() -> None:
    a, b = leaf(8, 1), leaf(1, 8)

    def function(a, b):
        return a @ b, F.layer_norm(a @ b, (8,)), (a @ b).softmax(-1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = torch.compile(function, backend=Captured())(a, b), function(a, b)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    sum(t.float().sum() for t in got).backward()
    assert a.grad is not None and a.grad.dtype is torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5), torch.nn.Softmax(-1))
    x = torch.randn(3, 4)
    compiled = torch.compile(model, backend=Captured())
    with mode():
        got, want = compiled(x), model(x)
    torch.testing.assert_close(got, want)
    assert got.requires_grad is want.requires_grad
    assert compiled(x).requires_grad


def test_graph_breaks() -> None:
    def function(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y.softmax(-1)

    agree(function, leaf(3, 4), training=True)


@torch.library.custom_op("fxfuser_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


scaled.register_fake(lambda x, by: torch.empty_like(x))
scaled.register_autograd(lambda ctx, g: (g * ctx.by, None),
                         setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]))


def test_custom_ops_stay_whole() -> None:
    captured = agree(lambda x: scaled(x.exp(), 3.0) + 1, leaf(4), training=True)
    assert "fxfuser_tests.scaled.default" in captured.ops("forward")


def test_higher_order_ops() -> None:
    def function(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    agree(function, torch.ones(3))
    agree(function, -torch.ones(3))


def test_checkpointed_regions_are_recomputed() -> None:
    weight = leaf(6, 6)

    def function(x):
        return checkpoint(lambda x: torch.tanh(x @ weight).softmax(-1), x, use_reentrant=False) * 2

    captured = agree(function, leaf(5, 6), training=True)
    assert captured.ops("backward").count("mm.default") == 3  # the forward's once more


def test_several_devices_in_one_graph() -> None:
    captured = agree(lambda x: (x * torch.tensor(2.0), torch.empty(3, device="meta").sum(0).shape), torch.randn(4))
    assert captured.graphs


def test_fuel_is_shared_by_a_region() -> None:
    captured = Captured(config=Config(fuel=1))
    a, b = torch.randn(3, 1), torch.randn(1, 3)
    torch.compile(lambda a, b: (a @ b, (a + 1) @ b), backend=captured)(a, b)
    assert sorted(captured.ops("inference")) == ["add.Tensor", "mm.default", "mul.Tensor"]


def test_decompositions_leave_random_numbers_products_and_pointwise_ops_whole() -> None:
    table = decompositions()
    assert torch.ops.aten.bernoulli.p not in table and torch.ops.aten.silu.default not in table
    assert torch.ops.aten.baddbmm.default not in table
    assert torch.ops.aten.glu.default in table and torch.ops.aten.hardswish.default in table
