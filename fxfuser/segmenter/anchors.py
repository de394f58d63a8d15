"""Matrix products as anchors: whole groups around one may be computed by its kernel.

Enters: products (EXTERN after growth) and the groups that growth left.  Leaves: an `Anchor`, the product with what it
has absorbed; what it reads and writes; its domain; and what it takes.  Invariant: an anchor's groups are whole: apart,
each of them is a kernel before or behind the library's product, with the same tensors at the border.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import Collection, Hashable, Iterator, Sequence

import torch
from torch import fx

from fxfuser.domain import views
from fxfuser.domain.chained import later_products, product_domain
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.parts import light
from fxfuser.domain.points import Reject
from fxfuser.domain.products import matrix_product, rounds_to_tf32
from fxfuser.segmenter.cost import (
    FusedWork,
    ProductSize,
    fused_time,
    kernel_time,
    library_time,
    parts_time,
    rows_time,
    transfer_time,
)
from fxfuser.segmenter.facts import Facts, Role
from fxfuser.segmenter.group import Group, read_bytes
from fxfuser.segmenter.rules import Context
from fxfuser.segmenter.structural_hash import Shape, Signatures
from fxfuser.segmenter.transplant import transplant

TILE = 128  # rows or columns of a product that share a computed factor


@dataclass(frozen=True, eq=False)
class Anchor:
    """Matrix products, one as a rule, and the whole groups that their kernel also computes.

    A product that absorbed nothing may still have a kernel of its `own`.
    """

    root: int
    products: tuple[int, ...]
    groups: tuple[Group, ...] = ()
    own: bool = False

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The vertices in graph order."""
        return tuple(sorted((*self.products, *(m for g in self.groups for m in g.members))))

    @property
    def fused(self) -> bool:
        """Whether there is more than a product that runs as its ATen call."""
        return self.own or bool(self.groups)


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What proposals may look at: the context of growth, the option `gemm`, domains resolved so far."""

    context: Context
    mode: str
    domains: GemmDomains


class GemmDomains:
    """Domains of anchors, resolved once for each distinct structure."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._signatures = Signatures(facts)
        self._resolved: dict[Hashable, tuple[Shape, GemmDomain | Reject]] = {}

    def domain(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> GemmDomain | Reject:
        """The domain of nodes in graph order, whose results `outputs` are stored."""
        mine = self._signatures.shape(nodes, outputs)
        known = self._resolved.get(mine.key)
        if known is None:
            known = self._resolved[mine.key] = (mine, product_domain(nodes, outputs))
        shape, found = known
        if isinstance(found, Reject) or shape.nodes == mine.nodes:
            return found
        moved = transplant(found, dict(zip(shape.nodes, mine.nodes)))
        assert isinstance(moved, GemmDomain)
        return moved


# ---------------------------------------------------------------- what an anchor reads and writes


def outputs_of(members: Sequence[int], facts: Facts) -> tuple[fx.Node, ...]:
    """The nodes of these vertices, in graph order, that something outside reads, or nothing at all."""
    inside = frozenset(facts.vertices[m] for m in members)
    return tuple(n for n in (facts.vertices[m] for m in members) if _written(n, inside, facts))


def _written(node: fx.Node, inside: frozenset[fx.Node], facts: Facts) -> bool:
    pending, seen = list(node.users), set[fx.Node]()
    read = False
    while pending:
        user = pending.pop()
        if user in seen:
            continue
        seen.add(user)
        if facts.roles[user] is Role.SEEN:
            pending.extend(user.users)
        elif user not in inside:
            return True
        else:
            read = True
    return not read


def inputs_of(members: Sequence[int], facts: Facts) -> tuple[fx.Node, ...]:
    """The tensors that these vertices read from outside, in the order in which they first do."""
    inside = frozenset(facts.vertices[m] for m in members)
    return tuple(dict.fromkeys(
        r.source for m in members for r in facts.reads[facts.vertices[m]] if r.source not in inside))


def crossing(anchor: Anchor, group: Group | Anchor, facts: Facts) -> tuple[fx.Node, fx.Node]:
    """A tensor of one that the other reads, and its first reader there; else their first nodes."""
    found = border(anchor.members, group.members, facts) or border(group.members, anchor.members, facts)
    return found or (facts.vertices[anchor.products[0]], facts.vertices[group.members[0]])


def border(makers: Sequence[int], readers: Sequence[int], facts: Facts) -> tuple[fx.Node, fx.Node] | None:
    """A tensor that one side makes and the other reads, through views, and its first reader there."""
    made = {facts.vertices[m] for m in makers}
    for reader in readers:
        for read in facts.reads[facts.vertices[reader]]:
            source = read.source.all_input_nodes[0] if read.source.target is operator.getitem else read.source
            if source in made:
                return read.source, facts.vertices[reader]
    return None


def feeds(group: Group, anchor: Anchor, facts: Facts) -> bool:
    """Whether a product of the anchor multiplies what the group makes: then it is part of the prologue."""
    made = {facts.vertices[m] for m in group.members}
    factors = [matrix_product(facts.vertices[p]) for p in anchor.products]
    return any(views.source(n) in made for f in factors if f is not None for n in (f.left, f.right))


# ---------------------------------------------------------------- what it costs


def product_size(vertex: int, facts: Facts) -> ProductSize:
    """The product in numbers, symbols replaced by their hints."""
    factors = matrix_product(facts.vertices[vertex])
    assert factors is not None, "an anchor is a product"
    number, shape = facts.sizing.number, facts.sizing.shape
    *batch, rows, depth = map(number, shape(factors.left))
    dtype = factors.left.meta["val"].dtype
    precise = dtype is torch.float32 and not rounds_to_tf32()
    return ProductSize(batch[0] if batch else 1, rows, number(shape(factors.right)[-1]), depth,
                       dtype is not torch.float32, precise)


def time_of(anchor: Anchor, around: Surroundings) -> float:
    """Microseconds of an anchor: the library's where it is alone, else those of our kernel."""
    facts, rates = around.context.facts, around.context.rates
    outputs = outputs_of(anchor.members, facts)
    operands: set[fx.Node] = set()
    main = 0
    inside = {facts.vertices[m] for m in anchor.members}
    first = {m for g in anchor.groups if feeds(g, anchor, facts) for m in g.members}
    for vertex in (*anchor.products, *first):
        for read in facts.reads[facts.vertices[vertex]]:
            if read.source not in inside and read.source not in operands:
                operands.add(read.source)
                main += read_bytes(read.source, frozenset({read.via}), facts)
    after = sum(facts.sizing.bytes(n) for n in outputs)
    for group in anchor.groups:
        after += sum(read_bytes(s, v, facts) for s, v in group.reads.items() if s not in inside | operands)
    if not anchor.fused:
        return library_time(rates, product_size(anchor.products[0], facts), main + after)
    if later := later_of(anchor, facts):
        return _chain_time(anchor, later, around)
    sizes = [product_size(p, facts) for p in anchor.products]
    found = _light_domain(anchor, around)
    apart = float("inf") if found is None else _apart_time(found, anchor, sizes, Traffic(main, after), around)
    if found is not None and not found.tiled:
        return apart
    tiles = max(1, min(sizes[0].rows, sizes[0].columns) // TILE)  # in each of which a factor is computed anew
    work = sum(g.work * (tiles if m in first else 1) for g in anchor.groups for m in g.members[:1])
    # the main loops of several products run one after the other
    more = sum(fused_time(rates, p, FusedWork(prologue=bool(first))) - rates.launch for p in sizes[1:])
    finish = rates.launch if any(g.reduces for g in anchor.groups) else 0.0
    passed = passed_of(anchor, around)
    if passed:  # the product is written, and read again
        moved = sum(facts.sizing.bytes(n) for n in passed if n not in outputs)
        finish += rates.launch + transfer_time(rates, 2 * moved)
    return min(apart, finish + more + fused_time(rates, sizes[0], FusedWork(main, after, work, bool(first))))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a product's main loop reads, and those that all else moves."""

    main: int
    after: int


def _apart_time(domain: GemmDomain, anchor: Anchor, sizes: Sequence[ProductSize], moved: Traffic,
                around: Surroundings) -> float:
    """Microseconds of two kernels, or of one that has loops for tiles; infinite where there are no such."""
    rates = around.context.rates
    if domain.rowwise is not None:
        return rows_time(rates, moved.main + moved.after)
    if domain.parts is None:
        return float("inf")
    points = max((g.points for g in anchor.groups), default=sizes[0].sums)
    behind = moved.after + sum(p.sums for p in sizes)
    return parts_time(rates, sizes, moved.main) + kernel_time(
        rates, behind, points, sum(g.work for g in anchor.groups))


def _light_domain(anchor: Anchor, around: Surroundings) -> GemmDomain | None:
    """The domain of an anchor whose products may leave their sums to another kernel."""
    facts = around.context.facts
    if not all(light(facts.vertices[p]) for p in anchor.products):
        return None
    nodes = tuple(facts.vertices[m] for m in anchor.members)
    found = around.domains.domain(nodes, outputs_of(anchor.members, facts))
    return found if isinstance(found, GemmDomain) else None


def later_of(anchor: Anchor, facts: Facts) -> tuple[int, ...]:
    """The products of an anchor that need another of them: a second kernel computes those."""
    if len(anchor.products) < 2:
        return ()
    found = later_products([facts.vertices[m] for m in anchor.members])
    return tuple(p for p in anchor.products if facts.vertices[p] in found)


def _chain_time(anchor: Anchor, later: Sequence[int], around: Surroundings) -> float:
    """Microseconds of two kernels, the second of which reads what the first one's tiles pass to it."""
    facts, rates = around.context.facts, around.context.rates
    passed, inside = passed_of(anchor, around), {facts.vertices[m] for m in anchor.members}
    first = [p for p in anchor.products if p not in later]
    moved = sum(facts.sizing.bytes(n) for n in passed)
    stored = sum(facts.sizing.bytes(n) for n in outputs_of(anchor.members, facts) if n not in passed)
    lefts = [views.source(f.left) for p in later if (f := matrix_product(facts.vertices[p])) is not None]
    prologue = any(n in inside and n not in passed for n in lefts)
    sizes = product_size(first[0], facts), product_size(later[0], facts)
    again = sum(g.work for g in anchor.groups) * max(1, sizes[1].columns // TILE) if prologue else 0.0
    beside = sum(read_bytes(s, v, facts) for g in anchor.groups for s, v in g.reads.items() if s not in inside)
    head = FusedWork(_factor_bytes(first, inside, facts), beside + moved, sum(g.work for g in anchor.groups))
    tail = FusedWork(_factor_bytes(later, inside, facts) + moved, stored, again, prologue)
    return fused_time(rates, sizes[0], head) + fused_time(rates, sizes[1], tail)


def _factor_bytes(products: Sequence[int], inside: Collection[fx.Node], facts: Facts) -> int:
    reads = {r.source: r.via for p in products for r in facts.reads[facts.vertices[p]] if r.source not in inside}
    return sum(read_bytes(s, frozenset({v}), facts) for s, v in reads.items())


def passed_of(anchor: Anchor, around: Surroundings) -> tuple[fx.Node, ...]:
    """What an anchor's tiles pass to a kernel behind them, where they need one."""
    if not any(g.reduces for g in anchor.groups):
        return ()
    facts = around.context.facts
    nodes = tuple(facts.vertices[m] for m in anchor.members)
    found = around.domains.domain(nodes, outputs_of(anchor.members, facts))
    return found.passed if isinstance(found, GemmDomain) else ()


def saved(anchor: Anchor, group: Group, facts: Facts) -> int:
    """Bytes that need not move once the anchor computes the group."""
    return sum(_saved(anchor.members, group.members, facts)) + sum(_saved(group.members, anchor.members, facts))


def _saved(makers: Sequence[int], readers: Sequence[int], facts: Facts) -> Iterator[int]:
    made = {facts.vertices[m] for m in makers}
    inside = frozenset(made | {facts.vertices[m] for m in readers})
    vias: dict[fx.Node, set[fx.Node]] = {}
    for reader in readers:
        for read in facts.reads[facts.vertices[reader]]:
            if read.source in made:
                vias.setdefault(read.source, set()).add(read.via)
    for source, found in vias.items():
        yield read_bytes(source, frozenset(found), facts)
        if not _written(source, inside, facts):
            yield facts.sizing.bytes(source)
