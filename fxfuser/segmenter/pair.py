"""What the rules say of exactly two nodes, whether or not their segments have anything in common.

Enters: a Segmentation and two of its compute nodes.  Leaves: the Reject of the first rule that keeps their segments
apart.  The groups are those of the segmentation: nothing is grown again.
"""

from __future__ import annotations

from torch import fx

from fxfuser.segmenter.boundaries import extern_reject, judged
from fxfuser.segmenter.domains import Domains
from fxfuser.segmenter.facts import gather_facts
from fxfuser.segmenter.group import Group, atom, merged
from fxfuser.segmenter.quotient import Quotient
from fxfuser.segmenter.rules import Candidate, Context
from fxfuser.segmenter.segment import Reject, Segment, Segmentation, SegmentKind


def why_apart(segmentation: Segmentation, first: fx.Node, second: fx.Node) -> Reject | None:
    """Why two compute nodes are not in one segment; None where they are, or where the rules would allow it.

    Errors: KeyError for a node that is in no segment.
    """
    owner = {n: s for s in segmentation.segments for n in s.nodes}
    left, right = owner[first], owner[second]
    if left is right:
        return None
    context, groups = _grown(segmentation, first.graph)
    for segment in (left, right):
        if segment.kind is SegmentKind.EXTERN:
            reject = extern_reject(first.name, second.name, segment.nodes[0], context.facts)
            return next((b for b in segmentation.boundaries if _between(b, left, right)), reject)
    a, b = groups[left.index], groups[right.index]
    label = context.quotient.label
    if label[a.root] > label[b.root]:
        a, b = b, a
    return judged(Candidate(a, b, context))


def _between(boundary: Reject, left: Segment, right: Segment) -> bool:
    names = [{n.name for n in s.nodes} for s in (left, right)]
    sides = boundary.producer, boundary.consumer
    return any(sides[0] in a and sides[1] in b for a, b in (names, reversed(names)))


def _grown(segmentation: Segmentation, graph: fx.Graph) -> tuple[Context, dict[int, Group]]:
    """The context as it was after growth, and the group of each kernel segment."""
    barred = {n: s.reason for s in segmentation.segments if s.kind is SegmentKind.EXTERN for n in s.nodes}
    facts = gather_facts(graph, barred)
    context = Context(facts, Quotient(len(facts.vertices), facts.edges), Domains(facts), segmentation.rates,
                      frozenset(range(len(facts.vertices))))  # no frame is trusted: domains are exact
    kernels = (s for s in segmentation.segments if s.kind is not SegmentKind.EXTERN)
    return context, {s.index: group for s, group in [(s, _group(s, context)) for s in kernels]}


def _group(segment: Segment, context: Context) -> Group:
    """The segment's group; in graph order every step of it is legal, since the whole is."""
    facts, quotient = context.facts, context.quotient
    first, *rest = (facts.number[n] for n in segment.nodes)
    group = atom(first, facts)
    for number in rest:
        following = atom(number, facts)
        clearance = quotient.clearance(group.root, following.root)
        assert clearance is not None, "a segment has no path through others"
        group = merged(group, following, facts, quotient)
        group = group.rooted(quotient.merge(clearance))
    return group
