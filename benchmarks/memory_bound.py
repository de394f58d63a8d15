"""Memory-bound work beside Inductor: pointwise chains, transposes, broadcasts, reductions, norms, losses.

    python -m benchmarks.memory_bound --quick                       two sizes of everything
    python -m benchmarks.memory_bound --only softmax --seconds 120

Each case runs at sizes of its largest tensor from 1 MB to 1 GB, on every backend, in one process.  The table gives
device time (`graph`), speed over Inductor's and the share of a copy that moves the same bytes; below it the geometric
means and the worst case.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from benchmarks import suite
from benchmarks.suite import Problem, Task
from fxfuser.runtime.timing import geometric_mean

MB = 1 << 20
SIZES = (1, 8, 64, 256, 1024)  # MB of the case's largest tensor
QUICK_SIZES = (8, 256)
LARGE = 256  # from here on the share of copy is summarised
CACHE = 64 * MB  # what the device may keep between two readings

Build = Callable[[torch.device, int], Problem]  # (device, elements of the largest tensor)
BFLOAT16 = torch.bfloat16


def draw(device: torch.device, *shape: int, grad: bool = False, dtype: torch.dtype = BFLOAT16) -> Tensor:
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def matrix(device: torch.device, elements: int, columns: int, grad: bool = False) -> Tensor:
    return draw(device, max(elements // columns, 1), columns, grad=grad)


def square(device: torch.device, elements: int) -> Tensor:
    side = 1 << (elements.bit_length() - 1) // 2
    return draw(device, max(elements // side, 1), side)


# Each function below builds one case.  Weights are inputs, so that every input set shares one function.

def relu_add(device: torch.device, n: int) -> Problem:
    return Problem(lambda x, y: torch.relu(x + y), (draw(device, n), draw(device, n)))


def gelu_chain(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: F.gelu(x * 1.5 + 0.25) * x - torch.tanh(x), (draw(device, n),))


def swiglu(device: torch.device, n: int) -> Problem:
    return Problem(lambda x, y: F.silu(x) * y, (draw(device, n), draw(device, n)))


def swiglu_backward(device: torch.device, n: int) -> Problem:
    return Problem(lambda x, y: F.silu(x) * y, (draw(device, n, grad=True), draw(device, n, grad=True)), True)


def cast_scale(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: x.float() * 0.125, (draw(device, n),))


def split_outputs(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: (x.sin(), x.cos()), (draw(device, n),))


def transpose(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: x.t().contiguous(), (square(device, n),))


def transpose_add(device: torch.device, n: int) -> Problem:
    x = square(device, n)
    return Problem(lambda x, y: x + y.t(), (x, draw(device, x.shape[1], x.shape[0])))


def permute_heads(device: torch.device, n: int) -> Problem:
    x = draw(device, 1, max(n // 4096, 1), 32, 128)
    return Problem(lambda x: x.transpose(1, 2).contiguous() * 0.5, (x,))


def concatenate(device: torch.device, n: int) -> Problem:
    x, y = (matrix(device, n // 2, 2048) for _ in range(2))
    return Problem(lambda x, y: torch.cat((x * 2, y), dim=1), (x, y))


def broadcast_row(device: torch.device, n: int) -> Problem:
    return Problem(lambda x, b: F.relu(x + b), (matrix(device, n, 4096), draw(device, 4096)))


def broadcast_column(device: torch.device, n: int) -> Problem:
    x = matrix(device, n, 4096)
    return Problem(lambda x, s: x * s, (x, draw(device, x.shape[0], 1)))


def outer(device: torch.device, n: int) -> Problem:
    return Problem(lambda a, b: torch.exp(a * b), (draw(device, max(n // 4096, 1), 1), draw(device, 1, 4096)))


def row_sum(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: (x * x).sum(-1), (matrix(device, n, 4096),))


def long_row_sum(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: x.sum(-1), (draw(device, 16, n // 16),))


def full_sum(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: (x * x).sum(), (draw(device, n),))


def column_sum(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: x.sum(0), (matrix(device, n, 1024),))


def row_argmax(device: torch.device, n: int) -> Problem:
    # distinct values: bf16 ties would make the first index depend on nothing but luck of the draw
    columns = 4096
    rows = max(n // 2 // columns, 1)
    x = torch.rand(rows, columns, device=device).argsort(-1).float()
    return Problem(lambda x: x.argmax(-1), (x,))


def variance(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: torch.var_mean(x, dim=-1), (matrix(device, n, 4096),))


def softmax(device: torch.device, n: int, columns: int, backward: bool) -> Problem:
    return Problem(lambda x: torch.softmax(x, -1), (matrix(device, n, columns, backward),), backward)


def log_softmax(device: torch.device, n: int) -> Problem:
    return Problem(lambda x: torch.log_softmax(x, -1), (matrix(device, n, 4096),))


def layer_norm(device: torch.device, n: int, columns: int, backward: bool) -> Problem:
    x = matrix(device, n, columns, backward)
    return Problem(lambda x, w, b: F.layer_norm(x, (columns,), w, b),
                   (x, draw(device, columns, grad=backward), draw(device, columns, grad=backward)), backward)


def rms_norm(device: torch.device, n: int, columns: int, backward: bool) -> Problem:
    x = matrix(device, n, columns, backward)
    return Problem(lambda x, w: F.rms_norm(x, (columns,), w), (x, draw(device, columns, grad=backward)), backward)


def head_norm(device: torch.device, n: int, backward: bool) -> Problem:
    """Queries of 16 heads, normalised a head at a time and laid out for attention: the gradient of the weights, 64
    numbers, is a sum of rows that lie in many places."""
    heads, size = 16, 64
    positions = min(1024, max(n // (heads * size), 1))
    x = draw(device, max(n // (positions * heads * size), 1), positions, heads, size, grad=backward)
    return Problem(lambda x, w: F.rms_norm(x, (size,), w).transpose(1, 2).contiguous(),
                   (x, draw(device, size, grad=backward)), backward)


def cross_entropy(device: torch.device, n: int, columns: int, backward: bool) -> Problem:
    x = matrix(device, n, columns, backward)
    labels = torch.randint(columns, (x.shape[0],), device=device)
    return Problem(lambda x, y: F.cross_entropy(x, y), (x, labels), backward)


def batch_norm(device: torch.device, n: int, training: bool, backward: bool = False) -> Problem:
    channels, side = 64, 32
    x = draw(device, max(n // (channels * side * side), 1), channels, side, side, grad=backward)
    weight, bias = (draw(device, channels, grad=backward, dtype=torch.float32) for _ in range(2))
    if training:
        # a channel's statistics come before its first result: what no cache keeps is read twice, forward and backward
        size, passes = 2 * x.numel(), (5 if backward else 3)
        least = passes * size if size > CACHE else None
        return Problem(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (x, weight, bias), backward, least)
    mean, spread = torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.5
    return Problem(lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), (x, weight, bias, mean, spread))


def pool(device: torch.device, n: int, pooled: Callable[[Tensor], Tensor], backward: bool) -> Problem:
    """Images of 64 channels, 112 wide, as after a network's first convolution."""
    side = 112 if n >= 64 * 112 * 112 else 14
    x = draw(device, max(n // (64 * side * side), 1), min(64, max(n // (side * side), 1)), side, side, grad=backward)
    return Problem(pooled, (x,), backward)


def average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


def maximum(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def embedding(device: torch.device, n: int) -> Problem:
    columns = 1024
    rows = max(n // columns, 1)
    table = draw(device, 50304, columns)
    index = torch.randint(50304, (rows,), device=device)
    # a row that is named twice is counted twice: it may well come from memory twice
    return Problem(lambda i, t: F.embedding(i, t) * 2, (index, table), bytes=rows * columns * 4 + rows * 8)


CASES: dict[str, Build] = {
    "relu_add": relu_add, "gelu_chain": gelu_chain, "swiglu": swiglu, "swiglu_backward": swiglu_backward,
    "cast_scale": cast_scale, "split_outputs": split_outputs,
    "transpose": transpose, "transpose_add": transpose_add, "permute_heads": permute_heads, "concatenate": concatenate,
    "broadcast_row": broadcast_row, "broadcast_column": broadcast_column, "outer": outer,
    "row_sum": row_sum, "long_row_sum": long_row_sum, "full_sum": full_sum, "column_sum": column_sum,
    "row_argmax": row_argmax, "variance": variance,
    "softmax": partial(softmax, columns=4096, backward=False),
    "softmax_50304": partial(softmax, columns=50304, backward=False),
    "softmax_backward": partial(softmax, columns=4096, backward=True),
    "log_softmax": log_softmax,
    "layer_norm": partial(layer_norm, columns=1024, backward=False),
    "layer_norm_4096": partial(layer_norm, columns=4096, backward=False),
    "layer_norm_backward": partial(layer_norm, columns=1024, backward=True),
    "rms_norm": partial(rms_norm, columns=4096, backward=False),
    "rms_norm_backward": partial(rms_norm, columns=4096, backward=True),
    "head_norm": partial(head_norm, backward=False),
    "head_norm_backward": partial(head_norm, backward=True),
    "cross_entropy": partial(cross_entropy, columns=50304, backward=False),
    "cross_entropy_backward": partial(cross_entropy, columns=50304, backward=True),
    "batch_norm": partial(batch_norm, training=True),
    "batch_norm_backward": partial(batch_norm, training=True, backward=True),
    "batch_norm_inference": partial(batch_norm, training=False),
    "embedding": embedding,
    "avg_pool2d": partial(pool, pooled=average, backward=False),
    "avg_pool2d_backward": partial(pool, pooled=average, backward=True),
    "max_pool2d": partial(pool, pooled=maximum, backward=False),
    "max_pool2d_backward": partial(pool, pooled=maximum, backward=True),
}


def _build(case: Build, elements: int, device: torch.device) -> Problem:
    return case(device, elements)


def tasks(sizes_mb: Iterable[float]) -> list[Task]:
    """Every case at every size; largest sizes last, so that a short budget still covers every case."""
    return [Task(name, f"{mb:g}MB", partial(_build, case, max(int(mb * MB) // 2, 64)))
            for mb in sizes_mb for name, case in CASES.items()]


def by_backend(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """(case, size) -> backend -> row, of the rows that were measured."""
    table: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["status"] == "ok" and "call" in row:
            table.setdefault((row["case"], row["size"]), {})[row["backend"]] = row
    return table


def device_us(row: dict[str, Any] | None) -> float | None:
    """The graph clock; on a machine without one the call clock, so that tables can be tried out there."""
    if row is None:
        return None
    return suite.microseconds(row, "graph") or (None if row.get("busy") else suite.microseconds(row, "call"))


def ratios(rows: Sequence[dict[str, Any]], ours: str, theirs: str) -> dict[tuple[str, str], float]:
    """(case, size) -> time of `theirs` over time of `ours`: above 1 where ours is faster."""
    found = {}
    for key, columns in by_backend(rows).items():
        mine, other = device_us(columns.get(ours)), device_us(columns.get(theirs))
        if mine and other:
            found[key] = other / mine
    return found


def shares(rows: Sequence[dict[str, Any]], backend: str, least_mb: float = 0) -> dict[tuple[str, str], float]:
    """(case, size) -> time of a copy of the same bytes over time, for sizes from `least_mb` on.

    From LARGE on, where what a copy takes is its bytes alone, the copy is the fastest of its size: the library's copy
    of 1 GB runs at two thirds of its own rate for some sizes, and would be no ceiling there.
    """
    found = {}
    for key, columns in by_backend(rows).items():
        mb, us = float(key[1].removesuffix("MB")), device_us(columns.get(backend))
        if mb >= least_mb and us:
            row = columns[backend]
            copy_us = row["bytes"] / _copy_rate(rows, key[1]) if mb >= LARGE else row["copy_us"]
            found[key] = copy_us / us
    return found


def _copy_rate(rows: Sequence[dict[str, Any]], size: str) -> float:
    """Bytes a microsecond of the fastest copy among cases of this size."""
    return max(r["bytes"] / r["copy_us"] for r in rows if r["size"] == size and r.get("copy_us"))


def table(rows: Sequence[dict[str, Any]], backends: Sequence[str]) -> str:
    """Device microseconds and kernels of each backend, our speed over Inductor's, our share of a copy."""
    ours, theirs = backends[-1], "inductor"
    speed, share = ratios(rows, ours, theirs), shares(rows, ours)
    lines = []
    for key, columns in by_backend(rows).items():
        times = [device_us(columns.get(b)) for b in backends]
        counts = "/".join(f"{columns[b]['busy']['kernels']:g}" if columns.get(b, {}).get("busy") else "-"
                          for b in backends)
        lines.append((*key, *times, counts, speed.get(key), share.get(key)))
    headers = ("case", "size", *backends, "kernels", f"vs {theirs}", "of copy")
    return tabulate(lines, headers, floatfmt=("", "", *[".1f"] * len(backends), "", ".2f", ".2f"))


def summary(rows: Sequence[dict[str, Any]], ours: str) -> str:
    """Geometric means over the cases, the slowest case, and what was not measured."""
    lines = []
    for theirs in dict.fromkeys(r["backend"] for r in rows if str(r["backend"]).startswith("inductor")):
        speed = ratios(rows, ours, theirs)
        if speed:
            worst = min(speed, key=speed.__getitem__)
            slow = sum(v < 0.9 for v in speed.values())
            lines.append(f"{ours} over {theirs}: geometric mean {geometric_mean(speed.values()):.3f} of {len(speed)}, "
                         f"{slow} below 0.9, worst {'/'.join(worst)} {speed[worst]:.2f}")
    share = shares(rows, ours, LARGE)
    if share:
        lines.append(f"{ours} from {LARGE} MB on: geometric mean {geometric_mean(share.values()):.3f} of copy, "
                     f"worst {'/'.join(min(share, key=share.__getitem__))} {min(share.values()):.2f}")
    bad = [r for r in rows if r["status"] != "ok"]
    lines += [f"{r['status']}: {suite.line(r)}" for r in bad if r["status"] != "skipped"]
    skipped = sum(r["status"] == "skipped" for r in bad)
    return "\n".join(lines + ([f"{skipped} tasks were skipped: the time budget was spent"] if skipped else []))


def main() -> int:
    parser = suite.parser(__doc__.splitlines()[0], "eager,inductor,fxfuser")
    parser.add_argument("--sizes", help=f"MB, separated by commas (default {','.join(map(str, SIZES))})")
    args = parser.parse_args()
    sizes = [float(s) for s in args.sizes.split(",")] if args.sizes else QUICK_SIZES if args.quick else SIZES
    if args.only and args.only.startswith("=") and args.only.endswith("MB"):
        sizes = [float(args.only.rpartition("/")[2].removesuffix("MB"))]
    rows = suite.run("memory_bound", args, tasks(sizes))
    if rows:
        print("\n" + table(rows, args.backends))
        print("\n" + summary(rows, args.backends[-1]))
    return 0 if all(r["status"] in ("ok", "skipped") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
