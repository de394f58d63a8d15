"""The rotary module of one Mistral block through fxfuser, forward and backward, compared with eager.

    python examples/mistral_rope.py             the module written out below
    python examples/mistral_rope.py --hf        transformers' own Mistral classes

32 query heads and 8 key/value heads of size 128, bf16.  q, k and v arrive as the three projections leave them,
[batch, sequence, heads * 128]; what leaves is what attention reads, [batch, 32, sequence, 128] each.  On a GPU the
sequence has 4096 positions; without one the generated kernels run in Triton's interpreter, on a short sequence.
Prints the segments of each graph and the error of eager and of the compiled module against float64; fails where
the compiled error is more than twice eager's, or where no kernel was generated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor, nn

from fxfuser import observe, report

QUERY_HEADS, KEY_HEADS, HEAD = 32, 8, 128
NAMES = ("q", "k", "v", "grad q", "grad k", "grad v")


def split_heads(x: Tensor) -> Tensor:
    """[batch, sequence, heads * HEAD] to [batch, heads, sequence, HEAD]."""
    return x.unflatten(-1, (-1, HEAD)).transpose(1, 2)


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Each key/value head serves `times` query heads."""
    batch, heads, length, size = x.shape
    return x[:, :, None].expand(batch, heads, times, length, size).reshape(batch, heads * times, length, size)


class MistralRope(nn.Module):
    """What a Mistral block does between its projections and its attention."""

    def __init__(self, theta: float = 10000.0) -> None:
        super().__init__()
        exponent = torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD
        self.register_buffer("inv_freq", (theta**-exponent).float(), persistent=False)

    def angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [batch, sequence, HEAD]; a matrix product whose inner dimension is 1, as in transformers."""
        frequencies = self.inv_freq[None, :, None].expand(position_ids.shape[0], -1, 1)
        angle = (frequencies @ position_ids[:, None, :].to(self.inv_freq.dtype)).transpose(1, 2)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = (t.unsqueeze(1) for t in self.angles(position_ids, q.dtype))
        q, k, v = split_heads(q), split_heads(k), split_heads(v)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        times = QUERY_HEADS // KEY_HEADS
        return q, repeat_heads(k, times), repeat_heads(v, times)


def huggingface_rope() -> nn.Module:
    """The same computation, put together from transformers' own parts."""
    # only this choice needs transformers
    from transformers import MistralConfig
    from transformers.models.mistral import modeling_mistral as mistral

    class HuggingFaceRope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary = mistral.MistralRotaryEmbedding(MistralConfig())

        def forward(self, q: Tensor, k: Tensor, v: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = split_heads(q), split_heads(k), split_heads(v)
            cos, sin = self.rotary(v, position_ids)
            q, k = mistral.apply_rotary_pos_emb(q, k, cos, sin)
            times = QUERY_HEADS // KEY_HEADS
            return q, mistral.repeat_kv(k, times), mistral.repeat_kv(v, times)

    return HuggingFaceRope()


def example_inputs(length: int, device: str) -> tuple[Tensor, ...]:
    heads = (QUERY_HEADS, KEY_HEADS, KEY_HEADS)
    projections = [torch.randn(1, length, n * HEAD, device=device, dtype=torch.bfloat16) for n in heads]
    return *(p.requires_grad_() for p in projections), torch.arange(length, device=device)[None]


def forward_backward(fn: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The three outputs and the gradients of the three projections, for fixed tangents."""
    outputs = fn(*inputs)
    generator = torch.Generator().manual_seed(1)
    tangents = [torch.randn(o.shape, generator=generator).to(o.device, torch.bfloat16).to(o.dtype) for o in outputs]
    return *outputs, *torch.autograd.grad(outputs, inputs[:3], tangents)


def reference(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The result in float64 throughout, from the float32 frequencies that the module has."""
    exact = MistralRope().to(inputs[0].device)
    exact.inv_freq = exact.inv_freq.double()
    return forward_backward(exact, tuple(x.detach().double().requires_grad_() for x in inputs[:3]) + inputs[3:])


def print_segments(recording: observe.Recording) -> bool:
    """Whether there is a kernel at all: without one the comparison below would compare eager with itself."""
    traces = [t for t in recording.graphs if t.segmentation is not None]
    for trace in traces:
        print(f"{trace.graph.kind}: {report.summary(trace)}\n{report.segment_table(trace)}\n")
    return any(trace.kernels for trace in traces)


def compare(eager: tuple[Tensor, ...], compiled: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> bool:
    """Prints the largest error of each result against float64; whether the compiled ones are as good as eager's."""
    rows, good = [], True
    for name, a, b, c in zip(NAMES, eager, compiled, exact, strict=True):
        ours, theirs = ((t.double() - c).abs().max().item() for t in (b, a))
        same = a.stride() == b.stride() and a.dtype == b.dtype
        # one unit in the last place of bf16 where eager happens to be exact
        passed = same and ours <= max(2 * theirs, 2**-8 * c.abs().max().item())
        rows.append((name, theirs, ours, "same" if same else "differ", "ok" if passed else "WRONG"))
        good &= passed
    print(tabulate(rows, ("result", "eager's error", "compiled error", "strides", ""), floatfmt=".2e"), "\n")
    return good


def call_microseconds(fn: Callable[..., object], inputs: tuple[Tensor, ...]) -> float:
    """Wall time of a call on the GPU, the mean of 100 in a row: guards and launch gaps included."""
    for _ in range(10):
        fn(*inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        fn(*inputs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", action="store_true", help="use transformers' Mistral classes")
    parser.add_argument("--backend", default="fxfuser", help="any backend of torch.compile")
    parser.add_argument("--length", type=int, help="positions (4096 on a GPU, else 32)")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    length = args.length or (4096 if device == "cuda" else 32)
    module = (huggingface_rope() if args.hf else MistralRope()).to(device)
    inputs = example_inputs(length, device)
    interpret = args.backend == "fxfuser" and device == "cpu"
    compiled = torch.compile(module, backend=args.backend, options={"executor": "interpret"} if interpret else None)
    print(f"{type(module).__name__}, {length} positions, {device}, backend {args.backend}"
          f"{', in the interpreter' if interpret else ''}\n")

    start = time.perf_counter()
    with observe.recording() as recording:
        results = forward_backward(compiled, inputs)
    print(f"compiled and ran forward and backward in {time.perf_counter() - start:.1f} s\n")
    fused = print_segments(recording)
    if args.backend == "fxfuser" and not fused:
        print("no kernel was generated\n")
    good = compare(forward_backward(module, inputs), results, reference(inputs))
    if device == "cuda":
        with torch.no_grad():
            for name, fn in (("eager", module), (args.backend, compiled)):
                print(f"forward, wall time of a call, {name}: {call_microseconds(fn, inputs):.0f} us")
    return 0 if good and (fused or args.backend != "fxfuser") else 1


if __name__ == "__main__":
    sys.exit(main())
