"""Rotary modules, forward and backward: kernels, the three clocks and the share of a copy of the same bytes.

    python -m benchmarks.rope --quick                               S = 4096 alone
    python -m benchmarks.rope --only mistral --seconds 200
    python -m benchmarks.rope --backends eager,inductor,inductor-strongest,fxfuser

Forward runs without gradients.  Backward is the backward alone, of outputs and random tangents.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import suite
from benchmarks.memory_bound import by_backend, device_us
from benchmarks.rope_modules import MODULES, Module, problem
from benchmarks.suite import Problem, Task

LENGTHS = (1024, 4096, 8192, 32768)
QUICK_LENGTHS = (4096,)


def _build(module: Module, length: int, backward: bool, device: torch.device) -> Problem:
    return problem(module, length, backward, device)


def tasks(lengths: Sequence[int]) -> list[Task]:
    return [Task(f"{module.name}_{'backward' if backward else 'forward'}", f"S{length}",
                 partial(_build, module, length, backward))
            for length in lengths for module in MODULES for backward in (False, True)]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per module, length and backend."""
    lines = []
    for (case, size), columns in by_backend(rows).items():
        for backend, row in columns.items():
            us = device_us(row)
            lines.append((case, size, backend, row["busy"]["kernels"] if row.get("busy") else None,
                          suite.microseconds(row, "graph"), suite.microseconds(row, "busy"),
                          suite.microseconds(row, "call"), row["copy_us"], row["copy_us"] / us if us else None))
    headers = ("module", "S", "backend", "kernels", "graph us", "busy us", "call us", "copy us", "of copy")
    return tabulate(lines, headers, floatfmt=("", "", "", "g", ".1f", ".1f", ".1f", ".1f", ".2f"))


def main() -> int:
    parser = suite.parser(__doc__.splitlines()[0], "eager,inductor,inductor-strongest,fxfuser")
    parser.add_argument("--lengths", help=f"separated by commas (default {','.join(map(str, LENGTHS))})")
    args = parser.parse_args()
    lengths = [int(s) for s in args.lengths.split(",")] if args.lengths else QUICK_LENGTHS if args.quick else LENGTHS
    if args.only and args.only.startswith("="):
        lengths = [int(args.only.rpartition("/S")[2])]
    rows = suite.run("rope", args, tasks(lengths))
    if rows:
        print("\n" + table(rows))
        print("\n".join(suite.line(r) for r in rows if r["status"] != "ok"))
    return 0 if all(r["status"] in ("ok", "skipped") for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
