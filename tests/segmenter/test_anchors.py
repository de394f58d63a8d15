"""Products absorb whole groups: what must hold for any graph, and what a few graphs must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import networkx
import pytest
import torch
from torch import fx

from fxfuser.domain import views
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.resolve import resolve
from fxfuser.fuel import Fuel
from fxfuser.ops import UPDATE_MARK, Kind, kind_of
from fxfuser.ops.hints import BOUNDARY, FUSE_MARK
from fxfuser.passes.split_reductions import split_reductions
from fxfuser.segmenter import anchors
from fxfuser.segmenter.cost import DeviceRates, FusedWork, ProductSize, fused_time, library_time
from fxfuser.segmenter.pair import why_apart
from fxfuser.segmenter.picture import to_networkx
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind
from fxfuser.segmenter.segmenter import segment
from tests.passes.rewriting import apply
from tests.segmenter.graphs import marked, named, random_graph, trace

aten = torch.ops.aten
SEEDS = range(20)


@pytest.fixture(autouse=True)
def _precise() -> Iterator[None]:
    """What products of float32 cost depends on PyTorch's setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def cut(f: Callable[..., Any], *inputs: torch.Tensor, gemm: str = "auto", mode: str = "fake") -> Segmentation:
    return segment(trace(f, *inputs, mode=mode), gemm=gemm)


def requested(f: Callable[..., Any], *inputs: torch.Tensor) -> Segmentation:
    """The same, all of it inside `fxfuser.fuse()`."""
    return segment(marked(trace(f, *inputs)), gemm="auto")


def ops_of(segmentation: Segmentation) -> list[list[str]]:
    return [[str(n.target).split(".")[1] for n in s.nodes] for s in segmentation.segments]


def gemms(segmentation: Segmentation) -> list[Segment]:
    return [s for s in segmentation.segments if s.kind is SegmentKind.GEMM]


# ---------------------------------------------------------------- any graph


@pytest.mark.parametrize("gemm", ["auto", "fused"])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_runs_and_alternatives_compute_the_same(seed: int, gemm: str) -> None:
    graph = random_graph(seed, 25)
    found, before = segment(graph, gemm=gemm), segment(graph)
    assert sorted(n.name for s in found.segments for n in s.nodes) == \
        sorted(n.name for s in before.segments for n in s.nodes)
    picture = to_networkx(found)
    assert networkx.is_directed_acyclic_graph(picture) and all(tail < head for tail, head in picture.edges)
    available: set[fx.Node] = {n for n in graph.graph.nodes if n.op == "placeholder"}
    for s in found.segments:
        assert {views.source(n) for n in s.inputs} <= available
        if s.kind is SegmentKind.GEMM:
            assert isinstance(s.domain, GemmDomain)
            assert {store.node for store in s.domain.stores} == set(s.outputs)
            (parts,) = s.alternatives
            _check_parts(parts, s, set(available))
        available.update(s.outputs)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    assert {views.source(n) for n in output.all_input_nodes} <= available


def _check_parts(parts: tuple[Segment, ...], whole: Segment, available: set[fx.Node]) -> None:
    assert sorted(n.name for p in parts for n in p.nodes) == sorted(n.name for n in whole.nodes)
    assert len({p.name for p in parts}) == len(parts) > 1
    for part in parts:
        assert {views.source(n) for n in part.inputs} <= available
        assert part.kind is SegmentKind.EXTERN or str(part.domain) == str(resolve(part.nodes, part.outputs))
        available.update(part.outputs)
    assert set(whole.outputs) <= {n for p in parts for n in p.outputs}


