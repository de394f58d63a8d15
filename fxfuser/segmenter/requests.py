"""What `fxfuser.fuse()` asked for, and what became of it.

Enters: the marks that nodes carry.  Leaves: the blocks before growth, which tries them first, and after it one
`Request` per block: granted, or the reasons why its nodes are in several segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator

from fxfuser import ops
from fxfuser.errors import user_location
from fxfuser.segmenter.absorption import Partition
from fxfuser.segmenter.boundaries import extern_reject, judged, judged_product, judged_products
from fxfuser.segmenter.facts import Facts, Role
from fxfuser.segmenter.rules import LEGAL, Candidate
from fxfuser.segmenter.segment import Reject, Request


@dataclass(frozen=True)
class Block:
    """The vertices of one context: those that a kernel can hold, and those that run as their ATen call."""

    kernels: tuple[int, ...]
    externs: tuple[int, ...]


def blocks(facts: Facts) -> tuple[Block, ...]:
    """The contexts of a graph in the order of their first nodes."""
    found: dict[str, dict[Role, list[int]]] = {}
    for number, node in enumerate(facts.vertices):
        for key in ops.blocks_of(node):
            members = found.setdefault(key, {Role.KERNEL: [], Role.EXTERN: [], Role.HOST: []})
            members[facts.roles[node]].append(number)
    return tuple(Block(tuple(m[Role.KERNEL]), tuple(m[Role.EXTERN])) for m in found.values()
                 if len(m[Role.KERNEL]) + len(m[Role.EXTERN]) > 1)


def answers(partition: Partition) -> tuple[Request, ...]:
    """What became of each context."""
    return tuple(_answer(block, partition) for block in blocks(partition.context.facts))


def _answer(block: Block, partition: Partition) -> Request:
    vertices = partition.context.facts.vertices
    members = sorted(block.kernels + block.externs)
    lines = dict.fromkeys(user_location(vertices[m].stack_trace) for m in members)
    return Request(tuple(vertices[m].name for m in members), tuple(filter(None, lines)),
                   tuple(_refusals(block, partition)))


def _refusals(block: Block, partition: Partition) -> Iterator[Reject]:
    """For each ATen call its reason, and for each kernel but the first what keeps it from those before it."""
    facts, quotient, anchors = partition.context.facts, partition.context.quotient, partition.anchors
    may = partition.around.mode != "library"
    products = [n for n in block.externs if may and quotient.find(n) in anchors]
    for number in block.externs:
        node = facts.vertices[number]
        if number not in products:
            yield extern_reject(node.name, node.name, node, facts)
    roots = sorted({quotient.find(m) for m in (*block.kernels, *products)}, key=quotient.label.__getitem__)
    for i, root in enumerate(roots[1:], 1):
        before = next((r for r in reversed(roots[:i]) if quotient.linked(r, root)), roots[i - 1])
        reject = _between(before, root, partition)
        if reject is not None:
            yield reject


def _between(before: int, after: int, partition: Partition) -> Reject | None:
    """What keeps two parts of a context apart."""
    groups, anchors = partition.groups, partition.anchors
    if before in groups and after in groups:
        return judged(Candidate(groups[before], groups[after], partition.context), LEGAL)
    if before in anchors and after in anchors:
        return judged_products(anchors[before], anchors[after], partition)
    product, beside = (before, after) if before in anchors else (after, before)
    return judged_product(anchors[product], groups[beside], partition)
