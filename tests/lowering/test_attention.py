"""The kernel of attention over pieces of its keys, in the interpreter and built."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fxfuser.lowering.attention import lower_attention
from fxfuser.lowering.kernel import Lowered
from fxfuser.ops.attention import ATTEND_PIECES
from fxfuser.runtime.build import report
from fxfuser.runtime.interpret import Interpreted
from fxfuser.segmenter.segment import Segment, SegmentKind
from tests.lowering.harness import trace


class Case(NamedTuple):
    """Sizes B, H, Q, D, S, E and the keys of a piece."""

    sizes: tuple[int, ...]
    piece: int
    mask: str = ""
    dtype: torch.dtype = torch.bfloat16
    turned: bool = False  # heads behind positions in memory


CASES = (
    Case((2, 3, 1, 16, 128, 16), 64), Case((1, 2, 4, 64, 100, 64), 64), Case((2, 1, 16, 24, 65, 40), 64, "heads"),
    Case((1, 2, 5, 96, 192, 32), 128, "some"), Case((2, 2, 3, 16, 130, 16), 64, "shared", torch.float16),
    Case((1, 3, 2, 8, 200, 8), 128, "some", torch.float16, True),
    Case((3, 1, 7, 33, 70, 17), 64, "shared", turned=True),
    Case((2, 1, 3, 16, 64, 16), 64), Case((2, 1, 3, 16, 20, 16), 64, "shared"),  # a second piece without keys
    Case((1, 1, 16, 128, 256, 128), 64, "hidden"), Case((1, 2, 2, 256, 67, 256), 64, "hidden"),
)


def hiding(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf)


def operands(case: Case) -> list[Tensor]:
    batch, heads, queries, width, keys, value_width = case.sizes
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int, columns: int) -> Tensor:
        shape = (batch, rows, heads, columns) if case.turned else (batch, heads, rows, columns)
        drawn = torch.randn(shape, generator=generator).to(case.dtype)
        return drawn.transpose(1, 2) if case.turned else drawn

    found = [draw(queries, width), draw(keys, width), draw(keys, value_width)]
    match case.mask:
        case "heads":
            found.append(torch.randn(batch, heads, queries, keys, generator=generator).to(case.dtype))
        case "shared":
            found.append(torch.randn(batch, 1, 1, keys, generator=generator).to(case.dtype).expand(-1, heads, -1, -1))
        case "some":
            found.append(hiding(torch.rand(1, 1, queries, keys, generator=generator) < 0.7, case.dtype))
        case "hidden":  # of one query all keys, of the others those of a piece
            seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
            seen[:, :, 0] = False
            seen[:, :, 1:, :case.piece] = False
            found.append(hiding(seen, case.dtype))
    return found


def lowered(case: Case, values: list[Tensor], varying: bool = False) -> Lowered:
    """`varying`: the numbers of sequences and of keys are symbols."""
    query, key, value, *mask = values

    def function(*given: Tensor) -> Tensor:
        return ATTEND_PIECES(*given[:3], given[3] if mask else None, 0.3, case.piece)

    symbols = [{0}, {0, 2}, {0, 2}, {0, 3}] if varying else []
    graph = trace(function, values, symbols).graph
    nodes = [n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor)]
    (node,) = (n for n in graph.nodes if n.target is ATTEND_PIECES)
    return lower_attention(Segment(0, SegmentKind.ATTENTION, (node,), tuple(nodes), (node,)), {})


def attended(case: Case, values: list[Tensor], low: Lowered) -> Tensor:
    expected = ATTEND_PIECES(*values[:3], values[3] if case.mask else None, 0.3, case.piece)
    found = torch.full_like(expected, math.nan)  # what is not written shows
    Interpreted(low.kernel).run([*(values[i] for i in low.inputs), found])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_piece_leaves_its_sums_and_maxima(case: Case) -> None:
    values = operands(case)
    low = lowered(case, values)
    first = attended(case, values, low)
    for tile in low.kernel.candidates[:2]:  # the order of the sums differs, no more
        other = attended(case, values, replace(low, kernel=replace(low.kernel, tile=tile)))
        torch.testing.assert_close(other, first, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("keys", [128, 130])
@pytest.mark.parametrize("queries", [3, 16])
def test_what_is_one_in_memory_fills_a_tile(queries: int, keys: int) -> None:
    """Expanded operands, and masks whose rows or columns, or both, are expanded."""
    case = Case((2, 2, queries, 16, keys, 16), 64, "given")
    query, key, value = operands(case)
    for shape in ((1, 1, 1, 1), (2, 1, queries, 1), (1, 1, 1, keys)):
        mask = torch.randn(shape).expand(2, 2, queries, keys)
        for seen in (mask.bfloat16(), torch.rand(shape).expand_as(mask) < 0.5):
            values = [query, key, value, seen]
            attended(case, values, lowered(case, values))
    case = case._replace(mask="")
    for values in ([query[:, :, :1].expand_as(query), key, value], [query, key[:, :, :1].expand_as(key), value],
                   [query, key, value[:1, :1, :1, :1].expand_as(value)], [query[..., :1].expand_as(query), key, value]):
        attended(case, values, lowered(case, values))


def test_states_are_those_of_the_scores() -> None:
    """Against float64 sums that share no code with the op."""
    case = Case((1, 2, 3, 16, 150, 16), 64)
    query, key, value = operands(case)
    found = attended(case, [query, key, value], lowered(case, [query, key, value]))
    scores = torch.einsum("bhqd,bhkd->bhqk", query.double(), key.double()) * 0.3
    for piece, start in enumerate(range(0, 150, 64)):
        part = scores[..., start:start + 64]
        torch.testing.assert_close(found[:, :, piece, :, 17].double(), part.amax(-1), rtol=1e-5, atol=1e-5)
        powers = (part - part.amax(-1, keepdim=True)).exp()
        torch.testing.assert_close(found[:, :, piece, :, 16].double(), powers.sum(-1), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[:, :, piece, :, :16].double(), powers @ value.double()[:, :, start:start + 64],
                                   rtol=2e-2, atol=2e-2)


def test_nan_of_a_key_reaches_its_piece_alone() -> None:
    case = Case((1, 1, 2, 16, 128, 16), 64)
    query, key, value = operands(case)
    key[0, 0, 3, 0] = math.nan
    low = lowered(case, [query, key, value])
    found = torch.zeros(1, 1, 2, 2, 18)
    Interpreted(low.kernel).run([query, key, value, found])
    assert found[:, :, 0].isnan().all() and found[:, :, 1].isfinite().all()


@pytest.mark.parametrize("mask, loaded", [("shared", "batch * 200 + k[None, :]"), ("heads", "+ q * 200 +")])
def test_a_mask_is_loaded_for_each_query_where_they_differ(mask: str, loaded: str) -> None:
    case = Case((2, 2, 3, 16, 200, 16), 64, mask)
    (line,) = (x for x in lowered(case, operands(case)).kernel.source.splitlines() if "in3 +" in x)
    assert loaded in line and ("q" in line) is (mask == "heads")


def test_many_programs_have_fewer_stages() -> None:
    """So that more of them are on a multiprocessor."""
    few, many = (Case((batch, 8, 4, 64, 128, 64), 64) for batch in (16, 17))  # 256 and 272 programs
    stages = [lowered(case, operands(case)).kernel.tile.num_stages for case in (few, many)]
    assert stages == [3, 2]


def test_operations_are_those_of_its_two_products() -> None:
    query, key, value = operands(Case((2, 3, 4, 16, 130, 24), 64))
    with FlopCounterMode(display=False) as counter:
        ATTEND_PIECES(query, key, value, None, 0.3, 64)
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 130 * (16 + 24)


def test_sizes_that_vary_are_arguments() -> None:
    case = Case((3, 2, 4, 64, 200, 64), 64, "shared")
    kernel = lowered(case, operands(case), varying=True).kernel
    assert kernel.sizes == 2 and "max(" in kernel.grid
    assert report(kernel).spills == 0


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("case", [
    Case((8, 4, 4, 64, 1024, 64), 128), Case((1, 8, 8, 128, 4096, 128), 256, "shared"),
    Case((1, 2, 16, 256, 500, 256), 128, "some")], ids=str)
def test_every_tile_is_built_for_tensor_cores(case: Case, arch: int) -> None:
    kernel = lowered(case, operands(case)).kernel
    for tile in (kernel.tile, *kernel.candidates):
        found = report(replace(kernel, tile=tile), arch=arch)
        assert found.spills == 0 and "mma" in found.ptx
        assert "ld.global.v4" in found.ptx or "cp.async" in found.ptx  # 16 bytes of a row at a time
