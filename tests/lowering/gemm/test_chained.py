"""A product behind another's rows: two kernels, of which the second combines the statistics that the first one's tiles
left, in its prologue or in its epilogue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxfuser.domain.chained import product_domain
from fxfuser.domain.points import Reject
from fxfuser.lowering.gemm import folded
from fxfuser.lowering.kernel import Place, Program
from fxfuser.ops import Kind, kind_of
from fxfuser.runtime.launcher import size_function
from fxfuser.runtime.programs import tiles_of, with_tile
from tests.lowering.harness import trace

from .harness import Blocks, Made, check, made, run

B = torch.bfloat16
M, K, N, L = 20, 40, 48, 36


def moments(h: Tensor) -> tuple[Tensor, Tensor]:
    """The distance from the mean, and the inverse deviation."""
    wide = h.float()
    distance = wide - wide.mean(-1, keepdim=True)
    return distance, torch.rsqrt((distance * distance).sum(-1, keepdim=True) / h.shape[-1] + 1e-5)


def scale(h: Tensor) -> Tensor:
    wide = h.float()
    return torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)


def rms_norm(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    h = res + x @ w.t()
    return (h.float() * scale(h) * g).to(x.dtype) @ v.t()


def with_residual(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    h = res + x @ w.t()
    return h, torch.relu((h.float() * scale(h) * g).to(x.dtype) @ v.t())


def layer_norm(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    h = res + x @ w.t()
    distance, r = moments(h)
    return (distance * r * g + g).to(x.dtype) @ v.t()


def deferred(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    h = res + x @ w.t()
    return (((h.float() * g).to(x.dtype) @ v.t()) * scale(h)).to(x.dtype)


def deferred_mean(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    h = res + x @ w.t()
    wide = h.float()
    m = wide.mean(-1, keepdim=True)
    _, r = moments(h)
    product = (h @ v.t()).float()
    return (product * r - (m * r) * g[None, :L].float()).to(x.dtype)


def softmax(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Tensor:
    scores = (x @ w.t() + res).float()
    exponents = (scores - scores.amax(-1, keepdim=True)).exp()
    return (exponents / exponents.sum(-1, keepdim=True)).to(x.dtype) @ v.t()


FUNCTIONS = [rms_norm, with_residual, layer_norm, deferred, deferred_mean, softmax]


def inputs(dtype: torch.dtype, rows: int = M) -> list[Tensor]:
    shapes = (rows, K), (N, K), (rows, N), (L, N), (N,)
    scales = 1.0, K ** -0.5, 1.0, N ** -0.5, 1.0
    return [(torch.randn(s) * by).to(dtype) for s, by in zip(shapes, scales)]


def launches(found: Made) -> set[int]:
    return {len(p.launches) for p in found.lowered.programs}


@pytest.mark.parametrize("dtype", [torch.float32, B], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_two_kernels(fn: Callable[..., Any], dtype: torch.dtype) -> None:
    found = check(fn, inputs(dtype))
    assert launches(found) == {2}
    first, second = found.lowered.programs[0].launches
    states = {where for where in second.pointers[:len(second.kernel.inputs)] if where[0] is Place.SCRATCH}
    assert states < set(first.pointers), "what the tiles left, and h where nothing else stores it"


def test_rows_of_a_size_that_varies_and_a_batch() -> None:
    check(rms_norm, inputs(B), [{0}, set(), {0}, set(), set()], [inputs(B, 37)])

    def batches(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = torch.bmm(x, w)
        return torch.bmm((h.float() * scale(h)).to(x.dtype), v)

    found = check(batches, [torch.randn(3, M, K).to(B), torch.randn(3, K, N).to(B), torch.randn(3, N, L).to(B)])
    assert launches(found) == {2}


def test_statistics_of_columns_scale_the_second_product() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        h = x @ w
        return (h.float() * (h.float() * h.float()).sum(0, keepdim=True).rsqrt()).to(x.dtype) @ v

    found = made(function, [torch.randn(M, K), torch.randn(K, N), torch.randn(N, L)])
    assert launches(found) == {3}, "they vary along the second sum, for which no program has room"
    check(function, [torch.randn(M, K), torch.randn(K, N), torch.randn(N, L)])


@pytest.mark.parametrize("reason", ["returned", "many", "dynamic"])
def test_a_finishing_kernel_where_there_is_need_of_one(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Tensor, w: Tensor, res: Tensor, v: Tensor, g: Tensor) -> Any:
        r = scale(h := res + x @ w.t())
        y = (h.float() * r * g).to(x.dtype) @ v.t()
        return (y, r) if reason == "returned" else y

    if reason == "many":
        monkeypatch.setattr(folded, "MOST", 2)
    found = check(function, inputs(B), [set(), {0}, {1}, {1}, {0}] if reason == "dynamic" else ())
    assert launches(found) == {3}


def of_first(program: Program, expression: str) -> int:
    """What an expression of a program without sizes is under its first launch's tile."""
    return size_function(0, program.launches[0].kernel.tile, 1, (expression,))()[0]


