"""A GPT-2 style language model in one file, trained through fxfuser on text that every machine has.

    python examples/nanogpt.py                              about a minute on two CPU cores
    python examples/nanogpt.py --compare                    the same steps with eager too, both loss curves
    python examples/nanogpt.py --size gpt2 --steps 200      GPT-2's 124M parameters, for a GPU
    python examples/nanogpt.py --data FOLDER --checkpoint run.pt      and later the same with --resume

The text is the Python standard library's own source, read as bytes; its last tenth is kept for validation.  What is
compiled is a closure that returns the loss alone: were the logits returned beside it, they would have to be stored,
and their gradient, all zeros, read.  On a GPU the model runs under bf16 autocast.  The same seed gives the same run,
resumed or not.  Fails where the loss has not fallen, or where --compare finds two different curves.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F

from fxfuser import observe, report

try:
    from tqdm import tqdm
except ImportError:  # the bar is a nicety: without it there are only the lines
    tqdm = None

BYTES = 256
VALIDATION_BATCHES = 4
CURVE_POINTS = 10
SAME_CURVE = 0.02  # of the loss, on average: bf16 noise is below a hundredth


@dataclass(frozen=True)
class Size:
    """A model, its batches and how long it is trained: `batch` sequences of `context` bytes, `accumulate` times."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    accumulate: int
    rate: float
    steps: int
    vocabulary: int = BYTES


SIZES = {
    "tiny": Size(layers=2, heads=2, width=32, context=32, batch=8, accumulate=1, rate=3e-3, steps=100),
    "small": Size(layers=3, heads=4, width=96, context=64, batch=8, accumulate=2, rate=2e-3, steps=800),
    # GPT-2's padded vocabulary, so that the work is GPT-2's; bytes use 256 of its rows
    "gpt2": Size(layers=12, heads=12, width=768, context=1024, batch=12, accumulate=1, rate=6e-4, steps=1000,
                 vocabulary=50304),
}

LossOf = Callable[[Tensor, Tensor], Tensor]


