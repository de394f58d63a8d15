from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxfuser.passes.casts import canonicalise_casts, is_plain_cast, widens
from fxfuser.passes.clones import drop_clones
from fxfuser.passes.dce import remove_dead_nodes
from tests.passes.rewriting import assert_rewrites, assert_untouched, trace

aten = torch.ops.aten
PASS = (canonicalise_casts, remove_dead_nodes)
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def to(x, dtype):
    return aten._to_copy.default(x, dtype=dtype)


def test_widening_round_trip_goes() -> None:
    def before(a):
        n = aten.neg.default(a)
        return aten.neg.default(to(to(n, F32), BF16))

    assert_rewrites(before, lambda a: aten.neg.default(aten.neg.default(a)), [torch.randn(4).bfloat16()], PASS)


def test_widening_chain_is_one_cast() -> None:
    assert_rewrites(lambda a: to(to(a, F32), F64), lambda a: to(a, F64), [torch.randn(4).half()], PASS)
    assert_rewrites(lambda a: to(to(a, F32), torch.int64), lambda a: to(a, torch.int64), [torch.randn(4).half()], PASS)


def test_narrowing_round_trip_rounds_and_stays() -> None:
    x = torch.randn(4)
    assert_untouched(lambda a: aten.neg.default(to(to(aten.neg.default(a), BF16), F32)), [x], PASS)
    assert_untouched(lambda a: to(to(a, torch.int32), F32), [x], PASS)


def test_a_copy_that_reaches_the_caller_stays() -> None:
    x = torch.randn(4)
    assert_untouched(lambda a: to(aten.neg.default(a), F32), [x], PASS)
    assert_untouched(lambda a: aten.neg.default(to(a, F32)), [x], PASS)


@pytest.mark.parametrize(("narrow", "wide"), [
    (F16, BF16), (BF16, F16), (torch.int32, F32), (torch.int64, F64), (F32, BF16),
])
def test_not_every_larger_type_is_wider(narrow, wide) -> None:
    assert not widens(narrow, wide)


@pytest.mark.parametrize(("narrow", "wide"), [(F16, F32), (BF16, F64), (torch.bool, BF16), (torch.uint8, torch.int16)])
def test_wider(narrow, wide) -> None:
    bits = torch.arange(2 ** min(16, 8 * narrow.itemsize)).to(torch.uint16 if narrow.itemsize > 1 else torch.uint8)
    every = bits.view(narrow) if narrow is not torch.bool else torch.tensor([False, True])
    assert widens(narrow, wide)
    torch.testing.assert_close(every.to(wide).to(narrow), every, rtol=0, atol=0, equal_nan=True)


def test_inner_copies_go() -> None:
    def before(a):
        return aten.neg.default(aten.clone.default(aten.neg.default(a)))

    assert_rewrites(before, lambda a: aten.neg.default(aten.neg.default(a)), [torch.randn(3)], (drop_clones,))


def test_copies_that_can_be_seen_stay() -> None:
    x = torch.randn(3, 4)
    dense = torch.contiguous_format
    assert_untouched(lambda a: aten.clone.default(aten.neg.default(a)), [x], (drop_clones,))
    assert_untouched(lambda a: aten.view.default(aten.clone.default(aten.neg.default(a)), [12]), [x], (drop_clones,))
    assert_untouched(lambda a: aten.neg.default(aten.clone.default(a)), [x], (drop_clones,))
    assert_untouched(lambda a: aten.neg.default(aten.clone.default(aten.neg.default(a).t(), memory_format=dense)), [x],
                     (drop_clones,))


def test_a_dense_copy_of_a_dense_tensor_changes_the_type_alone() -> None:
    def dense(a: Tensor) -> Tensor:
        return aten._to_copy.default(a, dtype=F32, memory_format=torch.contiguous_format)

    row_major = trace(dense, [torch.randn(3, 4).bfloat16()])
    assert [is_plain_cast(n) for n in row_major.graph.nodes] == [False, True, False]
    transposed = trace(dense, [torch.randn(4, 3).bfloat16().t()])
    assert not any(is_plain_cast(n) for n in transposed.graph.nodes)
