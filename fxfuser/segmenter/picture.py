"""The quotient graph as a networkx graph, for pictures and for checks.

Enters: a Segmentation.  Leaves: a DiGraph with one vertex per segment (attributes kind, ops, label) and one
edge per segment whose results another reads, through views (attribute `tensors`, names).
"""

from __future__ import annotations

import networkx
from torch import fx

from fxfuser.segmenter.segment import Segment, Segmentation


def to_networkx(segmentation: Segmentation) -> networkx.DiGraph:
    """The graph of segments."""
    graph = networkx.DiGraph()
    made_by: dict[fx.Node, Segment] = {}
    for segment in segmentation.segments:
        ops = [str(n.target) for n in segment.nodes]
        head = f"{segment.index} {segment.kind.value}"
        graph.add_node(segment.index, kind=segment.kind.value, ops=ops, label="\n".join([head, *ops[:8]]))
        made_by.update(dict.fromkeys(segment.nodes, segment))
    for segment in segmentation.segments:
        for source in _sources(segment, made_by):
            producer = made_by[source].index
            if producer == segment.index:
                continue
            if graph.has_edge(producer, segment.index):
                graph.edges[producer, segment.index]["tensors"].append(source.name)
            else:
                graph.add_edge(producer, segment.index, tensors=[source.name])
    return graph


def to_dot(segmentation: Segmentation) -> str:
    """The graph of segments in Graphviz's language; needs no further package."""
    graph = to_networkx(segmentation)
    lines = ["digraph segments {", "  node [shape=box];"]
    for index, data in graph.nodes(data=True):
        text = data["label"].replace('"', "'").replace("\n", "\\n")
        lines.append(f'  s{index} [label="{text}"];')
    for tail, head, data in graph.edges(data=True):
        lines.append(f'  s{tail} -> s{head} [label="{", ".join(data["tensors"])}"];')
    return "\n".join([*lines, "}", ""])


def _sources(segment: Segment, made_by: dict[fx.Node, Segment]) -> list[fx.Node]:
    """The compute nodes outside whose values the segment reads, through views and sizes."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    pending = [n for node in segment.nodes for n in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in made_by:
            found[node] = None
        else:
            pending.extend(node.all_input_nodes)
    return sorted(found, key=lambda n: n.name)
