from __future__ import annotations

import pytest
import torch

from fxfuser import observe
from fxfuser.errors import VerificationError
from fxfuser.passes import JOINT, LATE
from fxfuser.passes.dce import remove_dead_nodes
from fxfuser.passes.k1_matmul import multiply_instead_of_k1_matmul
from tests.passes.rewriting import apply, targets, trace

aten = torch.ops.aten


def three_products(a, b):
    return tuple(aten.mm.default(a, b) for _ in range(3))


INPUTS = [torch.randn(3, 1), torch.randn(1, 4)]


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 9])
def test_fuel_stops_after_so_many_changes(fuel: int) -> None:
    module = trace(three_products, INPUTS)
    assert apply(module, (multiply_instead_of_k1_matmul,), fuel) == min(fuel, 3)
    assert targets(module).count("mul.Tensor") == min(fuel, 3)


def test_runs_are_recorded() -> None:
    module = trace(three_products, INPUTS)
    with observe.recording() as records, observe.graph("joint", 0, ""):
        apply(module, (multiply_instead_of_k1_matmul, remove_dead_nodes))
    first, second = records.graphs[0].passes
    assert (first.name, first.changes, second.changes) == ("multiply_instead_of_k1_matmul", 3, 0)
    assert "aten.mm" in first.before and "aten.mm" not in first.after and first.milliseconds > 0


def drop_meta(graph, scope) -> int:
    next(n for n in graph.nodes if n.op == "call_function").meta.pop("val")
    return 1


def change_strides(graph, scope) -> int:
    node = graph.output_node().args[0][0]
    node.meta["val"] = node.meta["val"].t().clone(memory_format=torch.contiguous_format).t()
    return 1


def change_dtype(graph, scope) -> int:
    node = graph.output_node().args[0][0]
    node.meta["val"] = node.meta["val"].double()
    return 1


def use_before_definition(graph, scope) -> int:
    first, second, *_ = (n for n in graph.nodes if n.op == "call_function")
    first.args = (second, second)
    return 1


@pytest.mark.parametrize(("broken", "message"), [
    (drop_meta, "no meta value"), (change_strides, "strides"), (change_dtype, "float64"),
    (use_before_definition, "does not lint"),
])
def test_a_broken_graph_is_refused(broken, message: str) -> None:
    module = trace(three_products, INPUTS)
    with pytest.raises(VerificationError, match=message) as error:
        apply(module, (broken,))
    assert broken.__name__ in str(error.value)


def test_an_assertion_has_no_meta_value() -> None:
    module = trace(three_products, INPUTS)
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(torch.ops.aten._assert_async.msg, (torch.tensor(True), "never"))
    assert apply(module, (change_nothing,)) == 1


def change_nothing(graph, scope) -> int:
    return 1


def test_all_passes_reach_a_fixed_point() -> None:
    module = trace(lambda a, b: torch.softmax(three_products(a, b)[0] * 1 + 0.5, -1).sum(-1), INPUTS)
    want = module(*INPUTS)
    assert apply(module, (*JOINT, *LATE)) > 0
    assert apply(module, (*JOINT, *LATE)) == 0
    torch.testing.assert_close(module(*INPUTS), want)
