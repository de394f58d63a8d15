"""Products in two kernels, or with loops for tiles: values, who leaves what, and where it is not done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from fxfuser.domain.gemm import GemmDomain, gemm_domain
from fxfuser.domain.parts import Parts
from fxfuser.domain.points import Domain, PointKind, Reject

from .evaluate import Evaluator
from .groups import sizes_of
from .test_gemm import tensors, traced

Tensor = torch.Tensor
M, N, K = 5, 48, 528
PLAIN = ((M, K), (K, N))
ids = torch.tensor([2, 0, 1, 1])


def domain_of(fn: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dynamic: Sequence[Sequence[int]] = (),
              ) -> GemmDomain | Reject:
    """The domain; what it computes apart, or row by row, has the function's values."""
    args = tensors(shapes)
    found = traced(fn, args, dynamic)
    domain = gemm_domain(found.nodes, found.outputs)
    if isinstance(domain, Reject):
        return domain
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Recorder(found.graph, garbage_collect_values=False).run(*args)
    given = {n: v for n, v in values.items() if isinstance(v, Tensor)}
    for kernel in (domain.rowwise, domain.parts.rest if domain.parts is not None else None):
        if kernel is None:
            continue
        got = Evaluator(kernel, given, sizes_of(found, args)).stores()
        assert list(got) == found.outputs
        for node, value in got.items():
            torch.testing.assert_close(value, values[node])
    return domain


def parts_of(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Parts:
    domain = domain_of(fn, shapes or PLAIN)
    assert isinstance(domain, GemmDomain) and domain.parts is not None, domain
    return domain.parts


def kinds(domain: Domain) -> set[PointKind]:
    return {p.kind for p in domain.points()}


def normed(h: Tensor) -> Tensor:
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-6)


ROWS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "a norm": (lambda x, w, r: (h := r + x @ w, normed(h)), (*PLAIN, (M, N))),
    "a softmax": (lambda x, w: torch.softmax(x @ w, -1), PLAIN),
    "a softmax over columns": (lambda x, w: torch.softmax(x @ w, 0), PLAIN),
    "scaled, and added to": (lambda x, w, b: normed(torch.addmm(b, x, w, alpha=0.5, beta=2.0)), (*PLAIN, (N,))),
    "a batch": (lambda x, w: normed(torch.bmm(x, w)), ((3, M, K), (3, K, N))),
    "a product that is stored too": (lambda x, w: (h := x @ w, normed(h)), PLAIN),
    "a computed factor": (lambda x, w: normed((x.relu() * 2) @ w), PLAIN),
    "halves": (lambda x, w: normed((h := x @ w)[:, :24] * h[:, 24:]), PLAIN),
    "neighbours, at which an element is needed twice": (lambda x, w: normed((h := x @ w)[:, 1:] * h[:, :-1]), PLAIN),
    "heads": (lambda x, w: normed((x @ w).view(M, 6, 8)).transpose(0, 1), PLAIN),
    "two products": (lambda x, w, v: normed((x @ w).sigmoid() * (x @ v)), (*PLAIN, (K, N))),
    "two products of different shapes": (lambda x, w, v: (normed(x @ w), (x @ v).relu()), (*PLAIN, (K, N))),
    "a part of the columns": (lambda x, w: torch.cat([(x @ w)[:, :20], x[:, :28]], 1), PLAIN),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_rest_is_any_kernel_behind_the_product(name: str) -> None:
    fn, shapes = ROWS[name]
    parts = parts_of(fn, *shapes)
    assert isinstance(parts.head, GemmDomain) and PointKind.DOT in kinds(parts.head)
    assert kinds(parts.rest) >= {PointKind.PARTS, PointKind.SCALED} and not kinds(parts.rest) & {
        PointKind.DOT, PointKind.TIMES}
    assert all(s.value.kind is PointKind.DOT for s in parts.head.stores)


def test_a_row_that_is_reduced_and_read_again_has_no_tiles() -> None:
    domain = domain_of(*ROWS["a norm"])
    assert isinstance(domain, GemmDomain) and not domain.tiled and domain.stores[0].node.name.startswith("mm")
    whole = domain_of(lambda x, w: (x @ w).relu(), PLAIN)
    assert isinstance(whole, GemmDomain) and whole.tiled and whole.parts is not None


def test_symbolic_rows_count_as_many() -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return normed(torch.addmm(b, x, w))

    few, many = (domain_of(fn, ((M, K), (K, n), (n,)), [[0]]) for n in (N, 4096))
    assert isinstance(few, GemmDomain) and few.parts is not None
    assert isinstance(many, Reject)


NOT: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], str]] = {
    "a short sum": (lambda x, w: normed(x @ w), ((M, 500), (500, N)), "needs the whole row"),
    "sums that outweigh the factors": (lambda x, w: normed(x @ w), ((512, K), (K, 600)), "needs the whole row"),
    "a product of a product": (lambda x, w, v: normed((x @ w) @ v), (*PLAIN, (N, 4)), ""),
    "positions that a tensor holds": (lambda x, w: normed((x @ w)[:, ids]), PLAIN, "positions that a tensor holds"),
}


@pytest.mark.parametrize("name", NOT)
def test_where_parts_do_not_pay_or_cannot_be(name: str) -> None:
    fn, shapes, reason = NOT[name]
    domain = domain_of(fn, shapes)
    assert isinstance(domain, Reject) and reason in domain.reason


VECTORS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "one row": (lambda x, w: (x @ w.t()).relu(), ((1, K), (300, K))),
    "one column": (lambda w, x: (w @ x).relu(), ((300, K), (K, 1))),
    "a batch of rows": (lambda x, w: torch.bmm(x, w.transpose(1, 2)).relu(), ((4, 1, K), (4, 90, K))),
    "bias": (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2, beta=0.5).sigmoid(), ((1, K), (300, K), (300,))),
    "gates": (lambda x, w: (h := x @ w.t())[:, ::2].sigmoid() * h[:, 1::2], ((1, K), (600, K))),
    "two matrices": (lambda x, w, v: (x @ w.t()).sigmoid() * (x @ v.t()), ((1, K), (300, K), (300, K))),
}


@pytest.mark.parametrize("name", VECTORS)
def test_a_matrix_and_a_vector_have_loops(name: str) -> None:
    domain = domain_of(*VECTORS[name])
    assert isinstance(domain, GemmDomain) and domain.rowwise is not None and domain.parts is None
    assert kinds(domain.rowwise) >= {PointKind.TIMES, PointKind.REDUCE, PointKind.SCALED}
    assert all(p.axes[0] and p.deps for p in domain.rowwise.reductions())


def test_rows_of_the_matrix_leave_the_sums_of_a_norm() -> None:
    parts = parts_of(lambda x, w, r: normed(r + x @ w.t()), (1, K), (300, K), (1, 300))
    assert not isinstance(parts.head, GemmDomain) and PointKind.TIMES in kinds(parts.head)
    columns = parts_of(lambda x, w, r: normed(r + x @ w), (1, K), (K, 300), (1, 300))
    assert isinstance(columns.head, GemmDomain) and not columns.head.rows and columns.head.columns


@pytest.mark.parametrize("shapes", [((1, K), (40, K)), ((2, K), (300, K)), ((1, 300), (300, 300))])
def test_no_loops_for_few_rows_two_vectors_or_short_sums(shapes: tuple[tuple[int, ...], ...]) -> None:
    domain = domain_of(lambda x, w: (x @ w.t()).relu(), shapes)
    assert isinstance(domain, Reject) or domain.rowwise is None
