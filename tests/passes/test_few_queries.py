from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser import observe
from fxfuser.ops.attention import ATTEND_PIECES
from fxfuser.passes.few_queries import PROGRAMS, QUERIES, split_few_queries
from fxfuser.segmenter.segment import SegmentKind
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, trace

PASS = (split_few_queries,)
aten = torch.ops.aten
B, H, S, D = 2, 3, 200, 16


def drawn(queries: int = 4, dtype: torch.dtype = torch.bfloat16, heads: int = H, keys: int = S) -> list[Tensor]:
    # heads as a projection leaves them
    q = torch.randn(B, queries, heads, D).transpose(1, 2)
    return [x.to(dtype) for x in (q, torch.randn(B, heads, keys, D), torch.randn(B, heads, keys, D))]


MASKS: dict[str, Callable[[], Tensor] | None] = {
    "none": None,
    "of positions": lambda: torch.arange(S)[None, None, None, :] < 77,
    "of a head": lambda: torch.randn(B, H, 4, S).bfloat16(),
    "of a sequence": lambda: torch.randn(B, 1, 1, S).bfloat16(),
}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", MASKS)
def test_pieces_of_the_keys_are_put_together(name: str, scale: float | None) -> None:
    make = MASKS[name]

    def function(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, scale=scale) * 2

    inputs = [*drawn(), *([make()] if make else [])]
    module = trace(function, inputs)
    assert apply(module, PASS) == 1
    assert_meta(module)
    (pieces,) = module.graph.find_nodes(op="call_function", target=ATTEND_PIECES)
    assert pieces.meta["val"].shape == (B, H, 4, 4, D + 2)
    assert not any("scaled_dot_product" in name for name in targets(module))
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=2e-2, atol=2e-2)


def test_hidden_keys_give_zeros() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    mask = torch.ones(1, 1, 4, S, dtype=torch.bool)
    mask[:, :, 1] = False
    mask[:, :, 2, :64] = False  # all of a piece
    inputs = [*drawn(), mask]
    module = trace(function, inputs)
    assert apply(module, PASS) == 1
    found = module(*inputs)
    assert (found[:, :, 1] == 0).all() and found.isfinite().all()
    torch.testing.assert_close(found, function(*inputs).nan_to_num(0.0), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("change", [
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    lambda q, k, v: F.scaled_dot_product_attention(q.float(), k.float(), v.float()),
    lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)[:2],
    lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.5)[0],
    lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :64], v[:, :, :64]),
], ids=["causal", "float32", "logsumexp read", "dropout", "few keys"])
def test_what_stays_with_the_library(change: Callable[..., Tensor]) -> None:
    assert_untouched(change, drawn(), PASS)


FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize("change", [
    lambda q, k, v: FLASH(q, k[:1], v[:1])[0],
    lambda q, k, v: FLASH(q, k[..., :8], v)[0],
    lambda q, k, v: FLASH(q, k, v[:, :, :150])[0],
    lambda q, k, v: FLASH(q, k.half(), v)[0],
    lambda q, k, v: FLASH(q, k, v, attn_mask=torch.ones(4, S, dtype=torch.bool))[0],
    lambda q, k, v: FLASH(q, k, v, attn_mask=torch.ones(4, S, dtype=torch.float64))[0],
    lambda q, k, v: FLASH(q, k, v, attn_mask=torch.ones(S, dtype=q.dtype))[0],
    lambda q, k, v: FLASH(q, k, v, attn_mask=torch.ones(4, S // 2, dtype=q.dtype))[0],
], ids=["sequences", "width", "values", "dtype", "bool mask", "double mask", "mask of one dimension", "short mask"])
def test_what_the_library_refuses_stays(change: Callable[..., Tensor]) -> None:
    mode = FakeTensorMode()
    with mode:
        module = make_fx(change)(*map(mode.from_tensor, drawn()))
    assert apply(module, PASS) == 0 and FLASH in {n.target for n in module.graph.nodes}


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_strides_that_are_not_known_stay(executor: str) -> None:
    """Part of a cache whose length changes: its strides do as well."""
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :, :150], v[:, :, :150])

    call = torch.compile(function, backend="fxfuser", options={"executor": executor, "strict": True})
    with torch.no_grad():
        for keys in (200, 210, 220):
            inputs = drawn(keys=keys)
            torch.testing.assert_close(call(*inputs), function(*inputs), rtol=2e-2, atol=2e-2)


def test_many_queries_and_heads_that_fill_a_device_stay() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    assert_untouched(function, drawn(QUERIES + 1), PASS)
    heads = PROGRAMS // (2 * B) + 1
    assert_untouched(function, drawn(1, heads=heads), PASS)
    assert apply(trace(function, drawn(2, heads=heads)), PASS) == 1  # which each key and value serves twice


def cache_that_varies(q: Tensor, cache: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, cache[0, :, :, :S], cache[1, :, :, :S])


def mask_that_varies(q: Tensor, mask: Tensor) -> Tensor:
    keys = torch.ones(B, H, S, D, dtype=q.dtype)
    return F.scaled_dot_product_attention(q, keys, keys, mask[..., :S])


@pytest.mark.parametrize("function, shape", [
    (cache_that_varies, (2, B, H, S + 50, D)), (mask_that_varies, (B, 1, 4, S + 50))])
