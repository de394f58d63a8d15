"""A training step of small transformers models of many architectures, compiled, beside eager and float64.

    python -m benchmarks.hf_models                                   on a GPU if there is one
    python -m benchmarks.hf_models --device cpu --executor interpret --only mixtral,mamba
    python -m benchmarks.hf_models --dtype bfloat16 --attention sdpa

Weights are random and nothing is downloaded.  Every model has a process of its own and a time limit.  The loss, the
output and each parameter's gradient may be as far from float64 as twice eager's own error or a few units; two steps
differ in their inputs.  FXFUSER_STRICT=1 is set: no kernel may fall back to ATen.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks import record
from fxfuser import observe
from fxfuser.coverage import kernels_by_segment, total

Row = dict[str, Any]
Feed = dict[str, Tensor]
VOCABULARY, LABELS, STEPS = 97, 3, 2
MARK = "RESULT "  # the worker's answer among whatever else it prints
# of the norm of a result or a gradient; what is smaller than a hundredth of the largest gradient counts as that
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float64: 1e-12}
RATES = ("attention_dropout", "dropout", "activation_dropout", "hidden_dropout", "layerdrop", "drop_prob",
         "dropout_prob", "attention_dropout_prob", "final_dropout", "feat_proj_dropout")

TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
DECODER = {**TEXT, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
STAGES = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4],
          "window_size": 4, "num_labels": LABELS}


@dataclass(frozen=True)
class Architecture:
    """Names in transformers, arguments of the configuration, and what the model reads: a function of FEEDS."""

    model: str
    config: str
    arguments: Mapping[str, Any]
    feed: str = "tokens"


ARCHITECTURES: Mapping[str, Architecture] = {
    # mixtures of experts: top-k routing, one of them with latent attention and grouped scores
    "mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", {
        **DECODER, "experts_implementation": "eager", "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True}),
    "deepseek_v3": Architecture("DeepseekV3ForCausalLM", "DeepseekV3Config", {
        **DECODER, "experts_implementation": "eager", "num_key_value_heads": 4, "moe_intermediate_size": 16,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}),
    # decoders: soft caps and window layers; parallel blocks with one key head; learned positions
    "gemma2": Architecture("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8, "sliding_window": 8}),
    "falcon": Architecture("FalconForCausalLM", "FalconConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}),
    "opt": Architecture("OPTForCausalLM", "OPTConfig", {
        **TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}),
    # state spaces and linear recurrences, in PyTorch's own ops
    "mamba": Architecture("MambaForCausalLM", "MambaConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "use_cache": False}),
    "mamba2": Architecture("Mamba2ForCausalLM", "Mamba2Config", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 8, "num_hidden_layers": 1, "num_heads": 4,
        "head_dim": 8, "n_groups": 2, "chunk_size": 8, "use_cache": False}),
    "rwkv": Architecture("RwkvForCausalLM", "RwkvConfig", {
        "vocab_size": VOCABULARY, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2,
        "context_length": 32, "use_cache": False}),
    # encoders: disentangled attention, two attention streams, a Fourier transform instead of attention
    "deberta_v2": Architecture("DebertaV2ForMaskedLM", "DebertaV2Config", {
        **TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8}),
    "xlnet": Architecture("XLNetLMHeadModel", "XLNetConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    "fnet": Architecture("FNetForMaskedLM", "FNetConfig", {**TEXT, "type_vocab_size": 2}, "unmasked"),
    # encoder and decoder
    "bart": Architecture("BartForConditionalGeneration", "BartConfig", {
        "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": None, "use_cache": False}),
    # images: shifted windows, depthwise convolutions, layer scale; images and text; sound
    "swin": Architecture("SwinForImageClassification", "SwinConfig", STAGES, "images"),
    "convnext": Architecture("ConvNextForImageClassification", "ConvNextConfig", {
        "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32, "num_labels": LABELS}, "images"),
    "dinov2": Architecture("Dinov2ForImageClassification", "Dinov2Config", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2, "image_size": 32,
        "patch_size": 8, "num_labels": LABELS}, "images"),
    "clip": Architecture("CLIPModel", "CLIPConfig", {
        "text_config": {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "projection_dim": 16},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "projection_dim": 16},
        "projection_dim": 16}, "images_and_text"),
    "wav2vec2": Architecture("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "conv_dim": [16, 16], "conv_kernel": [8, 4], "conv_stride": [5, 2],
        "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
        "mask_time_prob": 0.0, "classifier_proj_size": 16, "num_labels": LABELS}, "sound"),
}


# ---------------------------------------------------------------- inputs


def feed(kind: str, step: int) -> Feed:
    """The keyword arguments of a step, on the CPU in float32; a new step has new values of equal shapes."""
    generator = torch.Generator().manual_seed(100 + step)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, VOCABULARY, shape, generator=generator)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    classes = {"labels": torch.randint(LABELS, (2,), generator=generator)}
    if kind == "images":
        return {"pixel_values": values(2, 3, 32, 32), **classes}
    if kind == "sound":
        return {"input_values": values(2, 400), **classes}
    if kind == "images_and_text":
        ids = tokens(2, 9)
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": values(2, 3, 32, 32)}
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, -3:] = 0
    batch = {"input_ids": tokens(2, 13), "labels": tokens(2, 13).masked_fill(mask == 0, -100)}
    return batch if kind == "unmasked" else {**batch, "attention_mask": mask}


def moved(batch: Feed, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The batch for a model of this dtype on this device."""
    on = {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in batch.items()}
    return on if "labels" in on else {**on, "return_loss": True}