@pytest.mark.parametrize("columns, strips, states", [(16, 1, 3), (16, 2, 3), (32, 4, 2), (64, 1, 1), (64, 4, 1)])
def test_the_second_kernel_follows_the_first_one_s_tile(columns: int, strips: int, states: int) -> None:
    """Of N = 48 columns; the strips of a tile leave one state together, those past the end included."""
    found = made(rms_norm, inputs(B), blocks=Blocks(columns=16))
    program = with_tile(found.programs["persistent"], Blocks(columns=columns, strips=strips).tile(False))
    second = program.launches[1]
    assert states in [of_first(program, size) for size in second.sizes], "those it combines are those that there are"
    left = min(where for where in second.pointers if where[0] is Place.SCRATCH)[1]
    assert of_first(program, program.scratch[left].size) == states * M
    assert states <= dict(second.kernel.tile.blocks)["STATES"] < 2 * states
    (got,) = run(found, program, given := inputs(B))
    torch.testing.assert_close(got, rms_norm(*given), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("strips", [1, 4])
@pytest.mark.parametrize("fn", [layer_norm, deferred_mean, softmax], ids=lambda f: f.__name__)
def test_states_of_several_numbers_of_strips(fn: Callable[..., Any], strips: int) -> None:
    found = check(fn, inputs(B), blocks=Blocks(columns=64, strips=strips))
    assert launches(found) == {2}


def test_states_are_combined_once_for_all_strips_of_the_second_tile() -> None:
    """Ahead of the main loop, behind which nothing waits for them."""
    source = made(deferred, inputs(B), blocks=Blocks(columns=64, strips=4)).programs["persistent"].launches[1]
    text = source.kernel.source
    assert text.count("tl.reduce(state") == 1 and text.index("tl.reduce(state") < text.index("for k_start")


def test_each_kernel_s_tiles_are_tried_beside_the_other_s_default() -> None:
    shapes = (4096, 768), (768, 768), (4096, 768), (3072, 768), (768,)
    found = made(rms_norm, [torch.empty(s, dtype=B) for s in shapes], blocks=None)
    first, *others = (p for p in found.lowered.programs if p.name.endswith("persistent"))
    assert len(tiles_of(first)) > 1 and others
    assert all(tiles_of(p) == (first.launches[0].kernel.tile,) for p in others)
    seconds = [p.launches[-1].kernel.tile for p in (first, *others)]
    assert len(set(seconds)) == len(seconds) and len({p.name for p in found.lowered.programs}) == len(
        found.lowered.programs)


def domain_of(fn: Callable[..., Any], args: list[Tensor]) -> object:
    graph = trace(fn, args).graph
    nodes = [n for n in graph.nodes if n.op == "call_function" and kind_of(n) not in (None, Kind.VIEW)]
    results = graph.output_node().args[0]
    return product_domain(nodes, tuple(results) if isinstance(results, (tuple, list)) else (results,))


@pytest.mark.parametrize("fn, reason", [
    (lambda x, w, res, v, g: torch.relu(x @ w.t()) @ v.t(), "nothing is reduced"),
    (lambda x, w, res, v, g: ((y := rms_norm(x, w, res, v, g)), y.amax(1))[1], "reduced itself"),
    (lambda x, w, res, v, g: ((y := ((h := x @ w.t()).float() * scale(h)).to(B)), y @ v.t()), "whole row"),
], ids=["nothing_reduced", "second_reduced", "normalised_returned"])
def test_what_is_no_chain(fn: Callable[..., Any], reason: str) -> None:
    found = domain_of(fn, inputs(B))
    assert isinstance(found, Reject) and reason in found.reason
