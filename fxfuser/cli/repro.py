"""`fxfuser repro`: one segment as one self-contained Python file.

Enters: a recording and the name of a segment.  Leaves: a file that needs torch and fxfuser alone: the segment's ATen
ops as a function, inputs of the same types, and the comparison with eager.  Without a name: the files that the
runtime wrote for segments that fell back to ATen.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Iterable, Sequence

from fxfuser import report, words
from fxfuser.cli import target
from fxfuser.cli.command import FAILED, Command
from fxfuser.observe import GraphTrace
from fxfuser.runtime import repro
from fxfuser.runtime.host import Host
from fxfuser.runtime.reference import reference
from fxfuser.segmenter.segment import Segment


def add_arguments(parser: ArgumentParser) -> None:
    target.add_target(parser)
    parser.add_argument("--segment", metavar="NAME", help="a segment as dump numbers it: 3, or backward.3")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (standard output)")


def run(args: Namespace) -> int:
    outcome = target.run(target.Target.of(args))
    traces = [t for t in outcome.recording.graphs if t.segmentation is not None]
    if outcome.failure:
        print(f"{outcome.failure}\n", file=sys.stderr)
    texts = _of_segment(traces, args.segment) if args.segment else _of_fallbacks(traces)
    if not texts:
        print(f"{args.target}: no segment fell back to ATen; name one with --segment:\n", file=sys.stderr)
        for trace in traces:
            print(f"{trace.name}\n{report.segment_table(trace)}\n", file=sys.stderr)
        return FAILED
    if args.out is None:
        print(texts[0], end="")
    else:
        args.out.write_text(texts[0])
        print(args.out)
    return FAILED if outcome.failure else 0


def _of_fallbacks(traces: Iterable[GraphTrace]) -> list[str]:
    return [Path(f.repro).read_text() for t in traces for f in t.fallbacks if f.repro]


def _of_segment(traces: Sequence[GraphTrace], name: str) -> list[str]:
    graph, _, number = name.rpartition(".")
    number = number.removeprefix("segment")
    found = [(t, s) for t in traces if graph in t.name for s in t.segmentation.segments  # type: ignore[union-attr]
             if str(s.index) == number]
    if not found:
        graphs = ", ".join(f"{t.name}.0 to {len(t.segmentation.segments) - 1}" for t in traces if t.segmentation)
        raise target.TargetError(f"no segment {name!r}; there are {graphs or 'none'}")
    trace, segment = found[0]
    return [_text(segment, trace)]


def _text(segment: Segment, trace: GraphTrace) -> str:
    assert trace.segmentation is not None
    module = segment.nodes[0].graph.owning_module
    assert module is not None, "the recording holds the graph's module"
    host = Host(module, {n for s in trace.segmentation.segments for n in s.nodes})
    made = reference(segment, host.namespace, host.symbols, host.size_text)
    where = words.place(dict.fromkeys(w for row in report.segment_rows(trace) if row.name == segment.name
                                       for w in row.locations))
    return repro.text(segment.name, made, host.namespace, f"{trace.name}, {where or 'no model line'}")


COMMAND = Command(
    "repro", "write one segment as a Python file that runs alone",
    "Run TARGET and write one of its segments as one self-contained Python file: its ATen ops, inputs of the same\n"
    "shapes, strides and dtypes, and a comparison of fxfuser with eager.  Without --segment: the first segment that\n"
    "could not be lowered and fell back to ATen.",
    add_arguments, run)
