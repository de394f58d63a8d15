"""Products and what is fused around them: values, the axes of a tile, and what no tile holds beside what one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from fxfuser.domain.gemm import GemmDomain, gemm_domain
from fxfuser.domain.index import Axis
from fxfuser.domain.points import PointKind, Reject
from fxfuser.ops import Kind, kind_of

from .groups import Traced, compare, trace

ids = torch.tensor([5, 0, 3, 3])
M, N, K = 12, 48, 10
PLAIN = ((M, K), (K, N))


def tensors(shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def traced(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]] = ()) -> Traced:
    found = trace(fn, args, dynamic)
    outputs = next(n for n in found.graph.graph.nodes if n.op == "output").args[0]
    outputs = [outputs] if isinstance(outputs, fx.Node) else list(outputs)
    nodes = [n for n in found.graph.graph.nodes if kind_of(n) not in (None, Kind.VIEW)]
    return Traced(found.graph, nodes, outputs)


def domain_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> GemmDomain | Reject:
    found = traced(fn, tensors(shapes or PLAIN))
    return gemm_domain(found.nodes, found.outputs)


def accepted(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> GemmDomain:
    """The domain, which computes what the function does."""
    args = tensors(shapes or PLAIN)
    found = traced(fn, args)
    domain = gemm_domain(found.nodes, found.outputs)
    assert isinstance(domain, GemmDomain), domain
    compare(found, domain, args)
    return domain


def refused(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Reject:
    domain = domain_of(fn, *shapes)
    assert isinstance(domain, Reject), f"accepted:\n{domain}"
    return domain


def sizes(axes: Sequence[Axis]) -> list[Any]:
    return [a.size for a in axes]


def reductions(domain: GemmDomain) -> list[frozenset[Axis]]:
    return [frozenset(a for axes in p.axes for a in axes) for p in domain.points() if p.kind is PointKind.REDUCE]


def logsumexp(h: torch.Tensor) -> torch.Tensor:
    m = h.amax(1, keepdim=True)
    return (h - m).exp().sum(1, keepdim=True).log() + m


# ---------------------------------------------------------------- axes

AXES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[list[int], ...]]] = {
    "mm": (lambda x, w: x @ w, PLAIN, ([], [12], [48], [10])),
    "transposed factors": (lambda x, w: x.t() @ w.t(), ((10, 12), (48, 10)), ([], [12], [48], [10])),
    "transposed result": (lambda x, w: (x @ w).t().relu(), PLAIN, ([], [12], [48], [10])),
    "bmm": (lambda x, w: torch.bmm(x, w).exp(), ((4, 6, 5), (4, 5, 7)), ([4], [6], [7], [5])),
    "one right factor for a batch": (lambda x, w: torch.bmm(x, w.expand(3, 5, 7)), ((3, 6, 5), (5, 7)),
                                     ([3], [6], [7], [5])),
    "rows of two dimensions": (lambda x, w: (x.view(12, 10) @ w).view(3, 4, 48).relu(), ((3, 4, 10), (10, 48)),
                               ([], [12], [48], [10])),
    "sum over two dimensions": (lambda x, w: x.permute(2, 0, 1).reshape(7, 24) @ w.view(24, 5), ((4, 6, 7), (4, 6, 5)),
                                ([], [7], [5], [24])),
    "heads": (lambda x, w: (x @ w).view(3, 4, 6, 8).transpose(1, 2).contiguous(), PLAIN, ([], [3, 4], [6, 8], [10])),
    "gated halves": (lambda x, w: (h := x @ w)[:, :24].sigmoid() * h[:, 24:], PLAIN, ([], [12], [24], [10])),
    "gated neighbours": (lambda x, w: (h := x @ w)[:, ::2].sigmoid() * h[:, 1::2], PLAIN, ([], [12], [24], [10])),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_by_kind(name: str) -> None:
    """Batch, rows, columns and what the dots sum, each outermost first; whatever memory lies contiguous."""
    fn, shapes, expected = AXES[name]
    domain = accepted(fn, *shapes)
    found = tuple(sizes(axes) for axes in (domain.batch, domain.rows, domain.columns, domain.inner))
    assert tuple(map(_product, found)) == tuple(map(_product, expected))
    if name == "heads":
        assert found == expected
    assert domain.program == (*domain.batch, *domain.rows, *domain.columns)
    assert domain.looped == frozenset(domain.inner) and all(d.deps == {*domain.program} for d in domain.dots())


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())


def test_symbolic_sizes_are_axes_too() -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.addmm(b, x, w)
        return h.view(x.shape[0], 6, -1).transpose(0, 1).contiguous(), h.sum(0)

    args = tensors([(12, 10), (10, 48), (48,)])
    found = traced(fn, args, [[0, 1], [0]])
    domain = gemm_domain(found.nodes, found.outputs)
    assert isinstance(domain, GemmDomain)
    assert [a.size for a in domain.columns] == [6, 8] and not isinstance(domain.rows[0].size, int)
    for rows, depth in ((12, 10), (5, 3)):
        compare(found, domain, tensors([(rows, depth), (depth, 48), (48,)]))


# ---------------------------------------------------------------- what is accepted, and what is not beside it

Case = tuple[Callable[..., Any], Callable[..., Any], str, tuple[tuple[int, ...], ...]]
LONG = ((108, K), (K, N))  # reductions of up to eight elements unroll
ROWS, PART = "a reduction takes part of a row or of a column", "needs the whole row of the product before"
TWINS: dict[str, Case] = {
    "whole rows": (lambda x, w: (x @ w).sum(1), lambda x, w: (x @ w).view(12, 4, 12).sum(2), ROWS, PLAIN),
    "whole columns": (lambda x, w: (x @ w).amax(0), lambda x, w: (x @ w).view(9, 12, 48).amax(1), ROWS, LONG),
    "everything": (lambda x, w: torch.bmm(x, w).sum(), lambda x, w: torch.bmm(x, w).sum(0), ROWS,
                   ((13, 14, 5), (13, 5, 6))),
    "a sum of sums": (
        lambda x, w: (x @ w).view(9, 12, 48).sum(1).sum(0), lambda x, w: (x @ w).view(9, 12, 48).sum(1).amax(0), ROWS,
        LONG),
    "a maximum of maxima that nobody else reads": (
        lambda x, w: (x @ w).view(9, 12, 48).amax(1).amax(0),
        lambda x, w: ((s := (x @ w).view(9, 12, 48).amax(1)), s.amax(0)), ROWS, LONG),
    "a mean, not of sums": (
        lambda x, w: (x @ w).mean(0), lambda x, w: (x @ w).view(9, 12, 48).sum(1).mean(0), ROWS, LONG),
    "a reduction, not of another": (
        lambda x, w: ((h := x @ w).amax(1), h.sum(0)), lambda x, w: (x @ w).amax(1).sum(0),
        "needs another's result first", PLAIN),
    "a joint pair": (
        lambda x, w: logsumexp(x @ w), lambda x, w: ((h := x @ w) - h.amin(1, keepdim=True)).exp().sum(1), PART, PLAIN),
    "moments": (
        lambda x, w: ((d := (h := x @ w) - h.mean(1, keepdim=True)) * d).sum(1),
        lambda x, w: ((d := (h := x @ w) - h.mean(0, keepdim=True)) * d).sum(1), PART, PLAIN),
    "an exponent that is only summed": (
        lambda x, w: ((h := x @ w) - h.amax(1, keepdim=True)).exp().sum(1),
        lambda x, w: ((e := ((h := x @ w) - h.amax(1, keepdim=True)).exp()), e.sum(1)), PART, PLAIN),
    "broadcast back": (
        lambda x, w: ((h := x @ w), h.sum(1)), lambda x, w: (h := x @ w) / h.sum(1, keepdim=True), PART, PLAIN),
    "softmax": (lambda x, w: (x @ w).exp() / 3, lambda x, w: torch.softmax(x @ w, -1), PART, PLAIN),
    "running values": (lambda x, w: (x @ w).sum(1), lambda x, w: (x @ w).cumsum(1), "running value", PLAIN),
    "a factor's statistics": (
        lambda x, w, s: (x / s) @ w, lambda x, w, s: (x / x.sum(1, keepdim=True)) @ w,
        "a factor of the product is reduced first", (*PLAIN, (12, 1))),
    "parts of the product": (
        lambda x, w: (h := x @ w)[:, :12] * h[:, 12:24] + h[:, 24:36] * h[:, 36:],
        lambda x, w: sum((x @ w).chunk(6, 1)), "at 6 places", PLAIN),
    "neighbours": (
        lambda x, w: (h := x @ w)[:, ::2] * h[:, 1::2], lambda x, w: (h := x @ w)[:, 1:] * h[:, :-1],
        "more than once", PLAIN),
    "an expanded result": (
        lambda x, w: (x @ w)[:, None] + 1, lambda x, w: (x @ w)[:, None].expand(12, 3, 48) + 1,
        "one of its results has an axis that the product lacks", PLAIN),
    "another axis": (
        lambda x, w, v: (x @ w) * v[0], lambda x, w, v: (x @ w) * v[:, None], "that the product lacks",
        (*PLAIN, (13, 48))),
    "a flat result": (
        lambda x, w: (x @ w).view(-1).relu(), lambda x, w: (x @ w).view(-1)[:575].view(23, 25).relu(),
        "through a view that does not factor", PLAIN),
    "positions that a tensor holds": (
        lambda x, w: torch.where(torch.arange(48) == ids[1], x @ w, 0.0).sum(1), lambda x, w: (x @ w)[:, ids].relu(),
        "reads the product at positions that a tensor holds", PLAIN),
    "a looked-up factor": (
        lambda x, w: x[ids] @ w, lambda x, w: (x @ w)[ids].relu(), "reads the product at positions that a tensor holds",
        PLAIN),
    "not its transpose": (
        lambda x, w: x @ w + x.t(), lambda x, w: (h := x @ w) + h.t(), "one axis runs along two dimensions",
        ((9, 9), (9, 9))),
    "a factor that is the residual": (
        lambda x, w: x[:, :8] + x @ w, lambda x, w: x[:, :9].sum(1, keepdim=True) + x @ w, ROWS, ((12, 10), (10, 8))),
    "two products of one depth": (
        lambda x, w, v: (x @ w) * (x @ v), lambda x, w, v: (x @ w) * (x[:, :5] @ v[:5]),
        "two products sum over different dimensions", (*PLAIN, (10, 48))),
    "two products of one shape": (
        lambda x, w, v: (x @ w) * (x @ v), lambda x, w, v: (x @ w) * (x @ v[:, :1]),
        "two products have tiles of different shapes", (*PLAIN, (10, 48))),
    "two columns": (
        lambda x, w: (x @ w[:, :2]).relu(), lambda x, w: (x @ w[:, :1]).relu(), "a matrix and a vector", PLAIN),
    "two rows": (lambda x, w: (x[:2] @ w).relu(), lambda x, w: (x[:1] @ w).relu(), "a matrix and a vector", PLAIN),
    "something to sum": (lambda x, w: x[:, :2] @ w[:2], lambda x, w: x[:, :1] @ w[:1], "sums nothing", PLAIN),
    "not empty": (lambda x, w: x[:2] @ w, lambda x, w: x[:0] @ w, "empty", PLAIN),
    "results beside the product's": (
        lambda x, w, b: ((x @ w).relu(), b.relu()), lambda x, w, b: b.relu(), "need no element of the product",
        (*PLAIN, (12, 1))),
}


@pytest.mark.parametrize("name", TWINS)
def test_what_a_tile_holds(name: str) -> None:
    good, _, _, shapes = TWINS[name]
    accepted(good, *shapes)


@pytest.mark.parametrize("name", TWINS)
def test_what_no_tile_holds(name: str) -> None:
    _, bad, reason, shapes = TWINS[name]
    assert reason in refused(bad, *shapes).reason


def test_sums_of_sums_are_one_reduction() -> None:
    domain = accepted(lambda x, w: (x @ w).view(9, 1, 12, 48).sum(2).sum(0).sum(0), *LONG)
    assert reductions(domain) == [frozenset(domain.rows)]


def test_joint_pairs() -> None:
    domain = accepted(lambda x, w: logsumexp(x @ w))
    (pair,) = domain.pairs()
    assert pair.monoid.name == "softmax" and reductions(domain) == [frozenset(domain.columns)] * 2
    (pair,) = accepted(lambda x, w: ((d := (h := x @ w) - h.mean(0, keepdim=True)) * d).sum(0)).pairs()
    assert pair.monoid.name == "moments"
    assert accepted(lambda x, w: (x @ w).amax(1)).pairs() == ()


def test_a_reduction_keeps_its_remedy_and_its_node() -> None:
    reject = refused(lambda x, w: (x @ w).view(12, 4, 12).sum(2))
    assert reject.remedy and reject.node is not None and reject.node.name.startswith("sum")


def test_nothing_is_added_where_beta_is_zero() -> None:
    (dot,) = accepted(lambda x, w, b: torch.addmm(b, x, w, beta=0), *PLAIN, (48,)).dots()
    assert len(dot.operands) == 2
    (dot,) = accepted(lambda x, w, b: torch.addmm(b, x, w, beta=2), *PLAIN, (48,)).dots()
    assert len(dot.operands) == 3


def test_equal_dots_are_one() -> None:
    assert len(accepted(lambda x, w: (h := x @ w).relu() + h.sigmoid() * h).dots()) == 1
    assert len(accepted(lambda x, w, v: (x @ w).relu() * (x @ v), *PLAIN, (10, 48)).dots()) == 2
