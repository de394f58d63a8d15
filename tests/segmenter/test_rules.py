"""Each rule with a pair that it lets through and one that it rejects."""

from __future__ import annotations

import torch
from torch import fx

from fxfuser.ops import SCATTER_INTO, UPDATE_MARK
from fxfuser.segmenter import rules
from fxfuser.segmenter.cost import DeviceRates, kernel_time
from tests.segmenter.graphs import candidate, trace


def chain(*shape: int) -> fx.GraphModule:
    return trace(lambda x: torch.cos(torch.sin(x)), torch.randn(*shape))


def test_device_accepts_one_device_and_rejects_two() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        values = [torch.empty(8, device=d) for d in ("cpu", "cuda")]
    graph = fx.Graph()
    nodes = []
    for value in values:
        source = graph.placeholder(f"on_{value.device.type}")
        source.meta["val"] = value
        node = graph.call_function(torch.ops.aten.sin.default, (source,))
        with mode:
            node.meta["val"] = torch.empty_like(value)
        nodes.append(node)
    graph.output(tuple(nodes))
    found = rules.device(candidate(fx.GraphModule({}, graph), nodes[0].name, nodes[1].name))
    assert found is not None and found.remedy == "put both tensors on one device"
    assert rules.device(candidate(chain(8), "sin", "cos")) is None


def test_size_counts_nodes_and_pointers() -> None:
    many = [torch.randn(8) for _ in range(40)]
    graph = trace(lambda *xs: (torch.stack(xs[:40]).sin(), torch.stack(xs[40:]).cos()), *many, *map(torch.clone, many))
    cats = [n.name for n in graph.graph.nodes if "cat" in n.name or "stack" in n.name]
    found = rules.size(candidate(graph, cats[0], cats[1]))
    assert found is not None and "82 tensors" in found.reason
    assert rules.size(candidate(chain(8), "sin", "cos")) is None


def test_near_bounds_the_distance_of_siblings_only() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.sin(w)
        for _ in range(40):
            x = torch.mm(x, w)
        return first, torch.cos(x) + torch.exp(first)

    graph = trace(f, torch.randn(8, 8), torch.randn(8, 8))
    assert rules.near(candidate(graph, "sin", "exp")) is None, "an edge joins them"
    found = rules.near(candidate(graph, "sin", "cos"))
    assert found is not None and found.rule == "near"
    assert rules.near(candidate(graph, "cos", "exp")) is None


def test_extents_of_siblings_must_meet() -> None:
    def f(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.sin(x), torch.cos(y), torch.exp(z)

    graph = trace(f, torch.randn(4096, 32), torch.randn(4096, 8), torch.randn(300, 7))
    assert rules.extents(candidate(graph, "sin", "cos")) is None
    found = rules.extents(candidate(graph, "cos", "exp"))
    assert found is not None and found.rule == "extents"


def test_few_rows_in_common_are_enough_where_a_launch_is_dearer() -> None:
    """Small kernels take as long as their launch, so fewer programs than the device has processors do."""
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x), torch.cos(y)

    def found(rows: int, columns: int, mode: str = "fake") -> str | None:
        inputs = torch.randn(rows, columns), torch.randn(rows, 2 * columns)
        reject = rules.first_reject(candidate(trace(f, *inputs, mode=mode), "sin", "cos"))
        return reject.rule if reject is not None else None

    assert found(32, 1024) is None and found(2, 1024) is None
    assert found(2, 1 << 20) == "extents", "two programs would move 24 MB"
    # whatever they are now, sizes that change from call to call and are not in common may become large
    assert found(32, 1024, "symbolic") == "extents"


def test_order_rejects_a_second_path() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x)
        return torch.mm(y, w) + y, torch.cos(y)

    graph = trace(f, torch.randn(8, 8), torch.randn(8, 8))
    assert rules.order(candidate(graph, "sin", "cos")) is None
    found = rules.order(candidate(graph, "sin", "add"))
    assert found is not None and found.rule == "order"


def test_domain_rejects_a_result_that_every_row_needs_whole() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.amax(x, 1)
        return rows, torch.sum(rows, 0)

    def g(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x - torch.amax(x, 1, keepdim=True))

    graph = trace(g, torch.randn(64, 64))
    assert rules.domain(candidate(graph, "amax", "sub")) is None
    rejected = rules.first_reject(candidate(trace(f, torch.randn(4096, 4096)), "amax", "sum_1"))
    assert rejected is not None and rejected.rule in ("domain", "parallelism") and rejected.reason


