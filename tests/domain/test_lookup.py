"""Indexed loads as indices: values against the graph, and what stays out of a group."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F

from fxfuser.domain.index import Axis, Form, Lookup, axes_of, divide, within
from fxfuser.domain.points import Domain, PointKind, Reject
from fxfuser.ops import unsupported
from tests.domain.groups import check, trace

Tensor = torch.Tensor


def x(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def at(size: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, size, shape, generator=torch.Generator().manual_seed(size))


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "gather": (lambda a, i: torch.gather(a * 2, 1, i) + 1, [x(7, 11), at(11, 7, 5)]),
    "gather of fewer rows": (lambda a, i: torch.gather(a, 0, i) * 2, [x(7, 11), at(7, 3, 5)]),
    "gather of a vector": (lambda a, i: torch.gather(a, 0, i) * 2, [x(7), at(7, 3)]),
    "gather of a number": (lambda a, i: torch.gather(a, 0, i) * 2, [x(), at(1, 3)]),
    "take_along_dim": (lambda a, i: torch.take_along_dim(a, i, 1) * 2, [x(7, 11), at(11, 1, 5)]),
    "index_select": (lambda a, i: a.t().index_select(-1, i) * 2, [x(7, 11), at(7, 9)]),
    "index_select by a number": (lambda a, i: a.index_select(0, i) * 2, [x(7, 11), at(7)]),
    "embedding": (lambda a, i: F.embedding(i, a).sin(), [x(13, 8), at(13, 3, 5)]),
    "take": (lambda a, i: torch.take(a.t(), i) + 1, [x(13, 8), at(104, 3, 5, low=-104)]),
    "index": (lambda a, i, j: a[:, i, j] + 1, [x(4, 7, 8, 3), at(7, 2, 5, low=-7), at(8, 5)]),
    "index apart": (lambda a, i, j: a[i, :, j] + 1, [x(4, 7, 8, 3), at(4, 2, 5), at(8, 5, low=-8)]),
    "index of three": (lambda a, i, j, k: a[i, j, k] + 1, [x(4, 7, 8), at(4, 2, 1), at(7, 5), at(8, 1, 1)]),
    "unsafe index": (lambda a, i: torch.ops.aten._unsafe_index.Tensor(a, [None, i]) * 2, [x(4, 7), at(7, 5)]),
    "int32 positions": (lambda a, i: a[i.int()] * 2, [x(4, 7), at(4, 5)]),
    "computed positions": (lambda a, i: a[(i + 1) % 9] * 2, [x(9, 7), at(9, 5)]),
    "positions that follow their table": (lambda a, i: (a * 2)[i * 2 - 8], [x(9, 7), at(9, 5)]),
    "positions of positions": (lambda a, i, j: a[i[j]] * 2, [x(9, 7), at(9, 5), at(5, 20)]),
    "expanded positions": (lambda a, i: a[i.expand(5)] * 2, [x(9, 7), at(9, 1)]),
    "largest": (lambda a: a.gather(1, a.argmax(1, keepdim=True)) * 2, [x(9, 17)]),
    "softmax at labels": (lambda a, i: -torch.log_softmax(a, 1).gather(1, i[:, None])[:, 0], [x(9, 17), at(17, 9)]),
    "pad below": (lambda a, i: F.pad(a, (1, 2))[:, i] * 2, [x(9, 17), at(20, 9)]),
    "view below": (lambda a, i: a.view(9, 4, 4).permute(2, 0, 1).reshape(4, 36)[:, i] * 2, [x(9, 16), at(36, 5)]),
    "flip and roll below": (lambda a, i: a.flip(0).roll(2, 0)[i] * 2, [x(9, 16), at(9, 5)]),
    "concatenation below": (lambda a, b, i: torch.cat([a, b])[i] * 2, [x(9, 4), x(3, 4), at(12, 5)]),
    "concatenation above": (lambda a, i, j: torch.cat([a[i], a[j] * 2]) + 1, [x(9, 17), at(9, 5), at(9, 3)]),
    "sum above": (lambda a, i: F.embedding(i, a).sum(1), [x(13, 8), at(13, 3, 5)]),
    "identity below": (lambda i: torch.eye(5)[i] * 2, [at(5, 13)]),
    "count below": (lambda i: torch.arange(5)[i] * 2, [at(5, 13)]),
    "nothing": (lambda a, i: a[i] * 2, [x(4, 7), at(4, 0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    fn, args = CASES[name]
    check(fn, args)


def test_values_with_symbolic_sizes() -> None:
    check(lambda a, i: F.embedding(i, a).sum(-1), [x(13, 8), at(13, 3, 5)], [(0,), (0, 1)],
          [[x(30, 8), at(30, 7, 2)]])


def loads(domain: Domain) -> list[str]:
    return [p.node.name for p in domain.points() if p.kind is PointKind.LOAD and p.node is not None]


def test_positions_that_count_are_no_lookup() -> None:
    domain = check(lambda a: a[torch.arange(3, 7)] * 2, [x(9, 7)])
    assert not any(p.lookups for p in domain.points())


def test_a_lookup_names_the_axes_of_its_positions() -> None:
    domain = check(lambda a, i: F.embedding(i, a) * 2, [x(13, 8), at(13, 3, 5)])
    rows, columns = domain.program  # the positions' two dimensions are one axis
    (lookup, value), = (pair for p in domain.points() for pair in p.lookups)
    assert axes_of(lookup.index) == value.deps == {rows} and columns.size == 8


def test_equal_positions_are_read_once() -> None:
    domain = check(lambda a, b, i: a[i] * b[i], [x(13, 8), x(13, 8).cos(), at(13, 5)])
    assert len(loads(domain)) == 3


def test_softmax_at_labels_needs_one_row_per_program() -> None:
    fn, args = CASES["softmax at labels"]
    domain = check(fn, args)
    assert [a.size for a in domain.program] == [9]
    assert len({p.node for p in domain.points() if p.kind is PointKind.REDUCE}) == 2


def test_a_reduction_is_not_repeated_at_positions() -> None:
    found = trace(lambda a, i: a.sum(1)[i] * 2, [x(9, 7), at(9, 5)]).resolve()
    assert isinstance(found, Reject) and "positions" in found.reason


def test_a_mask_is_no_position() -> None:
    traced = trace(lambda a: torch.ops.aten.index.Tensor(a, [torch.tensor([True, False, True])]) * 2, [x(3, 7)])
    assert "depends on data" in str(next(r for n in traced.graph.graph.nodes if (r := reason(n))))


def reason(node: torch.fx.Node) -> str | None:
    return unsupported(node) if node.op == "call_function" else None


def test_a_lookup_divides_like_an_axis_and_is_never_split() -> None:
    form = Form(((Lookup("t0", (Form.axis(Axis("a", 5)),), 12), 1),))
    splits: dict[Axis, list[Any]] = {}
    above, below = divide(form, 4, splits)
    assert within(form, 12) and within(above, 3) and within(below, 4) and not splits
    assert above.lookups == below.lookups == form.lookups
