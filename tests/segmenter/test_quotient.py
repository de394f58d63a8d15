"""The dynamic topological order against networkx."""

from __future__ import annotations

import random

import networkx
import pytest

from fxfuser.segmenter import quotient as quotient_module
from fxfuser.segmenter.quotient import Quotient


def joined(graph: networkx.DiGraph, a: int, b: int) -> bool:
    """Whether a path through a third vertex joins the two."""
    rest = graph.copy()
    rest.remove_edges_from([(a, b), (b, a)])
    return networkx.has_path(rest, a, b) or networkx.has_path(rest, b, a)


def check(quotient: Quotient, graph: networkx.DiGraph) -> None:
    roots = list(quotient.roots())
    assert set(roots) == set(graph.nodes)
    assert {(r, s) for r in roots for s in quotient.succs[r]} == set(graph.edges)
    assert {(p, r) for r in roots for p in quotient.preds[r]} == set(graph.edges)
    assert all(quotient.label[a] < quotient.label[b] for a, b in graph.edges)
    assert len({quotient.label[r] for r in roots}) == len(roots)


@pytest.mark.parametrize("gap", [1 << 128, 2])  # with a gap of 2, labels run out and are renewed all the time
@pytest.mark.parametrize("seed", range(40))
def test_merges_exactly_where_no_other_path_joins(seed: int, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotient_module, "GAP", gap)
    r = random.Random(seed)
    count, density = r.randint(2, 40), r.choice([0.05, 0.1, 0.2])
    edges = [(i, j) for i in range(count) for j in range(i + 1, count) if r.random() < density]
    quotient, graph = Quotient(count, edges), networkx.DiGraph(edges)
    graph.add_nodes_from(range(count))
    for _ in range(100):
        roots = list(quotient.roots())
        if len(roots) < 2:
            break
        a, b = r.sample(roots, 2)
        clear = quotient.clearance(a, b)
        assert (clear is None) == joined(graph, a, b)
        if clear is None:
            continue
        root = quotient.merge(clear)
        graph = networkx.contracted_nodes(graph, root, a if root == b else b, self_loops=False)
        assert quotient.find(a) == quotient.find(b) == root
        check(quotient, graph)


def test_path_names_what_lies_between() -> None:
    quotient = Quotient(4, [(0, 1), (1, 3), (0, 3), (0, 2)])
    assert quotient.path(0, 3) == (1,)
    assert quotient.path(0, 2) == ()


def test_vertices_must_come_in_topological_order() -> None:
    with pytest.raises(AssertionError, match="topological"):
        Quotient(2, [(1, 0)])
