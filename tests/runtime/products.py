"""Hand-made kernels of matrix products, as simple as a persistent kernel can be."""

from __future__ import annotations

from dataclasses import replace

import torch

from fxfuser.lowering.kernel import Kernel, Launch, LoweredPrograms, Place, Program, Scratch, Tile

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


PARTIAL = '''
@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


'''

MAXIMA = GEMM.replace("@triton.jit", PARTIAL.strip() + "\n\n\n@triton.jit").replace("def gemm", "def maxima")
MAXIMA = MAXIMA[:MAXIMA.index("        if DESCRIPTORS:\n            c_tiles")] + '''\
        best = tl.reduce(tl.where(j < n1, total, float("-inf")), 1, larger, keep_dims=True)
        tl.store(out0 + i * columns + column // NBLOCK, best, mask=i < n0)
'''

FINISH = '''import triton
import triton.language as tl
''' + PARTIAL + '''@triton.jit
def finish(in0, out0, n0, n1, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK).to(INDEX)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for j in tl.range(0, n1):
        best = larger(best, tl.load(in0 + i * n1 + j, mask=i < n0, other=0.0))
    tl.store(out0 + i, best.to(out0.dtype.element_ty), mask=i < n0)
'''

SPLIT = '''import triton
import triton.language as tl


@triton.jit
def split(in0, in1, out0, out1, out2, n0, n1, n2, n3, INDEX: tl.constexpr, MBLOCK: tl.constexpr,
          NBLOCK: tl.constexpr, KBLOCK: tl.constexpr, GROUP: tl.constexpr):
    columns = (n1 + NBLOCK - 1) // NBLOCK
    tile = tl.program_id(0) // n3
    part = tl.program_id(0) % n3
    i = tile // columns * MBLOCK + tl.arange(0, MBLOCK)[:, None]
    j = tile % columns * NBLOCK + tl.arange(0, NBLOCK)[None, :]
    live = (i < n0) & (j < n1)
    total = tl.full([MBLOCK, NBLOCK], 0.0, tl.float32)
    for k in tl.range(part * KBLOCK, n2, n3 * KBLOCK):
        ka = k + tl.arange(0, KBLOCK)[None, :]
        kb = k + tl.arange(0, KBLOCK)[:, None]
        a = tl.load(in0 + i * n2 + ka, mask=(i < n0) & (ka < n2), other=0.0)
        b = tl.load(in1 + j * n2 + kb, mask=(j < n1) & (kb < n2), other=0.0)
        total = tl.dot(a, b, total)
    tl.store(out1 + (part * n0 + i) * n1 + j, total, mask=live)
    tl.debug_barrier()
    if tl.atomic_add(out2 + tile, 1, sem="acq_rel") == n3 - 1:
        total = tl.full([MBLOCK, NBLOCK], 0.0, tl.float32)
        for s in tl.range(0, n3):
            total += tl.load(out1 + (s * n0 + i) * n1 + j, mask=live, other=0.0, cache_modifier=".cg")
        tl.store(out0 + i * n1 + j, total.to(out0.dtype.element_ty), mask=live)
        tl.atomic_xchg(out2 + tile, RESET, sem="relaxed")
'''

SIZES = ("n0", "n1", "n2")


def plain(dtype: torch.dtype = torch.bfloat16, of: Tile = SMALL) -> Program:
    """out0 = in0 @ in1.T as one launch."""
    pointers = ((Place.INPUT, 0), (Place.INPUT, 1), (Place.OUTPUT, 0))
    return Program("plain", (Launch(gemm(dtype, of), pointers, SIZES),), (), 3)


def maxima(dtype: torch.dtype = torch.bfloat16, of: Tile = SMALL) -> Program:
    """out0 = max(in0 @ in1.T, dim 1): maxima of each tile in scratch, then a finaliser."""
    partial = replace(gemm(dtype, of), name="maxima", source=MAXIMA, outputs=(torch.float32,), aligned=(0, 1),
                      divisible=(2,))
    finish = Kernel("finish", FINISH, (torch.float32,), (dtype,), 2, "cdiv(n0, BLOCK)", "(n0 + BLOCK) * n1",
                    Tile((("BLOCK", 64),), 1))
    tiles = "cdiv(n1, NBLOCK)"
    return Program("row_maxima", (
        Launch(partial, ((Place.INPUT, 0), (Place.INPUT, 1), (Place.SCRATCH, 0)), SIZES),
        Launch(finish, ((Place.SCRATCH, 0), (Place.OUTPUT, 0)), ("n0", tiles)),
    ), (Scratch(torch.float32, f"n0 * {tiles}"),), 3)


def split(dtype: torch.dtype = torch.bfloat16, of: Tile = SMALL, parts: int = 3, reset: int = 0) -> Program:
    """out0 = in0 @ in1.T, K in parts: the last program to arrive at a tile sums them and leaves `reset` arrivals."""
    tiles = "cdiv(n0, MBLOCK) * cdiv(n1, NBLOCK)"
    kernel = Kernel("split", SPLIT.replace("RESET", str(reset)), (dtype, dtype), (dtype, torch.float32, torch.int32), 4,
                    f"{tiles} * n3", "max(n0, n1) * max(n1, n2) * n3", of)
    pointers = ((Place.INPUT, 0), (Place.INPUT, 1), (Place.OUTPUT, 0), (Place.SCRATCH, 0), (Place.SCRATCH, 1))
    return Program("split_k", (Launch(kernel, pointers, (*SIZES, str(parts))),),
                   (Scratch(torch.float32, f"{parts} * n0 * n1"), Scratch(torch.int32, tiles, kept=True)), 3)


def static(program: Program, *sizes: int) -> Program:
    """The program for these sizes alone."""
    names = {f"n{i}": str(n) for i, n in enumerate(sizes)}

    def fixed(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    return replace(program, sizes=0, scratch=tuple(replace(s, size=fixed(s.size)) for s in program.scratch),
                   launches=tuple(replace(x, sizes=tuple(map(fixed, x.sizes))) for x in program.launches))


def lowered(*programs: Program) -> LoweredPrograms:
    sizes = SIZES[:programs[0].sizes]
    return LoweredPrograms(programs, (0, 1), (0,), sizes)
