"""What must hold for two groups to become one.

Each rule is a pure function of a `Candidate` (the two groups and what is known around them) that returns a
`Reject` or None.  `RULES` is ordered by price: the first Reject ends the questioning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Mapping, Sequence

from torch import fx

from fxfuser import ops
from fxfuser.errors import user_location
from fxfuser.segmenter.cost import DeviceRates, kernel_time
from fxfuser.segmenter.domains import Domains, Verdict
from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.group import Group, covering_frame, merged, saved_bytes, shared_sizes
from fxfuser.segmenter.quotient import Clearance, Quotient
from fxfuser.segmenter.segment import Reject

MAX_NODES = 256  # Triton's compile time grows faster than the text; past this, values spill
MAX_POINTERS = 64  # each takes two registers of at most 255 in every thread
FUSE = "wrap both sides in `with fxfuser.fuse():`, which overrules the cost model"
NEAR = 32  # vertices; siblings further apart would keep each other's operands alive for too long
SAME = "compute the two sides over the same dimensions"
FORCED = "a call of fxfuser.boundary lies between the two"


@dataclass(frozen=True, eq=False)
class Context:
    """What rules may look at besides the two groups.  `exact` vertices are those whose frames are not trusted."""

    facts: Facts
    quotient: Quotient
    domains: Domains
    rates: DeviceRates
    exact: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Candidate:
    """Two groups that might merge; `a` precedes `b` in the quotient's order."""

    a: Group
    b: Group
    context: Context

    @cached_property
    def linked(self) -> bool:
        """Whether an edge joins them; siblings otherwise."""
        return self.context.quotient.linked(self.a.root, self.b.root)

    @cached_property
    def clearance(self) -> Clearance | None:
        """What the quotient needs to merge them."""
        return self.context.quotient.clearance(self.a.root, self.b.root)

    @cached_property
    def framed(self) -> Group:
        """The merged group as far as it is known without resolving."""
        return merged(self.a, self.b, self.context.facts, self.context.quotient)

    @cached_property
    def verdict(self) -> Verdict | None:
        """What resolving the merged group says; None where its frame says enough."""
        if self.framed.frame is not None and self.context.exact.isdisjoint(self.framed.members):
            return None
        return self.context.domains.verdict(self.framed)

    @cached_property
    def merged(self) -> Group:
        """The merged group with the points and the work of its domain."""
        if self.verdict is None:
            return self.framed
        resolved = replace(self.framed, points=self.verdict.points, work=self.verdict.work)
        return replace(resolved, frame=covering_frame(resolved, self.verdict.programs, self.context.facts))

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes that need not move once they are one."""
        return saved_bytes(self.a, self.b, self.context.facts, self.context.quotient)

    def gain(self, points: int, work: float) -> float:
        """Microseconds saved if the merged group has these independent points and this much work."""
        rates = self.context.rates
        apart = sum(kernel_time(rates, g.moved, g.points, g.work) for g in (self.a, self.b))
        return apart - kernel_time(rates, self.framed.moved, points, work)

    def reject(self, rule: str, reason: str, remedy: str = "") -> Reject:
        """A Reject that names the last node of `a` and the first of `b`."""
        vertices = self.context.facts.vertices
        return Reject(rule, vertices[self.a.members[-1]].name, vertices[self.b.members[0]].name, reason, remedy=remedy)


Rule = Callable[[Candidate], "Reject | None"]


def device(candidate: Candidate) -> Reject | None:
    """Both run on one device."""
    a, b = candidate.a.device, candidate.b.device
    if a == b:
        return None
    return candidate.reject("device", f"one side runs on {a}, the other on {b}", "put both tensors on one device")


def size(candidate: Candidate) -> Reject | None:
    """One kernel stays within the registers and the compile time that it can have."""
    nodes = len(candidate.a.members) + len(candidate.b.members)
    if nodes > MAX_NODES:
        return candidate.reject("size", f"{nodes} ops are more than the {MAX_NODES} that one kernel holds",
            f"do with {nodes - MAX_NODES} ops less on the two sides")
    if candidate.a.pointers + candidate.b.pointers <= MAX_POINTERS or candidate.framed.pointers <= MAX_POINTERS:
        return None
    return candidate.reject(
        "size", f"{candidate.framed.pointers} tensors are more than the {MAX_POINTERS} that one kernel is passed",
        f"pass {candidate.framed.pointers - MAX_POINTERS} tensors less: small ones can be parts of one")


def near(candidate: Candidate) -> Reject | None:
    """Siblings lie close together, so that one launch for both does not keep operands alive for long."""
    if candidate.linked or _distance(candidate.a.members, candidate.b.members) <= NEAR:
        return None
    return candidate.reject(
        "near", f"unrelated kernels more than {NEAR} ops apart: merging would keep operands alive",
        f"compute them closer together, or {FUSE}")


def _distance(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """The least distance of a member of one sorted tuple from one of the other."""
    i = j = 0
    best = abs(left[0] - right[0])
    while i < len(left) and j < len(right) and best > 1:
        best = min(best, abs(left[i] - right[j]))
        if left[i] < right[j]:
            i += 1
        else:
            j += 1
    return best


def extents(candidate: Candidate) -> Reject | None:
    """Siblings have program dimensions in common, enough of them that one launch pays."""
    if candidate.linked:
        return None
    a, b, context = candidate.a, candidate.b, candidate.context
    if a.frame is not None and b.frame is not None and a.frame.program() == b.frame.program():
        return None
    shared = shared_sizes(a.extent, b.extent)
    common = context.facts.sizing.product(shared)
    if common >= min(context.rates.processors, max(a.points, b.points)):
        return None
    # the domain has no more points than the sizes in common: before it is resolved, what it could gain at best;
    # other sizes must not grow from call to call, since fewer programs would have to do all that they add
    fixed = all(isinstance(s, int) for s in (*a.extent, *b.extent) if s not in shared)
    if fixed and candidate.gain(common, a.work + b.work) > 0:
        return None
    rows = f"share {common} rows of programs only" if shared else "share no rows of programs"
    return candidate.reject("extents", f"independent kernels over different sizes {rows}",
                            f"give both the same leading sizes, or {FUSE}")


def boundary(candidate: Candidate) -> Reject | None:
    """No call of `fxfuser.boundary` lies between the two."""
    quotient, vertices = candidate.context.quotient, candidate.context.facts.vertices
    between = quotient.succs[candidate.a.root] & quotient.preds[candidate.b.root]
    forced = [vertices[v] for v in sorted(between) if vertices[v].target is ops.BOUNDARY]
    if not forced:
        return None
    return candidate.reject("boundary", FORCED, remove_boundary(forced[0]))


def remove_boundary(node: fx.Node) -> str:
    """What removes the boundary that this node forces."""
    where = user_location(node.stack_trace)
    return f"remove fxfuser.boundary{f' at {where}' if where else ''}"


def order(candidate: Candidate) -> Reject | None:
    """No path through a third group joins the two."""
    if candidate.clearance is not None:
        return None
    return candidate.reject(
        "order", "something between the two depends on the first and feeds the second",
        "it has to run between them: compute it from what the first does not make, or use it behind the second")


def overwrites(candidate: Candidate) -> Reject | None:
    """Neither scatters values into memory that the other reads or writes: their programs run in any order."""
    storage = candidate.context.facts.storage
    a, b = candidate.a, candidate.b
    if not storage or not (_scattered_into(a, storage) & _touched(b, storage)
                           or _scattered_into(b, storage) & _touched(a, storage)):
        return None
    return candidate.reject(
        "overwrites", "one stores into a tensor that the other reads or writes: programs of one kernel have no order",
        "read what is stored, not the tensor, or read the tensor in another kernel")


def updates(candidate: Candidate) -> Reject | None:
    """Both or neither are written over inputs that others read first, for which a kernel of such results waits."""
    known, groups = candidate.context.facts.updates, (candidate.a, candidate.b)
    if not known or len({known.isdisjoint(g.members) for g in groups}) == 1:
        return None
    return candidate.reject("updates", "one is written over an input that other kernels read first")


def _scattered_into(group: Group, storage: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    return {storage[n] for n in group.outputs if n.target is ops.SCATTER_INTO}


def _touched(group: Group, storage: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    return {storage[n] for n in group.reads} | _scattered_into(group, storage)


def halves(candidate: Candidate) -> Reject | None:
    """They are not the two halves of a split reduction, which one kernel would join again with a program per result."""
    known = candidate.context.facts.halves
    if not known or not candidate.linked:
        return None
    sides = [{known[m] for m in group.members if m in known} for group in (candidate.a, candidate.b)]
    torn = next((split for split, first in sides[0] if (split, not first) in sides[1]), None)
    if torn is None:
        return None
    return candidate.reject("halves", f"programs share the long rows of {torn}; the next kernel joins their results",
                            FUSE)


def domain(candidate: Candidate) -> Reject | None:
    """The merged group has an iteration space."""
    verdict = candidate.verdict
    if verdict is None or verdict.reject is None:
        return None
    return candidate.reject("domain", verdict.reject.reason, verdict.reject.remedy or SAME)


def parallelism(candidate: Candidate) -> Reject | None:
    """The bytes saved outweigh the programs lost."""
    merged, work = candidate.merged, candidate.a.work + candidate.b.work
    if candidate.gain(merged.points, work) > 0:
        return None
    return candidate.reject(
        "parallelism", f"one kernel would have {merged.points} independent programs"
        f" where the two have {candidate.a.points} and {candidate.b.points}", FUSE)


def recompute(candidate: Candidate) -> Reject | None:
    """Values that the merged group computes more than once cost less than the bytes saved."""
    merged = candidate.merged
    if candidate.gain(merged.points, merged.work) > 0:
        return None
    if candidate.verdict is None:  # a frame only bounds the work from above
        merged = replace(merged, work=candidate.context.domains.verdict(merged).work)
        if candidate.gain(merged.points, merged.work) > 0:
            return None
    before = candidate.a.work + candidate.b.work
    return candidate.reject(
        "recompute", f"one kernel would compute {merged.work / max(before, 1):.1f} times as much", FUSE)


RULES: tuple[Rule, ...] = (
    device, size, near, extents, boundary, halves, overwrites, updates, order, domain, parallelism, recompute)
LEGAL: tuple[Rule, ...] = (device, size, boundary, overwrites, updates, order, domain)  # the others ask whether it pays


def first_reject(candidate: Candidate, rules: Sequence[Rule] = RULES) -> Reject | None:
    """The Reject of the first rule that does not hold; None where the two may merge (by RULES: with gain)."""
    for rule in rules:
        found = rule(candidate)
        if found is not None:
            return found
    return None
