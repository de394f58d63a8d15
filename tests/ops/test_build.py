"""Every row's text compiles for a GPU, on any machine; where there is a GPU it agrees with eager CUDA."""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget

from fxfuser.runtime.build import Variant, build, load_text
from fxfuser.runtime.interpret import interpreted

from .batch import LANES, Batch, batch, distinct
from .samples import SAMPLES, TOLERANCE

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOGETHER = 10  # ops of one build, whose time grows faster than their number
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype, precise", [
    (torch.float64, False), (torch.float32, False), (torch.float32, True), (torch.bfloat16, False),
    (torch.int64, False), (torch.uint8, False), (torch.bool, False)])
def test_rows_compile(dtype: torch.dtype, precise: bool) -> None:
    ops, count = distinct(), 0
    for start in range(0, len(ops), TOGETHER):
        kernel = batch(dtype, precise, among=ops[start:start + TOGETHER]).kernel
        if kernel.outputs:
            assert build(kernel, Variant.usual(kernel), GPUTarget("cuda", 90, 32)).asm["cubin"]
            count += len(kernel.outputs)
    assert count > 20


def _disagreements(batch: Batch, outputs: list[torch.Tensor]) -> list[str]:
    """The ops whose output is not eager's, each with the first element that differs."""
    found = []
    for op, expected, output in zip(batch.ops, batch.results, outputs, strict=True):
        size = min(expected.numel(), LANES)
        wanted, actual = expected.reshape(-1)[:size], output[:size]
        exact = SAMPLES[op][0].exact or not expected.dtype.is_floating_point
        tolerance = 0.0 if exact else TOLERANCE[expected.dtype]
        close = torch.isclose(actual, wanted, rtol=tolerance, atol=tolerance * 0.1, equal_nan=True)
        if not close.all():
            i = int((~close).nonzero()[0])
            mismatch = f"{int((~close).sum())} of {size}, the first at {i}: {actual[i].item()} for {wanted[i].item()}"
            found.append(f"{op}: {mismatch}")
    return found


def test_a_batch_agrees_with_eager_in_the_interpreter() -> None:
    """What the device test computes is sound where no device is."""
    rows = batch(torch.float32, block=LANES)
    outputs = [torch.empty(LANES, dtype=r.dtype) for r in rows.results]
    interpreted(rows.kernel).run([*rows.inputs, *outputs])
    assert _disagreements(rows, outputs) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, precise", [*((d, False) for d in (*FLOATS, *WHOLE)), (torch.float32, True)])
def test_rows_agree_with_eager_on_the_device(dtype: torch.dtype, precise: bool) -> None:
    rows = batch(dtype, precise, device="cuda")
    outputs = [torch.empty(LANES, dtype=r.dtype, device="cuda") for r in rows.results]
    kernel = load_text(rows.kernel.source, "kernel")["kernel"]
    kernel[(LANES // 32,)](*rows.inputs, *outputs, INDEX=None, N=32, num_warps=1)
    assert _disagreements(rows, outputs) == []
