"""Masks of attention in the graph that Dynamo hands over: what is known of them, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

import fxfuser
from fxfuser.attention_masks import dense_rows, simplify_masks

B, H, S, D = 2, 3, 6, 8
Q, K, V = (torch.randn(B, H, S, D) for _ in range(3))
Mask = Callable[[], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, m: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m)


def by_position(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, m, 0.0, False)


def again(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    return checkpoint(attend, q, k, v, m, use_reentrant=False)


def simplified(fn: Callable[..., Tensor], *args: Any, fused: str = "cpu", dynamic: bool = False,
               ) -> tuple[list[tuple[bool, bool]], int, Tensor]:
    """(has a mask, is causal) of each call of attention afterwards; how many masks have changed; what is computed."""
    calls: list[tuple[bool, bool]] = []
    changes: list[int] = []

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        changes.append(len(simplify_masks(module, fused)))
        for part in (m for m in module.modules() if isinstance(m, fx.GraphModule)):
            for node in part.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
                named = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args)) | dict(node.kwargs)
                calls.append((named.get("attn_mask") is not None, bool(named.get("is_causal"))))
        return module

    torch.compiler.reset()
    found = torch.compile(fn, backend=backend, dynamic=dynamic)(*args)
    return calls, sum(changes), found


def positions() -> tuple[Tensor, Tensor]:
    return torch.arange(S)[:, None], torch.arange(S)[None, :]


def causal() -> Tensor:
    q, k = positions()
    return k <= q


def in_windows_of_one_document() -> Tensor:
    """As transformers builds it: causal, within a window as long as the sequence, and of one document a row."""
    numbers = torch.arange(S).unsqueeze(0).expand(B, -1)
    documents = (torch.diff(numbers, prepend=numbers[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    b, q, k = torch.arange(B)[:, None, None, None], torch.arange(S)[None, None, :, None], torch.arange(S)
    return ((k <= q) & (k > q - S) & (documents[b, q] == documents[b, k])).expand(B, -1, S, S)


CAUSAL: dict[str, Mask] = {
    "bool": causal, "in each batch": lambda: causal().expand(B, 1, S, S), "documents": in_windows_of_one_document,
    "infinite": lambda: torch.full((S, S), -float("inf")).triu(1),
    "least": lambda: torch.zeros(S, S).masked_fill(~causal(), torch.finfo(torch.float32).min),
    "special methods": lambda: torch.arange(S)[None, :].__le__(torch.arange(S)[:, None]).__and__(causal()),
    "tril": lambda: torch.ones(S, S, dtype=torch.bool).tril(),
}
EMPTY: dict[str, Mask] = {
    "bool": lambda: (torch.arange(S)[:, None] >= 0).expand(B, 1, S, S), "added": lambda: torch.zeros(S, S),
}


def written() -> Tensor:
    mask = causal()
    mask[2:, 0] = False
    return mask


def written_through_a_view() -> Tensor:
    mask = causal()
    mask[0].fill_(True)
    return mask


def set_to() -> Tensor:
    mask = causal()
    mask.__setitem__((slice(2, None), 0), False)
    mask.__iand__(causal())
    return mask


def added_to() -> Tensor:
    mask = torch.zeros(S, S)
    mask += torch.arange(S)
    return mask


OTHER: dict[str, Mask] = {
    "a window": lambda: causal() & ~causal().roll(2, 0), "written": written, "through a view": written_through_a_view,
    "reversed": lambda: causal().t(), "by chance": lambda: torch.rand(S, S) < 2,
    "added to": added_to, "set": set_to, "numbers": lambda: -1.0 * (torch.arange(S)[:, None] - torch.arange(S)).abs(),
}


@pytest.mark.parametrize("mask", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize("fn", [attend, by_position])
def test_causal_masks(fn: Callable[..., Tensor], mask: Mask) -> None:
    calls, changes, found = simplified(lambda q, k, v: fn(q, k, v, mask()), Q, K, V)
    assert calls == [(False, True)] and changes == 1
    torch.testing.assert_close(found, attend(Q, K, V, mask()))


@pytest.mark.parametrize("mask", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("fn", [attend, by_position])
def test_masks_that_allow_all(fn: Callable[..., Tensor], mask: Mask) -> None:
    calls, changes, found = simplified(lambda q, k, v: fn(q, k, v, mask()), Q, K, V)
    assert calls == [(False, False)] and changes == 1
    torch.testing.assert_close(found, attend(Q, K, V, None))


@pytest.mark.parametrize("mask", OTHER.values(), ids=OTHER)
def test_masks_that_say_something_else(mask: Mask) -> None:
    calls, changes, found = simplified(lambda q, k, v: attend(q, k, v, mask()), Q, K, V, fused="cuda")
    assert calls == [(True, False)] and changes == 0
    torch.testing.assert_close(found, attend(Q, K, V, mask()), equal_nan=True)


def test_inputs_and_sizes_that_vary_are_not_known() -> None:
    assert simplified(attend, Q, K, V, causal())[:2] == ([(True, False)], 0)
    fn = lambda q, k, v: attend(q, k, v, torch.arange(q.shape[2])[:, None] >= torch.arange(q.shape[2]))  # noqa: E731
    assert simplified(fn, Q, K, V, dynamic=True)[:2] == ([(True, False)], 0)


def test_few_queries_are_not_causal() -> None:
    """PyTorch's causal attention lets the first query see the first key alone."""
    found = simplified(lambda q, k, v: attend(q[:, :, -2:], k, v, causal()[-2:]), Q, K, V)
    assert found[0] == [(True, False)]


