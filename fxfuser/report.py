"""What was compiled, as a user reads it: rows and tables about the segments and boundaries of one graph.

Enters: a `GraphTrace` of `observe.recording()`.  Leaves: frozen rows, for JSON, and text.  Shared by the commands and
the examples.  Invariant: the text is deterministic, and paths in it are as short as they can be and still be found.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Mapping, Sequence

import torch
from tabulate import tabulate
from torch import fx

from fxfuser.coverage import coverage, kernels_by_segment, running
from fxfuser.domain import views
from fxfuser.domain.points import PointKind
from fxfuser.domain.size import from_torch
from fxfuser.errors import user_location
from fxfuser.observe import GraphTrace, KernelRecord
from fxfuser.ops import memory_of
from fxfuser.segmenter.pair import why_apart
from fxfuser.segmenter.segment import Reject, Segment, SegmentKind
from fxfuser.segmenter.sizing import Sizing

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}


@dataclass(frozen=True)
class SegmentRow:
    """One segment.  `inputs` and `outputs` are (node, type) pairs, `bytes_*` what crosses its borders.

    `kernel` is the name of its first kernel, `kernels` of all.  `alternatives`, of a product with what is fused around
    it, are other ways to the same outputs, of which a measurement may choose one.
    """

    number: int
    name: str
    kind: str
    kernel: str
    nodes: tuple[tuple[str, str, str], ...]  # node, op, the user's file:line
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    bytes_in: int
    bytes_out: int
    locations: tuple[str, ...]  # file:line, each once, in the order of the nodes
    reason: str  # why it is no kernel; empty for one
    key: str
    kernels: tuple[str, ...] = ()
    alternatives: tuple[tuple[SegmentRow, ...], ...] = ()


@dataclass(frozen=True)
class BoundaryRow:
    """One boundary: two nodes that stay apart, the tensors between their segments, and what would remove it."""

    rule: str
    producer: str
    consumer: str
    segments: tuple[str, str]
    tensors: tuple[tuple[str, str], ...]
    locations: tuple[str, str]
    bytes: int
    microseconds: float
    reason: str
    remedy: str


@dataclass(frozen=True)
class RequestRow:
    """One context of `fxfuser.fuse()`: its compute nodes, the segments that they are in, and what was refused."""

    nodes: tuple[str, ...]
    segments: tuple[str, ...]
    locations: tuple[str, ...]
    granted: bool
    refusals: tuple[BoundaryRow, ...]


# ---------------------------------------------------------------- words


def op_name(node: fx.Node) -> str:
    """aten.mul.Tensor as users write it, mul; a custom op keeps its namespace."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(target._schema.name).removeprefix("aten::").replace("::", ".")


def tensor_type(node: fx.Node) -> str:
    """dtype and shape of a node's value, such as bf16[1,32,s0,128]."""
    return _type(node.meta.get("val"))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    return "-" if value is None else type(value).__name__


def short_path(location: str) -> str:
    """`file:line` relative to the working directory or, for an installed package, to where packages are."""
    for part in ("site-packages/", "dist-packages/"):
        if part in location:
            return location.rpartition(part)[2]
    here = os.getcwd() + os.sep
    return location.removeprefix(here)


def _short(sentence: str) -> str:
    """A sentence with its paths shortened."""
    return re.sub(r"\S+:\d+", lambda m: short_path(m.group()), sentence)


def place(locations: Iterable[str], ranges: int = 3) -> str:
    """Many file:line as few words: model.py:31-33,40; what does not fit is counted."""
    lines: dict[str, set[int]] = {}
    for location in locations:
        file, _, line = short_path(location).rpartition(":")
        lines.setdefault(file, set()).add(int(line))
    texts = [f"{file}:{_ranges(sorted(numbers), ranges)}" for file, numbers in lines.items()]
    return " ".join(texts[:2]) + (f" and {len(texts) - 2} more files" if len(texts) > 2 else "")


def _ranges(numbers: Sequence[int], most: int) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n <= runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(texts[:most]) + ("..." if len(texts) > most else "")


def _base(location: str) -> str:
    """The location without its folders: tables are narrow."""
    return location.rpartition("/")[2]


