"""`fxfuser dump`: everything that was compiled, stage by stage.

Enters: a recording.  Leaves: for each graph its text, the passes as diffs, segments, boundaries, kernels and plan, as
text, one JSON object or Graphviz; on stdout, or one file per graph and stage.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Callable, Mapping, Sequence

from torch import fx

from fxfuser import report, rewrites, words
from fxfuser.cli import as_json, target, tunings
from fxfuser.cli.annotated import annotated
from fxfuser.cli.command import FAILED, Command
from fxfuser.coverage import total
from fxfuser.errors import user_location
from fxfuser.observe import GraphTrace, KernelRecord, PassRecord
from fxfuser.segmenter.picture import to_dot

Nodes = Mapping[str, fx.Node]  # of all graphs of a Dynamo region, by name
Write = Callable[[GraphTrace, Nodes], str]


def add_arguments(parser: ArgumentParser) -> None:
    target.add_target(parser)
    parser.add_argument("--stage", action="append", choices=tuple(STAGES), metavar="STAGE",
                        help=f"only this stage, may be repeated: {', '.join(STAGES)}")
    parser.add_argument("--graph", default="", metavar="TEXT",
                        help="only graphs whose name contains TEXT, such as backward or region0")
    parser.add_argument("--format", choices=("text", "json", "dot"), default="text")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write files under DIR instead of printing")


def run(args: Namespace) -> int:
    outcome = target.run(target.Target.of(args))
    graphs = outcome.recording.graphs
    traces = [t for t in graphs if args.graph in t.name]
    if traces:
        files = _files(traces, args.format, [s for s in STAGES if s in (args.stage or STAGES)])
        _print(files) if args.out is None else _write(args.out, files)
    failure = outcome.failure
    if not failure and not traces:
        failure = f"no graph is called {args.graph!r}; there are {', '.join(t.name for t in graphs)}" if graphs else \
            f"{args.target} ran, but nothing in it was compiled by torch.compile"
    if failure:
        print(f"\n{failure}", file=sys.stderr)
    return FAILED if failure else 0


def _print(files: Mapping[str, str]) -> None:
    print("\n".join(files.values()).rstrip())


def _files(traces: Sequence[GraphTrace], form: str, stages: Sequence[str]) -> Mapping[str, str]:
    """What is written, by file name; the names matter with --out only."""
    if form == "json":
        return {"dump.json": json.dumps(as_json.dump(traces), indent=1)}
    if form == "dot":
        return {f"{_stem(i, t)}.dot": to_dot(t.segmentation) for i, t in enumerate(traces) if t.segmentation}
    files = {"summary.txt": _summary(traces)}
    for i, trace in enumerate(traces):
        nodes = {name: n for t in traces if t.graph.region == trace.graph.region
                 for name, n in report.nodes_by_name(t).items()}
        texts = {stage: STAGES[stage](trace, nodes) for stage in stages}
        if any(texts.values()):
            files[f"{_stem(i, trace)}/title"] = _title(trace)
        for stage, text in texts.items():
            suffix = ".py" if stage in ("kernels", "plan") else ".txt"
            if text:
                files[f"{_stem(i, trace)}/{stage}{suffix}"] = f"# --- {stage} of {trace.name}\n\n{text}\n"
    return files


def _stem(number: int, trace: GraphTrace) -> str:
    return f"{number:02d}.{trace.name}"


def _write(directory: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        if not name.endswith("/title"):
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            print(path)


def _title(trace: GraphTrace) -> str:
    return f"\n{f'=== {trace.name} ':=<120}\n{report.summary(trace)}\n"


def _summary(traces: Sequence[GraphTrace]) -> str:
    graphs = sum(t.segmentation is not None for t in traces)
    return f"{words.plural(graphs, 'graph')}; {total(traces)}"


# ---------------------------------------------------------------- stages


def graph_text(trace: GraphTrace, nodes: Nodes) -> str:
    """The graph before the first pass, a node a line, with type and model line of those that the passes left."""
    lines = [_typed(line, nodes) for line in _node_lines(trace.graph.text)]
    inputs = ", ".join(line.removesuffix(_INPUT) for line in lines if line.endswith(_INPUT))
    head = textwrap.wrap(f"inputs {inputs}", 118, subsequent_indent="  ") if inputs else []
    return "\n".join([*head, *(line for line in lines if not line.endswith(_INPUT))])


def _typed(line: str, nodes: Nodes) -> str:
    name, equals, rest = line.partition(" = ")
    node = nodes.get(name) if equals else None
    if node is None:
        return line
    where = words.short_path(user_location(node.stack_trace)) if node.op == "call_function" else ""
    return f"{name}: {words.tensor_type(node)} = {rest}" + (f"  # {where}" if where else "")


def _node_lines(text: str) -> list[str]:
    """The lines of FX's text of a graph, its head left out."""
    return [_node_line(line) for line in text.splitlines()[1:] if line.strip()]