@pytest.mark.parametrize("seed", range(4))
def test_the_same_graph_gives_the_same_segments(seed: int) -> None:
    first, second = (segment(random_graph(seed, 40), gemm="fused") for _ in range(2))
    assert ops_of(first) == ops_of(second) and first.boundaries == second.boundaries
    assert [s.key for s in first.segments] == [s.key for s in second.segments]


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_every_absorption_takes_fuel_and_the_last_is_named(seed: int) -> None:
    graph, fuel = random_graph(seed, 25), Fuel()
    whole = segment(graph, fuel=fuel, gemm="fused")
    grown = Fuel()
    segment(graph, fuel=grown)
    assert fuel.spent > grown.spent
    for left in range(grown.spent, fuel.spent + 1):
        tank = Fuel(left)
        found = segment(graph, fuel=tank, gemm="fused")
        absorbed = sum(len(s.alternatives[0]) - 1 for s in gemms(found))
        assert absorbed >= left - grown.spent and tank.spent == left
    assert ops_of(found) == ops_of(whole)
    assert tank.last is not None and len(tank.last.detail.splitlines()) > 1


def test_pairs_are_judged_as_they_were() -> None:
    for seed in range(6):
        found = segment(random_graph(seed, 25), gemm="auto")
        nodes = {n.name: n for s in found.segments for n in s.nodes}
        for b in found.boundaries:
            again = why_apart(found, nodes[b.producer], nodes[b.consumer])
            assert again is not None and again.rule == b.rule, (seed, b, again)


# ---------------------------------------------------------------- single graphs


def gelu(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ w.t())


def test_an_epilogue_is_absorbed_and_the_product_is_not_written() -> None:
    (only,) = cut(gelu, half(512, 256), half(1024, 256)).segments
    assert only.kind is SegmentKind.GEMM and only.fused
    assert [n.name for n in only.inputs] == ["x_1", "w_1"], "views are looked through"
    assert [n.name for n in only.outputs] == ["gelu"]
    library, kernel = only.alternatives[0]
    assert (library.name, library.kind) == ("segment0_0", SegmentKind.EXTERN) and library.reason
    assert (kernel.name, kernel.kind) == ("segment0_1", SegmentKind.POINTWISE)


def test_a_product_that_others_read_is_an_output() -> None:
    def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return torch.relu(y), torch.topk(y, 4)[0]

    first = cut(both, half(512, 256), half(256, 1024)).segments[0]
    assert [n.name for n in first.outputs] == ["mm", "relu"]


def test_the_option_leaves_products_to_the_library() -> None:
    found = cut(gelu, half(512, 256), half(1024, 256), gemm="library")
    assert ops_of(found) == [["mm"], ["gelu"]]
    (reject,) = found.boundaries
    assert reject.rule == "gemm" and "library" in reject.reason and reject.remedy and reject.microseconds > 0


def test_what_does_not_pay_is_left_with_its_estimate_unless_it_is_asked_for() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return (x @ w.t()) * r

    inputs = torch.randn(4096, 4096), torch.randn(4096, 4096), torch.randn(4096, 1)
    found = cut(f, *inputs)  # Triton's fp32 products are slow
    (reject,) = found.boundaries
    assert ops_of(found) == [["mm"], ["mul"]] and reject.rule == "gemm" and "estimated at" in reject.reason
    assert ops_of(cut(f, *inputs, gemm="fused")) == [["mm", "mul"]]
    graph = trace(f, *inputs)
    for node in graph.graph.nodes:
        node.meta["custom"] = {f"{FUSE_MARK}0": True}
    asked = segment(graph, gemm="auto")
    assert ops_of(asked) == [["mm", "mul"]] and asked.segments[0].fused and asked.requests[0].granted
    refused = segment(graph, gemm="library").requests[0]
    assert not refused.granted and refused.refusals[0].rule == "lowerable"


def test_near_the_library_s_time_both_are_built_and_the_model_says_which_it_prefers() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    found = cut(f, half(12288, 3072), half(3072, 768))
    assert ops_of(found) == [["mm", "relu"]] and not found.segments[0].fused


def test_what_no_tile_holds_says_so() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).float()
        return y / y.sum(-1, keepdim=True)

    found = cut(f, half(512, 256), half(256, 1024))
    (reject,) = found.boundaries
    assert len(found.segments) == 2 and reject.rule == "epilogue" and "whole row" in reject.reason
    assert (reject.producer, reject.bytes > 0) == ("mm", True)


