"""Views, layouts and broadcasts as indices: values against the graph, and which axes are left."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F

from fxfuser.domain.index import linear
from fxfuser.domain.points import Domain, PointKind, points_of
from tests.domain.groups import check

Make = Callable[[], list[torch.Tensor]]


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator) for s in shapes]


STATIC: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "broadcast": (lambda a, b: a * b + 1, [(4, 5, 6), (5, 1)]),
    "scalar tensor": (lambda a, b: a * b, [(), (3,)]),
    "view": (lambda a: a.view(12, 10) * 2, [(4, 3, 10)]),
    "view chain": (lambda a: a.view(2, 3, 5, 4).permute(2, 0, 3, 1).reshape(10, 12) * 2, [(6, 20)]),
    "coprime view": (lambda a: a.view(7, 11).t().reshape(11, 7).t().reshape(77) * 2, [(77,)]),
    "view that does not factor": (lambda a: (a.t().reshape(4, 9) * 2).view(6, 6), [(6, 6)]),
    "slices": (lambda a: a[1:, ::2] * a[:-1, 1::2], [(6, 20)]),
    "selects": (lambda a: a[1] * a[-1], [(6, 6)]),
    "cat": (lambda a, b: torch.cat([a, b, a], 1) * 2, [(6, 3), (6, 5)]),
    "cat of cats": (lambda a, b: torch.cat([torch.cat([a, b], 1), torch.cat([b, a], 1)]) * 2, [(6, 3), (6, 5)]),
    "view of cat": (lambda a, b: (torch.cat([a, b], 1) * 2).view(6, 4, 2) + 1, [(6, 3), (6, 5)]),
    "cat of views": (lambda a, b: torch.cat([a.view(4, 6), b.t()], 0) * 2, [(3, 8), (6, 5)]),
    "cat with an empty": (lambda a, b: torch.cat([a, b]) * 2, [(0,), (3, 2)]),
    "pad": (lambda a: F.pad(a, (2, 3, -1, 4)) * 2 + 1, [(6, 3)]),
    "negative pad": (lambda a: F.pad(a, (-2, 3)) * 2 + 1, [(6, 5)]),
    "pad with a number": (lambda a: F.pad(a, (1, 0), value=7.5).view(-1) * 2, [(6, 5)]),
    "flip": (lambda a: a.flip(0, 1).view(10, 3) * 2, [(6, 5)]),
    "roll": (lambda a: a.roll(2, 1) + a.roll((1, -1), (0, 1)) + a.roll(7), [(6, 5)]),
    "rot90": (lambda a: a.rot90(1, (0, 2)) + a.rot90(-1, (0, 2)) + a.rot90(2).transpose(0, 2), [(6, 3, 5)]),
    "squeeze": (lambda a: a.squeeze() * torch.ops.aten.squeeze_copy.default(a), [(1, 6, 1)]),
    "repeat": (lambda a: a.repeat(3, 1, 2) * 2, [(6, 5)]),
    "expand": (lambda a: a[:, None].expand(2, 3, 4).reshape(6, 4) * 2, [(2, 4)]),
    "slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 1, 2, 6) * 2, [(6, 10), (6, 4)]),
    "strided slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 1, 1, 9, 3) * 2, [(6, 10), (6, 3)]),
    "select_scatter": (lambda a, b: torch.select_scatter(a, b, 1, -2) * 2, [(6, 10), (6,)]),
    "diagonal_scatter": (lambda a, b: torch.diagonal_scatter(a, b, 1) * 2, [(6, 6), (5,)]),
    "diagonal": (lambda a: torch.diagonal(a, -1, 0, 2) * 2, [(6, 3, 6)]),
    "triangles": (lambda a: a.tril(1) + a.triu(-1), [(6, 5)]),
    "unfold": (lambda a: a.unfold(1, 4, 2) * 2, [(6, 11)]),
    "stack": (lambda a, b: torch.stack([a, b, a], 1) * 2, [(6, 3), (6, 3)]),
    "split": (lambda a: [t * 2 for t in a.split([3, 4, 1], 1)], [(5, 8)]),
    "unbind": (lambda a: [t * 2 for t in a.unbind(1)], [(5, 8)]),
    "size one": (lambda a: (a.squeeze(1) * 2).unsqueeze(0), [(5, 1, 8)]),
    "empty": (lambda a: a.view(0, 3) * 2, [(6, 0)]),
    "iota": (lambda a: a + torch.arange(5) * 3 + torch.arange(1, 11, 2), [(6, 5)]),
    "fractional arange": (lambda a: a + torch.arange(0.5, 3, 0.5) + torch.arange(1.5, 11.5, 2).flip(0), [(6, 5)]),
    "eye": (lambda a: a + torch.eye(5), [(5, 5)]),
    "full": (lambda a: a + torch.full((5,), 2.0) + torch.ones_like(a), [(5, 5)]),
    "transposed sum": (lambda a: a + a.t(), [(6, 6)]),
    "two orders": (lambda a: (a * 2, a.t() * 3), [(6, 16)]),
}


@pytest.mark.parametrize("name", STATIC)
def test_values(name: str) -> None:
    fn, shapes = STATIC[name]
    check(fn, tensors(*shapes))


def shapes(*pairs: tuple[tuple[int, ...], ...]) -> list[list[torch.Tensor]]:
    return [tensors(*p) for p in pairs]


SYMBOLIC: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], list[list[torch.Tensor]]]] = {
    "view": (lambda a: a.view(a.shape[0] * 2, 24) * 2, [(0,)], shapes(((5, 48),), ((7, 48),))),
    "flatten": (lambda a: a.reshape(-1) * 2, [(0, 1)], shapes(((5, 48),), ((7, 13),))),
    "unflatten": (lambda a: a.reshape(-1, 4).t() * 2, [(0,)], shapes(((5, 8),), ((12, 8),))),
    "permuted flatten": (lambda a: a.permute(1, 0).reshape(-1, 4) * 2, [(0,)], shapes(((5, 8),), ((12, 8),))),
    "does not factor": (lambda a: torch.cat((a, a), 1).reshape(-1, 32) * 2, [(0,)], shapes(((24, 24),), ((36, 24),))),
    "cat": (lambda a, b: torch.cat([a, b]) * 2, [(0,), (0,)], shapes(((5, 8), (6, 8)), ((7, 8), (3, 8)))),
    "roll": (lambda a: a.roll(3, 0) * 2, [(0,)], shapes(((5, 8),), ((2, 8),))),
    "flip": (lambda a: a.flip(0).view(-1) * 2, [(0,)], shapes(((5, 8),), ((2, 8),))),
    "pad": (lambda a: F.pad(a, (0, 0, 2, 1)).view(-1) * 2, [(0,)], shapes(((5, 8),), ((2, 8),))),
    "slices": (lambda a: a[-2:] * 2 + a[:2], [(0,)], shapes(((5, 8),), ((12, 8),))),
    "size as operand": (lambda a: a * a.shape[0] + torch.full_like(a, a.shape[0]), [(0,)],
                        shapes(((5, 8),), ((3, 8),))),
    "scatter": (lambda a, b: torch.slice_scatter(a, b, 0, 1, a.shape[0]) * 2, [(0,), (0,)],
                shapes(((5, 8), (4, 8)), ((9, 8), (8, 8)))),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_values(name: str) -> None:
    fn, dynamic, (first, *others) = SYMBOLIC[name]
    check(fn, first, dynamic, others)


def axes(domain: Domain) -> list[object]:
    return [a.size for a in domain.axes]


def test_contiguous_axes_become_one() -> None:
    assert axes(check(lambda a, b: a * b, tensors((4, 5, 6), (4, 5, 6)))) == [120]


def test_broadcast_axes_stay_apart() -> None:
    assert axes(check(lambda a, b: a * b, tensors((4, 5, 6), (6,)))) == [20, 6]


def test_transposed_axes_stay_apart() -> None:
    assert axes(check(lambda a: a + a.t(), tensors((6, 6)))) == [6, 6]


def test_a_split_that_nothing_needs_is_undone() -> None:
    domain = check(lambda a: (a.view(2, 3, 20) * 2).view(120) + 1, tensors((6, 20)))
    assert axes(domain) == [120]


def test_program_axes_follow_the_store() -> None:
    domain = check(lambda a: a.t() + 1, tensors((6, 16)))
    store = domain.stores[0]
    assert store.node.meta["val"].stride() == (1, 16)
    assert [a.size for a in domain.program] == [96]


def test_equal_reads_are_one_point() -> None:
    domain = check(lambda a, b: torch.cat([a, b]) * torch.cat([a, b]) + a.view(2, 6).view(3, 4)[0, 0],
                   tensors((3, 4), (3, 4)))
    loads = [p for p in points_of(domain.stores) if p.kind is PointKind.LOAD]
    assert len(loads) == 3


def test_decided_bounds_are_gone() -> None:
    domain = check(lambda a, b: torch.cat([a, b])[:3] * 2, tensors((3, 4), (5, 4)))
    assert all(p.kind is not PointKind.SELECT for p in domain.points())


def test_a_repeat_reads_one_copy() -> None:
    domain = check(lambda a: a.repeat(2, 1) * 2, tensors((3, 4)))
    load = next(p for p in domain.points() if p.kind is PointKind.LOAD)
    assert linear(load.index, (4, 1)).affine


def test_same_domain_every_time() -> None:
    texts = {str(check(lambda a, b: (a.view(6, 4) * b, b.sum(0)), tensors((3, 8), (6, 4)))) for _ in range(3)}
    assert len(texts) == 1