def bytes_text(count: int) -> str:
    """1536 as 1.5 KB."""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def counted(words: Iterable[str], most: int = 8) -> str:
    """Each word once, with how often it occurs where that is more than once: mul x3, add."""
    counts = Counter(words)
    texts = [word if n == 1 else f"{word} x{n}" for word, n in counts.items()]
    return ", ".join(texts[:most]) + (f", {len(texts) - most} more" if len(texts) > most else "")


def plural(count: int, noun: str) -> str:
    """1 kernel, 2 kernels."""
    return f"{count} {noun}{'s' * (count != 1)}"


def broken(name: str, width: int) -> str:
    """A long identifier on several lines, broken at its underscores."""
    lines = [""]
    for part in re.findall(r"[^_]*_*", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


# ---------------------------------------------------------------- segments


def segment_rows(trace: GraphTrace) -> tuple[SegmentRow, ...]:
    """The segments of a graph in the order in which they run; none for a joint graph."""
    rows = _Rows(kernels_by_segment(trace), {k.segment: k for k in trace.kernels if "_" in k.segment},
                 {f.segment: f.error for f in trace.fallbacks}, Sizing(nodes_by_name(trace).values()))
    return tuple(map(rows.row, running(trace)))


def all_rows(trace: GraphTrace) -> tuple[SegmentRow, ...]:
    """The same, each followed by those of its alternatives."""
    return tuple(r for row in segment_rows(trace) for r in (row, *(p for way in row.alternatives for p in way)))


@dataclass(frozen=True)
class _Rows:
    """What rows are made from: the kernels of segments that run, those of parts that may, errors by segment."""

    kernels: Mapping[str, tuple[KernelRecord, ...]]
    parts: Mapping[str, KernelRecord]
    failed: Mapping[str, str]
    sizing: Sizing

    def row(self, segment: Segment) -> SegmentRow:
        kernels = self.kernels.get(segment.name, ())
        if not kernels and segment.name in self.parts and segment.name not in self.failed:
            kernels = (self.parts[segment.name],)
        nodes = tuple((n.name, str(n.target), user_location(n.stack_trace)) for n in segment.nodes)
        parts = tuple(tuple(map(self.row, way)) for way in segment.alternatives)
        chosen = bool(kernels) and any(r.kernel for way in parts for r in way)  # else nothing was built to choose from
        return SegmentRow(
            segment.index, segment.name, segment.kind.value, kernels[0].name if kernels else "", nodes,
            tuple((n.name, tensor_type(n)) for n in segment.inputs),
            tuple((n.name, tensor_type(n)) for n in segment.outputs),
            _bytes_read(segment, self.sizing), sum(_bytes(n, self.sizing) for n in segment.outputs),
            tuple(dict.fromkeys(where for _, _, where in nodes if where)),
            "" if kernels else self._reason(segment), segment.key, tuple(k.name for k in kernels),
            parts if chosen else ())

    def _reason(self, segment: Segment) -> str:
        whole = self.failed.get(f"segment{segment.index}") if segment.part else None
        missing = "" if segment.kind is SegmentKind.EXTERN else "no kernel was generated"
        return whole or segment.reason or self.failed.get(segment.name, missing)


def _bytes(node: fx.Node, sizing: Sizing) -> int:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return sizing.bytes(node)
    return sum(_elements(v, sizing) * v.dtype.itemsize for v in _strided(value))


def _strided(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in the result of a call that returns several."""
    for item in value if isinstance(value, (tuple, list)) else ():
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield item


def _elements(value: torch.Tensor, sizing: Sizing) -> int:
    count = 1
    for size in value.shape:
        count *= sizing.number(from_torch(size))
    return count


def _bytes_read(segment: Segment, sizing: Sizing) -> int:
    """Bytes of the inputs, each once; where only views of an input are read, no more than they cover."""
    inside, seen = set(segment.nodes), set(segment.inputs)
    through: dict[fx.Node, dict[fx.Node, None]] = {n: {} for n in segment.inputs}
    for node in segment.nodes:
        for operand in node.all_input_nodes:
            source = operand if operand in seen else views.source(operand)
            if source in seen and source not in inside:
                through[source][operand] = None
    return sum(_least(source, tuple(found), sizing) for source, found in through.items())


def _least(source: fx.Node, found: Sequence[fx.Node], sizing: Sizing) -> int:
    whole = _bytes(source, sizing)
    return min(whole, sum(_bytes(n, sizing) for n in found)) if found else whole


def segment_table(trace: GraphTrace) -> str:
    """The segments of one graph as a table; one line says so where there are none."""
    rows = segment_rows(trace)
    if not rows:
        return "no segments"
    names = nodes_by_name(trace)
    shown = [line for row in rows for line in _lines(row, names)]
    headers = ("#", "kind", "kernel", "ATen ops", "shapes", "in", "out", "model")
    return str(tabulate(
        shown, headers, maxcolwidths=[None, None, 26, 28, 34, None, None, 32], disable_numparse=True,
        colalign=("right", "left", "left", "left", "left", "right", "right", "left")))


def _lines(row: SegmentRow, names: Mapping[str, fx.Node], mark: str = "") -> Iterator[tuple[str, ...]]:
    """A segment's line and those of what may run in its place."""
    more = f"\n+ {plural(len(row.kernels) - 1, 'kernel')}" if len(row.kernels) > 1 else ""
    yield (mark + row.name.removeprefix("segment"), row.kind, broken(row.kernel, 26) + more or "-",
           counted(op_name(names[n]) for n, _, _ in row.nodes), _shapes(row), bytes_text(row.bytes_in),
           bytes_text(row.bytes_out), place(map(_base, row.locations)))
    for way in row.alternatives:
        for i, part in enumerate(way):
            yield from _lines(part, names, "or " if i == 0 else "")


def _shapes(row: SegmentRow) -> str:
    return " -> ".join(counted((t for _, t in side), 5) or "nothing" for side in (row.inputs, row.outputs))


def _segments(trace: GraphTrace) -> tuple[Segment, ...]:
    return trace.segmentation.segments if trace.segmentation is not None else ()


def nodes_by_name(trace: GraphTrace) -> Mapping[str, fx.Node]:
    """The nodes of the graph as it was segmented; none where it was not."""
    segments = _segments(trace)
    return {n.name: n for n in segments[0].nodes[0].graph.nodes} if segments else {}


def summary(trace: GraphTrace) -> str:
    """One line: kernels, distinct ones among them, ATen calls, coverage."""
    if trace.segmentation is None:
        return "cut into forward and backward after its passes"
    by_segment = kernels_by_segment(trace)
    kernels = [k.name for found in by_segment.values() for k in found]
    distinct, calls = len(set(kernels)), len(running(trace)) - len(by_segment)
    same = f" ({distinct} distinct)" if distinct != len(kernels) else ""
    return f"{plural(len(kernels), 'kernel')}{same}, {plural(calls, 'ATen call')}; {coverage(trace)}"


# ---------------------------------------------------------------- boundaries


def boundary_rows(trace: GraphTrace) -> tuple[BoundaryRow, ...]:
    """The final boundaries of a graph, as its segmentation lists them."""
    if trace.segmentation is None:
        return ()
    return _rows(trace, trace.segmentation.boundaries)


def request_rows(trace: GraphTrace) -> tuple[RequestRow, ...]:
    """What became of each context of `fxfuser.fuse()` in this graph."""
    if trace.segmentation is None:
        return ()
    owner = {n.name: s.name for s in running(trace) for n in s.nodes}
    return tuple(RequestRow(r.nodes, tuple(dict.fromkeys(owner[n] for n in r.nodes)), r.locations, r.granted,
                            _rows(trace, r.refusals)) for r in trace.segmentation.requests)


def pair_row(trace: GraphTrace, first: fx.Node, second: fx.Node) -> BoundaryRow | None:
    """What the rules say of exactly these two compute nodes; None where they let them be one kernel."""
    reject = why_apart(trace.segmentation, first, second) if trace.segmentation is not None else None
    return None if reject is None else _rows(trace, (reject,))[0]


def _rows(trace: GraphTrace, rejects: Iterable[Reject]) -> tuple[BoundaryRow, ...]:
    owner = {n.name: s for s in running(trace) for n in s.nodes}
    nodes = nodes_by_name(trace)
    rows = []
    for b in rejects:
        left, right = owner.get(b.producer), owner.get(b.consumer)
        crossing = _crossing(left, right) if left and right else []
        where = tuple(user_location(nodes[n].stack_trace) if n in nodes else "" for n in (b.producer, b.consumer))
        rows.append(BoundaryRow(
            b.rule, b.producer, b.consumer, (left.name if left else "", right.name if right else ""),
            tuple((n.name, tensor_type(n)) for n in crossing), (where[0], where[1]), b.bytes, b.microseconds,
            b.reason, b.remedy))
    return tuple(rows)


def boundary_report(trace: GraphTrace) -> str:
    """All boundaries of a graph, the dearest first, what they cost together, and what `fxfuser.fuse()` was granted."""
    rows = sorted(boundary_rows(trace), key=lambda r: -r.microseconds)
    if rows:
        cost, count = sum(r.microseconds for r in rows), len(rows)
        what = "1 boundary" if count == 1 else f"{count} boundaries"
        text = f"{what}, estimated {cost:.1f} us in all; {summary(trace)}\n\n{boundary_table(rows)}"
    else:
        text = f"{summary(trace)}\nno boundaries: nothing more can be joined"
    return "\n\n".join([text, *map(_request_text, request_rows(trace))])


def _request_text(row: RequestRow) -> str:
    head = f"fxfuser.fuse() at {place(row.locations)} ({plural(len(row.nodes), 'op')})"
    if row.granted:
        return f"{head}: granted, {row.segments[0]}"
    return f"{head}: refused, {plural(len(row.segments), 'segment')}\n\n{boundary_table(row.refusals)}"


def _crossing(left: Segment, right: Segment) -> list[fx.Node]:
    """The results of `left` that `right` reads, through whatever views."""
    made, found = set(left.outputs), dict[fx.Node, None]()
    for node in right.inputs:
        while node not in made and node.op == "call_function" and node.all_input_nodes:
            node = node.all_input_nodes[0]
        if node in made:
            found[node] = None
    return list(found)


def boundary_table(rows: Sequence[BoundaryRow]) -> str:
    """Boundaries as a table, the two sides with their lines in the model, costs, reason and remedy."""
    if not rows:
        return "no boundaries"
    shown = [(r.rule, _side(r, 0), _side(r, 1), "\n".join(t for _, t in r.tensors) or "-", bytes_text(r.bytes),
              f"{r.microseconds:.2f}", r.reason + (f"\ntry: {_short(r.remedy)}" if r.remedy else "")) for r in rows]
    headers = ("rule", "from", "to", "tensors", "bytes", "us", "reason")
    return str(tabulate(
        shown, headers, maxcolwidths=[None, 30, 30, 24, None, None, 52], disable_numparse=True,
        colalign=("left", "left", "left", "left", "right", "right", "left")))


def _side(row: BoundaryRow, side: int) -> str:
    node = (row.producer, row.consumer)[side]
    number = row.segments[side].removeprefix("segment")
    head = f"{node} (#{number})" if number else node
    return "\n".join(filter(None, (head, short_path(row.locations[side]))))


# ---------------------------------------------------------------- kernels


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
    ways = (s for whole in _segments(trace) for s in (whole, *(p for way in whole.alternatives for p in way)))
    segment = next((s for s in ways if s.name == kernel.segment), None)
    if segment is None or segment.domain is None:
        return []
    if segment.kind is SegmentKind.GEMM:
        nodes = nodes_by_name(trace)
        return [f"# {n.value} = {n.node}" + (f": {tensor_type(nodes[n.node])}" if n.node in nodes else "")
                for n in kernel.notes if re.fullmatch(r"(in|out)\d+", n.value)]
    read = {p.node for p in segment.domain.points() if p.kind is PointKind.LOAD}
    tensors = [("in", [n for n in segment.inputs if n in read]), ("out", list(segment.outputs))]
    return [f"# {side}{i} = {n.name}: {tensor_type(n)}{_inside(n)}" for side, found in tensors
            for i, n in enumerate(found)]


def _inside(node: fx.Node) -> str:
    """The tensor in which a kernel stores a value, where it is larger."""
    base = memory_of(node)
    return "" if base is node else f", inside {base.name}: {tensor_type(base)}"
