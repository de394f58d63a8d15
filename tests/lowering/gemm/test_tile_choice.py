"""Which tile comes first: by estimates, and by what it leaves where estimates do not tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxfuser.lowering.gemm.tiles import Product, gemm_tiles
from fxfuser.lowering.kernel import Tile

LOGSUMEXP = Product(1, 12288, 50304, 768, 2, staged=0, work=12, states=4)


def blocks(tile: Tile) -> tuple[int, int]:
    found = dict(tile.blocks)
    return found["MBLOCK"], found["NBLOCK"]


@pytest.mark.parametrize("rows, columns, depth", [
    (12288, 50304, 768), (4096, 50304, 768), (8192, 32000, 4096), (8192, 128256, 4096), (8192, 50304, 1024)])
def test_tiles_that_leave_states_alone_are_wide(rows: int, columns: int, depth: int) -> None:
    first, *others = map(blocks, gemm_tiles(replace(LOGSUMEXP, rows=rows, columns=columns, depth=depth)))
    assert first == (128, 256) and (128, 128) in others


def test_estimates_decide_elsewhere() -> None:
    """Where there are no states, where elements are stored beside them, and of tiles that are not nearly as good."""
    for product in (replace(LOGSUMEXP, states=0), replace(LOGSUMEXP, staged=2)):
        assert blocks(gemm_tiles(product)[0]) == (128, 128)
    assert blocks(gemm_tiles(replace(LOGSUMEXP, rows=64))[0])[0] == 64
    found = [blocks(t) for t in gemm_tiles(LOGSUMEXP)]
    assert found.index((256, 128)) < found.index((64, 128)) < found.index((64, 64))
