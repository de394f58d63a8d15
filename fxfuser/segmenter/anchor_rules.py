"""What must hold for a product's kernel to compute more than the product.

Enters: a `Proposal`: anchors, and groups beside them.  Leaves: the `Reject` of the first rule that does not hold, or
None.  As with the rules of growth, each is a pure function; those that are cheap to ask come first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable

import torch
from torch import fx

from fxfuser import ops
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.parts import light
from fxfuser.domain.points import Reject as DomainReject
from fxfuser.domain.products import matrix_product
from fxfuser.ops import Kind, kind_of
from fxfuser.ops.products import WIDE_PRODUCT
from fxfuser.segmenter.anchors import (
    TILE,
    Anchor,
    Surroundings,
    crossing,
    feeds,
    inputs_of,
    later_of,
    outputs_of,
    passed_of,
    product_size,
    saved,
    time_of,
)
from fxfuser.segmenter.cost import kernel_time, transfer_time
from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.group import Group
from fxfuser.segmenter.rules import FORCED, MAX_NODES, MAX_POINTERS, remove_boundary
from fxfuser.segmenter.segment import Reject

FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32})
REACH = 0.25  # of the time apart: what is estimated to lose no more than this is built and measured
ALLOW = 'options={"gemm": "auto"} lets products take part'
BEHIND = "a product that combines the statistics of another's rows took 1.8 to 3.5 times the usual way on an H200"
FORCE = 'options={"gemm": "fused"} or `with fxfuser.fuse():` around both overrules the cost model'


@dataclass(frozen=True, eq=False)
class Proposal:
    """Anchors that may become one with groups beside them.  `reader` precedes nothing: sides are by the quotient."""

    anchors: tuple[Anchor, ...]
    groups: tuple[Group, ...]
    around: Surroundings

    @property
    def facts(self) -> Facts:
        return self.around.context.facts

    @cached_property
    def whole(self) -> Anchor:
        """What they would become; its root is provisional."""
        return Anchor(
            self.anchors[0].root, tuple(sorted(p for a in self.anchors for p in a.products)),
            (*(g for a in self.anchors for g in a.groups), *self.groups))

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """All parts in the quotient's order."""
        found = (*(a.root for a in self.anchors), *(g.root for g in self.groups))
        return tuple(sorted(found, key=self.around.context.quotient.label.__getitem__))

    @cached_property
    def apart(self) -> float:
        """Microseconds of the parts as they are."""
        rates = self.around.context.rates
        return sum(time_of(a, self.around) for a in self.anchors) + transfer_time(rates, self.read_again) + sum(
            kernel_time(rates, g.moved, g.points, g.work) for g in self.groups)

    @cached_property
    def read_again(self) -> int:
        """Bytes of the product that a kernel behind it reads a second time, as no program holds a whole row."""
        return sum(self.facts.sizing.bytes(n) for n in passed_of(self.whole, self.around) if kind_of(n) is Kind.GEMM)

    @cached_property
    def together(self) -> float:
        """Microseconds of the whole in a kernel of ours."""
        return time_of(self.whole, self.around)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that need not move once they are one."""
        return sum(saved(a, g, self.facts) for a in self.anchors for g in self.groups)

    @cached_property
    def requested(self) -> bool:
        """Whether one context of `fxfuser.fuse()` holds a product and a node of each group."""
        vertices = self.facts.vertices
        sides = [{b for m in members for b in ops.blocks_of(vertices[m])}
                 for members in (*(a.members for a in self.anchors), *(g.members for g in self.groups))]
        return bool(set.intersection(*sides))

    @cached_property
    def later(self) -> tuple[int, ...]:
        """The products that need others of the whole."""
        return later_of(self.whole, self.facts)

    def reject(self, rule: str, reason: str, remedy: str = "") -> Reject:
        """A Reject that names nodes at the border of the first anchor and the first group."""
        beside = self.groups[0] if self.groups else self.anchors[1]
        producer, consumer = crossing(self.anchors[0], beside, self.facts)
        return Reject(rule, producer.name, consumer.name, reason, remedy=remedy)


Rule = Callable[[Proposal], "Reject | None"]


def unfit(node: fx.Node) -> str | None:
    """Why a product can be no anchor, whatever is around it."""
    if matrix_product(node) is None:
        return f"{node.target} is no product of whole matrices that our kernel computes"
    values = [n.meta["val"] for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), torch.Tensor)]
    dtypes = {v.dtype for v in values[node.target is WIDE_PRODUCT:]}
    if len(dtypes) != 1 or not dtypes <= FLOATS:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return f"our kernel multiplies bfloat16, float16 or float32, not {names}"
    if len({v.device for v in values}) > 1 or values[0].device.type not in ("cuda", "cpu"):
        return "its operands are not on one device that Triton serves"
    if any(v.layout is not torch.strided for v in values):
        return "its operands are not all strided tensors"
    return None


def option(proposal: Proposal) -> Reject | None:
    """The option lets products take part."""
    if proposal.around.mode != "library":
        return None
    return proposal.reject("gemm", 'the options "gemm" or "numerics" leave products to the library', ALLOW)


def product(proposal: Proposal) -> Reject | None:
    """The products are of a kind that our kernel computes."""
    for anchor in proposal.anchors:
        for vertex in anchor.products:
            reason = unfit(proposal.facts.vertices[vertex])
            if reason is not None:
                return proposal.reject("gemm", reason)
    return None


def device(proposal: Proposal) -> Reject | None:
    """All parts run on one device."""
    where = proposal.facts.vertices[proposal.anchors[0].products[0]].meta["val"].device
    other = next((g.device for g in proposal.groups if g.device != where), None)
    if other is None:
        return None
    return proposal.reject("device", f"one side runs on {where}, the other on {other}", "put both on one device")


def size(proposal: Proposal) -> Reject | None:
    """One kernel stays within what it can hold."""
    nodes = len(proposal.whole.members)
    if nodes > MAX_NODES:
        return proposal.reject("size", f"{nodes} ops are more than the {MAX_NODES} that one kernel holds")
    members, facts = proposal.whole.members, proposal.facts
    pointers = len(inputs_of(members, facts)) + len(outputs_of(members, facts))
    if pointers <= MAX_POINTERS:
        return None
    return proposal.reject("size", f"{pointers} tensors are more than the {MAX_POINTERS} that one kernel is passed")


def boundary(proposal: Proposal) -> Reject | None:
    """No call of `fxfuser.boundary` lies between the parts."""
    quotient, vertices = proposal.around.context.quotient, proposal.facts.vertices
    roots = proposal.roots
    after = {s for r in roots for s in quotient.succs[r]}
    before = {p for r in roots for p in quotient.preds[r]}
    forced = [vertices[v] for v in sorted(after & before) if vertices[v].target is ops.BOUNDARY]
    return proposal.reject("boundary", FORCED, remove_boundary(forced[0])) if forced else None


def order(proposal: Proposal) -> Reject | None:
    """No path through something else joins two parts."""
    between = path_outside(proposal)
    if between is None:
        return None
    name = proposal.facts.vertices[between].name
    return proposal.reject(
        "order", f"{name} depends on one side and feeds the other",
        f"it has to run between them: compute {name} from what neither side makes, or use it behind both")


def path_outside(proposal: Proposal) -> int | None:
    """A part of the quotient, in none of the proposal's, on a path from one of them to another."""
    quotient, roots = proposal.around.context.quotient, set(proposal.roots)
    last = max(quotient.label[r] for r in roots)
    pending = [s for r in proposal.roots for s in sorted(quotient.succs[r]) if s not in roots]
    seen = set(pending)
    while pending:
        group = pending.pop()
        for s in sorted(quotient.succs[group]):
            if s in roots:
                return group
            if s not in seen and quotient.label[s] < last:
                seen.add(s)
                pending.append(s)
    return None


