"""The segmenter: which nodes of an ATen graph share a kernel.

Enters: an ATen graph with fake tensors in meta["val"], after the passes.  Leaves: a `Segmentation`: every
compute node in exactly one segment, every kernel segment with its domain, in an order that may run, and the
reasons for the boundaries that are left.  Lowering is never asked: a merge that the rules allow has a domain,
and every domain lowers.  The same graph gives the same segmentation.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Iterable, Mapping

import torch
from torch import fx

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.points import Domain
from fxfuser.domain.points import Reject as DomainReject
from fxfuser.domain.views import address
from fxfuser.fuel import Fuel
from fxfuser.garbage import uncollected
from fxfuser.ops import Kind, kind_of
from fxfuser.segmenter.absorption import Absorption, Partition, anchored
from fxfuser.segmenter.anchor_rules import domain_of, prefers_fused, standing
from fxfuser.segmenter.anchors import Anchor, Surroundings, inputs_of, outputs_of
from fxfuser.segmenter.boundaries import final_boundaries
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.domains import Domains
from fxfuser.segmenter.facts import Facts, Role, gather_facts
from fxfuser.segmenter.group import Group, atom
from fxfuser.segmenter.growth import Growth
from fxfuser.segmenter.quotient import Quotient
from fxfuser.segmenter.requests import answers
from fxfuser.segmenter.rules import Context
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind
from fxfuser.segmenter.structural_hash import structural_key


def segment(
    graph_module: fx.GraphModule, device_rates: DeviceRates | None = None, fuel: Fuel | None = None,
    gemm: str = "library",
) -> Segmentation:
    """Partition a graph's compute nodes into segments.  `device_rates` default to a current server GPU; every merge
    takes one of `fuel`, where it is given.  `gemm` is the option of this name: what products may absorb."""
    with uncollected():
        return _segmentation(grow(graph_module.graph, device_rates or DeviceRates(), fuel, gemm))


def grow(graph: fx.Graph, rates: DeviceRates, fuel: Fuel | None = None, gemm: str = "library") -> Partition:
    """The final groups of a graph, each with a domain that resolves, and what its products absorbed."""
    fuel = fuel or Fuel()
    fuel.stage = "merge"
    barred: dict[fx.Node, str] = {}
    exact: frozenset[fx.Node] = frozenset()
    while True:
        facts = gather_facts(graph, barred)
        unsure = frozenset(facts.number[n] for n in exact if n in facts.number)
        context = Context(
            facts, Quotient(len(facts.vertices), facts.edges), Domains(facts, unsure), rates, unsure)
        spent = fuel.spent
        partition = _grown(context, fuel, gemm)
        groups = (*partition.groups.values(), *(g for a in partition.anchors.values() for g in a.groups))
        failed = [g for g in groups if isinstance(context.domains.domain(g), DomainReject)]
        if not failed:
            return partition
        fuel.give_back(fuel.spent - spent)
        # a frame promised a domain that does not resolve: grow again, trusting no frame around these nodes
        members = [m for g in failed for m in g.members]
        exact |= {facts.vertices[m] for m in members}
        barred.update(_unresolved(members, context))


def _grown(context: Context, fuel: Fuel, gemm: str) -> Partition:
    """Merges along edges, what products absorb of their readers, siblings, what products absorb of what they read, and
    products behind others."""
    growth = Growth(context, fuel)
    growth.along_edges()
    if gemm != "library":
        growth.around(frozenset(anchored(context.facts)))
    absorption = Absorption(growth.groups, context, gemm, fuel)
    absorption.readers()
    growth.beside()
    absorption.makers()
    absorption.chains()
    return absorption.partition


def _unresolved(members: Iterable[int], context: Context) -> Mapping[fx.Node, str]:
    """The nodes that have no domain even alone, with the reason: they run as ATen calls."""
    found = {}
    for member in members:
        domain = context.domains.domain(atom(member, context.facts))
        if isinstance(domain, DomainReject):
            found[context.facts.vertices[member]] = str(domain)
    return found


def _segmentation(partition: Partition) -> Segmentation:
    context = partition.context
    facts = context.facts
    segments: list[Segment] = []
    for root in _schedule(context.quotient, facts):
        index, anchor = len(segments), partition.anchors.get(root)
        if root in partition.groups:
            segments.append(_kernel_segment(index, partition.groups[root], context))
        elif anchor is not None and (own := standing(anchor, partition.around)) is not None:
            segments.append(_gemm_segment(index, own, partition.around))
        elif facts.roles[facts.vertices[root]] is Role.EXTERN:
            segments.append(_single_segment(index, facts.vertices[root], facts))
    return Segmentation(
        tuple(segments), final_boundaries(partition), answers(partition), context.rates, partition.around.mode)


def _schedule(quotient: Quotient, facts: Facts) -> Iterable[int]:
    """A topological order of the groups that stays near the graph's: of those that are ready, the one whose
    last member comes first, so that values die about where they did."""
    last: dict[int, int] = {}
    for vertex in range(len(facts.vertices)):
        last[quotient.find(vertex)] = vertex
    waiting = {root: len(quotient.preds[root]) for root in last}
    ready = [(last[root], root) for root, count in waiting.items() if not count]
    heapq.heapify(ready)
    while ready:
        _, root = heapq.heappop(ready)
        yield root
        for after in quotient.succs[root]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, (last[after], after))


def _kernel_segment(index: int, group: Group, context: Context) -> Segment:
    facts = context.facts
    nodes = tuple(facts.vertices[m] for m in group.members)
    outputs = tuple(sorted(group.outputs, key=facts.number.__getitem__))
    inputs = tuple(dict.fromkeys(
        r.source for n in nodes for r in facts.reads[n] if r.source in group.reads))
    domain = context.domains.domain(group)
    assert isinstance(domain, Domain), "every group that is left has a domain"
    return Segment(
        index, SegmentKind.REDUCTION if group.reduces else SegmentKind.POINTWISE, nodes, inputs, outputs, domain,
        key=structural_key(nodes, outputs, facts))


def _single_segment(index: int, node: fx.Node, facts: Facts) -> Segment:
    inputs = tuple(n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor))
    kind = SegmentKind.ATTENTION if kind_of(node) is Kind.ATTENTION else SegmentKind.EXTERN
    if kind is SegmentKind.ATTENTION:  # whose kernel needs no view but its strides and where it begins
        inputs = tuple(dict.fromkeys(address(n)[0] for n in inputs))
    return Segment(
        index, kind, (node,), inputs, (node,), reason=facts.reasons[node],
        key=structural_key((node,), (node,), facts))


def _gemm_segment(index: int, anchor: Anchor, around: Surroundings) -> Segment:
    facts = around.context.facts
    nodes = tuple(facts.vertices[m] for m in anchor.members)
    outputs = outputs_of(anchor.members, facts)
    domain = domain_of(anchor, around)
    assert isinstance(domain, GemmDomain), "the domain rule holds"
    apart = tuple(replace(s, part=f"_{i}") for i, s in enumerate(_apart(index, anchor, around.context)))
    return Segment(
        index, SegmentKind.GEMM, nodes, inputs_of(anchor.members, facts), outputs, domain,
        key=structural_key(nodes, outputs, facts), alternatives=(apart,), fused=prefers_fused(anchor, around))


def _apart(index: int, anchor: Anchor, context: Context) -> Iterable[Segment]:
    """The products as their ATen calls and the groups as their kernels, in an order that may run."""
    facts = context.facts
    parts = [(p,) for p in anchor.products] + [g.members for g in anchor.groups]
    made_by = {facts.vertices[m]: i for i, members in enumerate(parts) for m in members}
    groups = {len(anchor.products) + i: g for i, g in enumerate(anchor.groups)}
    needs = [{made_by[r.source] for m in members for r in facts.reads[facts.vertices[m]] if r.source in made_by} - {i}
             for i, members in enumerate(parts)]
    waiting = sorted(range(len(parts)), key=lambda i: parts[i])
    done: set[int] = set()
    while waiting:
        i = next(i for i in waiting if needs[i] <= done)
        waiting.remove(i)
        done.add(i)
        yield _kernel_segment(index, groups[i], context) if i in groups else \
            _single_segment(index, facts.vertices[parts[i][0]], facts)
