"""Statistics of rows behind products: what the pass makes of an operand, what it leaves alone, and how exact it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fxfuser
from fxfuser import observe
from fxfuser.capture import scope_of
from fxfuser.config import Config
from fxfuser.ops.products import WIDE_PRODUCT
from fxfuser.passes import JOINT, Fuel, funnel
from fxfuser.passes.dce import remove_dead_nodes
from fxfuser.passes.defer_normalisation import defer_normalisation
from fxfuser.segmenter import anchor_rules
from tests.passes.rewriting import assert_meta, targets, text, trace

aten = torch.ops.aten
B = torch.bfloat16
ROWS, K, N = 12, 24, 20


def run(module: fx.GraphModule, deferred: bool = True, expanded: bool = False) -> int:
    """The changes of the pass on the graph, which is also taken apart where it is not in ATen's smaller ops."""
    scope = replace(scope_of(module, Fuel()), defer_normalisation=deferred)
    if expanded:
        funnel.run(module, [p for p in JOINT if p is not defer_normalisation], scope)
    changes = funnel.run(module, (defer_normalisation,), scope)
    funnel.run(module, (remove_dead_nodes,), scope)
    return changes


def scale(x: Tensor) -> Tensor:
    """[M, 1] in float32."""
    wide = aten._to_copy.default(x, dtype=torch.float32)
    square = aten.mul.Tensor(wide, wide)
    return aten.rsqrt.default(aten.add.Tensor(aten.mean.dim(square, [-1], True), 1e-5))


def before(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    y = aten.mul.Tensor(aten.mul.Tensor(wide, scale(x)), g)
    return aten.mm.default(aten._to_copy.default(y, dtype=B), aten.permute.default(w, [1, 0]))


def after(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    r, across = scale(x), aten.permute.default(w, [1, 0])
    wide = aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.float32), aten._to_copy.default(g, dtype=torch.float32))
    product = aten.mm.default(aten._to_copy.default(wide, dtype=B), across)
    return aten._to_copy.default(aten.mul.Tensor(product, r), dtype=B)


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = B) -> list[Tensor]:
    return [torch.randn(s).to(dtype) for s in shapes]


INPUTS = (ROWS, K), (K,), (N, K)


def test_a_scale_moves_behind_the_product() -> None:
    module = trace(before, tensors(*INPUTS))
    assert run(module) == 1
    assert_meta(module)
    wanted = trace(after, tensors(*INPUTS))
    funnel.run(wanted, (remove_dead_nodes,), scope_of(wanted, Fuel()))
    assert sorted(targets(module)) == sorted(targets(wanted))
    x, g, w = tensors(*INPUTS)
    torch.testing.assert_close(module(x, g, w), after(x, g, w), rtol=0, atol=0)


def untouched(function: Callable[..., Any], *inputs: Tensor, deferred: bool = True) -> None:
    module = trace(function, list(inputs))
    before = text(module.graph)
    assert run(module, deferred) == 0, module.graph
    assert text(module.graph) == before


def test_the_option_asks_for_it() -> None:
    untouched(before, *tensors(*INPUTS), deferred=False)
    assert not Config(defer_normalisation=True, gemm="library").deferral
    assert not Config(defer_normalisation=True, numerics="eager").deferral
    assert Config(defer_normalisation=True).deferral and not Config().deferral


def test_half_may_overflow() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = aten.mul.Tensor(aten._to_copy.default(x, dtype=torch.float32), scale(x))
        return aten.mm.default(aten._to_copy.default(y, dtype=torch.float16), w)

    untouched(function, *tensors((ROWS, K), (K, N), dtype=torch.float16))


