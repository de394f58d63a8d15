"""What `fxfuser.fuse()` asked for, and what became of it.

Enters: the marks that nodes carry.  Leaves: the blocks before growth, which tries them first, and after it one
`Request` per block: granted, or the reasons why its nodes are in several segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterator, Mapping

from fxfuser import ops
from fxfuser.errors import user_location
from fxfuser.segmenter.boundaries import extern_reject, judged
from fxfuser.segmenter.facts import Facts, Role
from fxfuser.segmenter.group import Group
from fxfuser.segmenter.rules import LEGAL, Candidate, Context
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


def answers(groups: Mapping[int, Group], context: Context) -> tuple[Request, ...]:
    """What became of each context."""
    return tuple(_answer(block, groups, context) for block in blocks(context.facts))


def _answer(block: Block, groups: Mapping[int, Group], context: Context) -> Request:
    vertices = context.facts.vertices
    members = sorted(block.kernels + block.externs)
    lines = dict.fromkeys(user_location(vertices[m].stack_trace) for m in members)
    return Request(tuple(vertices[m].name for m in members), tuple(filter(None, lines)),
                   tuple(_refusals(block, groups, context)))


def _refusals(block: Block, groups: Mapping[int, Group], context: Context) -> Iterator[Reject]:
    """For each ATen call its reason, and for each kernel but the first what keeps it from those before it."""
    facts, quotient = context.facts, context.quotient
    for number in block.externs:
        node = facts.vertices[number]
        yield extern_reject(node.name, node.name, node, facts)
    roots = sorted({quotient.find(m) for m in block.kernels}, key=quotient.label.__getitem__)
    for i, root in enumerate(roots[1:], 1):
        before = next((r for r in reversed(roots[:i]) if quotient.linked(r, root)), roots[i - 1])
        reject = judged(Candidate(groups[before], groups[root], context), LEGAL)
        if reject is not None:
            yield reject
