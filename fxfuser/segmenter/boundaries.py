"""Why the final segments stay apart, and what that costs.

Enters: the final partition.  Leaves: one `Reject` per boundary: two kernels that share data, a kernel and the extern
call that it feeds or reads, a matrix product and a kernel beside it, or the two sides of `fxfuser.boundary`.  The
rules run once more here, so a reason is never stale; what the many candidates of growth were told is not kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import Iterator, Mapping, Sequence

from torch import fx

from fxfuser import ops
from fxfuser.domain import views
from fxfuser.segmenter.absorption import Partition
from fxfuser.segmenter.anchor_rules import Proposal
from fxfuser.segmenter.anchor_rules import first_reject as first_absorption_reject
from fxfuser.segmenter.anchors import Anchor, border, saved
from fxfuser.segmenter.cost import transfer_time
from fxfuser.segmenter.facts import Facts, Role
from fxfuser.segmenter.group import Group, read_bytes
from fxfuser.segmenter.remedies import around, without_call
from fxfuser.segmenter.rules import (
    FORCED,
    NEAR,
    RULES,
    Candidate,
    Context,
    Rule,
    first_reject,
    remove_boundary,
)
from fxfuser.segmenter.segment import Reject

ONE_PRODUCT = "both are matrix products, and the second multiplies whole rows of the first, which no tile of it has"


def final_boundaries(partition: Partition) -> tuple[Reject, ...]:
    """The boundaries in the order of their producers."""
    groups, context = partition.groups, partition.context
    found: list[Reject] = []
    for root in sorted((*groups, *partition.anchors)):
        if root in partition.anchors:
            found.extend(_product_boundaries(partition.anchors[root], partition))
            continue
        found.extend(_kernel_boundaries(groups[root], groups, context))
        found.extend(_extern_boundaries(groups[root], partition))
    return (*found, *_forced_boundaries(context))


def _kernel_boundaries(group: Group, groups: Mapping[int, Group], context: Context) -> Iterator[Reject]:
    quotient = context.quotient
    for other in _partners(group, groups, context):
        before, after = group, groups[other]
        if quotient.label[before.root] > quotient.label[after.root]:
            before, after = after, before
        reject = judged(Candidate(before, after, context))
        if reject is not None and reject.rule != "boundary":  # which is listed once, however many read it
            yield reject


def judged(candidate: Candidate, rules: Sequence[Rule] = RULES) -> Reject | None:
    """The first Reject of a pair, with its price and, where one side feeds the other, the nodes at the border."""
    before, after, context = candidate.a, candidate.b, candidate.context
    reject = first_reject(candidate, rules)
    if reject is None:
        return None
    if reject.rule == "order":
        reason, remedy = _between(before, after, context)
        reject = replace(reject, reason=reason, remedy=remedy)
    if candidate.linked:
        producer, consumer = _crossing(before, after, context)
        reject = replace(reject, producer=producer, consumer=consumer)
    return priced(reject, candidate.saved_bytes, context)


def _forced_boundaries(context: Context) -> Iterator[Reject]:
    """Each call of `fxfuser.boundary` with the first of its readers."""
    facts, quotient = context.facts, context.quotient
    for number, node in enumerate(facts.vertices):
        if node.target is not ops.BOUNDARY or not quotient.succs[number]:
            continue
        producer = views.source(node.all_input_nodes[0])
        reject = Reject("boundary", producer.name, _reader(node, facts).name, FORCED, remedy=remove_boundary(node))
        yield priced(reject, 2 * facts.sizing.bytes(node), context)


def _reader(node: fx.Node, facts: Facts) -> fx.Node:
    """The first node that computes something of `node`, through views; a size that follows from it counts."""
    pending = list(node.users)
    for user in pending:
        if user in facts.number:
            return user
        pending.extend(u for u in user.users if u not in pending)
    return node


def _partners(group: Group, groups: Mapping[int, Group], context: Context) -> list[int]:
    """The kernels that read from this one, and those of higher number that read a tensor that this one reads."""
    quotient, facts = context.quotient, context.facts
    found = {s for s in quotient.succs[group.root] if s in groups}
    first, last = group.members[0] - NEAR, group.members[-1] + NEAR
    for source in group.reads:
        readers = facts.readers.get(source, ())  # in ascending order; all of a model may read its one scale
        end = bisect_right(readers, last) + 1  # of distant readers the next one: not worth a line each
        near = {quotient.find(v) for v in readers[bisect_left(readers, first):end]}
        found.update(r for r in near if r > group.root and r in groups and not quotient.linked(r, group.root))
    return sorted(found)


def _between(before: Group, after: Group, context: Context) -> tuple[str, str]:
    """What makes the order rule reject, the extern calls, else the kernels, on a path that joins the two; a remedy."""
    quotient, facts = context.quotient, context.facts
    path = quotient.path(before.root, after.root)
    nodes = [facts.vertices[r] for r in path]
    extern = [n for n in nodes if facts.roles[n] is not Role.KERNEL]
    shown = (extern or nodes)[:3]
    return f"{', '.join(n.name for n in shown)} depends on the first and feeds the second", around(shown[0])


def priced(reject: Reject, moved: int, context: Context) -> Reject:
    """A Reject with the bytes that cross and the microseconds that they and a launch take."""
    cost = context.rates.launch + transfer_time(context.rates, moved)
    return replace(reject, bytes=moved, microseconds=round(cost, 3))


def _crossing(before: Group, after: Group, context: Context) -> tuple[str, str]:
    """The names of the first node that crosses the boundary and of its first reader."""
    facts = context.facts
    for source in before.outputs:
        if source in after.reads:
            reader = next(v for v in facts.readers[source] if v in after.members)
            return source.name, facts.vertices[reader].name
    return facts.vertices[before.members[-1]].name, facts.vertices[after.members[0]].name


def _product_boundaries(anchor: Anchor, partition: Partition) -> Iterator[Reject]:
    """What keeps a product's kernel, or the library's, from the kernels, products and calls beside it."""
    context = partition.context
    quotient, facts = context.quotient, context.facts
    for other in sorted(quotient.succs[anchor.root] | quotient.preds[anchor.root]):
        if other in partition.groups:
            reject = judged_product(anchor, partition.groups[other], partition)
            if reject is not None and reject.rule != "boundary":
                yield reject
        elif other in partition.anchors:
            second = partition.anchors[other]
            if other in quotient.succs[anchor.root] and (anchor.fused or second.fused):
                yield judged_products(anchor, second, partition)
        elif anchor.fused and facts.roles[facts.vertices[other]] is Role.EXTERN:
            call = (other,)
            found = border(anchor.members, call, facts) or border(call, anchor.members, facts)
            if found is not None:
                reject = extern_reject(found[0].name, found[1].name, facts.vertices[other], facts)
                yield priced(reject, 2 * facts.sizing.bytes(found[0]), context)


def judged_products(before: Anchor, after: Anchor, partition: Partition) -> Reject:
    """That two products stay apart, with what crosses."""
    context = partition.context
    sizing, vertices = context.facts.sizing, context.facts.vertices
    found = border(before.members, after.members, context.facts)
    maker, reader = found or (vertices[before.members[-1]], vertices[after.members[0]])
    reject = Reject("gemm", maker.name, reader.name, ONE_PRODUCT)
    if found and any(g.reduces for g in before.groups):
        reject = first_absorption_reject(Proposal((before, after), (), partition.around)) or reject
    return priced(reject, 2 * sizing.bytes(maker) * bool(found), context)


def judged_product(anchor: Anchor, group: Group, partition: Partition) -> Reject | None:
    """Why a product does not absorb a group beside it, with its price."""
    reject = first_absorption_reject(Proposal((anchor,), (group,), partition.around))
    if reject is None:
        return None
    context = partition.context
    return priced(reject, saved(anchor, group, context.facts), context)


def _extern_boundaries(group: Group, partition: Partition) -> Iterator[Reject]:
    context = partition.context
    quotient, facts = context.quotient, context.facts
    for other in sorted(quotient.succs[group.root] | quotient.preds[group.root]):
        node = facts.vertices[other]
        if facts.roles[node] is not Role.EXTERN or other in partition.anchors:
            continue
        if other in quotient.succs[group.root]:
            crossing = _read_by(node, group, context)
            if crossing is not None:
                moved = 2 * facts.sizing.bytes(crossing)
                yield priced(extern_reject(crossing.name, node.name, node, facts), moved, context)
            continue
        for source, vias in group.reads.items():
            if source is node or (source.op == "call_function" and node in source.all_input_nodes):
                moved = 2 * read_bytes(source, vias, facts)
                reader = facts.vertices[next(v for v in facts.readers[source] if v in group.members)]
                yield priced(extern_reject(node.name, reader.name, node, facts), moved, context)
                break


def extern_reject(producer: str, consumer: str, node: fx.Node, facts: Facts) -> Reject:
    """Why nothing is fused with `node`, one of the two sides: it runs as its ATen call, or as a kernel of its own."""
    rule = "attention" if ops.kind_of(node) is ops.Kind.ATTENTION else "lowerable"
    return Reject(rule, producer, consumer, facts.reasons[node], remedy=without_call(node, facts.reasons[node]))


def _read_by(node: fx.Node, group: Group, context: Context) -> fx.Node | None:
    """The first output of the group that an extern call reads, through views."""
    outputs = set(group.outputs)
    pending = list(node.all_input_nodes)
    seen: set[fx.Node] = set()
    while pending:
        operand = pending.pop(0)
        if operand in outputs:
            return operand
        if operand not in seen and context.facts.roles[operand] is Role.SEEN:
            seen.add(operand)
            pending.extend(operand.all_input_nodes)
    return None