_INPUT = " = input"
_NODE = re.compile(r"\s*%(\w+) : (?:\[num_users=\d+\] )?= (\w+)\[target=([^\]]+)\]"
                   r"(?:\(args = \((.*)\), kwargs = \{(.*)\}\))?$")


def _node_line(line: str) -> str:
    """A node as FX prints it, as an assignment: %a : [num_users=1] = call_function[target=...](...) to a = ...(...)"""
    found = _NODE.match(line)
    if not found:
        return line.strip().replace("%", "")
    name, op, called, args, kwargs = found.groups()
    if op == "placeholder":
        return f"{name}{_INPUT}"
    given = ", ".join(filter(None, ((args or "").removesuffix(","), re.sub(r"(\w+): ", r"\1=", kwargs or ""))))
    called = called.removeprefix("torch.ops.")
    return f"{name} = {called}({given})".replace("%", "") if op != "get_attr" else f"{name} = self.{called}"


def passes_text(trace: GraphTrace, nodes: Nodes) -> str:
    """Each pass that changed something as a diff of node lines; the others in one line."""
    parts = list(filter(None, [rewrites.text(trace)]))
    parts += [_diff(p) for p in trace.passes if p.changes]
    idle = [p.name for p in trace.passes if not p.changes]
    if idle:
        parts.append(textwrap.fill(f"no changes: {', '.join(dict.fromkeys(idle))}", 118, subsequent_indent="  "))
    return "\n\n".join(parts)


def _diff(one: PassRecord) -> str:
    changes = words.plural(one.changes, "change")
    what = node_diff(one.before, one.after) or "  marks on nodes, which stay as they are"
    return f"{one.name}: {changes}, {one.milliseconds:.1f} ms\n{what}"


def node_diff(before: str, after: str) -> str:
    """What differs between two graphs as FX prints them, a node a line."""
    lines = difflib.unified_diff(_node_lines(before), _node_lines(after), lineterm="", n=1)
    body = [line if not line.startswith("@@") else "  ..." for line in lines if not line.startswith(("---", "+++"))]
    return "\n".join(f"  {line}" for line in body)


def segments_text(trace: GraphTrace, nodes: Nodes) -> str:
    """The segment table, and why those that are no kernel are none."""
    rows = report.segment_rows(trace)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            reasons.setdefault(row.reason, []).append(f"#{row.name.removeprefix('segment')}")
    why = [f"{', '.join(numbers)} as ATen: {reason}" for reason, numbers in reasons.items()]
    if any(row.alternatives for row in rows):
        why.append("or: what a measurement at the first call may choose in place of the kernel above it")
    return "\n".join([report.segment_table(trace), *([""] if why else []), *why]) if rows else ""


def boundaries_text(trace: GraphTrace, nodes: Nodes) -> str:
    return report.boundary_table(report.boundary_rows(trace)) if trace.segmentation is not None else ""


def kernels_text(trace: GraphTrace, nodes: Nodes) -> str:
    """Each distinct kernel once, with the model's names and lines between its own."""
    users: dict[str, dict[str, None]] = {}
    records: dict[str, KernelRecord] = {}
    rows = {row.name: row for row in report.all_rows(trace)}
    for kernel in trace.kernels:
        if kernel.segment in rows and kernel.name in rows[kernel.segment].kernels:
            users.setdefault(kernel.name, {})[kernel.segment] = None
            records.setdefault(kernel.name, kernel)
    where = {name: words.place(row.locations) for name, row in rows.items()}
    parts = []
    for name, kernel in records.items():
        heads = [f"# {segment}{': ' if where[segment] else ''}{where[segment]}" for segment in users[name]]
        parts.append("\n".join(
            [f"# kernel {name}", *heads, *(f"# {line}" for line in tunings.lines(name, trace)),
             annotated(kernel, trace)]))
    return "\n\n\n".join(parts)


def plan_text(trace: GraphTrace, nodes: Nodes) -> str:
    return trace.plan.rstrip()


STAGES: Mapping[str, Write] = {
    "graph": graph_text, "passes": passes_text, "segments": segments_text, "boundaries": boundaries_text,
    "kernels": kernels_text, "plan": plan_text,
}

COMMAND = Command(
    "dump", "print everything that a program compiles, stage by stage",
    "Run TARGET with fxfuser as its only backend and print, for each graph, forward and backward: the ATen graph, the\n"
    "passes as diffs, the segments, the boundaries between them with reasons, the Triton kernels and the plan.",
    add_arguments, run, forwards=True)
