"""Steps of k that are cut into slices, one for each warp: values of every form, the shape of kernels, their tiles."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.lowering.gemm.sliced import SLICE, WARPS
from fxfuser.lowering.kernel import Program
from fxfuser.ops.products import WIDE_PRODUCT
from fxfuser.runtime.build import report
from fxfuser.runtime.choice import FEW
from fxfuser.runtime.programs import tiles_of

from .harness import Made, check, made
from .test_parts import CASES, B, K, M, N, Shapes, Tensor, tensors

FORMS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    **{name: CASES[name] for name in ("bias and activation", "gates")},
    "two products": (lambda x, w, v: F.silu(x @ w) * (x @ v), ((M, K), (K, N), (K, N))),
    "a batch": (lambda a, b: torch.bmm(a, b).relu(), ((3, M, K), (3, K, N))),
    "a computed factor": (lambda x, w: torch.tanh((x * 0.5) @ w), ((M, K), (K, N))),
    "a wide product": (lambda x, w: WIDE_PRODUCT(x, w).relu(), ((M, K), (K, N))),
    "alone": (lambda x, w: x @ w.t(), ((M, K), (N, K))),
    "rows along k": (lambda x, w: x.t() @ w, ((K, M), (K, N))),
    "few columns": (lambda w, x: (w @ x.t()).relu(), ((130, K), (M, K))),
    "odd sizes": (lambda x, w: torch.tanh(x @ w.t()), ((3, 517), (37, 517))),
    "a short k": (lambda x, w: (x @ w.t()).relu(), ((M, 24), (N, 24))),
    "several rows of tiles": (lambda x, w: torch.tanh(x @ w.t()), ((33, 80), (40, 80))),
    "a matrix of the batch": (lambda x, w: torch.matmul(x, w.t()).relu(), ((2, M, K), (N, K))),
    "sums of rows and columns": (
        lambda x, w: ((h := (x @ w.t()).float()).sum(0), h.amax(-1), h.argmax(-1)), ((M, K), (N, K))),
    "logsumexp": (lambda x, w: torch.logsumexp((x @ w.t()).float(), -1), ((M, K), (N, K))),
    "padded": (lambda x, w: x[:, 3:-2] @ w[1:-1, 3:-2].t(), ((M, K), (N, K))),
    "every second row": (lambda x, w: (x[::2] @ w[::3].t()).relu(), ((2 * M, K), (3 * N, K))),
}


@pytest.mark.parametrize("name", FORMS)
def test_slices_add_up(name: str) -> None:
    fn, shapes = FORMS[name]
    source = check(fn, tensors(shapes), policies=("sliced",)).source("sliced")
    assert "[SLICES, MBLOCK, NBLOCK]" in source and "tl.reduce(accumulator_0, 0, combine_sum)" in source


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Values of float32 too, although it gets no such tile: see below."""
    check(lambda x, w: (x @ w.t()).relu(), tensors(((M, K), (N, K)), dtype), policies=("sliced",))


def test_symbolic_sizes() -> None:
    others = [tensors(((m, k), (N, k))) for m, k in ((2, 33), (17, 64))]
    check(linear, tensors(((M, K), (N, K))), [{0, 1}, {1}], others, policies=("sliced",))


def sliced(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = B) -> Made:
    return made(fn, [torch.empty(s, dtype=dtype) for s in shapes], blocks=None)


def linear(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w.t()).relu()


def gate(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(x @ w.t()) * (x @ v.t())


@pytest.mark.parametrize("rows, columns, depth", [
    (8, 1024, 1024), (8, 256, 1024), (8, 1024, 3584), (4, 4096, 4096), (16, 4096, 4096), (1024, 8, 1024)])
def test_few_rows_or_columns_need_no_second_round(rows: int, columns: int, depth: int) -> None:
    """What was fastest on an H200, without max-autotune too."""
    program = sliced(linear, (rows, depth), (columns, depth)).programs["sliced"]
    assert not program.spare and len(program.launches) == 1 and not program.scratch


@pytest.mark.parametrize("sizes, fastest", [
    ((8, 1024, 1024), (8, 256)), ((8, 1024, 3584), (8, 512)), ((4, 4096, 4096), (16, 256)),
    ((8, 32000, 1024), (16, 256)), ((8, 7168, 1024), (32, 256)), ((16, 4096, 4096), (32, 512)),
    ((16, 4096, 14336), (32, 512))], ids=str)
def test_what_was_fastest_is_measured(sizes: tuple[int, int, int], fastest: tuple[int, int]) -> None:
    rows, columns, depth = sizes
    program = sliced(linear, (rows, depth), (columns, depth)).programs["sliced"]
    assert fastest in {(b["NBLOCK"], b["KBLOCK"]) for b in (dict(t.blocks) for t in tiles_of(program)[:FEW])}


@pytest.mark.parametrize("shapes, dtype", [
    (((512, 1024), (1024, 1024)), B), (((8, 1024), (1024, 1024)), torch.float32), (((8, 128), (1024, 128)), B)])
def test_what_gets_no_slices(shapes: Shapes, dtype: torch.dtype) -> None:
    """Many rows, float32, a k of few steps."""
    assert "sliced" not in sliced(linear, *shapes, dtype=dtype).programs


def test_a_matrix_and_a_vector_get_none() -> None:
    assert "sliced" not in made(linear, tensors(((1, K), (N, K)))).programs


def every_tile(program: Program) -> list[Any]:
    kernel = program.launches[0].kernel
    return [report(replace(kernel, tile=tile, candidates=()), arch=arch)
            for tile in tiles_of(program)[:FEW] for arch in (80, 90)]


@pytest.mark.parametrize("fn, shapes", [
    (linear, ((8, 1024), (1024, 1024))), (linear, ((16, 4096), (4096, 4096))), (linear, ((1000, 2048), (6, 2048))),
    (gate, ((8, 1024), (3584, 1024), (3584, 1024))), (linear, ((8, 1031), (1024, 1031)))])
def test_builds(fn: Callable[..., Any], shapes: Shapes) -> None:
    """Warps multiply slices by the tensor cores, of what is copied ahead to shared memory, without spills."""
    for found in every_tile(sliced(fn, *shapes).programs["sliced"]):
        assert "mma.sync" in found.ptx and "wgmma" not in found.ptx
        assert found.spills <= 16 * (shapes[0][1] % 16 > 0)  # a word or two, where loads are single elements
        if shapes[0][1] % 16 == 0:
            assert re.search(r"cp\.async\.c[ag]\.shared\.global \[.*\], \[.*\], 0x10", found.ptx)


def test_slices_are_those_of_warps() -> None:
    for tile in tiles_of(sliced(linear, (8, 4096), (4096, 4096)).programs["sliced"]):
        blocks = dict(tile.blocks)
        assert blocks["SLICES"] == tile.num_warps == WARPS and blocks["KBLOCK"] // WARPS in SLICE
