"""How much of what a process compiles is in Triton kernels, added up over many processes.

    export TALLY=/tmp/float32.jsonl
    python ../shared/cases/run_opinfo.py --backend fxfuser --import benchmarks.tally --dtypes float32
    python -m benchmarks.tally /tmp/float32.jsonl /tmp/bfloat16.jsonl

Importing the module counts: each graph's figures become a line of the file that TALLY names as soon as the graph is
compiled, for the processes of an acceptance run are killed.  As a program it prints a line for each file.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fxfuser import backend, observe
from fxfuser.coverage import Coverage, coverage, kernels_by_segment


def line_of(trace: observe.GraphTrace) -> dict[str, Any]:
    """A graph's figures."""
    figure = coverage(trace)
    return {"graph": trace.graph.kind, "lowered": figure.lowered, "compute": figure.compute,
            "kernels": len(kernels_by_segment(trace)), "fallbacks": len(trace.fallbacks),
            "extern": Counter(e.op for e in trace.externs)}


def counting(compile_graph: Callable[..., Any], recording: observe.Recording, path: Path) -> Callable[..., Any]:
    """`compile_graph` that leaves a line for each graph."""
    @wraps(compile_graph)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = compile_graph(*args, **kwargs)
        with path.open("a") as file:
            print(json.dumps(line_of(recording.graphs[-1])), file=file)
        recording.graphs.clear()  # of a run of thousands
        return result

    return counted


def totals(path: Path) -> tuple[Coverage, Counter[str], Counter[str]]:
    """The coverage of a file's graphs, sums of its counts, and how often each op ran as its ATen call."""
    figure, counts, extern = Coverage(), Counter[str](), Counter[str]()
    for text in path.read_text().splitlines():
        line = json.loads(text)
        figure += Coverage(line["lowered"], line["compute"])
        counts.update(graphs=1, kernels=line["kernels"], fallbacks=line["fallbacks"])
        extern.update(line["extern"])
    return figure, counts, extern


def table(paths: Sequence[Path]) -> str:
    """A line for each file, and the ops that ran most often as ATen calls in all of them."""
    lines, outside = [], Counter[str]()
    for path in paths:
        figure, counts, extern = totals(path)
        outside += extern
        lines.append((path.stem, counts["graphs"], counts["kernels"], counts["fallbacks"], figure.compute,
                      figure.lowered, figure.ratio))
    head = ("run", "graphs", "kernels", "fallbacks", "ATen compute nodes", "in kernels", "coverage")
    most = ", ".join(f"{op} ({n})" for op, n in outside.most_common(24))
    return f"{tabulate(lines, head, floatfmt='.3f')}\nmost frequent as ATen: {most or 'nothing'}"


if __name__ == "__main__":
    print(table([Path(name) for name in sys.argv[1:]]))
elif "TALLY" in os.environ:
    _context = observe.recording()  # open as long as the process lives
    backend.compile_graph = counting(backend.compile_graph, _context.__enter__(), Path(os.environ["TALLY"]))