def test_a_boundary_is_kept() -> None:
    graph = trace(lambda x, w: torch.relu(aten.alias(x @ w)), half(512, 256), half(256, 1024))
    assert gemms(segment(graph, gemm="fused")), "aten.alias is a view"
    named(graph, "alias").target = BOUNDARY
    found = segment(graph, gemm="fused")
    assert not gemms(found) and [b.rule for b in found.boundaries] == ["boundary"]


def test_a_number_that_is_written_over_an_input_stays_out() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x @ w), step + 1

    graph = marked(trace(f, half(512, 256), half(256, 1024), torch.tensor(1.0)))
    named(graph, "add").meta[UPDATE_MARK] = True
    found = segment(graph, gemm="fused")
    assert ["add"] in ops_of(found) and ["mm", "relu"] in ops_of(found)
    assert "updates" in {r.rule for r in found.requests[0].refusals}


def test_a_reader_behind_another_call_stays_out() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        return torch.cumsum(y, 0).topk(1024)[0] + y

    found = cut(f, half(512, 256), half(256, 1024))
    assert not gemms(found) and "order" in {b.rule for b in found.boundaries}


def test_two_products_of_one_gate_share_a_kernel() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x @ w) * (x @ v)

    (only,) = cut(f, half(512, 256), half(256, 1024), half(256, 1024), gemm="fused").segments
    assert only.kind is SegmentKind.GEMM
    assert [p.kind for p in only.alternatives[0]] == [SegmentKind.EXTERN, SegmentKind.EXTERN, SegmentKind.POINTWISE]


def test_one_residual_goes_to_one_product() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w) + x[:, :128] @ v

    found = cut(f, half(512, 256), half(256, 1024), half(128, 1024))
    assert len(gemms(found)) == 1 and len(found.segments) == 2, "sums over different dimensions do not share a kernel"
    assert {b.rule for b in found.boundaries} == {"gemm"}


def test_a_reduction_in_two_steps_is_absorbed_whole() -> None:
    graph = trace(lambda x, w: (x @ w.t()).amax(-1), half(8, 256), half(131072, 256))
    assert apply(graph, [split_reductions]) == 1
    assert [len(s.nodes) for s in segment(graph).segments] == [1, 1, 1]
    (only,) = segment(graph, gemm="auto").segments
    assert only.kind is SegmentKind.GEMM and len(only.alternatives[0]) == 3
    assert [n.name for n in only.outputs] == [only.nodes[-1].name]


def test_a_cast_before_the_product_is_its_prologue() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.bfloat16() @ w)

    first = cut(f, torch.randn(64, 256), half(256, 1024)).segments[0]
    assert first.kind is SegmentKind.GEMM
    assert [p.nodes[0].name for p in first.alternatives[0]] == ["_to_copy", "mm", "relu"]


def test_what_shares_nothing_with_a_product_does_not_stand_in_its_way() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.relu(x @ w), r.sin()

    inputs = half(512, 256), half(256, 1024), half(512, 1024)
    assert ops_of(cut(f, *inputs, gemm="library")) == [["mm"], ["relu", "sin"]]
    assert ops_of(cut(f, *inputs)) == [["mm", "relu"], ["sin"]]


def test_what_reads_one_product_is_one_kernel_behind_the_library_s() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ w
        return torch.relu(y), torch.sigmoid(y)

    (only,) = cut(f, half(512, 256), half(256, 1024)).segments
    assert [len(p.nodes) for p in only.alternatives[0]] == [1, 2]


def test_small_casts_that_share_a_launch_stay_where_they_are() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.addmm(a.bfloat16(), x, w), torch.addmm(b.bfloat16(), x, w)

    found = cut(f, half(512, 256), half(256, 1024), torch.randn(1024), torch.randn(1024))
    assert ops_of(found) == [["_to_copy", "_to_copy"], ["addmm"], ["addmm"]]


