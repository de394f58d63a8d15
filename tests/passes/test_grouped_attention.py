from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxfuser import observe
from fxfuser.passes.dce import remove_dead_nodes
from fxfuser.passes.grouped_attention import share_keys_in_groups
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, trace

PASS = (share_keys_in_groups,)
aten = torch.ops.aten
B, H, G, S, D = 2, 3, 4, 11, 8


def repeated(x: Tensor, group: int = G) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, group, length, width).reshape(batch, heads * group, length, width)


def drawn(queries: int = 1, key_width: int = D) -> tuple[Tensor, Tensor, Tensor]:
    # heads as a projection leaves them
    q = torch.randn(B, queries, H * G, key_width).transpose(1, 2)
    return q, torch.randn(B, H, S, key_width), torch.randn(B, H, S, key_width)


MASKS = {
    "none": None,
    "shared": lambda: torch.arange(S)[None, None, None, :].expand(B, 1, 1, S) < 7,
    "of a head": lambda: torch.randn(B, H * G, 1, S),
    "of a sequence": lambda: torch.randn(B, 1, 1, S),
    "of positions": lambda: torch.randn(1, S),
}


def assert_queries(function: Callable[..., Tensor], inputs: list[Tensor], queries: int) -> None:
    """The heads of a group become so many queries of one, and nothing else changes."""
    module = trace(function, inputs)
    assert apply(module, PASS) == 1
    assert_meta(module)
    attention = next(n for n in module.graph.nodes if "scaled_dot_product" in str(n.target))
    assert [tuple(n.meta["val"].shape) for n in attention.args[:3]] == [(B, H, queries, D), (B, H, S, D), (B, H, S, D)]
    assert_same(module(*inputs), function(*inputs), exact=False)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("name", MASKS)
def test_one_query_reads_the_keys_of_its_group_once(name: str, scale: float | None) -> None:
    make = MASKS[name]

    def function(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, repeated(k), repeated(v), *mask, scale=scale)
        return found.transpose(1, 2).reshape(B, 1, H * G * D) * 2

    inputs = [*drawn(), *([make()] if make else [])]
    assert_queries(function, inputs, G)


@pytest.mark.parametrize("name", MASKS)
def test_kernels_that_know_of_groups_are_called_alike(name: str) -> None:
    make = MASKS[name]

    def function(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, *mask, enable_gqa=True).transpose(1, 2) * 2

    inputs = [*drawn(), *([make()] if make else [])]
    assert_queries(function, inputs, G)
    assert_untouched(function, [*drawn(5), *inputs[3:]] if name != "of a head" else list(drawn(5)), PASS)


def test_only_the_keys_and_values_of_one_grouping_are_shared() -> None:
    q, k, v = drawn()
    wide = torch.randn(B, H * G, S, D)
    assert_untouched(lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), v), [q, k, wide], PASS)

    def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # head after head, not each head G times
        k, v = (x[:, None].expand(B, G, H, S, D).reshape(B, G * H, S, D) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    assert_untouched(interleaved, [q, k, v], PASS)


@pytest.mark.parametrize("lay", [
    lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),  # a column after the other
    lambda x: F.pad(x, (0, 3))[..., :D],  # rows that begin anywhere
])
def test_keys_that_only_their_copy_lays_out(lay: Callable[[Tensor], Tensor]) -> None:
    q, k, v = drawn()
    assert_untouched(lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v)), [q, lay(k), v], PASS)