def test_strides_that_vary(function: Callable[..., Tensor], shape: tuple[int, ...]) -> None:
    """Known sizes of a tensor whose own are not: its strides are arguments, and no guard fixes them."""
    torch._dynamo.reset()
    found = torch.compile(function, backend="fxfuser", options={"executor": "interpret", "strict": True})
    with torch.no_grad(), observe.recording() as recorded:
        for more in (0, 30, 60):
            wider = (*shape[:3], shape[3] + more, *shape[4:])
            arguments = (drawn()[0], torch.randn(wider).bfloat16())
            torch._dynamo.maybe_mark_dynamic(arguments[1], 3)
            torch.testing.assert_close(found(*arguments), function(*arguments), rtol=2e-2, atol=2e-2)
    assert recorded.graphs and all("attend_pieces" in graph.plan for graph in recorded.graphs)


def test_eager_numerics_are_those_of_the_library() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    inputs = drawn()
    found = torch.compile(function, backend="fxfuser", options={"numerics": "eager", "strict": True})(*inputs)
    assert_same(found, function(*inputs))


@pytest.mark.parametrize("target", [aten._scaled_dot_product_efficient_attention.default,
                                    aten._scaled_dot_product_cudnn_attention.default])
def test_the_ops_of_a_gpu(target: Callable[..., tuple[Tensor, ...]]) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return target(q, k, v, mask, False)[0]

    inputs = [*drawn(dtype=torch.float16), torch.randn(B, H, 4, S).half()]
    module = trace(function, inputs)
    assert apply(module, PASS) == 1
    assert_meta(module)
    torch.testing.assert_close(module(*inputs), F.scaled_dot_product_attention(*inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_heads_that_lie_behind_positions_become_one_view(executor: str) -> None:
    """The library's kernel lays its result out as the queries are; what is computed in its place may not be."""
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), -1)

    inputs = drawn()
    with torch.no_grad():
        found = torch.compile(function, backend="fxfuser", options={"executor": executor, "strict": True})(*inputs)
        torch.testing.assert_close(found, function(*inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("executor", ["reference", "interpret"])
@pytest.mark.parametrize("group, repeats", [(1, False), (4, True), (4, False)])
def test_a_step_of_decoding(group: int, repeats: bool, executor: str) -> None:
    """Heads that share keys, a cache that lies with positions before heads, and a projection behind."""
    def step(x: Tensor, cache: Tensor, position: Tensor, w: Tensor) -> Tensor:
        keys, values = (c.transpose(1, 2) for c in cache)
        if repeats:
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        mask = torch.arange(S)[None, None, None, :] <= position
        q = x.view(B, 1, H * group, D).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=not repeats)
        return x + found.transpose(1, 2).reshape(B, -1) @ w

    width = H * group * D
    arguments = (torch.randn(B, width).bfloat16(), torch.randn(2, B, S, H, D).bfloat16(), torch.tensor(150),
                 (torch.randn(width, width) / width**0.5).bfloat16())
    with torch.no_grad(), observe.recording() as recorded:
        found = torch.compile(step, backend="fxfuser", options={"executor": executor, "strict": True})(*arguments)
        torch.testing.assert_close(found, step(*arguments), rtol=3e-2, atol=3e-2)
    (graph,) = recorded.graphs
    assert graph.segmentation is not None
    assert [s.kind for s in graph.segmentation.segments].count(SegmentKind.ATTENTION) == 1


@pytest.mark.parametrize("executor", ["reference", "interpret"])
@pytest.mark.parametrize("masked", [False, True])
def test_numbers_of_sequences_and_of_keys_vary(masked: bool, executor: str) -> None:
    def function(q: Tensor, cache: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *cache, *mask) + 1

    call = torch.compile(function, backend="fxfuser", options={"executor": executor, "strict": True})
    with torch.no_grad(), observe.recording() as recorded:
        for batch, keys in ((2, 200), (3, 321), (2, 64), (5, 40)):
            inputs = [torch.randn(batch, H, 4, D).bfloat16(), torch.randn(2, batch, H, keys, D).bfloat16()]
            inputs += [torch.randn(batch, 1, 1, keys).bfloat16()] if masked else []
            for tensor, dims in zip(inputs, ([0], [1, 3], [0, 3])):
                torch._dynamo.mark_dynamic(tensor, dims)
            torch.testing.assert_close(call(*inputs), function(*inputs), rtol=3e-2, atol=3e-2)
    (graph,) = recorded.graphs
    assert not graph.externs and "attend_pieces" in graph.plan


def test_keys_and_values_whose_numbers_may_differ_stay() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    inputs = drawn()
    for tensor in inputs[1:]:
        torch._dynamo.mark_dynamic(tensor, 2)
    with torch.no_grad(), observe.recording() as recorded:
        call = torch.compile(function, backend="fxfuser", options={"strict": True})
        torch.testing.assert_close(call(*inputs), function(*inputs), rtol=2e-2, atol=2e-2)
    assert len(recorded.graphs[0].externs) == 1  # which says so when they do


@pytest.mark.parametrize("first", [0, 1])
def test_views_of_operands_are_no_tensors(first: int) -> None:
    """The kernel has their strides, and where they begin in what others made."""
    def fn(q: Tensor, cache: Tensor) -> Tensor:
        heads = (q * 2).view(2, 4, 1, 16)
        keys, values = cache[first:first + 2].unbind(0)
        return F.scaled_dot_product_attention(heads, keys.transpose(1, 2), values.transpose(1, 2))

    q, cache = torch.randn(2, 64).bfloat16(), torch.randn(3, 2, 90, 4, 16).bfloat16()
    torch.compiler.reset()
    with torch.no_grad(), observe.recording() as recording:
        options = {"executor": "interpret", "strict": True}
        result = torch.compile(fn, backend="fxfuser", dynamic=False, options=options)(q, cache)
    torch.testing.assert_close(result, fn(q, cache), rtol=2e-2, atol=2e-2)
    (graph,) = recording.graphs
    body = graph.plan[graph.plan.index("def call"):]
    assert "attend_pieces" in body and "aten." not in body, body
