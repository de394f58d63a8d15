"""`fxfuser explain`: why segments stay apart, what that costs and what would join them.

Enters: the final boundaries of each graph, the rules' own reasons.  Leaves: all of them, dearest first, and what
became of `fxfuser.fuse()`; or, for two nodes, ops or lines of the model, what the rules say of exactly their segments,
and the chain of boundaries where one depends on the other through more.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import Mapping, Sequence

import networkx
from torch import fx

from fxfuser import report, rewrites, words
from fxfuser.cli import target, tunings
from fxfuser.cli.command import FAILED, Command
from fxfuser.coverage import running
from fxfuser.errors import user_location
from fxfuser.observe import GraphTrace
from fxfuser.segmenter.picture import to_networkx
from fxfuser.segmenter.segment import Segment

MOST_LINES = 12  # of the model that are named where none was found


def add_arguments(parser: ArgumentParser) -> None:
    target.add_target(parser)
    parser.add_argument("pair", nargs="*", metavar="A B",
                        help="two nodes (mul_1), ops (mul, aten.mm) or lines of the model (model.py:31)")
    parser.add_argument("--graph", default="", metavar="TEXT", help="only graphs whose name contains TEXT")


def run(args: Namespace) -> int:
    if len(args.pair) not in (0, 2):
        raise target.TargetError(f"explain takes no names or two, not {len(args.pair)}: {' '.join(args.pair)}")
    outcome = target.run(target.Target.of(args))
    traces = [t for t in outcome.recording.graphs if t.segmentation is not None and args.graph in t.name]
    answers = [] if args.pair else [
        (t.name, rewrites.text(t)) for t in outcome.recording.graphs if t.segmentation is None and args.graph in t.name]
    answers += [(t.name, _pair(t, *args.pair) if args.pair else _all(t)) for t in traces]
    told = [f"=== {name}\n\n{text}\n" for name, text in answers if text]
    if told:
        print("\n".join(told).rstrip())
    if outcome.failure:
        print(f"\n{outcome.failure}", file=sys.stderr)
        return FAILED
    if not told:
        wanted = f"no graph has both {' and '.join(args.pair)}{_lines(traces)}" if args.pair and traces else \
            "nothing was compiled"
        print(f"{args.target}: {wanted}", file=sys.stderr)
        return FAILED
    return 0


def _lines(traces: Sequence[GraphTrace]) -> str:
    """The lines of the model from which nodes come, for who has asked for another."""
    found = dict.fromkeys(words.short_path(user_location(n.stack_trace)) for t in traces
                          for n in report.nodes_by_name(t).values() if n.op == "call_function")
    places = [place for place in found if place]
    more = f" and {len(places) - MOST_LINES} more" if len(places) > MOST_LINES else ""
    return f"; nodes come from {', '.join(places[:MOST_LINES])}{more}" if places else ""


def _all(trace: GraphTrace) -> str:
    return "\n\n".join(filter(None, (rewrites.text(trace), report.boundary_report(trace), tunings.summary(trace))))


# ---------------------------------------------------------------- two names


def _pair(trace: GraphTrace, first: str, second: str) -> str:
    """Why the nearest two nodes of these names are not in one segment; empty if the graph lacks one of them."""
    left, right = _find(trace, first), _find(trace, second)
    if not left or not right:
        return ""
    owner = {n: s for s in running(trace) for n in s.nodes}
    views = [side[0] for side in (left, right) if not any(n in owner for n in side)]
    if views:
        return "\n".join(f"{n.name} ({words.op_name(n)}) moves no data and is in no segment: kernels see through it"
                         for n in views)
    pairs = [(a, b) for a in left for b in right if a is not b and a in owner and b in owner]
    if not pairs:
        return f"{first} and {second} are the same node"
    rows = {frozenset(r.segments): r for r in report.boundary_rows(trace)}

    def rank(pair: tuple[fx.Node, fx.Node]) -> int:
        a, b = owner[pair[0]], owner[pair[1]]
        return 0 if a is b else 1 if frozenset((a.name, b.name)) in rows else 2

    a, b = min(pairs, key=rank)
    return f"{_where(a, owner[a])}\n{_where(b, owner[b])}\n\n{_answer(trace, a, b, owner)}"


def _find(trace: GraphTrace, name: str) -> list[fx.Node]:
    """The nodes of this name; else those of this op; else those from this line of the model."""
    nodes = [n for n in report.nodes_by_name(trace).values() if n.op == "call_function"]
    for match in (
        lambda n: n.name == name,
        lambda n: name in (words.op_name(n), str(n.target), str(n.target).rpartition(".")[0]),
        lambda n: ":" in name and f"/{user_location(n.stack_trace)}".endswith(f"/{name}"),
    ):
        found = [n for n in nodes if match(n)]
        if found:
            return found
    return []


def _where(node: fx.Node, segment: Segment) -> str:
    location = words.short_path(user_location(node.stack_trace))
    place = f", {location}" if location else ""
    return f"{node.name} ({words.op_name(node)}{place}) is in {segment.name}, {segment.kind.value}"


def _answer(trace: GraphTrace, first: fx.Node, second: fx.Node, owner: Mapping[fx.Node, Segment]) -> str:
    a, b = owner[first], owner[second]
    if a is b:
        return "They are in one segment."
    row = report.pair_row(trace, first, second)
    verdict = report.boundary_table([row]) if row else "No rule keeps them apart: growth stopped before it tried them."
    known = any(set(r.segments) == {a.name, b.name} for r in report.boundary_rows(trace))
    return verdict if known else f"{verdict}\n\n{_relation(trace, a, b)}"


def _relation(trace: GraphTrace, a: Segment, b: Segment) -> str:
    assert trace.segmentation is not None
    graph = to_networkx(trace.segmentation)
    for source, end in ((a.index, b.index), (b.index, a.index)):
        if networkx.has_path(graph, source, end):
            return _chain(trace, networkx.shortest_path(graph, source, end))
    return "Neither depends on the other."


def _chain(trace: GraphTrace, path: Sequence[int]) -> str:
    """Every boundary on the way from one segment to the other."""
    steps = {frozenset((f"segment{x}", f"segment{y}")) for x, y in zip(path, path[1:])}
    rows = [r for r in report.boundary_rows(trace) if frozenset(r.segments) in steps]
    head = f"The second depends on the first through segments {' -> '.join(map(str, path))}:"
    calls = "The segments between them are ATen calls that follow one another." if not rows else \
        report.boundary_table(rows)
    return f"{head}\n\n{calls}"


COMMAND = Command(
    "explain", "say why segments stay apart, what it costs and what would join them",
    "Run TARGET and list the boundaries that are left between its segments, dearest first: the rule, both sides, the\n"
    "tensors and bytes that cross, estimated microseconds, and what would remove it; then what fxfuser.fuse() was\n"
    "granted.  With A and B: what the rules say of exactly those two.",
    add_arguments, run)
