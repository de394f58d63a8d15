"""The domain of a matrix product whose operand or epilogue needs what another product's whole rows have in common.

    h = res + x @ w1.T;  r = rsqrt(mean(h * h) + eps)         head   h and the states of mean(h * h)
    p = (h * r) @ w2.T                                         tail   prologue h * r, or with the statistics deferred
    p = (h @ w2.T) * r                                                epilogue * r

Enters: nodes with products of which some need the others.  Leaves: the `GemmDomain` of the first products, the head,
with the `GemmDomain` of the later ones as its tail.  What the tail reads of the head is passed: the results of
reductions, and the narrowest tensors from which all else follows, each row of which is known before its results are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Collection, Iterator, Sequence

import torch
from torch import fx

from fxfuser.domain.gemm import GemmDomain, above, gemm_domain, made_of, of_elements, one_pass, used_by
from fxfuser.domain.pattern import ordered
from fxfuser.domain.points import Reject
from fxfuser.ops import Kind, kind_of

aten = torch.ops.aten


def product_domain(nodes: Collection[fx.Node], outputs: Sequence[fx.Node]) -> GemmDomain | Reject:
    """The domain of `nodes`, at least one of which is a product, whose results `outputs` are stored."""
    in_order = ordered(nodes)
    later = later_products(in_order)
    return _chain(in_order, outputs, later) if later else gemm_domain(nodes, outputs)


def later_products(nodes: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The products among nodes in graph order that need another of these."""
    products = [n for n in nodes if kind_of(n) is Kind.GEMM]
    if len(products) < 2:
        return frozenset()
    inside = frozenset(nodes)
    fed = _fed_by(nodes, frozenset(products), inside)
    return frozenset(n for n in products if any(m in fed for m in made_of(n, inside)))


def _fed_by(nodes: Sequence[fx.Node], sources: frozenset[fx.Node], inside: frozenset[fx.Node]) -> frozenset[fx.Node]:
    """The sources and what depends on them."""
    found: set[fx.Node] = set()
    for node in nodes:
        if node in sources or any(m in found for m in made_of(node, inside)):
            found.add(node)
    return frozenset(found)


def _chain(nodes: list[fx.Node], outputs: Sequence[fx.Node], later: frozenset[fx.Node]) -> GemmDomain | Reject:
    inside = frozenset(nodes)
    first = frozenset(n for n in nodes if kind_of(n) is Kind.GEMM) - later
    fed, behind = _fed_by(nodes, first, inside), _fed_by(nodes, later, inside)
    reductions = {n for n in nodes if kind_of(n) is Kind.REDUCTION and n in fed and n not in behind
                  and of_elements(n, next(iter(first)))}
    results = frozenset(n for n in reductions if any(u not in reductions for u in used_by(n, inside)))
    if not results:
        return Reject("a product needs another's rows, and nothing is reduced between them", "")
    last = [n for n in outputs if n in behind]
    needed = above(last, inside, results)
    late = (_fed_by(nodes, results, inside) - reductions | behind) & needed
    passed = (*dict.fromkeys(_borders(nodes, late, fed - late - reductions, inside)),
              *(n for n in nodes if n in results and n in needed))
    early = [n for n in outputs if n not in behind and n not in passed]
    head = one_pass(_within(nodes, above((*passed, *early), inside)), (*passed, *early))
    if isinstance(head, Reject):
        return head
    tail = one_pass(_within(nodes, above(last, inside, frozenset(passed)).difference(passed)), last)
    if isinstance(tail, Reject):
        return tail
    if any(True for _ in tail.folds()):
        return Reject("the second of two products is reduced itself", "")
    return replace(head, tail=tail, passed=passed)


def _within(nodes: Sequence[fx.Node], chosen: Collection[fx.Node]) -> list[fx.Node]:
    return [n for n in nodes if n in chosen]


def _borders(nodes: Sequence[fx.Node], late: frozenset[fx.Node], early: frozenset[fx.Node], inside: frozenset[fx.Node],
             ) -> Iterator[fx.Node]:
    """What the late nodes read of the early ones, before it was widened."""
    for node in nodes:
        if node in late:
            for read in made_of(node, inside):
                if read in early:
                    yield _narrowest(read, early, inside)


def _narrowest(node: fx.Node, early: frozenset[fx.Node], inside: frozenset[fx.Node]) -> fx.Node:
    while node.target is aten._to_copy.default:
        made = made_of(node, inside)
        if len(made) != 1 or made[0] not in early or \
                made[0].meta["val"].dtype.itemsize >= node.meta["val"].dtype.itemsize:
            break
        node = made[0]
    return node
