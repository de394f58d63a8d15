"""A recording as one JSON object.

    coverage   ATen compute nodes in Triton kernels over all ATen compute nodes, 0 to 1
    graphs     forward, backward and inference graphs: name, kind, coverage, segments, kernels, boundaries, requests,
               extern, fallbacks, tunings, passes, graph, plan
    joint      what was cut into forward and backward: name, passes, graph
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

from fxfuser import report
from fxfuser.coverage import coverage, kernels_by_segment, total
from fxfuser.observe import GraphTrace


def dump(traces: Sequence[GraphTrace]) -> dict[str, Any]:
    """The object; everything in it is a string, a number, a list or a dict with string keys."""
    figure = total(traces)
    return {
        "coverage": figure.ratio,
        "compute_nodes": figure.compute,
        "lowered_nodes": figure.lowered,
        "graphs": [_graph(t) for t in traces if t.graph.kind != "joint"],
        "joint": [_head(t) for t in traces if t.graph.kind == "joint"],
    }


def _head(trace: GraphTrace) -> dict[str, Any]:
    passes = [{"name": p.name, "changes": p.changes, "milliseconds": p.milliseconds} for p in trace.passes]
    return {"name": trace.name, "kind": trace.graph.kind, "passes": passes, "graph": trace.graph.text}


def _graph(trace: GraphTrace) -> dict[str, Any]:
    return {
        **_head(trace),
        "coverage": coverage(trace).ratio,
        "segments": [_segment(row) for row in report.segment_rows(trace)],
        "kernels": _kernels(trace),
        "boundaries": [dataclasses.asdict(row) for row in report.boundary_rows(trace)],
        "requests": [dataclasses.asdict(row) for row in report.request_rows(trace)],
        "extern": _extern(trace),
        "fallbacks": [dataclasses.asdict(f) for f in trace.fallbacks],
        "tunings": [dataclasses.asdict(t) for t in trace.tunings],
        "plan": trace.plan,
    }


def _segment(row: report.SegmentRow) -> dict[str, Any]:
    return {
        **dataclasses.asdict(row),
        "nodes": [{"name": name, "op": op, "location": where} for name, op, where in row.nodes],
        "inputs": [{"name": name, "type": kind} for name, kind in row.inputs],
        "outputs": [{"name": name, "type": kind} for name, kind in row.outputs],
        "alternatives": [[_segment(part) for part in way] for way in row.alternatives],
    }


def _kernels(trace: GraphTrace) -> list[dict[str, Any]]:
    """One entry per kernel of a segment that runs; equal segments share names and sources."""
    return [{"segment": segment, "name": kernel.name, "source": kernel.source, "sizes": list(kernel.sizes)}
            for segment, kernels in kernels_by_segment(trace).items() for kernel in kernels]


def _extern(trace: GraphTrace) -> list[dict[str, str]]:
    """The nodes that run as ATen calls and why, those of segments that fell back included."""
    return [{"node": name, "op": op, "reason": row.reason, "location": where}
            for row in report.segment_rows(trace) if not row.kernel for name, op, where in row.nodes]
