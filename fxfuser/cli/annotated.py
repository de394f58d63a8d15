"""A kernel's text beside the model that it computes.

Enters: a kernel's record and its graph's.  Leaves: the same text, with what its names are in comments of its own lines.
"""

from __future__ import annotations

import re
from typing import Sequence

from torch import fx

from fxfuser.domain.points import PointKind
from fxfuser.errors import user_location
from fxfuser.observe import GraphTrace, KernelRecord
from fxfuser.ops import memory_of
from fxfuser.report import nodes_by_name, segments_of
from fxfuser.segmenter.segment import SegmentKind
from fxfuser.words import short_path, tensor_type


def annotated(kernel: KernelRecord, trace: GraphTrace) -> str:
    """The kernel's text with its side table between the lines: the tensors of the model that its parameters point
    to, the sizes that it is passed and the node that each value is."""
    nodes = nodes_by_name(trace)
    notes = {note.value: note for note in kernel.notes}
    sizes = [f"# n{i} = {size}" for i, size in enumerate(kernel.sizes)]
    lines, last = [*_parameters(kernel, trace), *sizes], ""
    for line in kernel.source.rstrip().splitlines():
        bound = re.match(r"(\s*)(\w+) = ", line)
        if bound and bound[2] in notes:
            note = notes[bound[2]]
            where = note.location or (user_location(nodes[note.node].stack_trace) if note.node in nodes else "")
            text = f"{note.node}: {note.op}" + (f", {short_path(where)}" if where and where != last else "")
            lines.append(f"{bound[1]}# {text}")
            last = where or last
        lines.append(line)
    return "\n".join(lines)


def _parameters(kernel: KernelRecord, trace: GraphTrace) -> list[str]:
    ways = (s for whole in segments_of(trace) for s in (whole, *(p for way in whole.alternatives for p in way)))
    segment = next((s for s in ways if s.name == kernel.segment), None)
    if segment is None:
        return []
    if segment.kind is SegmentKind.ATTENTION:  # whose kernel reads each operand by a pointer of its own
        return _sides([n for n in segment.nodes[0].args if isinstance(n, fx.Node)], segment.outputs)
    if segment.domain is None:
        return []
    if segment.kind is SegmentKind.GEMM:
        nodes = nodes_by_name(trace)
        return [f"# {n.value} = {n.node}" + (f": {tensor_type(nodes[n.node])}" if n.node in nodes else "")
                for n in kernel.notes if re.fullmatch(r"(in|out)\d+", n.value)]
    read = {p.node for p in segment.domain.points() if p.kind is PointKind.LOAD}
    return _sides([n for n in segment.inputs if n in read], segment.outputs)


def _sides(inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[str]:
    return [f"# {side}{i} = {n.name}: {tensor_type(n)}{_inside(n)}"
            for side, found in (("in", inputs), ("out", outputs)) for i, n in enumerate(found)]


def _inside(node: fx.Node) -> str:
    """The tensor in which a kernel stores a value, where it is larger."""
    base = memory_of(node)
    return "" if base is node else f", inside {base.name}: {tensor_type(base)}"
