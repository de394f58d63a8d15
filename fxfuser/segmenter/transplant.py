"""A domain for another group of equal structure.

Enters: the domain of one group and the correspondence of its nodes with another's.  Leaves: what resolving
the other would give.  This is how twelve equal layers are resolved once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Mapping

from torch import fx

from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.parts import Parts
from fxfuser.domain.points import Domain, Point, Store, mirrored


def transplant(domain: Domain, nodes: Mapping[fx.Node, fx.Node]) -> Domain:
    """`domain` with each node replaced by its counterpart; axes and indices are shared.  KeyError if one has none."""
    made: dict[int, Point] = {}

    for point in domain.points():
        made[id(point)] = replace(
            point, node=None if point.node is None else nodes[point.node], args=mirrored(point.args, made),
            kwargs=mirrored(point.kwargs, made), operands=mirrored(point.operands, made),
            lookups=mirrored(point.lookups, made))
    stores = tuple(Store(nodes[s.node], s.index, made[id(s.value)]) for s in domain.stores)
    if not isinstance(domain, GemmDomain):
        return replace(domain, stores=stores)
    tail, rowwise = (None if d is None else transplant(d, nodes) for d in (domain.tail, domain.rowwise))
    parts = None if domain.parts is None else Parts(
        transplant(domain.parts.head, nodes), transplant(domain.parts.rest, nodes))
    return replace(domain, stores=stores, tail=tail, passed=tuple(nodes[n] for n in domain.passed), parts=parts,
                   rowwise=rowwise)