def test_a_mask_that_repeats_queries_stays() -> None:
    """Eager refuses it; without a mask there would be results."""
    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(B, 1, S, S)
        return attend(q, k, v, mask) + attend(q[0], k[0], v[0], mask)

    for call in (two, lambda *args: simplified(two, *args)):
        with pytest.raises(RuntimeError, match="broadcast"):
            call(Q, K, V)


# ---------------------------------------------------------------- how they lie in memory

REPEATED = {
    "along keys": torch.rand(S, 1).expand(S, S), "a bool": (torch.rand(S, 1) < 2).expand(B, 1, S, S),
    "by heads": torch.rand(1, S, S, H).permute(0, 3, 1, 2), "turned": torch.rand(S, S).t(),
}


@pytest.mark.parametrize("mask", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("fn", [attend, by_position, again])
def test_rows_are_laid_out(fn: Callable[..., Tensor], mask: Tensor) -> None:
    calls, changes, found = simplified(fn, Q, K, V, mask)
    assert calls == [(True, False)] and changes == 1
    torch.testing.assert_close(found, attend(Q, K, V, mask))


def test_a_mask_of_several_calls_is_laid_out_once() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        return attend(attend(q, k, v, m), k, v, m)

    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        assert len(simplify_masks(module, "cpu")) == 2
        assert len(module.graph.find_nodes(op="call_function", target=dense_rows)) == 1
        return module

    torch.compiler.reset()
    found = torch.compile(layers, backend=backend, dynamic=False)(Q, K, V, REPEATED["turned"])
    torch.testing.assert_close(found, layers(Q, K, V, REPEATED["turned"]))


@pytest.mark.parametrize("mask", [None, torch.rand(S, S), torch.rand(1, S).expand(S, S), torch.rand(S, 1)])
def test_rows_that_are_rows_stay(mask: Tensor | None) -> None:
    assert simplified(attend, Q, K, V, mask)[1] == 0


def test_other_devices_take_any_mask() -> None:
    assert simplified(attend, Q, K, V, REPEATED["turned"], fused="cuda")[1] == 0


def test_what_is_repeated_is_not_copied() -> None:
    mask = torch.rand(1, 1, S, 1).expand(B, H, S, 64)
    dense = dense_rows(mask)
    assert dense.stride() == (0, 0, 64, 1) and torch.equal(dense, mask)
    assert dense.untyped_storage().nbytes() == 4 * 64 * S


def test_gradients_of_a_bias() -> None:
    bias = torch.rand(1, S, S, H, requires_grad=True)

    def loss(q: Tensor, bias: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, K, V, dense_rows(bias.permute(0, 3, 1, 2))).square().sum()

    got, = torch.autograd.grad(torch.compile(loss, backend="fxfuser")(Q, bias), bias)
    want, = torch.autograd.grad(attend(Q, K, V, bias.permute(0, 3, 1, 2)).square().sum(), bias)
    torch.testing.assert_close(got, want)


def test_the_backend_simplifies_masks_unless_numerics_are_eager_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[fx.GraphModule] = []
    monkeypatch.setattr(fxfuser.capture, "simplify_masks", lambda module: seen.append(module) or ())
    for numerics in ("default", "eager"):
        torch.compiler.reset()
        torch.compile(attend, backend="fxfuser", options={"numerics": numerics})(Q, K, V, REPEATED["turned"])
    assert len(seen) == 1


@pytest.mark.parametrize("grad", [False, True])
def test_explain_says_what_a_mask_said(grad: bool) -> None:
    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for mask in (causal(), causal()):
            q = attend(q, k, v, mask)
        return attend(q, k, v, torch.zeros(S, S))

    found = fxfuser.explain(two, Q.detach().requires_grad_(grad), K, V)
    assert [m.fate for m in found.masks] == ["causal", "causal", "allows all"]
    lines = [line for line in str(found).splitlines() if line.startswith("attention at ")]
    assert len(lines) == 2 and lines[0].endswith("instead of reading it (2 times)") and "allows all" in lines[1]


def test_a_model_of_transformers_is_causal() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=64, attn_implementation="sdpa", use_cache=False))
    ids = torch.randint(64, (B, S))
    calls, changes, found = simplified(lambda ids: model(input_ids=ids).logits, ids)
    assert calls == [(False, True)] * 2 and changes == 2
    torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
