"""The kernels that `fxfuser calibrate` times: a copy, arithmetic, and nothing."""

from __future__ import annotations

import triton
import triton.language as tl

COPY_BLOCK = 8192  # elements of 4 bytes: 32 in each of 256 threads
COMPUTE_BLOCK = 2048  # 8 independent chains of arithmetic in each thread
OPERATIONS_PER_STEP = 16


@triton.jit
def nothing(target):  # type: ignore[no-untyped-def]  # Triton would look annotations up
    tl.program_id(0)


@triton.jit  # type: ignore[untyped-decorator]
def copy(source, target, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program p copies blocks p, p + n, p + 2 n and so on of n programs."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    for i in range(steps):
        at = first + i * stride + lanes
        tl.store(target + at, tl.load(source + at))


@triton.jit  # type: ignore[untyped-decorator]
def compute(target, steps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight multiplications and eight additions a step for each element, each on the result of the one before."""
    lanes = tl.arange(0, BLOCK)
    x = lanes.to(tl.float32)
    for _ in range(steps):
        for _ in tl.static_range(8):
            x = x * 0.999 + 0.5
    tl.store(target + tl.program_id(0) * BLOCK + lanes, x)
