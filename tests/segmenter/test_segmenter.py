"""Whole segmentations: what must hold for any graph, and what a few graphs must give."""

from __future__ import annotations

import itertools

import networkx
import pytest
import torch
from torch import fx

from fxfuser import ops
from fxfuser.domain import views
from fxfuser.domain.points import Domain, Reject
from fxfuser.domain.resolve import resolve
from fxfuser.fuel import Fuel
from fxfuser.segmenter import domains
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.facts import Role, gather_facts
from fxfuser.segmenter.picture import to_dot, to_networkx
from fxfuser.segmenter.rules import NEAR, Candidate, first_reject
from fxfuser.segmenter.segment import Segmentation, SegmentKind
from fxfuser.segmenter.segmenter import grow, segment
from tests.segmenter.graphs import named, random_graph, trace

SEEDS = range(20)


def names(segmentation: Segmentation) -> list[list[str]]:
    return [[n.name for n in s.nodes] for s in segmentation.segments]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_compute_node_is_in_one_segment_and_the_order_runs(seed: int) -> None:
    graph = random_graph(seed, 25)
    segmentation = segment(graph)
    roles = gather_facts(graph.graph, {}).roles
    compute = [n for n in graph.graph.nodes if roles[n] in (Role.KERNEL, Role.EXTERN)]
    assert sorted((n for s in segmentation.segments for n in s.nodes), key=str) == sorted(compute, key=str)
    picture = to_networkx(segmentation)
    assert networkx.is_directed_acyclic_graph(picture)
    assert all(tail < head for tail, head in picture.edges)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kernel_has_its_domain_and_writes_what_others_read(seed: int) -> None:
    graph = random_graph(seed, 25)
    segmentation = segment(graph)
    available: set[fx.Node] = {n for n in graph.graph.nodes if n.op == "placeholder"}
    for s in segmentation.segments:
        if s.kind is not SegmentKind.EXTERN:
            assert isinstance(s.domain, Domain)
            assert {store.node for store in s.domain.stores} == set(s.outputs)
        assert {views.source(n) for n in s.inputs} <= available
        available.update(s.outputs)
    output = next(n for n in graph.graph.nodes if n.op == "output")
    assert {views.source(n) for n in output.all_input_nodes} <= available


@pytest.mark.parametrize("seed", SEEDS)
def test_no_two_groups_that_the_rules_allow_stay_apart(seed: int) -> None:
    partition = grow(random_graph(seed, 25).graph, DeviceRates())
    groups, context = partition.groups, partition.context
    label = context.quotient.label
    for a, b in itertools.combinations(sorted(groups.values(), key=lambda g: label[g.root]), 2):
        assert first_reject(Candidate(a, b, context)) is not None, (a.members, b.members)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_graph_gives_the_same_segments(seed: int) -> None:
    first, second = segment(random_graph(seed, 40)), segment(random_graph(seed, 40))
    assert names(first) == names(second)
    assert [s.key for s in first.segments] == [s.key for s in second.segments]
    assert first.boundaries == second.boundaries


def test_pointwise_chain_with_views_is_one_kernel() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x + 1).view(8, 4, 32).transpose(0, 1).contiguous() * 2

    found = segment(trace(f, torch.randn(8, 128)))
    assert len(found.segments) == 1 and found.boundaries == ()
    assert [n.name for n in found.segments[0].outputs] == ["mul"]


def test_softmax_is_one_kernel() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        e = torch.exp(x - torch.amax(x, -1, keepdim=True))
        return e / torch.sum(e, -1, keepdim=True)

    (only,) = segment(trace(f, torch.randn(256, 512))).segments
    assert only.kind is SegmentKind.REDUCTION and len(only.nodes) == 5


def test_independent_kernels_over_the_same_rows_share_a_launch() -> None:
    def f(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q.transpose(1, 2) * 2, v.transpose(1, 2) + 1

    found = segment(trace(f, torch.randn(1, 4096, 32, 16), torch.randn(1, 4096, 8, 16)))
    assert len(found.segments) == 1


def test_extern_reads_a_view_so_its_source_is_written() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.sin(x).t(), w)

    kernel, product = segment(trace(f, torch.randn(64, 64), torch.randn(64, 64))).segments
    assert [n.name for n in kernel.outputs] == ["sin"]
    assert product.kind is SegmentKind.EXTERN and [n.name for n in product.inputs] == ["t", "w_1"]


def test_an_opaque_view_is_made_between_two_kernels() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x).view(torch.int32) + 1

    first, second = segment(trace(f, torch.randn(64))).segments
    assert [n.name for n in first.outputs] == ["sin"]
    assert [str(n.target) for n in second.inputs] == ["aten.view.dtype"]


def test_results_of_a_several_output_call_are_inputs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        values, indices = torch.topk(x, 4)
        return torch.sin(values) + indices

    extern, kernel = segment(trace(f, torch.randn(64, 64))).segments
    assert extern.kind is SegmentKind.EXTERN
    assert [n.name for n in kernel.inputs] == ["getitem", "getitem_1"]