def test_a_scale_along_the_sum_stays() -> None:
    def along(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return aten.mm.default(aten.mul.Tensor(x, g), w)

    def of_columns(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return aten.mm.default(aten.mul.Tensor(x, aten.rsqrt.default(aten.mean.dim(x, [0], True))), w)

    for function in (along, of_columns):
        untouched(function, *tensors((ROWS, K), (K,), (K, N)))


def test_a_given_scale_stays() -> None:
    untouched(lambda x, r, w: aten.mm.default(aten.mul.Tensor(x, r), w), *tensors((ROWS, K), (ROWS, 1), (K, N)))


def test_a_function_of_normalised_values_is_not_affine() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = aten.mul.Tensor(x, aten._to_copy.default(scale(x), dtype=B))
        return aten.mm.default(aten.relu.default(y), w)

    untouched(function, *tensors((ROWS, K), (K, N)))


@pytest.mark.parametrize("reader", [
    lambda y, w: y, lambda y, w: aten.mm.default(aten.permute.default(w, [1, 0]), aten.permute.default(y, [1, 0])),
    lambda y, w: aten.sin.default(y)])
def test_what_is_stored_anyway_stays_normalised(reader: Callable[[Tensor, Tensor], Tensor]) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = aten.mul.Tensor(x, aten._to_copy.default(scale(x), dtype=B))
        return aten.mm.default(y, w), reader(y, w)

    untouched(function, *tensors((ROWS, K), (K, N)))


def layer_norm(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, g.shape, g, b) @ w.t()


def test_a_mean_taken_off_what_is_rounded_later_stays() -> None:
    """A mean much larger than the deviation would leave but the rounding's error."""
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x, (K,)).to(B) @ w

    module = trace(function, [torch.randn(ROWS, K), *tensors((K, N))])
    assert run(module, expanded=True) == 0


def test_a_centred_operand_meets_weights_that_hold_the_columns() -> None:
    inputs = tensors((ROWS, K), (K,), (K,), (N, K))
    module = trace(layer_norm, inputs)
    assert run(module, expanded=True) == 1
    (product,) = module.graph.find_nodes(op="call_function", target=WIDE_PRODUCT)
    assert product.args[0].op == "placeholder", "x is multiplied as it is"
    assert product.args[1].op == "call_function" and product.args[1].target is aten._to_copy.default
    judged(layer_norm, module, inputs)


def judged(function: Callable[..., Any], module: Callable[..., Any], inputs: list[Tensor]) -> None:
    """No further from float64 than twice eager's error."""
    true = function(*(x.double() for x in inputs))
    got, eager = module(*inputs), function(*inputs)
    assert (got.dtype, got.shape, got.stride()) == (eager.dtype, eager.shape, eager.stride())
    ours, theirs = ((y.double() - true).norm() / true.norm() for y in (got, eager))
    assert ours <= 2 * theirs + 1e-6, f"error {float(ours):.1e}, eager's {float(theirs):.1e}"


@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_a_large_mean_cancels(mean: float) -> None:
    x, g, b, w = tensors((64, 256), (256,), (256,), (48, 256))
    inputs = [x + mean, g, b, w]
    module = trace(layer_norm, inputs)
    assert run(module, expanded=True) == 1
    judged(layer_norm, module, inputs)


def test_a_mean_in_float32_stays() -> None:
    module = trace(layer_norm, tensors((ROWS, K), (K,), (K,), (N, K), dtype=torch.float32))
    assert run(module, expanded=True) == 0


def rms_norm(x: Tensor, g: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5) * g).to(x.dtype)


