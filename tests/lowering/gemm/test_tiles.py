"""Which programs and tiles of a product are measured without max-autotune: those that were fastest on an H200."""

from __future__ import annotations

import pytest
import torch

from fxfuser.lowering.kernel import Program, Tile
from fxfuser.runtime.choice import FEW
from fxfuser.runtime.programs import tiles_of

from .harness import Made, made

B = torch.bfloat16
GRADIENTS = ((256, 256, 65536), (768, 768, 12288), (768, 768, 65536), (128, 128, 262144), (1024, 1024, 4096))
# of one grid, measured against two kernels, last arrivers and other tiles: rows, columns, step, parts, warps, stages,
# elements of a program that adds parts up, and parts under way at once
FASTEST = ((128, 128, 64, 33, 8, 5, 512, 11), (128, 128, 64, 3, 8, 5, 4096, 3), (128, 256, 64, 7, 8, 4, 4096, 4),
           (64, 64, 128, 33, 4, 6, 128, 11), (128, 128, 64, 2, 8, 5, 4096, 2))


def gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.t() @ b).float()


def lowered(rows: int, columns: int, samples: int) -> Made:
    return made(gradient, [torch.empty(samples, n, dtype=B) for n in (rows, columns)], blocks=None)


def few(program: Program) -> list[tuple[int, ...]]:
    """The tiles of the program that are measured, as in FASTEST."""
    return [described(tile) for tile in tiles_of(program)[:FEW]]


def described(tile: Tile) -> tuple[int, ...]:
    b = dict(tile.blocks)
    return (b["MBLOCK"], b["NBLOCK"], b["KBLOCK"], b["SPLITS"], tile.num_warps, tile.num_stages, b["REST_XBLOCK"],
            b["REST_TOGETHER"])


@pytest.mark.parametrize("sizes, fastest", list(zip(GRADIENTS, FASTEST)), ids=str)
def test_what_was_fastest_is_measured(sizes: tuple[int, int, int], fastest: tuple[int, ...]) -> None:
    program = lowered(*sizes).programs["one_grid"]
    assert not program.spare and fastest in few(program)


@pytest.mark.parametrize("sizes", GRADIENTS, ids=str)
def test_what_one_grid_beats_is_left_to_max_autotune(sizes: tuple[int, int, int]) -> None:
    """Parts that meet in their tile, and what takes turns; a deterministic choice is of one grid, too."""
    of = lowered(*sizes)
    assert of.lowered.programs[0] is of.programs["one_grid"]
    assert not of.programs["parts"].spare
    assert of.programs["last_arriver"].spare and of.programs["turnstile"].spare


def test_parts_that_meet_in_their_tile_are_measured_where_there_is_no_grid() -> None:
    of = lowered(3072, 768, 12288)
    assert "one_grid" not in of.programs and not of.programs["last_arriver"].spare


def decode(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + x @ w.t()
    f = h.float()
    return h, (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6)).to(B)


@pytest.mark.parametrize("rows, columns", [(1, 4096), (1, 14336), (16, 4096), (16, 14336)])
def test_few_rows_are_added_up_by_a_kernel_of_their_own(rows: int, columns: int) -> None:
    """A program that needs a whole row has more warps there, and few tiles to follow: measured, as is one grid."""
    args = [torch.empty(s, dtype=B) for s in ((rows, 4096), (columns, 4096), (rows, columns))]
    of = made(decode, args, blocks=None)
    assert of.lowered.programs[0] is of.programs["parts"] and not of.programs["one_grid"].spare
