"""What the cut wraps in checkpointed regions of CUDA devices; tests/test_random.py has those of the host."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from fxfuser.capture import scope_of
from fxfuser.passes import Fuel
from fxfuser.passes.rng_states import WITH_GENERATOR, unwrap_what_draws_nothing

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def half(mode: FakeTensorMode, state: str, dropouts: list[float]) -> fx.GraphModule:
    """As the cut leaves it: each wrapper reads a generator, and has no value."""
    graph = fx.Graph()
    hidden = graph.placeholder("q")
    hidden.meta["val"] = mode.from_tensor(torch.randn(2, 3, 5, 8))
    states = [graph.placeholder(f"{state}_{i}") for i in range(len(dropouts))]
    for node, dropout in zip(states, dropouts):
        node.meta["val"] = torch.Generator()
        both = graph.call_function(WITH_GENERATOR, (ATTENTION, hidden, hidden, hidden, dropout), {"rng_state": node})
        hidden = graph.call_function(operator.getitem, (both, 0))
        hidden.meta["val"] = mode.from_tensor(torch.randn(2, 3, 5, 8))
    graph.output((hidden,))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize("dropouts", [[0.0], [0.2], [0.0, 0.2, 0.0]])
def test_generators_are_left_to_what_draws(dropouts: list[float]) -> None:
    mode = FakeTensorMode()
    halves = half(mode, "fwd_rng_state", dropouts), half(mode, "bwd_rng_state", dropouts)
    unwrap_what_draws_nothing(*halves, scope_of(halves[0], Fuel(None)))
    for module in halves:
        module.graph.lint()
        calls = [n for n in module.graph.nodes if n.target in (ATTENTION, WITH_GENERATOR)]
        assert [n.target for n in calls] == [WITH_GENERATOR if d else ATTENTION for d in dropouts]
        assert all(n.meta["val"][0].shape == (2, 3, 5, 8) for n in calls)
        assert len(module.graph.find_nodes(op="placeholder")) == 1 + sum(d > 0 for d in dropouts)