# ---------------------------------------------------------------- the model


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.project = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.width), Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.expand, self.project = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.project(F.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Bytes [batch, length] to logits [batch, length, vocabulary]; embedding and head share their weight."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # residual branches start small, as in GPT-2
            for last in (block.attention.project, block.project):
                nn.init.normal_(last.weight, std=0.02 * (2 * size.layers) ** -0.5)
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


def loss_closure(model: GPT, device: str) -> LossOf:
    """The mean cross entropy of targets [batch, length] after tokens [batch, length]."""

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return loss_of


# ---------------------------------------------------------------- the text


def read_text(data: Path | None) -> Tensor:
    """A file, or the files of a folder in the order of their names, as one tensor of bytes.

    Without one: the top-level modules of the standard library.  Files with zero bytes are not text and left out.
    """
    if data is not None and not data.exists():
        raise SystemExit(f"{data}: no such file or folder")
    if data is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    else:
        files = [data] if data.is_file() else sorted(f for f in data.rglob("*") if f.is_file())
    parts = [part for f in files if b"\0" not in (part := f.read_bytes())]
    return torch.frombuffer(bytearray(b"\n".join(parts) or b"\n"), dtype=torch.uint8)


def split(text: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """(for training, for validation)"""
    cut = len(text) * 9 // 10
    if len(text) - cut < context + 2:
        raise SystemExit(f"{len(text)} bytes of text are too few for windows of {context}: ten times that is needed")
    return text[:cut], text[cut:]


def batch(text: Tensor, size: Size, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and, for each byte, the one that follows."""
    starts = torch.randint(len(text) - size.context, (size.batch, 1), generator=generator)
    windows = text[starts + torch.arange(size.context + 1)].long()
    if device == "cuda":
        windows = windows.pin_memory().to(device, non_blocking=True)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class Settings:
    """How one run goes; see the options' help texts."""

    size: Size
    steps: int
    backend: str
    mode: str | None = None
    seed: int = 0
    device: str = "cpu"
    checkpoint: Path | None = None
    resume: bool = False


@dataclass
class History:
    """What a run leaves: losses by step, validation losses as (step, loss), tokens per second once compiled."""

    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.rates) if self.rates else math.nan


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over the first tenth, then a cosine down to a tenth of the peak."""
    warm_up = max(steps // 10, 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    along = (step - warm_up) / max(steps - warm_up, 1)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * along)))


def make_optimizer(model: GPT, rate: float, device: str) -> torch.optim.AdamW:
    """Matrices decay; norms and biases do not."""
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")


def compiled(loss_of: LossOf, settings: Settings) -> LossOf:
    if settings.backend == "eager":
        return loss_of
    return torch.compile(loss_of, backend=settings.backend, mode=settings.mode)


@torch.no_grad()
def validation_loss(loss_of: LossOf, text: Tensor, settings: Settings) -> float:
    """Over the same windows every time."""
    generator = torch.Generator().manual_seed(settings.seed + 1)
    total = torch.zeros((), device=settings.device)
    for _ in range(VALIDATION_BATCHES):  # added at once: a CUDA graph's result lasts until its next replay
        total += loss_of(*batch(text, settings.size, settings.device, generator))
    return total.item() / VALIDATION_BATCHES


class Trainer:
    """A run that can stop after any step and go on in another process."""

    def __init__(self, settings: Settings, text: Tensor) -> None:
        self.settings = settings
        self.train_text, self.validation_text = split(text, settings.size.context)
        torch.manual_seed(settings.seed)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.model = GPT(settings.size).to(settings.device)
        self.optimizer = make_optimizer(self.model, settings.size.rate, settings.device)
        self.loss_of = compiled(loss_closure(self.model, settings.device), settings)
        self.history = History()
        if settings.resume:
            self._load()

    def step(self, number: int) -> Tensor:
        """One update of the weights, from `accumulate` batches; the mean loss stays on the device, unread."""
        size, total = self.settings.size, torch.zeros((), device=self.settings.device)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.settings.steps, size.rate)
        for _ in range(size.accumulate):
            loss = self.loss_of(*batch(self.train_text, size, self.settings.device, self.generator)) / size.accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def validate(self) -> None:
        loss = validation_loss(self.loss_of, self.validation_text, self.settings)
        self.history.validation.append((len(self.history.losses), loss))

    def stretch(self, first: int, count: int, advance: Callable[[], object]) -> float:
        """Seconds for steps `first` to `first + count`; losses are read at the end, so that no step waits for one."""
        start, losses = time.perf_counter(), list[Tensor]()
        for number in range(first, first + count):
            losses.append(self.step(number))
            advance()
        self.history.losses += torch.stack(losses).tolist()
        return time.perf_counter() - start

    def save(self) -> None:
        """Whole or not at all: a run that is killed while it saves keeps its last checkpoint."""
        path = self.settings.checkpoint
        if path is None:
            return
        part = path.with_name(path.name + ".part")
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                    "generator": self.generator.get_state(), "losses": self.history.losses,
                    "validation": self.history.validation}, part)
        part.replace(path)

    def _load(self) -> None:
        path = self.settings.checkpoint
        if path is None or not path.exists():
            raise SystemExit("--resume needs --checkpoint with a file that an earlier run has written")
        state = torch.load(path, map_location=self.settings.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.history = History(state["losses"], state["validation"])


class Progress:
    """A bar on a terminal, and lines everywhere."""

    def __init__(self, name: str, done: int, total: int) -> None:
        self.start = time.perf_counter()
        self.bar = tqdm and tqdm(desc=name, initial=done, total=total, unit="step", leave=False, disable=None)

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.clear()
        print(text, flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def train(settings: Settings, text: Tensor) -> Trainer:
    """Trains to the end: a line, a validation loss and a checkpoint after every tenth, what was compiled at first."""
    trainer = Trainer(settings, text)
    history, size, steps = trainer.history, settings.size, settings.steps
    done = first = len(history.losses)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters / 1e6:.2f}M parameters, {len(text) / 1e6:.1f} MB of text, {settings.device}, "
          f"backend {settings.backend}, steps {done} to {steps}", flush=True)
    progress = Progress(settings.backend, done, steps)
    with observe.recording() as recording:
        if not done:
            trainer.validate()
        while done < steps:
            # the first step compiles, so it is a stretch of its own and no measure of speed
            count = 1 if done == first else min(max(steps // 10, 1), steps - done)
            seconds = trainer.stretch(done, count, progress.advance)
            if done == first:
                print_compiled(recording, progress)
            else:
                history.rates.append(count * size.accumulate * size.batch * size.context / seconds)
            done += count
            trainer.validate()
            trainer.save()
            progress.line(f"step {done:5}  loss {history.losses[-1]:.3f}  validation {history.validation[-1][1]:.3f}"
                          f"  {time.perf_counter() - progress.start:6.1f} s")
    progress.close()
    return trainer


def print_compiled(recording: observe.Recording, progress: Progress) -> None:
    """The segments of each graph; nothing where another backend compiled."""
    for trace in recording.graphs:
        if trace.segmentation is not None:
            progress.line(f"\n{trace.graph.kind}: {report.summary(trace)}\n{report.segment_table(trace)}\n")


# ---------------------------------------------------------------- what came of it


@torch.no_grad()
def sample(model: GPT, settings: Settings, prompt: str, length: int) -> str:
    """`length` bytes after the prompt, drawn from what the model predicts; eager: every length is another shape."""
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = torch.tensor([list(prompt.encode())], device=settings.device)
    for _ in range(length):
        logits = model(tokens[:, -settings.size.context :])[0, -1, :BYTES].float().cpu()
        chosen = torch.multinomial(F.softmax(logits / 0.8, dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, chosen[None].to(settings.device)), dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def smooth(losses: Sequence[float]) -> list[float]:
    """The means of CURVE_POINTS stretches of about equal length, fewer where there are fewer losses."""
    points = min(CURVE_POINTS, len(losses))
    edges = [len(losses) * i // points for i in range(points + 1)]
    return [statistics.fmean(losses[a:b]) for a, b in zip(edges, edges[1:])]


def spark(values: Sequence[float], low: float, high: float) -> str:
    """One block per value, the higher the larger."""
    return "".join("▁▂▃▄▅▆▇█"[min(int((v - low) / max(high - low, 1e-9) * 8), 7)] for v in values)


def compare(settings: Settings, ours: History, eager: History) -> bool:
    """Prints both loss curves; whether they are one curve."""
    a, b = smooth(ours.losses), smooth(eager.losses)
    ends = [len(ours.losses) * (i + 1) // len(a) for i in range(len(a))]
    headers = ("to step", settings.backend, "eager", "difference")
    print(tabulate([(n, x, y, x - y) for n, x, y in zip(ends, a, b)], headers,
                   floatfmt=("", ".4f", ".4f", "+.5f")))
    low, high = min(a + b), max(a + b)
    width = max(len(settings.backend), len("eager"))
    for name, curve, history in ((settings.backend, a, ours), ("eager", b, eager)):
        print(f"{name:{width}}  {spark(curve, low, high)}  {history.tokens_per_second:,.0f} tokens/s")
    apart = statistics.fmean(abs(x - y) / y for x, y in zip(a, b))
    print(f"the curves differ by {apart:.2e} of the loss on average" + ("" if apart < SAME_CURVE else ": TOO MUCH"))
    return apart < SAME_CURVE


def fell(losses: Sequence[float]) -> bool:
    """Whether the mean over the last tenth is below the first tenth's by a tenth."""
    curve = smooth(losses)
    print(f"loss, mean over a tenth of the steps: {curve[0]:.3f} at the start, {curve[-1]:.3f} at the end")
    return curve[-1] < 0.9 * curve[0]


def parse() -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="fxfuser", help="eager, or any backend of torch.compile")
    parser.add_argument("--mode", help="torch.compile's mode")
    parser.add_argument("--compare", action="store_true", help="train with eager too and show both loss curves")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, help="of the optimizer (by default the size's own number)")
    parser.add_argument("--data", type=Path, metavar="PATH", help="a text file or a folder of them")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after every tenth of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="def ", help="what the sample at the end begins with")
    parser.add_argument("--sample", type=int, default=200, metavar="BYTES", help="length of the sample")
    args = parser.parse_args()
    size = SIZES[args.size]
    steps = size.steps if args.steps is None else args.steps
    if steps < 1 or not args.prompt:
        parser.error("--steps must be at least 1 and --prompt not empty")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Settings(size, steps, args.backend, args.mode, args.seed, device, args.checkpoint, args.resume), args


def main() -> int:
    settings, args = parse()
    torch.set_float32_matmul_precision("high")
    text = read_text(args.data)
    trainer = train(settings, text)
    history = trainer.history
    good = fell(history.losses)
    print(f"{history.tokens_per_second:,.0f} tokens/s\n")
    if args.compare:
        plain = replace(settings, backend="eager", mode=None, checkpoint=None, resume=False)
        good &= compare(settings, history, train(plain, text).history)
    print(f"\n{sample(trainer.model, settings, args.prompt, args.sample)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
