"""What CUDA's libraries take at their first call in GPT-2's step, and what calling them before on a thread takes off.

    python -m benchmarks.first_calls                     each row in a process of its own, about 8 s each

Nothing is compiled.  `ahead` is what the thread takes for its calls (fxfuser/runtime/warm_up.py), here with nothing
beside it; `forward` and `backward` are those of eager's first step after it, and `second` is the step after that.

    none       no call ahead
    small      as warm_up does it: small tensors, each call's backward on the thread itself
    products   the same without attention
    sizes      attention at the step's own sizes, for which cuDNN makes its plans
    engine     at those sizes, with backward on autograd's thread of the device, as the step's is
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.nn import functional as F

from benchmarks.nanogpt import seconds_of
from examples import nanogpt as example
from fxfuser.runtime import warm_up
from fxfuser.runtime.warm_up import Made, Sample

ROWS = ("none", "small", "products", "sizes", "engine")


def at_sizes(sample: Sample) -> Made:
    """Attention of operands [batch, heads, positions, depth] that lie as the model's do."""
    batch, heads, length, depth = sample.sizes
    q, k, v = (sample.zeros(batch, length, heads, depth) for _ in range(3))
    mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return mixed, (q, k, v)


def calls(row: str, size: example.Size, device: torch.device) -> list[Callable[[], None]]:
    """What the thread calls."""
    depth = size.width // size.heads
    product = Sample(warm_up._product, device, torch.bfloat16, True)
    small = Sample(warm_up._attention, device, torch.bfloat16, True, (warm_up.LONGEST, depth), True)
    whole = replace(small, make=at_sizes, sizes=(size.batch, size.heads, size.context, depth))

    def on_engine() -> None:
        made, leaves = at_sizes(whole)
        torch.autograd.grad(made, leaves, torch.zeros_like(made))

    return {"none": [], "small": [product.call, small.call], "products": [product.call],
            "sizes": [product.call, whole.call], "engine": [product.call, on_engine]}[row]


def measure(row: str, device: torch.device) -> dict[str, Any]:
    torch.set_float32_matmul_precision("high")
    small = {} if device.type == "cuda" else {"batch": 2, "context": 64, "layers": 1}
    size = replace(example.SIZES["gpt2"], **small)
    model = example.GPT(size).to(device)
    loss_of, parameters = example.loss_closure(model, device.type), list(model.parameters())
    tokens = torch.zeros(size.batch, size.context, dtype=torch.long, device=device)
    found: dict[str, Any] = {"row": row, "ahead": seconds_of(lambda: on_thread(calls(row, size, device)), device)}
    loss: list[torch.Tensor] = []
    found["forward"] = seconds_of(lambda: loss.append(loss_of(tokens, tokens)), device)
    found["backward"] = seconds_of(lambda: torch.autograd.grad(loss.pop(), parameters), device)
    found["second"] = seconds_of(lambda: torch.autograd.grad(loss_of(tokens, tokens), parameters), device)
    return found


def on_thread(work: Sequence[Callable[[], None]]) -> None:
    """Raises what one of them raises: such a row would tell nothing."""
    with ThreadPoolExecutor(1) as thread:
        for done in [thread.submit(call) for call in work]:
            done.result()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, help="writes the rows there")
    p.add_argument("--worker", choices=ROWS, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker, torch.device(args.device))))
        return 0
    rows = []
    for row in ROWS:
        command = [sys.executable, "-m", "benchmarks.first_calls", "--device", args.device, "--worker", row]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parent.parent)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    print(tabulate(rows, headers="keys", floatfmt=".3f"))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
