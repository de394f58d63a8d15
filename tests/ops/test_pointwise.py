"""Every POINTWISE row's text, interpreted, against eager over all dtypes."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload

from fxfuser import ops as table

from .harness import interpret, make_node
from .samples import DTYPES, SAMPLES, TOLERANCE, Sample, eager

POINTWISE = [op for op, row in table.TABLE.items() if row.kind is table.Kind.POINTWISE]
# rows that leave a dtype to ATen although eager has it
LEFT_OUT = {(op, dtype) for op in (torch.ops.aten.nextafter.default, torch.ops.prims.nextafter.default,
                                    torch.ops.aten.igamma.default, torch.ops.aten.igammac.default)
            for dtype in (torch.bfloat16, torch.float16)}
# of two zeros eager takes now the one, now the other, as its vector width decides
ANY_ZERO = ("maximum", "minimum", "fmax", "fmin", "max", "min", "clamp", "clamp_min", "clamp_max")


def test_every_row_has_a_sample() -> None:
    assert [op for op in POINTWISE if op not in SAMPLES] == []
    assert [op for op in SAMPLES if op not in POINTWISE] == []


def _check(op: OpOverload, sample: Sample, dtype: torch.dtype) -> bool:
    """Whether eager admits the sample; asserts that the row then agrees."""
    args, kwargs = sample.make(dtype)
    expected = eager(op, args, kwargs)
    if expected is None:
        return False
    node = make_node(op, args, kwargs, expected)
    reason = table.unsupported(node)
    if reason is not None:
        assert "complex" in reason or (op, dtype) in LEFT_OUT, f"{op} {dtype} {sample.note}: {reason}"
        return False
    actual = interpret(op, args, kwargs, expected)
    assert actual.dtype == expected.dtype
    name = f"{op} on {dtype} {sample.note}"
    if sample.exact or not expected.dtype.is_floating_point:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}")
    else:
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance * 0.1, equal_nan=True, msg=lambda m: f"{name}: {m}")
    if sample.exact and expected.dtype.is_floating_point and op._schema.name.split("::")[1] not in ANY_ZERO:
        zero = (expected == 0) & (actual == 0)
        assert torch.equal(actual[zero].signbit(), expected[zero].signbit()), f"{name}: sign of zero"
    return True


@pytest.mark.parametrize("op", POINTWISE, ids=str)
def test_row_agrees_witheager(op: OpOverload) -> None:
    ran = [_check(op, sample, dtype) for sample in SAMPLES[op] for dtype in DTYPES]
    assert any(ran), "eager refuses every sample"