def test_what_two_products_read_is_no_prologue() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.bfloat16()
        return y @ w, y @ v

    assert not gemms(cut(f, torch.randn(64, 256), half(256, 1024), half(256, 512), gemm="fused"))


@pytest.mark.parametrize("function", [
    lambda x, w: torch.relu((x.to(torch.int32) @ w.to(torch.int32)).float()),
    lambda x, w: torch.relu(torch.mv(x, w[0])),
    lambda x, w: torch.relu(x.double() @ w.double()),
])
def test_other_products_stay_calls(function: Callable[..., torch.Tensor]) -> None:
    found = cut(function, torch.randn(64, 64), torch.randn(64, 64), gemm="fused")
    assert not gemms(found)
    assert {b.rule for b in found.boundaries} <= {"gemm", "lowerable"} and found.boundaries


def test_equal_layers_have_equal_keys_and_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.relu(torch.addmm(b, x, w)) + x
        return x

    resolved = []
    plain = anchors.product_domain
    monkeypatch.setattr(anchors, "product_domain", lambda n, o: resolved.append(n) or plain(n, o))
    graph = trace(model, half(256, 256), half(256, 256), half(256))
    found = gemms(segment(graph, gemm="auto"))
    assert len(found) == 6 and len({s.key for s in found[1:]}) == 1
    assert len(resolved) < 6
    for s in found:
        assert str(s.domain) == str(plain(s.nodes, s.outputs))


def test_symbolic_sizes() -> None:
    (only,) = cut(gelu, half(512, 256), half(1024, 256), mode="symbolic").segments
    assert only.kind is SegmentKind.GEMM


# ---------------------------------------------------------------- costs


@pytest.mark.parametrize(("rows", "columns", "depth", "measured"), [
    (12288, 50304, 768, 1500), (8192, 50304, 1024, 1280), (8192, 4096, 4096, 392), (8192, 4096, 1024, 101),
    (1024, 1024, 4096, 16.9), (768, 768, 12288, 32.4),
])
def test_estimates_of_the_library_are_near_what_was_measured(
    rows: int, columns: int, depth: int, measured: float,
) -> None:
    size = ProductSize(1, rows, columns, depth, True)
    moved = 2 * (rows * depth + depth * columns + rows * columns)
    assert library_time(DeviceRates(), size, moved) == pytest.approx(measured, rel=0.25)


def test_our_kernel_trails_where_tiles_do_not_fill_the_columns() -> None:
    rates = DeviceRates()
    narrow, wide = ProductSize(1, 12288, 768, 3072, True), ProductSize(1, 8192, 32000, 4096, True)
    ratios = [library_time(rates, p, 0) / fused_time(rates, p, FusedWork()) for p in (narrow, wide)]
    assert ratios[0] < 0.9 and 0.95 < ratios[1] < 1.03
    assert fused_time(rates, wide, FusedWork(prologue=True)) > fused_time(rates, wide, FusedWork())


def test_a_product_without_neighbours_stays_a_call() -> None:
    found = cut(lambda x, w: x @ w, half(64, 64), half(64, 64), gemm="fused")
    assert [s.kind for s in found.segments] == [SegmentKind.EXTERN] and found.boundaries == ()
    assert named(found.segments[0].nodes[0].graph.owning_module, "mm") in found.segments[0].nodes


# ---------------------------------------------------------------- one product behind another