SEVERAL = {
    "none": None,
    "of positions": lambda: torch.randn(3, S),
    "of all queries": lambda: torch.arange(S)[None, None, None, :] < 7,
    "of a head": lambda: torch.randn(B, H * G, 3, S),
    "of any head": lambda: torch.randn(1, H * G, 1, S),
    "of a sequence": lambda: torch.randn(B, 1, 3, S),
    "of a sequence's positions": lambda: torch.randn(B, 1, 1, S).expand(B, H * G, 3, S),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_queries_lie_head_by_head(name: str) -> None:
    make = SEVERAL[name]

    def function(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), *mask) * 2

    assert_queries(function, [*drawn(3), *([make()] if make else [])], 3 * G)


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_a_draft_is_checked_with_each_key_read_once(executor: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), mask).transpose(1, 2).flatten(2) + 1

    def cache() -> Tensor:
        return torch.randn(B, H, 300, 16).bfloat16()

    inputs = [torch.randn(B, H * G, 4, 16).bfloat16(), cache(), cache(), torch.ones(4, 300).tril(200).bool()]
    with torch.no_grad(), observe.recording() as recorded:
        call = torch.compile(function, backend="fxfuser", options={"executor": executor, "strict": True})
        torch.testing.assert_close(call(*inputs), function(*inputs), rtol=3e-2, atol=3e-2)
    (graph,) = recorded.graphs
    assert not graph.externs and "attend_pieces" in graph.plan


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_keys_whose_number_varies_are_read_once_too(executor: str) -> None:
    def function(q: Tensor, cache: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, *map(repeated, cache), mask) + 1

    call = torch.compile(function, backend="fxfuser", options={"executor": executor, "strict": True})
    with torch.no_grad(), observe.recording() as recorded:
        for batch, keys in ((2, 200), (3, 321), (5, 40)):
            shapes = (batch, H * G, 1, 16), (2, batch, H, keys, 16), (batch, 1, 1, keys)
            inputs = [torch.randn(*shape).bfloat16() for shape in shapes]
            for tensor, dims in zip(inputs, ([0], [1, 3], [0, 3])):
                torch._dynamo.mark_dynamic(tensor, dims)
            torch.testing.assert_close(call(*inputs), function(*inputs), rtol=3e-2, atol=3e-2)
    (graph,) = recorded.graphs
    assert not graph.externs and len(graph.kernels) == 2  # none repeats keys or values


@pytest.mark.parametrize("queries, options", [(5, {}), (1, {"is_causal": True})])
def test_more_queries_and_causal_attention_stay(queries: int, options: dict) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, repeated(k), repeated(v), **options)

    assert_untouched(function, list(drawn(queries)), PASS)


def test_a_logsumexp_that_is_read() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return aten._scaled_dot_product_flash_attention_for_cpu.default(q, repeated(k), repeated(v))[:2]

    assert_untouched(function, list(drawn()), PASS)


def test_the_op_of_a_gpu_that_knows_of_groups() -> None:
    target = aten._scaled_dot_product_cudnn_attention.default

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return target(q, k, v, mask.expand(B, H * G, 1, S), False)[0]

    module = trace(function, [*(x.half() for x in drawn()), torch.randn(B, 1, 1, S).half()])
    assert apply(module, PASS) == 1
    assert_meta(module)
    assert targets(module).count("_scaled_dot_product_cudnn_attention.default") == 1


@pytest.mark.parametrize("target", [aten._scaled_dot_product_efficient_attention.default,
                                    aten._scaled_dot_product_cudnn_attention.default])
def test_the_ops_of_a_gpu(target: object) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return target(q, repeated(k), repeated(v), mask.expand(B, H * G, 1, S), False)[0]  # type: ignore[operator]

    module = trace(function, [*(x.half() for x in drawn()), torch.randn(B, 1, 1, S).half()])
    assert apply(module, PASS) == 1
    assert_meta(module)
    shape = next(n for n in module.graph.nodes if n.target is target).args[3].meta["val"].shape
    assert tuple(shape) == (B, H, G, S)
    apply(module, (remove_dead_nodes,))
    assert "unsqueeze.default" not in targets(module)


class Step(nn.Module):
    """One token of attention over a cache."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(H * G * D, H * G * D)
        self.register_buffer("cache", torch.zeros(2, B, H, S, D))

    def forward(self, x: Tensor, new: Tensor, position: Tensor) -> Tensor:
        self.cache.index_copy_(3, position, new)
        q = self.query(x).view(B, 1, H * G, D).transpose(1, 2)
        mask = torch.arange(S)[None, None, None] <= position
        found = F.scaled_dot_product_attention(q, repeated(self.cache[0]), repeated(self.cache[1]), mask)
        return found.transpose(1, 2).reshape(B, 1, -1) + x


@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_steps_of_decoding(executor: str) -> None:
    torch.manual_seed(0)
    ours, eager = Step(), Step()
    eager.load_state_dict(ours.state_dict())
    call = torch.compile(ours, backend="fxfuser", options={"executor": executor, "strict": True})
    with torch.no_grad():
        for i in range(3):
            arguments = torch.randn(B, 1, H * G * D), torch.randn(2, B, H, 1, D), torch.tensor([i])
            torch.testing.assert_close(call(*arguments), eager(*arguments))
            torch.testing.assert_close(ours.cache, eager.cache)