def test_a_scalar_on_the_cpu_keeps_a_cuda_op_out() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x = torch.empty(64, device="cuda")
        scale = torch.empty((), device="cpu")
    graph = fx.Graph()
    left, right = graph.placeholder("x"), graph.placeholder("scale")
    node = graph.call_function(torch.ops.aten.mul.Tensor, (left, right))
    graph.output(node)
    left.meta["val"], right.meta["val"] = x, scale
    with mode:
        node.meta["val"] = torch.empty(64, device="cuda")
    (only,) = segment(fx.GraphModule({}, graph)).segments
    assert only.kind is SegmentKind.EXTERN and "several devices" in only.reason


def test_symbolic_sizes_segment_like_static_ones() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).view(-1, 4).sum(-1) * 2

    found = segment(trace(f, torch.randn(12, 8), torch.randn(12, 8), mode="symbolic"))
    assert len(found.segments) == 1


def test_weights_of_symbolic_sizes_are_those_of_their_hints() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = x.chunk(2, -1)
        return torch.sin(right), torch.cos(left)

    graph = trace(f, torch.randn(12, 9), mode="symbolic")
    sizing = gather_facts(graph.graph, {}).sizing
    assert [sizing.elements(named(graph, n)) for n in ("sin", "cos")] == [12 * 4, 12 * 5]
    assert [sizing.bytes(named(graph, n)) for n in ("sin", "cos")] == [12 * 4 * 4, 12 * 5 * 4]


def test_a_size_that_is_read_from_data_orders_the_host() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return torch.full((8,), n.sum().item()) + x

    found = segment(trace(f, torch.randn(8), torch.ones(4, dtype=torch.int64), mode="symbolic"))
    item = next(s for s in found.segments if s.kind is SegmentKind.EXTERN)
    assert str(item.nodes[0].target) == "aten._local_scalar_dense.default"
    assert item.index == 1


def test_boundaries_say_why() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return torch.mm(y, w) * y

    graph = trace(f, torch.randn(64, 64), torch.randn(64, 64))
    found = {(b.producer, b.consumer): b for b in segment(graph).boundaries}
    assert found["sin", "mm"].rule == found["mm", "mul"].rule == "gemm"
    assert found["sin", "mul"].rule == "order" and "mm" in found["sin", "mul"].reason
    assert found["sin", "mul"].bytes == 64 * 64 * 4
    assert all(b.microseconds > 0 for b in found.values())


def test_picture_is_a_dot_graph() -> None:
    graph = trace(lambda x, w: torch.mm(torch.sin(x), w), torch.randn(8, 8), torch.randn(8, 8))
    text = to_dot(segment(graph))
    assert text.startswith("digraph") and 's0 -> s1 [label="sin"]' in text
    assert ops.kind_of(named(graph, "sin")) is ops.Kind.POINTWISE


def test_a_frame_that_promised_too_much_is_not_trusted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(nodes: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]) -> Domain | Reject:
        if len(nodes) > 3 or any(n.target is torch.ops.aten.cos.default for n in nodes):
            return Reject("too many nodes, or a cosine", "write less")
        return resolve(nodes, outputs)

    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.sin(x) * 2
        return torch.cos(x) + 1

    monkeypatch.setattr(domains, "resolve", narrow)
    found = segment(trace(f, torch.randn(8)))
    assert [len(s.nodes) for s in found.segments] == [3, 3, 2, 1, 1]
    extern = found.segments[3]
    assert extern.kind is SegmentKind.EXTERN and extern.reason == "too many nodes, or a cosine; write less"
    assert [b.rule for b in found.boundaries] == ["domain", "domain", "lowerable", "lowerable"]


@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_every_merge_takes_fuel(left: int) -> None:
    graph = random_graph(0, 12)
    without, fuel = Fuel(0), Fuel(left)
    alone = len(segment(graph, fuel=without).segments)
    assert len(segment(graph, fuel=fuel).segments) == alone - left
    assert fuel.spent == left and (fuel.last is None if not left else fuel.last.stage == "merge")
    if fuel.last is not None:
        assert all(fuel.last.detail.splitlines())  # two sides


def test_fuel_counts_the_merges() -> None:
    graph, fuel = random_graph(3, 25), Fuel()
    alone, whole = segment(graph, fuel=Fuel(0)), segment(graph, fuel=fuel)
    assert fuel.spent == len(alone.segments) - len(whole.segments)


def test_of_those_that_share_a_tensor_the_near_ones_are_listed_and_the_next() -> None:
    def chain(x: torch.Tensor, scale: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(40):
            x = torch.mm(x * scale, v)
        return x

    found = segment(trace(chain, torch.randn(64, 64), torch.randn(64), torch.randn(64, 64))).boundaries
    numbered = [(b.producer.removeprefix("mul"), b.consumer.removeprefix("mul"), b.rule) for b in found
                if b.producer.startswith("mul") and b.consumer.startswith("mul")]
    beside = [(int(a[1:] or 0), int(b[1:] or 0), rule) for a, b, rule in numbered]
    near = NEAR // 2  # a product lies between each and the next
    assert [b for a, b, _ in beside if a == 3] == list(range(4, 3 + near + 2))
    assert {b - a for a, b, rule in beside if rule == "near"} == {near + 1}
