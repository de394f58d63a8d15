"""Language models of transformers with random weights, as closures that a backend compiles.

Leaves: `Workload`s, training (loss alone; bf16 autocast over float32 weights), inference (logits of whole sequences;
bf16 weights) and decoding (logits of one more token of each sequence, with the keys and values of the others in a
static cache), and the error of their results against float32, with eager's error beside it.  Sizes: hidden 1024,
8 layers, as the issue of each model's speed is stated; tiny ones to try the code out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("gpt2", "llama", "mistral")
KINDS = ("training", "inference", "decoding")
# a result this close to float32 is good however close eager is
TOLERATED = 2e-3


@dataclass(frozen=True)
class Scale:
    """Sizes shared by the three families."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int


SCALES = {"full": Scale(1024, 8, 16, 4, 3584, 32000, 8, 1024), "tiny": Scale(32, 1, 4, 2, 64, 128, 2, 8)}


def build(name: str, scale: Scale, device: torch.device) -> nn.Module:
    """The causal language model, float32, random weights of a fixed seed.  Raises ImportError without transformers."""
    # only these cases need transformers
    import transformers

    torch.manual_seed(0)
    shared = {"vocab_size": scale.vocabulary, "use_cache": False, "attn_implementation": "sdpa"}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=scale.width, n_layer=scale.layers, n_head=scale.heads, n_positions=scale.length,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared)
    else:
        # no window, as Mistral has none since 0.2: within the window both compute the same
        kind = transformers.LlamaConfig if name == "llama" else partial(transformers.MistralConfig, sliding_window=None)
        config = kind(
            hidden_size=scale.width, num_hidden_layers=scale.layers, num_attention_heads=scale.heads,
            num_key_value_heads=scale.key_heads, intermediate_size=scale.inner,
            max_position_embeddings=scale.length, **shared)
    with device:  # a CPU would take longer to draw the weights than a GPU for all that is measured
        return transformers.AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True)
class Workload:
    """`fn(ids)` is what is compiled; `run(fn)` does the whole work once and returns its results in a fixed order;
    `again` undoes what a call has counted."""

    name: str
    kind: str
    fn: Callable[[Tensor], Tensor]
    exact: Callable[[], list[Tensor]]
    model: nn.Module
    ids: Tensor
    again: Callable[[], None] = lambda: None

    def run(self, fn: Callable[[Tensor], Tensor]) -> list[Tensor]:
        if self.kind != "training":
            with torch.no_grad():
                found = fn(self.ids)
                self.again()
                return [found]
        loss = fn(self.ids)
        return [loss.detach(), *torch.autograd.grad(loss, list(self.model.parameters()))]


def workload(name: str, kind: str, scale: Scale, device: torch.device) -> Workload:
    """One of NAMES, one of KINDS."""
    ids = torch.randint(scale.vocabulary, (scale.batch, scale.length),
                        generator=torch.Generator().manual_seed(1)).to(device)
    make = {"training": _training, "inference": _inference, "decoding": _decoding}[kind]
    return make(name, build(name, scale, device), ids)


def _training(name: str, model: nn.Module, ids: Tensor) -> Workload:
    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            return model(input_ids=tokens, labels=tokens).loss

    def exact() -> list[Tensor]:
        loss = model(input_ids=ids, labels=ids).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    return Workload(name, "training", loss_of, exact, model, ids)


def _inference(name: str, model: nn.Module, ids: Tensor) -> Workload:
    model.eval()
    with torch.no_grad():
        kept = [model(input_ids=ids).logits]
    model.to(torch.bfloat16)
    return Workload(name, "inference", lambda tokens: model(input_ids=tokens).logits, lambda: kept, model, ids)


def _decoding(name: str, model: nn.Module, ids: Tensor) -> Workload:
    """The last position: a call writes its keys and values into the cache, the same each time."""
    from transformers import StaticCache

    model.eval()
    with torch.no_grad():
        kept = [model(input_ids=ids).logits[:, -1:]]
        model.to(torch.bfloat16)
        cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    counts = [layer.cumulative_length for layer in cache.layers]  # of positions that are filled: a call adds one
    last = torch.tensor([[ids.shape[1] - 1]], device=ids.device)
    return Workload(
        name, "decoding",
        lambda tokens: model(input_ids=tokens, past_key_values=cache, position_ids=last, use_cache=True).logits,
        lambda: kept, model, ids[:, -1:], lambda: torch._foreach_sub_(counts, 1))


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    """The norm of the difference over the norm, of the first result and of all others together, the larger."""
    return max(_distance(results[:1], exact[:1]), _distance(results[1:], exact[1:]))


def _distance(results: list[Tensor], exact: list[Tensor]) -> float:
    pairs = list(zip(results, exact, strict=True))
    difference = sum(float((a.float() - b.float()).square().sum()) for a, b in pairs)
    total = sum(float(b.float().square().sum()) for _, b in pairs)
    ratio = (difference / total) ** 0.5 if total else difference
    return ratio if ratio == ratio else float("inf")


def verdict(ours: float, eager: float) -> Mapping[str, Any]:
    """Good where at most 1.5 x eager's error; the columns of a row."""
    good = ours <= max(1.5 * eager, TOLERATED)
    return {"status": "ok" if good else "wrong", "error_to_float32": ours, "eager_error": eager}
