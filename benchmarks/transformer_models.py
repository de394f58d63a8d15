"""Models of transformers with random weights, as closures that a backend compiles.

Leaves: `Workload`s, training (loss alone; bf16 autocast over float32 weights), inference (logits of whole sequences, or
of images; bf16 weights) and decoding (logits of one more token of each sequence, with the keys and values of the others
in a static cache), and the error of their results against float32, with eager's error beside it.  Sizes: hidden 1024,
8 layers, as the issue of each model's speed is stated; tiny ones to try the code out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("training", "inference", "decoding")
# a result this close to float32 is good however close eager is
TOLERATED = 2e-3


@dataclass(frozen=True)
class Scale:
    """Sizes shared by all families; images are of `side` x `side` pixels, in patches of `patch` x `patch`."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    batch: int
    length: int
    side: int
    patch: int


SCALES = {"full": Scale(1024, 8, 16, 4, 3584, 32000, 8, 1024, 384, 12), "tiny": Scale(32, 1, 4, 2, 64, 128, 2, 8, 8, 4)}


@dataclass(frozen=True)
class Family:
    """A configuration of transformers, by its class's name, and the class of its model; whether it decodes from a
    static cache that keeps all positions."""

    config: str
    options: Callable[[Scale], dict[str, Any]]
    model: str = "AutoModelForCausalLM"
    decodes: bool = True


def _decoder(scale: Scale) -> dict[str, Any]:
    return {"hidden_size": scale.width, "num_hidden_layers": scale.layers, "num_attention_heads": scale.heads,
            "num_key_value_heads": scale.key_heads, "intermediate_size": scale.inner, "vocab_size": scale.vocabulary,
            "max_position_embeddings": scale.length, "use_cache": False}


def _gpt2(scale: Scale) -> dict[str, Any]:
    return {"n_embd": scale.width, "n_layer": scale.layers, "n_head": scale.heads, "n_positions": scale.length,
            "vocab_size": scale.vocabulary, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def _head_size(scale: Scale) -> dict[str, Any]:
    return {**_decoder(scale), "head_dim": scale.width // scale.heads}


def _encoder(scale: Scale) -> dict[str, Any]:
    return {"hidden_size": scale.width, "num_hidden_layers": scale.layers, "num_attention_heads": scale.heads,
            "intermediate_size": 4 * scale.width, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _bert(scale: Scale) -> dict[str, Any]:
    return {**_encoder(scale), "vocab_size": scale.vocabulary, "max_position_embeddings": scale.length}


def _vit(scale: Scale) -> dict[str, Any]:
    return {**_encoder(scale), "image_size": scale.side, "patch_size": scale.patch, "num_labels": 1000}


def _t5(scale: Scale) -> dict[str, Any]:
    return {"d_model": scale.width, "d_kv": scale.width // scale.heads, "d_ff": scale.inner, "num_heads": scale.heads,
            "num_layers": scale.layers // 2 or 1, "num_decoder_layers": scale.layers // 2 or 1, "dropout_rate": 0.0,
            "vocab_size": scale.vocabulary, "feed_forward_proj": "gated-gelu", "use_cache": False,
            "pad_token_id": 0, "decoder_start_token_id": 0}


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family("GPT2Config", _gpt2),
    "llama": Family("LlamaConfig", _decoder),
    # no window, as Mistral has none since 0.2: within the window both compute the same
    "mistral": Family("MistralConfig", lambda scale: {**_decoder(scale), "sliding_window": None}),
    "qwen3": Family("Qwen3Config", _head_size),
    "gemma2": Family("Gemma2Config", _head_size, decodes=False),  # every second layer has a window
    "bert": Family("BertConfig", _bert, "AutoModelForMaskedLM", decodes=False),
    "t5": Family("T5Config", _t5, "AutoModelForSeq2SeqLM", decodes=False),
    "vit": Family("ViTConfig", _vit, "AutoModelForImageClassification", decodes=False),
}
NAMES = tuple(FAMILIES)


def build(name: str, scale: Scale, device: torch.device) -> nn.Module:
    """The model, float32, random weights of a fixed seed.  Raises ImportError without transformers."""
    # only these cases need transformers
    import transformers

    torch.manual_seed(0)
    family = FAMILIES[name]
    attention = {} if name == "t5" else {"attn_implementation": "sdpa"}
    config = getattr(transformers, family.config)(**family.options(scale), **attention)
    with device:  # a CPU would take longer to draw the weights than a GPU for all that is measured
        model = getattr(transformers, family.model).from_config(config)
    if family.model == "AutoModelForCausalLM":
        model.loss_type = "ForCausalLM"  # else GPT-2 warns, where Dynamo breaks the graph
    return model


def draw(name: str, scale: Scale, device: torch.device) -> dict[str, Tensor]:
    """What a model of the family takes: tokens or pixels, and labels."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(2 * scale.batch, 3, scale.side, scale.side, generator=generator)
        labels = torch.randint(1000, (2 * scale.batch,), generator=generator)
        return {"pixel_values": pixels.to(device), "labels": labels.to(device)}
    ids = torch.randint(scale.vocabulary, (scale.batch, scale.length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


@dataclass(frozen=True)
class Workload:
    """`fn(**given)` is what is compiled; `run(fn)` does the whole work once and returns its results in a fixed order;
    `again` undoes what a call has counted."""

    name: str
    kind: str
    fn: Callable[..., Tensor]
    exact: Callable[[], list[Tensor]]
    model: nn.Module
    given: Mapping[str, Tensor]
    again: Callable[[], None] = lambda: None

    def run(self, fn: Callable[..., Tensor]) -> list[Tensor]:
        if self.kind != "training":
            with torch.no_grad():
                found = fn(**self.given)
                self.again()
                return [found]
        loss = fn(**self.given)
        return [loss.detach(), *_gradients(loss, self.model)]


def supported(name: str, kind: str) -> bool:
    """Whether a family's models do this kind of work."""
    return kind != "decoding" or FAMILIES[name].decodes


def workload(name: str, kind: str, scale: Scale, device: torch.device) -> Workload:
    """One of NAMES, one of KINDS."""
    make = {"training": _training, "inference": _inference, "decoding": _decoding}[kind]
    return make(name, build(name, scale, device), draw(name, scale, device))


def _gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    """Of all parameters that the loss depends on."""
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [g for g in found if g is not None]


def _training(name: str, model: nn.Module, given: dict[str, Tensor]) -> Workload:
    device = given["labels"].device.type

    def loss_of(**given: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(**given).loss

    def exact() -> list[Tensor]:
        loss = model(**given).loss
        return [loss.detach(), *_gradients(loss, model)]

    return Workload(name, "training", loss_of, exact, model, given)


def _inference(name: str, model: nn.Module, given: dict[str, Tensor]) -> Workload:
    model.eval()
    labels = given.pop("labels")
    if FAMILIES[name].model == "AutoModelForSeq2SeqLM":
        given["decoder_input_ids"] = labels
    with torch.no_grad():
        kept = [model(**given).logits]
    model.to(torch.bfloat16)
    given = {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in given.items()}
    return Workload(name, "inference", lambda **given: model(**given).logits, lambda: kept, model, given)


def _decoding(name: str, model: nn.Module, given: dict[str, Tensor]) -> Workload:
    """The last position: a call writes its keys and values into the cache, the same each time."""
    from transformers import StaticCache

    ids = given["input_ids"]
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
        lambda input_ids: model(input_ids=input_ids, past_key_values=cache, position_ids=last, use_cache=True).logits,
        lambda: kept, model, {"input_ids": ids[:, -1:]}, lambda: torch._foreach_sub_(counts, 1))


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
