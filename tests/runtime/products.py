"""Hand-made kernels of matrix products, as simple as a persistent kernel can be."""

from __future__ import annotations

import torch

from fxfuser.lowering.kernel import Kernel, Tile

GEMM = '''import triton
import triton.language as tl


@triton.jit
def gemm(in0, in1, out0, n0, n1, n2, INDEX: tl.constexpr, DESCRIPTORS: tl.constexpr, MBLOCK: tl.constexpr,
         NBLOCK: tl.constexpr, KBLOCK: tl.constexpr, GROUP: tl.constexpr):
    rows = (n0 + MBLOCK - 1) // MBLOCK
    columns = (n1 + NBLOCK - 1) // NBLOCK
    if DESCRIPTORS:
        a_tiles = tl.make_tensor_descriptor(in0, shape=[n0, n2], strides=[n2, 1], block_shape=[MBLOCK, KBLOCK])
        b_tiles = tl.make_tensor_descriptor(in1, shape=[n1, n2], strides=[n2, 1], block_shape=[NBLOCK, KBLOCK])
        c_tiles = tl.make_tensor_descriptor(out0, shape=[n0, n1], strides=[n1, 1], block_shape=[MBLOCK, NBLOCK])
    for tile in tl.range(tl.program_id(0), rows * columns, tl.num_programs(0), flatten=True):
        first = tile // (GROUP * columns) * GROUP
        height = tl.minimum(rows - first, GROUP)
        within = tile % (GROUP * columns)
        row = (first + within % height) * MBLOCK
        column = within // height * NBLOCK
        i = row.to(INDEX) + tl.arange(0, MBLOCK)[:, None]
        j = column.to(INDEX) + tl.arange(0, NBLOCK)[None, :]
        total = tl.full([MBLOCK, NBLOCK], 0.0, tl.float32)
        for k in tl.range(0, n2, KBLOCK):
            if DESCRIPTORS:
                a = a_tiles.load([row, k])
                b = b_tiles.load([column, k]).T
            else:
                ka = k + tl.arange(0, KBLOCK)[None, :]
                kb = k + tl.arange(0, KBLOCK)[:, None]
                a = tl.load(in0 + i * n2 + ka, mask=(i < n0) & (ka < n2), other=0.0)
                b = tl.load(in1 + j * n2 + kb, mask=(j < n1) & (kb < n2), other=0.0)
            total = tl.dot(a, b, total)
        if DESCRIPTORS:
            c_tiles.store([row, column], total.to(out0.dtype.element_ty))
        else:
            tl.store(out0 + i * n1 + j, total.to(out0.dtype.element_ty), mask=(i < n0) & (j < n1))
'''


def tile(rows: int, columns: int, depth: int, warps: int = 4, stages: int = 2) -> Tile:
    return Tile((("MBLOCK", rows), ("NBLOCK", columns), ("KBLOCK", depth), ("GROUP", 8)), warps, stages)


SMALL, LARGE = tile(32, 16, 32), tile(128, 256, 64, 8, 3)


def gemm(dtype: torch.dtype = torch.bfloat16, of: Tile = SMALL) -> Kernel:
    """out0[n0, n1] = in0[n0, n2] @ in1[n1, n2].T, all contiguous."""
    return Kernel("gemm", GEMM, (dtype, dtype), (dtype,), 3, "min(cdiv(n0, MBLOCK) * cdiv(n1, NBLOCK), PROCESSORS)",
                  "max(n0, n1) * max(n1, n2) + MBLOCK * NBLOCK", of, aligned=(0, 1, 2), divisible=(1, 2))
