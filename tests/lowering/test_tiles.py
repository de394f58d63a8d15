"""Tiles: which are worth measuring, and that all of them may share one kernel's text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Callable

import pytest
import torch

from fxfuser.config import Config
from fxfuser.errors import VerificationError
from fxfuser.lowering import candidates
from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.lowering.lower import lower, size_hints
from fxfuser.ops import PRELUDE, row

from .harness import compiled, run, segment_of, trace

aten = torch.ops.aten


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def transposed(x: torch.Tensor) -> torch.Tensor:
    return (x.t() * 2).contiguous()


def row_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(1)


def column_sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def normalised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    centred = x - x.mean(1, keepdim=True)
    return centred, (centred * x).sum(0)


CASES: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
    (add, [(4096, 1024)] * 2), (add, [(3, 1000)] * 2), (add, [()] * 2), (transposed, [(1024, 768)]),
    (transposed, [(100, 36)]), (row_sums, [(512, 768)]), (row_sums, [(5, 50304)]), (column_sums, [(4096, 768)]),
    (column_sums, [(20000, 768)]),
    (column_sums, [(512, 768)]), (softmax, [(333, 1000)]), (softmax, [(64, 20000)]), (normalised, [(512, 768)]),
]


def kernel_of(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dynamic: list[set[int]] | None = None) -> Kernel:
    graph = trace(fn, [torch.empty(shape) for shape in shapes], dynamic or ())
    return lower(segment_of(graph), Config(), size_hints(graph.graph)).kernel


def choices(kernel: Kernel) -> tuple[Tile, ...]:
    return (kernel.tile, *kernel.candidates)


@pytest.mark.parametrize("fn, shapes", CASES)
def test_all_tiles_may_share_one_text(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    """Where the text has no mask for a dim, every block divides its extent: all are powers of two, so that the largest
    is a multiple of the others."""
    kernel = kernel_of(fn, shapes)
    found = choices(kernel)
    assert len(set(found)) == len(found) <= candidates.MOST
    assert len({tuple(n for n, _ in t.blocks) for t in found}) == 1
    for tile in found:
        assert all(size & (size - 1) == 0 for _, size in tile.blocks)
        assert tile.num_warps & (tile.num_warps - 1) == 0 and 1 <= tile.num_warps <= candidates.MOST_WARPS
    walked = re.findall(r"cdiv\((\d+), (\w+)\)", kernel.grid) + re.findall(r"range\(0, (\d+), (\w+)\)", kernel.source)
    for extent, block in walked:
        if f"{block[:-5].lower()} < {extent}" not in kernel.source:  # no mask
            assert all(int(extent) % dict(t.blocks)[block] == 0 for t in found), (block, extent)


@pytest.mark.parametrize("fn, shapes", [c for c in CASES if c[1][0]])
def test_there_is_something_to_search(fn: Callable[..., Any], shapes: list[tuple[int, ...]]) -> None:
    found = choices(kernel_of(fn, shapes))
    assert len(found) > 1
    assert len({t.num_warps for t in found}) > 1 or max(map(max, shapes)) < 1000


def test_no_candidate_costs_the_default_a_mask() -> None:
    kernel = kernel_of(add, [(3, 1024)] * 2)  # 3072 elements: 2048 do not divide them
    assert all(3072 % dict(t.blocks)["XBLOCK"] == 0 for t in choices(kernel))
    assert "mask" not in kernel.source
    uneven = kernel_of(add, [(3, 1000)] * 2)
    assert "mask" in uneven.source and len(choices(uneven)) > 2


def test_held_dims_stay_whole() -> None:
    held = {dict(t.blocks)["R0BLOCK"] for t in choices(kernel_of(softmax, [(333, 1000)]))}
    assert held == {1024}
    looped = {dict(t.blocks)["R0BLOCK"] for t in choices(kernel_of(softmax, [(64, 20000)]))}
    assert len(looped) > 1


def test_dynamic_sizes_have_masks_and_candidates() -> None:
    kernel = kernel_of(row_sums, [(512, 768)], [{0}])
    assert kernel.sizes == 1 and len(choices(kernel)) > 2 and "mask" in kernel.source


def test_what_was_measured_to_be_good_is_measured_again() -> None:
    columns = kernel_of(column_sums, [(20000, 768)])
    assert columns.tile == Tile((("XBLOCK", 64), ("R0BLOCK", 64)), 2)
    assert {4, 8} <= {t.num_warps for t in columns.candidates if t.blocks == columns.tile.blocks}
    finish = choices(kernel_of(column_sums, [(512, 768)]))
    assert any(dict(t.blocks)["XBLOCK"] == 16 and t.num_warps == 16 for t in finish)
    assert Tile((("YBLOCK", 64), ("XBLOCK", 64)), 8) in choices(kernel_of(transposed, [(4096, 4096)]))


def head(x: torch.Tensor, y: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [S, heads, D], y: [S, fewer heads, D], table: [S, D]."""
    return x * table[:, None], y * table[:, None]


