"""Why the final segments stay apart, and what that costs.

Enters: the final groups and the context in which they grew.  Leaves: one `Reject` per boundary: two kernels
that share data, or a kernel and the extern call that it feeds or reads.  The rules run once more here, so a
reason is never stale; what the many candidates of growth were told is not kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Iterator, Mapping

from torch import fx

from fxfuser.segmenter.cost import transfer_time
from fxfuser.segmenter.facts import Role
from fxfuser.segmenter.group import Group, read_bytes
from fxfuser.segmenter.rules import NEAR, Candidate, Context, first_reject
from fxfuser.segmenter.segment import Reject


def final_boundaries(groups: Mapping[int, Group], context: Context) -> tuple[Reject, ...]:
    """The boundaries in the order of their producers."""
    found: list[Reject] = []
    for root in sorted(groups):
        found.extend(_kernel_boundaries(groups[root], groups, context))
        found.extend(_extern_boundaries(groups[root], context))
    return tuple(found)


def _kernel_boundaries(group: Group, groups: Mapping[int, Group], context: Context) -> Iterator[Reject]:
    quotient = context.quotient
    for other in _partners(group, groups, context):
        before, after = group, groups[other]
        if quotient.label[before.root] > quotient.label[after.root]:
            before, after = after, before
        candidate = Candidate(before, after, context)
        reject = first_reject(candidate)
        if reject is None or reject.rule == "near":  # distant readers of one tensor: not worth a line each
            continue
        if reject.rule == "order":
            reject = replace(reject, reason=_between(before, after, context))
        if candidate.linked:
            producer, consumer = _crossing(before, after, context)
            reject = replace(reject, producer=producer, consumer=consumer)
        yield _priced(reject, candidate.saved_bytes, context)


def _partners(group: Group, groups: Mapping[int, Group], context: Context) -> list[int]:
    """The kernels that read from this one, and those of higher number that read a tensor that this one reads."""
    quotient, facts = context.quotient, context.facts
    found = {s for s in quotient.succs[group.root] if s in groups}
    first, last = group.members[0] - NEAR, group.members[-1] + NEAR
    for source in group.reads:
        near = {quotient.find(v) for v in facts.readers.get(source, ()) if first <= v <= last}
        found.update(r for r in near if r > group.root and r in groups and not quotient.linked(r, group.root))
    return sorted(found)


def _between(before: Group, after: Group, context: Context) -> str:
    """What makes the order rule reject: the extern calls, else the kernels, on a path that joins the two."""
    quotient, facts = context.quotient, context.facts
    path = quotient.path(before.root, after.root)
    names = [facts.vertices[r].name for r in path]
    extern = [n for r, n in zip(path, names) if facts.roles[facts.vertices[r]] is not Role.KERNEL]
    return f"{', '.join((extern or names)[:3])} depends on the first and feeds the second"


def _priced(reject: Reject, moved: int, context: Context) -> Reject:
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


def _extern_boundaries(group: Group, context: Context) -> Iterator[Reject]:
    quotient, facts = context.quotient, context.facts
    for other in sorted(quotient.succs[group.root] | quotient.preds[group.root]):
        node = facts.vertices[other]
        if facts.roles[node] is not Role.EXTERN:
            continue
        if other in quotient.succs[group.root]:
            crossing = _read_by(node, group, context)
            if crossing is not None:
                moved = 2 * facts.sizing.bytes(crossing)
                yield _priced(_extern_reject(crossing.name, node.name, node, context), moved, context)
            continue
        for source, vias in group.reads.items():
            if source is node or (source.op == "call_function" and node in source.all_input_nodes):
                moved = 2 * read_bytes(source, vias, facts)
                reader = facts.vertices[next(v for v in facts.readers[source] if v in group.members)]
                yield _priced(_extern_reject(node.name, reader.name, node, context), moved, context)
                break


def _extern_reject(producer: str, consumer: str, node: fx.Node, context: Context) -> Reject:
    return Reject("lowerable", producer, consumer, context.facts.reasons[node])


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
