"""The table as a whole: what has a row, what is left to ATen and why, promotion, literals, reductions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from fxfuser import ops as table
from fxfuser.ops import Kind

from .harness import interpret, make_node

aten, prims = torch.ops.aten, torch.ops.prims


def _functional_core_ops() -> list[OpOverload]:
    kept = []
    decomposed = core_aten_decompositions()
    for name in dir(aten):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if torch.Tag.core in op.tags and op not in decomposed and not op._schema.is_mutable:
                kept.append(op)
    return kept


def test_every_core_op_has_a_row() -> None:
    returns_tensors = [op for op in _functional_core_ops() if not op._schema.name.startswith("aten::sym_")]
    assert [str(op) for op in returns_tensors if table.row(op) is None] == []


def test_extern_rows_say_why_and_pointwise_rows_have_text() -> None:
    for op, row in table.TABLE.items():
        assert (row.kind is Kind.EXTERN) <= bool(row.reason), op
        assert (row.kind is Kind.POINTWISE) == (row.emit is not None) or row.kind is Kind.FACTORY, op
        assert (row.kind in (Kind.REDUCTION, Kind.SCAN)) == (row.monoid is not None), op
        assert set(row.libdevice) <= set(table.LIBDEVICE), op


@pytest.mark.parametrize("op, kind", [
    (aten.add.Tensor, Kind.POINTWISE), (aten.view.default, Kind.VIEW), (aten.expand.default, Kind.VIEW),
    (aten.clone.default, Kind.LAYOUT), (aten.cat.default, Kind.LAYOUT), (aten.constant_pad_nd.default, Kind.LAYOUT),
    (aten.full.default, Kind.FACTORY), (prims.iota.default, Kind.FACTORY), (aten.sum.dim_IntList, Kind.REDUCTION),
    (aten.max.default, Kind.REDUCTION), (aten.max.dim, Kind.EXTERN), (aten.embedding.default, Kind.GATHER),
    (aten.addmm.default, Kind.GEMM), (aten.convolution.default, Kind.EXTERN), (aten.split.Tensor, Kind.VIEW)])
def test_kinds(op: OpOverload, kind: Kind) -> None:
    node = make_node(op, (), {}, None)
    assert table.kind_of(node) is kind
    assert table.is_view(node) == (kind is Kind.VIEW)


def test_unsupported_names_the_obstacle() -> None:
    real, whole = torch.ones(3), torch.ones(3, dtype=torch.int32)
    complex_ = torch.ones(3, dtype=torch.complex64)
    assert table.unsupported(make_node(aten.add.Tensor, (real, whole), {}, real)) is None
    assert table.unsupported(make_node(aten.add.Tensor, (complex_, real), {}, complex_)) == "dtype complex64"
    float8 = real.to(torch.float8_e4m3fn)
    assert table.unsupported(make_node(aten._to_copy.default, (float8,), {}, real)) is None
    for op, args in ((aten.add.Tensor, (float8, float8)), (aten.neg.default, (float8,)), (aten.tril.default, (float8,)),
                     (aten.where.self, (real > 0, float8, real)), (aten.gather.default, (float8, 0, whole.long()))):
        assert table.unsupported(make_node(op, args, {}, float8)) == "dtype float8_e4m3fn", op
    sparse = real.to_sparse()
    assert table.unsupported(make_node(aten.mul.Tensor, (sparse, real), {}, sparse)) == "layout sparse_coo"
    assert table.unsupported(make_node(aten.nextafter.default, (real.half(), real.half()), {}, real.half())) == (
        "aten.nextafter.default on float16")
    assert "random" in (table.unsupported(make_node(aten.bernoulli.default, (real,), {}, real)) or "")
    assert "no row" in (table.unsupported(make_node(aten._cslt_compress.default, (real,), {}, real)) or "")


def test_unsupported_sees_a_host_operand() -> None:
    with FakeTensorMode():
        device, host = torch.ones(3, device="cuda"), torch.ones(())
        reason = table.unsupported(make_node(aten.add.Tensor, (device, host), {}, device))
    assert reason == "operands on several devices: cpu, cuda:0"


@pytest.mark.parametrize("op, args, kwargs, dtype", [
    (aten.add.Tensor, (torch.ones(2, dtype=torch.bfloat16), torch.tensor(1.0)), {}, torch.float32),
    (aten.add.Tensor, (torch.ones(2, dtype=torch.int8), 3), {}, torch.int8),
    (aten.add.Tensor, (torch.ones(2, dtype=torch.int8), torch.tensor(3)), {}, torch.int8),
    (aten.mul.Tensor, (torch.ones(2, dtype=torch.int64), 0.5), {}, torch.float32),
    (aten.div.Tensor, (torch.ones(2, dtype=torch.int64), 2), {}, torch.float32),
    (aten.div.Tensor_mode, (torch.ones(2, dtype=torch.int64), 2), {"rounding_mode": "floor"}, torch.int64),
    (aten.div.Tensor_mode, (torch.ones(2, dtype=torch.int64), 2), {"rounding_mode": None}, torch.float32),
    (aten.lt.Scalar, (torch.ones(2, dtype=torch.int64), 0.5), {}, torch.float32),
    (aten.where.self, (torch.ones(2) > 0, torch.ones(2, dtype=torch.float64), torch.ones(2)), {}, torch.float64),
    (aten.clamp.default, (torch.ones(2, dtype=torch.int32),), {"max": 1.5}, torch.float32),
    (aten._to_copy.default, (torch.ones(2),), {"dtype": torch.int16}, torch.int16)])
def test_compute_dtype(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> None:
    node, row = make_node(op, args, kwargs, op(*args, **kwargs)), table.TABLE[op]
    assert table.compute_dtype(node, row) == dtype


@pytest.mark.parametrize("value, dtype, text", [
    (2, torch.float32, "2.0"), (-1.5, torch.bfloat16, "(-1.5)"), (float("-inf"), torch.float32, 'float("-inf")'),
    (300, torch.int8, "tl.full([], 44, tl.int8)"), (-1, torch.uint8, "tl.full([], 255, tl.uint8)"),
    (1e-42, torch.float32, "tl.full([], 1e-42, tl.float32)"), (0.1, torch.float64, "tl.full([], 0.1, tl.float64)"),
    (3, torch.int32, "3"), (True, torch.bool, "True"), (0.0, torch.float32, "0.0"), (-0.0, torch.int32, "0"),
    (-0.0, torch.float16, "(tl.full([], 0.0, tl.float32) * (-1.0))")])
def test_literals_have_the_dtype_that_triton_would_give_them(value: float, dtype: torch.dtype, text: str) -> None:
    assert table.literal(value, dtype) == text


@pytest.mark.parametrize("op, args, kwargs, dims, keep, dtype", [
    (aten.sum.default, (torch.ones(2, 3, dtype=torch.bool),), {}, (0, 1), False, torch.int64),
    (aten.sum.dim_IntList, (torch.ones(2, 3, 4, dtype=torch.bfloat16), [-1, 0], True), {}, (0, 2), True, torch.float32),
    (aten.sum.dim_IntList, (torch.ones(2, 3), []), {}, (0, 1), False, torch.float32),
    (aten.sum.dim_IntList, (torch.ones(2, 3), [1]), {"dtype": torch.float64}, (1,), False, torch.float64),
    (aten.mean.dim, (torch.ones(2, 3, dtype=torch.float16), [1]), {}, (1,), False, torch.float32),
    (aten.prod.dim_int, (torch.ones(2, 3, dtype=torch.int8), 1), {}, (1,), False, torch.int64),
    (aten.amax.default, (torch.ones(2, 3, dtype=torch.int8), [], True), {}, (0, 1), True, torch.int8),
    (aten.argmax.default, (torch.ones(2, 3),), {}, (0, 1), False, torch.float32),
    (aten.argmin.default, (torch.ones(2, 3), -1, True), {}, (1,), True, torch.float32),
    (aten.any.dims, (torch.ones(2, 3), []), {}, (), False, torch.bool),
    (aten.any.dims, (torch.ones(2, 3),), {}, (0, 1), False, torch.bool),
    (aten.all.dim, (torch.ones(2, 3, dtype=torch.uint8), 0), {}, (0,), False, torch.bool),
    (aten.sum.dim_IntList, (torch.tensor(1.0), [-1]), {}, (), False, torch.float32)])
def test_reductions(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[int, ...], keep: bool,
                    dtype: torch.dtype) -> None:
    expected = op(*args, **kwargs)
    node, row = make_node(op, args, kwargs, expected), table.TABLE[op]
    reduced, kept = table.reduction_dims(node)
    assert (reduced, kept) == (dims, keep)
    assert table.reduction_dtype(node, row) == dtype
    left = [1 if d in reduced else n for d, n in enumerate(args[0].shape) if keep or d not in reduced]
    assert list(expected.shape) == left


def test_prelude_brings_callees_first() -> None:
    text = table.prelude_for("y = floor_divide_float(a, b)")
    assert text.index("def divide_exact") < text.index("def floor_divide_float")
    assert "digamma" not in text


@pytest.mark.parametrize("op, args", [
    (aten.div.Tensor, (torch.linspace(-3, 3, 64), torch.linspace(0.1, 7, 64))),
    (aten.sqrt.default, (torch.linspace(0.1, 7, 64),)), (aten.rsqrt.default, (torch.linspace(0.1, 7, 64),)),
    (aten.sigmoid.default, (torch.linspace(-5, 5, 64),)), (aten.exp.default, (torch.linspace(-5, 5, 64),))], ids=str)
def test_eager_numerics(op: OpOverload, args: tuple[Any, ...]) -> None:
    expected = op(*args)
    torch.testing.assert_close(interpret(op, args, {}, expected, precise=True), expected, rtol=3e-7, atol=0)
