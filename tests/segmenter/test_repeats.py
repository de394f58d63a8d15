"""What repeats within a group is resolved once, and counts as often as it is there."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
import torch
from torch import fx

from fxfuser.segmenter import domains
from fxfuser.segmenter.domains import Domains, Verdict
from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.group import Group, atom, merged
from fxfuser.segmenter.repeats import Essence, essence
from fxfuser.segmenter.segmenter import segment
from fxfuser.segmenter.structural_hash import Signatures
from tests.segmenter.graphs import context_of, trace


def whole(graph_module: fx.GraphModule) -> tuple[Group, Facts]:
    """All of a graph as one group."""
    context = context_of(graph_module)
    group, *others = (atom(v, context.facts) for v in range(len(context.facts.vertices)))
    for other in others:
        group = merged(group, other, context.facts, context.quotient)
    return group, context.facts


def essence_of(graph_module: fx.GraphModule) -> Essence:
    group, facts = whole(graph_module)
    return essence([facts.vertices[m] for m in group.members], group.outputs, facts, Signatures(facts))


def verdicts(graph_module: fx.GraphModule) -> tuple[Verdict, Verdict]:
    """As asked during growth, and of the whole group."""
    group, facts = whole(graph_module)
    return Domains(facts).verdict(group), Domains(facts, frozenset(group.members)).verdict(group)


def sums(*xs: torch.Tensor) -> Sequence[Any]:
    """Of each tensor the sum over its rows, and of every third another part."""
    return [t for i, x in enumerate(xs) for t in ((x.sum(0), x * 2) if i % 3 == 0 else (x.sum(0) * 3,))]


def test_equal_parts_are_one_and_the_verdict_is_that_of_all() -> None:
    module = trace(sums, *(torch.randn(512, 256) for _ in range(7)))
    found = essence_of(module)
    assert [n.target for n in found.nodes] == [torch.ops.aten.sum.dim_IntList, torch.ops.aten.mul.Tensor] * 2
    assert [found.copies[n] for n in found.nodes] == [3, 3, 4, 4]
    brief, full = verdicts(module)
    assert brief == full and brief.work > 0


def test_loads_of_copies_weigh_as_much_as_they_are_many() -> None:
    """Runs along the contiguous axis are for groups of which a good part of the bytes lies along it."""
    def function(y: torch.Tensor, *xs: torch.Tensor) -> Sequence[Any]:
        return [y.t() * 2, *(x.sum(0) for x in xs)]

    brief, full = verdicts(trace(function, torch.randn(256, 8192), *(torch.randn(64, 256) for _ in range(40))))
    assert brief == full


def test_parts_that_read_one_tensor_are_one_part() -> None:
    def function(x: torch.Tensor) -> Sequence[Any]:
        return [x.sum(0), x.t().sum(1)]

    assert essence_of(trace(function, torch.randn(64, 32))).copies == {}


def test_parts_of_other_sizes_are_no_copies() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Sequence[Any]:
        return [x.sum(0), y.sum(0)]

    assert essence_of(trace(function, torch.randn(64, 32), torch.randn(65, 32))).copies == {}


def test_growth_resolves_as_often_for_many_siblings_as_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def counted(*arguments: Any) -> Any:
        counts[-1] += 1
        return resolve(*arguments)

    resolve = domains.resolve
    monkeypatch.setattr(domains, "resolve", counted)
    for number in (8, 24):
        counts.append(0)
        found = segment(trace(sums, *(torch.randn(512, 256) for _ in range(number)))).segments
        assert len(found) == 1
    assert counts[0] == counts[1]
