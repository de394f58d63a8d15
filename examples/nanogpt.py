"""A small GPT-2 style language model in one file, trained through fxfuser on text that every machine has.

    python examples/nanogpt.py                          well under a minute on two CPU cores
    python examples/nanogpt.py --backend eager          the same run without a compiler
    python examples/nanogpt.py --model gpt2             124M parameters, for a GPU

The text is the Python standard library's own source, read as bytes.  What is compiled is a closure that returns the
loss alone: were the logits returned beside it, they would have to be stored, and their gradient, all zeros, read.
On a GPU the model runs under bf16 autocast.  Fails where the loss has not fallen.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxfuser import observe, report


@dataclass(frozen=True)
class Shape:
    """The sizes of a model and of its batches."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    rate: float
    vocabulary: int = 256


SHAPES = {
    "small": Shape(layers=3, heads=4, width=96, context=64, batch=16, rate=1e-3),
    "gpt2": Shape(layers=12, heads=12, width=768, context=1024, batch=12, rate=6e-4),
}


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.project = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(shape.width), Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.expand, self.project = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.project(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes [batch, length] to logits [batch, length, vocabulary]; embedding and head share their weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # residual branches start small, as in GPT-2
            for last in (block.attention.project, block.project):
                nn.init.normal_(last.weight, std=0.02 * (2 * shape.layers) ** -0.5)
        self.head.weight = self.tokens.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def library_source() -> Tensor:
    """The top-level modules of the standard library as one tensor of bytes, in the order of their names."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(text: Tensor, shape: Shape, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and, for each byte, the one that follows."""
    starts = torch.randint(len(text) - shape.context - 1, (shape.batch, 1), generator=generator)
    windows = text[starts + torch.arange(shape.context + 1)].long().to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def train(shape: Shape, steps: int, backend: str, executor: str | None) -> list[float]:
    """The loss at every step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text, generator = library_source(), torch.Generator().manual_seed(0)
    model = GPT(shape).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {len(text) / 1e6:.1f} MB of text, {device}, backend {backend}")

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    options = {"executor": executor} if executor else None
    step = loss_of if backend == "eager" else torch.compile(loss_of, backend=backend, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=shape.rate, betas=(0.9, 0.95), fused=True)
    losses: list[float] = []
    start = time.perf_counter()
    for number in range(steps):
        loss = step(*batch(text, shape, device, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number % max(1, steps // 10) == 0 or number == steps - 1:
            print(f"step {number:4}  loss {losses[-1]:.3f}  {time.perf_counter() - start:6.1f} s", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fxfuser", help="eager, or any backend of torch.compile")
    parser.add_argument("--executor", help="for fxfuser: where kernels run, as in its options")
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(0)
    with observe.recording() as recording:
        losses = train(SHAPES[args.model], args.steps, args.backend, args.executor)
    for trace in recording.graphs:
        if trace.segmentation is not None:
            print(f"{trace.graph.kind}: {report.summary(trace)}")
    tenth = max(1, len(losses) // 10)
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"loss, mean over {tenth} steps: {first:.3f} at the start, {last:.3f} at the end")
    return 0 if last < 0.9 * first else 1


if __name__ == "__main__":
    sys.exit(main())