def residual_of(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.relu(x)
    return h, rms_norm(h, g) @ w.t()


def test_columns_go_where_fewer_bytes_move() -> None:
    """h is stored all the same: h * g would be stored beside it, unless few weights take g."""
    for rows, folded in ((512, True), (16, False)):
        module = trace(residual_of, tensors((rows, K), (K,), (N, K)))
        assert run(module, expanded=True) == 1
        (product,) = module.graph.find_nodes(op="call_function", target=aten.mm.default)
        assert (product.args[0].target is aten.relu.default) is folded


def test_division_views_batches_and_biases() -> None:
    def divided(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        wide = x.float()
        norm = (wide * wide).sum(-1, keepdim=True).sqrt() + 1e-6
        return F.linear((wide / norm * 3.0).to(x.dtype), w, b)

    def batches(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        wide = x.float()
        return torch.bmm((wide * (wide * wide).mean(-1, keepdim=True).rsqrt()).to(x.dtype), w)

    for function, shapes in ((divided, ((3, ROWS, K), (N, K), (N,))), (batches, ((3, ROWS, K), (3, K, N), (1,)))):
        inputs = tensors(*shapes)
        module = trace(function, inputs)
        assert run(module, expanded=True) == 1
        judged(function, module, inputs)


def test_products_of_one_operand_share_it() -> None:
    def function(x: Tensor, g: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = rms_norm(x, g)
        return y @ a.t(), y @ b.t()

    module = trace(function, tensors((ROWS, K), (K,), (N, K), (N, K)))
    assert run(module, expanded=True) == 1
    products = module.graph.find_nodes(op="call_function", target=aten.mm.default)
    assert len({p.args[0] for p in products}) == 1 and len(products) == 2


# ---------------------------------------------------------------- compiled


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options under which small products take part, one behind another too, as inside `fxfuser.fuse()`."""
    monkeypatch.setattr(anchor_rules, "TILE", 1)
    monkeypatch.setattr(anchor_rules.Proposal, "requested", True)
    yield {"executor": "interpret", "strict": True, "gemm": "fused", "defer_normalisation": True}


def block(x: Tensor, w1: Tensor, res: Tensor, w2: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(res + x @ w1.t(), g.shape, g, b) @ w2.t()


def rms_block(x: Tensor, w1: Tensor, res: Tensor, w2: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.rms_norm(res + x @ w1.t(), g.shape, g) @ w2.t()


@pytest.mark.parametrize("function, kernels", [(block, 3), (rms_block, 2)])
def test_two_products_are_two_kernels(
    function: Callable[..., Any], kernels: int, interpreted: dict[str, Any]
) -> None:
    """And one that prepares the weights where the operand is centred."""
    inputs = tensors((32, 24), (32, 24), (32, 32), (48, 32), (32,), (32,))
    inputs[1], inputs[3] = inputs[1] * 24 ** -0.5, inputs[3] * 32 ** -0.5
    torch._dynamo.reset()
    with torch.no_grad(), observe.recording() as records:
        judged(function, torch.compile(function, backend=fxfuser.fxfuser, options=interpreted), inputs)
    assert len([k for r in records.graphs for k in r.kernels]) == kernels
    assert not [e for r in records.graphs for e in r.externs]


def test_a_backward_reads_the_normalised_operand(interpreted: dict[str, Any]) -> None:
    inputs = [x.requires_grad_() for x in tensors(*INPUTS)]

    def function(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, g.shape, g) @ w.t()

    def changes(trained: bool) -> int:
        torch._dynamo.reset()
        inputs[2].requires_grad_(trained)
        with observe.recording() as records:
            torch.compile(function, backend=fxfuser.fxfuser, options={"defer_normalisation": True})(*inputs)
        return sum(p.changes for r in records.graphs for p in r.passes if p.name == "defer_normalisation")

    assert (changes(trained=True), changes(trained=False)) == (0, 1)


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


@pytest.mark.parametrize("norm, dynamic", [(nn.RMSNorm, True), (nn.LayerNorm, False)])
def test_a_transformer(norm: type[nn.Module], dynamic: bool, interpreted: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Block(32, norm).to(B), torch.randn(2, 16, 32).to(B)
    torch._dynamo.reset()
    with torch.no_grad(), observe.recording() as records:
        got = torch.compile(model, backend=fxfuser.fxfuser, dynamic=dynamic, options=interpreted)(x)
        eager, true = model(x), model.double()(x.double())
    assert sum(p.changes for r in records.graphs for p in r.passes if p.name == "defer_normalisation") == 2
    assert any(k.name.startswith("second") for r in records.graphs for k in r.kernels)
    ours, theirs = ((y.double() - true).norm() / true.norm() for y in (got, eager))
    assert ours <= 1.5 * theirs
