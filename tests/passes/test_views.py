from __future__ import annotations

import torch

from fxfuser.passes.dims import canonicalise_dims
from fxfuser.passes.views import canonicalise_views
from tests.passes.rewriting import assert_rewrites, assert_untouched, targets

aten = torch.ops.aten
PASS = (canonicalise_views,)


def test_views_that_change_nothing_go() -> None:
    def before(a):
        b = aten.view.default(a, [4, 6])
        c = aten.expand.default(b, [4, 6])
        d = aten.permute.default(c, [0, 1])
        return aten.neg.default(aten.slice.Tensor(d, 0, 0, 9223372036854775807))

    assert_rewrites(before, lambda a: aten.neg.default(a), [torch.randn(4, 6)], PASS)


def test_views_that_change_nothing_go_with_symbolic_sizes() -> None:
    def before(a):
        return aten.neg.default(aten.alias.default(a))

    module = assert_rewrites(before, lambda a: aten.neg.default(a), [torch.randn(4, 6)], PASS, dynamic=True)
    assert targets(module) == ["neg.default"]


def test_chains_merge() -> None:
    from_three = [torch.randn(2, 3, 4)]

    def before(a):
        n = aten.neg.default(a)
        b = aten.view.default(aten.view.default(n, [6, 4]), [24])
        c = aten.permute.default(aten.permute.default(a, [2, 0, 1]), [1, 0, 2])
        return aten.neg.default(b), aten.neg.default(c)

    def expected(a):
        n = aten.neg.default(a)
        aten.view.default(n, [6, 4])
        b = aten.view.default(n, [24])
        aten.permute.default(a, [2, 0, 1])
        c = aten.permute.default(a, [0, 2, 1])
        return aten.neg.default(b), aten.neg.default(c)

    assert_rewrites(before, expected, from_three, PASS)


def test_expands_merge() -> None:
    def before(a):
        return aten.neg.default(aten.expand.default(aten.expand.default(a, [5, 3]), [2, -1, -1]))

    def expected(a):
        aten.expand.default(a, [5, 3])
        return aten.neg.default(aten.expand.default(a, [2, 5, 3]))

    assert_rewrites(before, expected, [torch.randn(1, 3)], PASS)


def test_views_that_move_or_escape_stay() -> None:
    x = torch.randn(4, 6)
    assert_untouched(lambda a: aten.neg.default(aten.permute.default(a, [1, 0])), [x], PASS)
    assert_untouched(lambda a: aten.neg.default(aten.slice.Tensor(a, 0, 1, 4)), [x], PASS)
    assert_untouched(lambda a: aten.view.default(a, [4, 6]), [x], PASS)
    assert_untouched(lambda a: aten.neg.default(aten.as_strided.default(a, [4, 6], [6, 1], 0)), [torch.randn(30)], PASS)


def test_view_of_a_view_of_strided_memory_stays() -> None:
    """The outer view may be impossible on the base's strides."""
    x = torch.randn(6, 8)[:, :4]

    def function(a):
        return aten.neg.default(aten.view.default(aten.view.default(a, [2, 3, 4]), [6, 2, 2]))

    assert_untouched(function, [x], PASS)


def test_dims_have_one_spelling() -> None:
    def before(a):
        return aten.amax.default(a, [-1], True), aten.sum.dim_IntList(a, []), aten.permute.default(a, [-1, 0])

    def expected(a):
        return aten.amax.default(a, [1], True), aten.sum.dim_IntList(a, [0, 1]), aten.permute.default(a, [1, 0])

    assert_rewrites(before, expected, [torch.randn(3, 4)], (canonicalise_dims,))


def test_dims_of_a_number_stay() -> None:
    assert_untouched(lambda a: aten.sum.dim_IntList(a, [-1]), [torch.tensor(2.0)], (canonicalise_dims,))
    assert_untouched(lambda a: aten.sum.dim_IntList(a, [1]), [torch.randn(2, 3)], (canonicalise_dims,))