def test_loops_beside_each_other_take_whole_lines_and_dividing_steps() -> None:
    kernel = kernel_of(head, [(8192, 28, 64), (8192, 4, 64), (8192, 64)])
    assert kernel.tile == Tile((("XBLOCK", 256), ("R0BLOCK", 4), ("R1BLOCK", 4)), 4)  # 28 heads, 4 at a time
    assert "mask" not in kernel.source
    few = kernel_of(lambda x, table: x * table[:, None], [(8192, 16, 128), (8192, 128)])
    assert dict(few.tile.blocks) == {"XBLOCK": 128, "R0BLOCK": 8}  # two iterations at least
    # threads that compute the same cosine are few, or one iteration is all
    angles = kernel_of(lambda x, y, a: (x * a.cos()[:, None], y * a.cos()[:, None]),
                       [(8192, 32, 64), (8192, 8, 64), (8192, 64)])
    assert dict(angles.tile.blocks) == {"XBLOCK": 256, "R0BLOCK": 4, "R1BLOCK": 4}
    alone = kernel_of(lambda x, a: x * a.cos()[:, None], [(8192, 32, 64), (8192, 64)])
    assert dict(alone.tile.blocks) == {"XBLOCK": 128, "R0BLOCK": 32}
    # rows of several lengths: each program reads along them
    rows = kernel_of(lambda x, y: (x + 1, y * 2), [(1 << 16, 3072), (1 << 16, 1024)])
    assert dict(rows.tile.blocks)["XBLOCK"] <= 2 and dict(rows.tile.blocks)["R0BLOCK"] >= 1024