# ---------------------------------------------------------------- one model


def build(architecture: Architecture, attention: str) -> nn.Module:
    """The model in training mode, float32 on the CPU, without dropout.  Raises ImportError without transformers."""
    import transformers  # only this function needs it

    arguments = copy.deepcopy(dict(architecture.arguments))
    config = getattr(transformers, architecture.config)(**arguments)
    kind = getattr(transformers, architecture.model)
    torch.manual_seed(0)
    try:
        model = kind._from_config(config, attn_implementation=attention)
    except ValueError:  # a model that has one way of attention
        model = kind(config)
    for module in model.modules():
        if type(module).__name__.lower().startswith(("dropout", "droppath", "stabledropout")):
            module.p = 0.0
        for name in RATES:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith("A_log"):
                parameter.normal_(0, 0.15)  # a configuration's own weights are near zero: nothing would show
    return model.train()


def step_of(model: nn.Module, call: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The loss, the output and every gradient, by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    out = call(**batch)
    out.loss.backward()
    logits = out["logits"] if "logits" in out else out["logits_per_image"]
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"the loss": out.loss.detach(), "the output": logits.detach(), **gradients}


def distances(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """The norm of each difference over the norm of what is exact; infinite where a result is absent or NaN."""
    largest = max((float(t.norm()) for n, t in exact.items() if not n.startswith("the ")), default=0.0)
    for name, expected in exact.items():
        floor = 1e-6 if name.startswith("the ") else 0.01 * largest  # an exact zero holds only noise
        if name not in ours:
            yield name, float("inf") if float(expected.norm()) > floor else 0.0
            continue
        ratio = float((ours[name].double() - expected).norm()) / max(float(expected.norm()), floor, 1e-30)
        yield name, ratio if ratio == ratio else float("inf")


def outcome(name: str, args: argparse.Namespace) -> Row:
    """A model's row: ok or wrong, our largest error and eager's, kernels and coverage."""
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    architecture = ARCHITECTURES[name]
    model = build(architecture, args.attention)
    exact = copy.deepcopy(model).to(device, torch.float64)
    eager = copy.deepcopy(model).to(device, dtype)
    model = model.to(device, dtype)
    compiled = torch.compile(model, backend=args.backend, **_options(args))
    worst, faults = (0.0, 0.0), []
    with observe.recording() as recording:
        for step in range(STEPS):
            batch = feed(architecture.feed, step)
            reference = step_of(exact, exact, moved(batch, device, torch.float64))
            theirs = dict(distances(step_of(eager, eager, moved(batch, device, dtype)), reference))
            for what, error in distances(step_of(model, compiled, moved(batch, device, dtype)), reference):
                worst = max(worst, (error, theirs[what]))
                if error > max(2 * theirs[what], TOLERANCE[dtype]):
                    faults.append(f"step {step}: {what}: error {error:.2e}, eager's {theirs[what]:.2e}")
    figure = total(recording.graphs)
    outside = Counter(e.op for t in recording.graphs for e in t.externs)
    return {"status": "wrong" if faults else "ok", "detail": "; ".join(faults[:3]), "error": worst[0],
            "eager_error": worst[1], "graphs": len(recording.graphs), "lowered": figure.lowered,
            "compute": figure.compute, "kernels": sum(len(kernels_by_segment(t)) for t in recording.graphs),
            "extern": dict(outside)}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {"options": {"executor": args.executor}} if args.backend == "fxfuser" else {}


def work(args: argparse.Namespace) -> int:
    """The worker: one model's row as a line of JSON."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        row = outcome(args.worker, args)
    except Exception as error:  # a failing model is a row
        row = {"status": "error", "detail": f"{type(error).__name__}: {error}"[:600],
               "traceback": traceback.format_exc()[-4000:]}
    print(MARK + json.dumps(row), flush=True)
    return 0


# ---------------------------------------------------------------- all of them


def supervise(name: str, args: argparse.Namespace, deadline: float) -> Row:
    """The row of a model's worker; "crash" or "timeout" where it gave none, "skipped" where no time was left."""
    left = deadline - time.monotonic()
    if left <= 0:
        return {"model": name, "status": "skipped", "detail": "the time budget was spent", "seconds": 0.0}
    command = [sys.executable, "-m", "benchmarks.hf_models", "--worker", name]
    for option in ("device", "backend", "executor", "dtype", "attention"):
        command += [f"--{option}", getattr(args, option)]
    environment = {"FXFUSER_STRICT": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                   "TRANSFORMERS_VERBOSITY": "error", **os.environ}
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=min(args.limit, left), env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        row: Row = json.loads(lines[-1][len(MARK):]) if lines else {
            "status": "crash", "detail": f"exit status {done.returncode}", "traceback": done.stderr[-1500:]}
    except subprocess.TimeoutExpired:
        row = {"status": "timeout", "detail": f"ran past {min(args.limit, left):.0f} s"}
    return {"model": name, **row, "seconds": round(time.monotonic() - start, 1)}


def table(rows: Sequence[Row]) -> str:
    """A line for each model, the closing figures, and how each failure ended."""
    columns = [(r["model"], r["status"], r.get("graphs"), r.get("kernels"),
                r["lowered"] / max(r["compute"], 1) if "compute" in r else None, r.get("error"), r.get("eager_error"),
                r["seconds"]) for r in rows]
    head = ("model", "result", "graphs", "kernels", "coverage", "error", "eager's", "s")
    lowered, compute = (sum(r.get(k, 0) for r in rows) for k in ("lowered", "compute"))
    outside = sum((Counter(r.get("extern", {})) for r in rows), Counter[str]())
    good = sum(r["status"] == "ok" for r in rows)
    parts = [tabulate(columns, head, floatfmt=("", "", "", "", ".3f", ".1e", ".1e", ".0f")),
             f"{good} of {len(rows)} models equal to eager; {sum(r.get('kernels', 0) for r in rows)} kernels, "
             f"{lowered} of {compute} ATen compute nodes in them, coverage {lowered / max(compute, 1):.3f}",
             f"as ATen: {', '.join(f'{op} ({n})' for op, n in outside.most_common()) or 'nothing'}"]
    parts += [f"--- {r['model']}: {r['status']}: {r['detail']}\n{r.get('traceback', '')}"
              for r in rows if r["status"] not in ("ok", "skipped")]
    return "\n".join(parts)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--backend", default="fxfuser")
    p.add_argument("--executor", default="auto", help="of fxfuser: auto, reference, interpret or triton")
    p.add_argument("--dtype", default="float32", choices=[str(d).removeprefix("torch.") for d in TOLERANCE])
    p.add_argument("--attention", default="eager", choices=["eager", "sdpa"])
    p.add_argument("--only", help="models whose name contains one of these texts (commas)")
    p.add_argument("--jobs", type=int, default=2)
    p.add_argument("--limit", type=float, default=300, help="seconds of one model")
    p.add_argument("--seconds", type=float, default=3000, help="the whole call ends in about this time")
    p.add_argument("--json", type=Path, help="the results file (benchmarks/results/<date>-hf_models.json)")
    p.add_argument("--commit", help="recorded in the results, where the tree has no history")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        return work(args)
    names = [n for n in ARCHITECTURES if not args.only or any(part in n for part in args.only.split(","))]
    results = record.start("hf_models", torch.device(args.device), args.json, args.commit)
    with ThreadPoolExecutor(args.jobs) as pool:
        for row in pool.map(partial(supervise, args=args, deadline=time.monotonic() + args.seconds), names):
            results.add(row)
    print(table(results.rows))
    return 0 if all(r["status"] == "ok" for r in results.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