def overwrites(proposal: Proposal) -> Reject | None:
    """The whole scatters no values into memory that it reads, or scatters others into: programs run in any order."""
    facts = proposal.facts
    if not facts.storage:
        return None
    members = proposal.whole.members
    written = [facts.storage[n] for n in outputs_of(members, facts) if n.target is ops.SCATTER_INTO]
    if len(written) == len(set(written)) and not set(written) & {facts.storage[n] for n in inputs_of(members, facts)}:
        return None
    return proposal.reject("overwrites", "one side stores into a tensor that the other reads or writes")


def updates(proposal: Proposal) -> Reject | None:
    """Nothing in it is written over an input that others read first."""
    if proposal.facts.updates.isdisjoint(proposal.whole.members):
        return None
    return proposal.reject("updates", "one side is written over an input that other kernels read first")


def chain(proposal: Proposal) -> Reject | None:
    """Of two products, one after the other, the second has tiles for all multiprocessors, neither waits for memory, for
    which there are other kernels, and someone asks for it."""
    if not proposal.later:
        return None
    if any(light(proposal.facts.vertices[p]) for p in proposal.whole.products):
        return proposal.reject("gemm", "one of the two products reads so much for its sums that these are better split")
    second = product_size(proposal.later[0], proposal.facts)
    tiles = second.batch * -(-second.rows // TILE) * -(-second.columns // TILE)
    if tiles < proposal.around.context.rates.processors:
        return proposal.reject("gemm", f"the second product has but {tiles} tiles, so that its sum is better split")
    if not proposal.requested:
        return proposal.reject("gemm", BEHIND, "`with fxfuser.fuse():` around both joins them all the same")
    return None


def domain(proposal: Proposal) -> Reject | None:
    """The whole has tiles in which each program can finish what it starts."""
    found = domain_of(proposal.whole, proposal.around)
    if isinstance(found, GemmDomain):
        return None
    fed = any(feeds(g, proposal.anchors[0], proposal.facts) for g in proposal.groups[:1])
    rule = "gemm" if proposal.later else "prologue" if fed else "epilogue"
    return proposal.reject(rule, found.reason, found.remedy)


def domain_of(anchor: Anchor, around: Surroundings) -> GemmDomain | DomainReject:
    """The domain of an anchor with its groups."""
    facts = around.context.facts
    nodes = tuple(facts.vertices[m] for m in anchor.members)
    return around.domains.domain(nodes, outputs_of(anchor.members, facts))


def profit(proposal: Proposal) -> Reject | None:
    """A kernel of ours is faster than the library's and kernels, or near enough to be worth a measurement."""
    if proposal.around.mode == "fused" or proposal.requested:
        return None
    alone = not any(a.fused for a in proposal.anchors)
    if proposal.together <= proposal.apart * (1 + REACH * alone):
        return None
    return proposal.reject(
        "gemm", f"our kernel is estimated at {proposal.together:.1f} us, the library's product"
        f" and kernels at {proposal.apart:.1f} us", FORCE)


RULES: tuple[Rule, ...] = (option, product, device, boundary, overwrites, updates, order, size, chain, domain, profit)


def first_reject(proposal: Proposal) -> Reject | None:
    """The Reject of the first rule that does not hold."""
    for rule in RULES:
        found = rule(proposal)
        if found is not None:
            return found
    return None


def standing(anchor: Anchor, around: Surroundings) -> Anchor | None:
    """The anchor as one that has a kernel of ours; None where it stays the library's call.

    A product that nothing was fused with is worth one where it waits for memory: the library draws no more than half of
    the bandwidth there.
    """
    if anchor.fused:
        return anchor
    facts = around.context.facts
    node = facts.vertices[anchor.products[0]]
    if around.mode == "library" or unfit(node) is not None or not light(node):
        return None
    own = replace(anchor, own=True)
    if not product_size(anchor.products[0], facts).few or not isinstance(domain_of(own, around), GemmDomain):
        return None
    return own


def prefers_fused(anchor: Anchor, around: Surroundings) -> bool:
    """Whether the cost model, the option or `fxfuser.fuse()` prefers the anchor's kernel to what it is made of."""
    if anchor.own:
        return around.mode == "fused" or time_of(anchor, around) < time_of(replace(anchor, own=False), around)
    alone = tuple(Anchor(p, (p,)) for p in anchor.products)
    whole = Proposal(alone, anchor.groups, around)
    return around.mode == "fused" or whole.requested or whole.together < whole.apart