def gradients(q: torch.Tensor, k: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [S, heads, D]; k: [S, fewer heads, 3, D], summed over its repeats; a: [S, D]."""
    return q * a.cos()[:, None], k.sum(2) * a.cos()[:, None]


def test_what_is_no_loop_stays_whole_beside_a_loop() -> None:
    kernel = kernel_of(gradients, [(8192, 32, 64), (8192, 8, 3, 64), (8192, 64)])
    held = [f"R{i}BLOCK" for i in range(2) if f"range(0, 8, R{i}BLOCK" not in kernel.source
            and f"range(0, 32, R{i}BLOCK" not in kernel.source]
    assert len(held) == 1
    assert {dict(tile.blocks)[held[0]] for tile in choices(kernel)} == {8}


def test_a_tile_that_leaves_out_elements_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxfuser.lowering.lower.tiles", lambda *rest: (Tile((("XBLOCK", 1), ("R0BLOCK", 512)), 4),))
    with pytest.raises(VerificationError, match="leaves out some of r0, which has 1000"):
        kernel_of(softmax, [(333, 1000)])


def spread(x: torch.Tensor) -> torch.Tensor:
    centred = x - x.mean(1, keepdim=True)
    return (centred * centred).sum(1)


def test_a_loop_of_several_states_takes_smaller_steps() -> None:
    """Whether one fold has them or two that become one."""
    assert dict(kernel_of(row_sums, [(2048, 65536)]).tile.blocks)["R0BLOCK"] == 4096
    kernel = kernel_of(spread, [(2048, 65536)])
    assert "combine_moments" in kernel.source and dict(kernel.tile.blocks)["R0BLOCK"] == 2048


@pytest.mark.parametrize("rows, threads", [(100, 256), (500, 256), (667, 128), (704, 128), (800, 256), (12288, 512)])
def test_no_few_rows_begin_when_all_others_end(rows: int, threads: int) -> None:
    """A multiprocessor holds 4 programs of 256 threads that walk a row, or 8 of 128; the cache fewer long rows."""
    tile = kernel_of(softmax, [(rows, 50304)]).tile
    assert 32 * tile.num_warps == threads and dict(tile.blocks)["R0BLOCK"] == 16 * threads


def weighted_columns(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x.float() * y.float() * scale).sum(0)


def test_a_vector_does_not_say_how_matrices_lie() -> None:
    """Rows of 16 bytes are half of what memory moves at least; one scale a row weighs as little as it has elements."""
    shapes = ((128, 4096), torch.bfloat16), ((128, 4096), torch.bfloat16), ((128, 1), torch.float32)
    graph = trace(weighted_columns, [torch.empty(shape, dtype=dtype) for shape, dtype in shapes])
    kernel = lower(segment_of(graph), Config(), size_hints(graph.graph)).kernel
    assert dict(kernel.tile.blocks) == {"XBLOCK": 32, "R0BLOCK": 128} and kernel.tile.num_warps == 8


@pytest.mark.parametrize("dtype, both, elements", [
    (torch.bfloat16, True, 512), (torch.bfloat16, False, 1024), (torch.float32, True, 512), (torch.float32, False, 512),
])
def test_programs_whose_warps_wait_for_each_other_are_small(dtype: torch.dtype, both: bool, elements: int) -> None:
    """As few elements as move 3 KB, two warps at least; ops without such a wait keep large programs."""
    def waves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.sin(), x.cos()) if both else (x.cos(),)

    graph, alone = (trace(fn, [torch.empty(1 << 22, dtype=dtype)]) for fn in (waves, torch.tanh))
    found = lower(segment_of(graph), Config(), size_hints(graph.graph)).kernel
    assert found.tile == Tile((("XBLOCK", elements),), 2)
    other = lower(segment_of(alone), Config(), size_hints(alone.graph)).kernel
    assert dict(other.tile.blocks)["XBLOCK"] == 4096 // dtype.itemsize  # 16-byte accesses


def test_ops_that_fold_a_tile_say_so() -> None:
    """Two functions of the prelude do; a third would need its rows marked."""
    folding = {"sine_cosine_everywhere", "largest_order"}
    assert {name for name, text in PRELUDE.items() if "tl.reduce(" in text and ", None, " in text} == folding
    ops = [aten.sin, aten.cos, aten.special_legendre_polynomial_p, aten.special_shifted_chebyshev_polynomial_t]
    assert all(found.agrees for op in ops if (found := row(op.default)) is not None)
    assert not any(found.agrees for op in (aten.tan, aten.exp) if (found := row(op.default)) is not None)


SMALL: list[tuple[Callable[..., Any], list[tuple[int, ...]]]] = [
    (add, [(7, 190)] * 2), (transposed, [(70, 130)]), (row_sums, [(9, 190)]), (column_sums, [(190, 40)]),
    (softmax, [(9, 190)]), (normalised, [(36, 70)]),
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn, shapes", SMALL)
def test_each_tile_gives_the_result(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dynamic: bool) -> None:
    args = [torch.randn(shape) for shape in shapes]
    graph, segment, lowered = compiled(fn, args, [{0}] * len(args) if dynamic else ())
    expected = fn(*args)
    for tile in (lowered.kernel.tile, *lowered.kernel.candidates[:8]):
        one = replace(lowered, kernel=replace(lowered.kernel, tile=tile))
        for got, want in zip(run(graph, one, segment, args), expected if isinstance(expected, tuple) else [expected]):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
