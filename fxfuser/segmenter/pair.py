"""What the rules say of exactly two nodes, whether or not their segments have anything in common.

Enters: a Segmentation and two of its compute nodes.  Leaves: the Reject of the first rule that keeps their segments
apart.  The groups are those of the segmentation: nothing is grown again.
"""

from __future__ import annotations

from torch import fx

from fxfuser.segmenter.absorption import Partition, anchored
from fxfuser.segmenter.anchors import Anchor, GemmDomains, Surroundings
from fxfuser.segmenter.boundaries import extern_reject, judged, judged_product, judged_products
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
    partition = _grown(segmentation, first.graph)
    groups, anchors, context = partition.groups, partition.anchors, partition.context
    label = context.quotient.label
    roots = [context.quotient.find(context.facts.number[n]) for n in (first, second)]
    for segment, root in zip((left, right), roots):
        if segment.single and root not in anchors:
            reject = extern_reject(first.name, second.name, segment.nodes[0], context.facts)
            return next((b for b in segmentation.boundaries if _between(b, left, right)), reject)
    a, b = sorted(roots, key=label.__getitem__)
    if a in anchors and b in anchors:
        return judged_products(anchors[a], anchors[b], partition)
    if a in groups and b in groups:
        return judged(Candidate(groups[a], groups[b], context))
    product, beside = (a, b) if a in anchors else (b, a)
    return judged_product(anchors[product], groups[beside], partition)


def _between(boundary: Reject, left: Segment, right: Segment) -> bool:
    names = [{n.name for n in s.nodes} for s in (left, right)]
    sides = boundary.producer, boundary.consumer
    return any(sides[0] in a and sides[1] in b for a, b in (names, reversed(names)))


def _grown(segmentation: Segmentation, graph: fx.Graph) -> Partition:
    """The partition as it was after growth and absorption."""
    barred = {n: s.reason for s in segmentation.segments if s.single for n in s.nodes}
    facts = gather_facts(graph, barred)
    context = Context(facts, Quotient(len(facts.vertices), facts.edges), Domains(facts), segmentation.rates,
                      frozenset(range(len(facts.vertices))))  # no frame is trusted: domains are exact
    groups: dict[int, Group] = {}
    anchors = {v: Anchor(v, (v,)) for v in anchored(facts)}
    for segment in segmentation.segments:
        if segment.kind is SegmentKind.GEMM:
            anchor = _anchor(segment, context)
            for vertex in anchor.products:
                del anchors[vertex]
            anchors[anchor.root] = anchor
        elif not segment.single:
            group = _group(segment, context)
            groups[group.root] = group
    return Partition(groups, anchors, Surroundings(context, segmentation.gemm, GemmDomains(facts)))


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


def _anchor(segment: Segment, context: Context) -> Anchor:
    """The segment's products and groups."""
    facts, quotient = context.facts, context.quotient
    groups, products = [], []
    for part in segment.alternatives[0]:
        if part.kind is SegmentKind.EXTERN:
            products.append(facts.number[part.nodes[0]])
        else:
            groups.append(_group(part, context))
    roots = sorted((*products, *(g.root for g in groups)), key=quotient.label.__getitem__)
    root = roots[0]
    for other in roots[1:]:
        clearance = quotient.clearance(root, other)
        assert clearance is not None, "a segment has no path through others"
        root = quotient.merge(clearance)
    return Anchor(root, tuple(sorted(products)), tuple(groups))