def norm_between(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = x @ w
    scale = torch.rsqrt((h.float() * h.float()).mean(-1, keepdim=True) + 1e-5)
    return (h.float() * scale).bfloat16() @ v


def norm_behind(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    h = torch.relu(x @ w)
    scale = torch.rsqrt((h.float() * h.float()).mean(-1, keepdim=True) + 1e-5)
    return (h @ v).float() * scale


LARGE = half(8192, 1024), half(1024, 1024), half(1024, 4096)
SMALL = half(512, 1024), half(1024, 1024), half(1024, 1024)


@pytest.mark.parametrize("function, apart", [
    (norm_between, ["mm", "reduction", "mm"]), (norm_behind, ["mm", "reduction", "mm", "pointwise"])])
def test_a_product_joins_another_whose_rows_it_needs(function: Callable[..., torch.Tensor], apart: list[str]) -> None:
    (only,) = requested(function, *LARGE).segments
    kinds = ["mm" if p.kind is SegmentKind.EXTERN else p.kind.value for p in only.alternatives[0]]
    assert kinds == apart
    domain = only.domain
    assert isinstance(domain, GemmDomain) and isinstance(domain.tail, GemmDomain) and len(domain.passed) == 2


@pytest.mark.parametrize("function", [norm_between, norm_behind])
def test_a_second_product_of_few_tiles_stays_apart(function: Callable[..., torch.Tensor]) -> None:
    found = requested(function, *SMALL)
    assert len(found.segments) > 1
    assert any("but 32 tiles" in b.reason for b in found.boundaries) == (function is norm_behind)


@pytest.mark.parametrize("gemm", ["auto", "fused"])
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("function", [norm_between, norm_behind])
def test_products_that_wait_for_memory_stay_apart(
        function: Callable[..., torch.Tensor], rows: int, gemm: str) -> None:
    found = cut(function, half(rows, 4096), half(4096, 4096), half(4096, 32000), gemm=gemm)
    assert any("better split" in b.reason for b in found.boundaries)
    assert all(sum(kind_of(n) is Kind.GEMM for n in s.nodes) < 2 for s in found.segments)


def test_nothing_to_reduce_is_no_reason_to_join() -> None:
    found = requested(lambda x, w, v: torch.relu(x @ w) @ v, *LARGE)
    assert ops_of(found) == [["mm", "relu"], ["mm"]]


@pytest.mark.parametrize("gemm", ["auto", "fused"])
def test_products_stay_apart_where_nobody_asks(gemm: str) -> None:
    found = cut(norm_between, *LARGE, gemm=gemm)
    assert sum(kind_of(n) is Kind.GEMM for s in found.segments for n in s.nodes) == 2 and len(found.segments) > 1
    assert len(requested(norm_between, *LARGE).segments) == 1


# ---------------------------------------------------------------- products that wait for memory


def normed(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = residual + x @ w.t()
    f = h.float()
    return h, (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6)).bfloat16()


@pytest.mark.parametrize("rows, columns", [(1, 4096), (16, 4096), (64, 14336)])
def test_a_norm_behind_few_rows_adds_up_parts(rows: int, columns: int) -> None:
    found = cut(normed, half(rows, 4096), half(columns, 4096), half(rows, columns))
    (one,) = found.segments
    assert one.kind is SegmentKind.GEMM and one.fused and isinstance(one.domain, GemmDomain)
    assert one.domain.parts is not None and not one.domain.tiled
    assert [s.kind for s in one.alternatives[0]] == [SegmentKind.EXTERN, SegmentKind.REDUCTION]


def test_a_norm_behind_many_rows_does_not() -> None:
    found = cut(normed, half(2048, 1024), half(1024, 1024), half(2048, 1024))
    assert [s.kind for s in found.segments] == [SegmentKind.EXTERN, SegmentKind.REDUCTION]


@pytest.mark.parametrize("rows, gemm, kind", [
    (1, "auto", SegmentKind.GEMM), (16, "auto", SegmentKind.GEMM), (1, "library", SegmentKind.EXTERN),
    (256, "auto", SegmentKind.EXTERN)])
def test_a_product_of_few_rows_has_a_kernel_beside_the_library_s(rows: int, gemm: str, kind: SegmentKind) -> None:
    (one,) = cut(lambda x, w: x @ w.t(), half(rows, 4096), half(4096, 4096), gemm=gemm).segments
    assert one.kind is kind
    if kind is SegmentKind.GEMM:
        assert [[s.kind for s in parts] for parts in one.alternatives] == [[SegmentKind.EXTERN]]
