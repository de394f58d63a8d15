"""A domain for another group of equal structure.

Enters: the domain of one group and the correspondence of its nodes with another's.  Leaves: what resolving
the other would give.  This is how twelve equal layers are resolved once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Mapping

from torch import fx

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.points import Domain, Point, Store


def transplant(domain: Domain, nodes: Mapping[fx.Node, fx.Node]) -> Domain:
    """`domain` with each node replaced by its counterpart; axes and indices are shared.  KeyError if one has none."""
    made: dict[int, Point] = {}

    def counterpart(value: Any) -> Any:
        if isinstance(value, Point):
            return made[id(value)]
        if isinstance(value, tuple):
            return tuple(map(counterpart, value))
        return value

    for point in domain.points():
        made[id(point)] = replace(
            point, node=None if point.node is None else nodes[point.node], args=counterpart(point.args),
            kwargs=counterpart(point.kwargs), operands=counterpart(point.operands),
            lookups=counterpart(point.lookups))
    stores = tuple(Store(nodes[s.node], s.index, made[id(s.value)]) for s in domain.stores)
    if not isinstance(domain, GemmDomain):
        return replace(domain, stores=stores)
    tail = None if domain.tail is None else transplant(domain.tail, nodes)
    return replace(domain, stores=stores, tail=tail, passed=tuple(nodes[n] for n in domain.passed))