def test_parallelism_rejects_a_large_kernel_behind_a_full_reduction() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * torch.sum(x)

    def full(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x)
        return y, torch.sum(y)

    apart = candidate(trace(f, torch.randn(128), torch.randn(4096, 4096)), "sum_1", "mul")
    found = rules.first_reject(apart)
    assert found is not None and found.rule in ("parallelism", "domain")
    found = rules.first_reject(candidate(trace(full, torch.randn(4096, 4096)), "sin", "sum_1"))
    assert found is not None and found.rule == "parallelism" and "1 independent" in found.reason
    assert rules.first_reject(candidate(trace(full, torch.randn(512)), "sin", "sum_1")) is None


def test_recompute_rejects_costly_work_done_for_every_row() -> None:
    def f(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + torch.sin(b)

    slow = DeviceRates(operations=1e4)  # a device whose arithmetic is dear
    graph = trace(f, torch.randn(4096, 256), torch.randn(256))
    found = rules.recompute(candidate(graph, "sin", "add", slow))
    assert found is not None and "times as much" in found.reason
    assert rules.recompute(candidate(graph, "sin", "add")) is None


def test_fewer_programs_take_longer() -> None:
    rates = DeviceRates()
    assert kernel_time(rates, 1 << 26, 1, 0) > 10 * kernel_time(rates, 1 << 26, 1 << 20, 0)
    assert kernel_time(rates, 0, 1, 0) == rates.launch


def test_a_column_reduction_has_a_point_per_run_of_columns_only() -> None:
    graph = trace(lambda x: (torch.sum(x, 0), torch.sum(x, 1)), torch.randn(4096, 768))
    columns, rows = (candidate(graph, "sum_1", "sum_2").a, candidate(graph, "sum_1", "sum_2").b)
    assert (columns.points, rows.points) == (768 // 32, 4096)
    apart = candidate(graph, "sum_1", "sum_2")
    judged = [apart.context.domains.verdict(g).points for g in (columns, rows)]
    assert judged == [columns.points, rows.points], "a frame and the domain agree"


def test_siblings_that_would_take_a_large_tensor_column_by_column_stay_apart() -> None:
    """Rows of equal number share programs; columns do not: neighbours in memory would be in different programs."""
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.sin(x), torch.cos(y)

    columns = candidate(trace(f, torch.randn(8192, 768), torch.randn(4096, 768)), "sin", "cos")
    found = rules.parallelism(columns)
    assert found is not None and "24 independent programs" in found.reason
    assert rules.first_reject(candidate(trace(f, torch.randn(768, 8192), torch.randn(768, 4096)), "sin", "cos")) is None


def test_halves_of_a_split_reduction_stay_apart() -> None:
    graph = trace(lambda x: x.view(2, 16, 4096).sum(2).sum(1).cos(), torch.randn(2, 65536))
    assert rules.halves(candidate(graph, "sum_1", "sum_2")) is None, "nothing says that they are halves"
    for node in graph.graph.nodes:
        if "sum" in node.name:
            node.meta["half"] = ("sum", node.name == "sum_1")
    found = rules.halves(candidate(graph, "sum_1", "sum_2"))
    assert found is not None and found.rule == "halves" and "long rows of sum" in found.reason
    assert rules.halves(candidate(graph, "sum_2", "cos")) is None


def scattering(reads_before: bool) -> fx.GraphModule:
    """A kernel that reads one of two tensors, and another that stores into the first of them."""
    def f(c: torch.Tensor, d: torch.Tensor, k: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        read = torch.sin(c if reads_before else d)
        return read, torch.ops.aten.index_copy.default(c, 0, i, k)

    graph = trace(f, torch.randn(16, 8), torch.randn(16, 8), torch.randn(2, 8), torch.tensor([1, 2]))
    node = next(n for n in graph.graph.nodes if n.name == "index_copy")
    source = node.args[3]
    node.target, node.args = SCATTER_INTO, (node.args[0], [node.args[2]], source, False)
    node.meta = {**node.meta, "val": source.meta["val"]}
    return graph


def test_no_kernel_stores_into_a_tensor_that_it_reads() -> None:
    found = rules.overwrites(candidate(scattering(True), "sin", "index_copy"))
    assert found is not None and found.rule == "overwrites" and "no order" in found.reason
    assert rules.overwrites(candidate(scattering(False), "sin", "index_copy")) is None
    assert rules.overwrites(candidate(chain(8), "sin", "cos")) is None


def test_what_is_written_over_an_input_waits_for_its_readers() -> None:
    def f(x: torch.Tensor, step: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * step, step + 1, other + 1

    graph = trace(f, torch.randn(4), torch.tensor(1.0), torch.tensor(2.0))
    assert rules.updates(candidate(graph, "mul", "add")) is None, "nothing says that it is written over"
    for node in graph.graph.nodes:
        if "add" in node.name:
            node.meta[UPDATE_MARK] = True
    found = rules.updates(candidate(graph, "mul", "add"))
    assert found is not None and found.rule == "updates" and "read first" in found.reason
    assert rules.updates(candidate(graph, "add", "add_1")) is None, "those of several inputs share a kernel"
