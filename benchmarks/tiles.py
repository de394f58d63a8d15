"""Tiles that a pure function picks beside those that a search finds: what `max-autotune` would gain.

    python -m benchmarks.tiles                                      the chosen cases, 64 MB and 4096 positions
    python -m benchmarks.tiles --all --seconds 500
    python -m benchmarks.tiles --only softmax,mistral --mb 8 --length 1024

Each case is compiled twice, by default and under `max-autotune-no-cudagraphs`, and both are measured by device time.
A kernel whose search kept the default tile differs by noise alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from benchmarks import memory_bound, rope, suite
from benchmarks.suite import Task
from fxfuser.runtime.timing import geometric_mean

DEFAULT, SEARCHED = "fxfuser", "fxfuser-autotune"
ALLOWED = 1.1  # times the search's time
# one of each kind of schedule: flat, strided, rows that fit a program, rows that do not, columns, whole tensors, many
# nests
CASES = ("relu_add", "split_outputs", "transpose", "permute_heads", "broadcast_row", "row_sum", "long_row_sum",
         "full_sum", "column_sum", "softmax", "softmax_50304", "rms_norm", "layer_norm_backward", "cross_entropy",
         "batch_norm_backward")
MODULES = ("mistral_nemo", "qwen2", "phi3", "litgpt_gemma2_9b")


def tasks(mb: float, length: int, every: bool) -> list[Task]:
    """Rotary modules first: they are few."""
    rotary = [t for t in rope.tasks([length]) if every or t.name.rpartition("_")[0] in MODULES]
    return rotary + [t for t in memory_bound.tasks([mb]) if every or t.name in CASES]


def ratios(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """(case, size) -> time with default tiles over time with those that a search found."""
    return memory_bound.ratios(rows, SEARCHED, DEFAULT)


def tiles_of(row: dict[str, Any]) -> list[str]:
    """A line per kernel: the tile that the search chose, and the default where that is another."""
    return [f"{t['chosen']}" if t["chosen"] == t["default"] else f"{t['chosen']} for {t['default']}"
            for t in row.get("tiles", ())]


def table(rows: Sequence[dict[str, Any]]) -> str:
    found, lines = ratios(rows), []
    for key, columns in memory_bound.by_backend(rows).items():
        if key in found:
            times = [memory_bound.device_us(columns[b]) for b in (DEFAULT, SEARCHED)]
            lines.append((*key, *times, found[key], "\n".join(tiles_of(columns[SEARCHED]))))
    headers = ("case", "size", "default us", "searched us", "default / searched", "tiles")
    return str(tabulate(lines, headers, floatfmt=("", "", ".1f", ".1f", ".2f", ""), maxcolwidths=[*[None] * 5, 80]))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How far the default tiles are from the search's, over all cases and at worst."""
    found = ratios(rows)
    if not found:
        return "nothing was measured with both"
    worst = max(found, key=found.__getitem__)
    slow = sum(r > ALLOWED for r in found.values())
    return (f"default tiles take {geometric_mean(found.values()):.2f} of the time of those that max-autotune finds"
            f" (geometric mean of {len(found)} cases), {found[worst]:.2f} at worst ({worst[0].replace('_', ' ')});"
            f" {slow} of them over {ALLOWED}")


def main() -> int:
    parser = suite.parser(__doc__.splitlines()[0], f"{DEFAULT},{SEARCHED}")
    parser.add_argument("--mb", type=float, default=64, help="of the largest tensor of memory-bound cases")
    parser.add_argument("--length", type=int, default=4096, help="positions of rotary modules")
    parser.add_argument("--all", action="store_true", help="every case, not one of each kind")
    args = parser.parse_args()
    rows = suite.run("tiles", args, tasks(args.mb, args.length, args.all))
    if rows:
        print(f"\n{table(rows)}\n\n{summary(rows)}")
    return 0 if all(r["status"] in ("ok", "skipped") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
