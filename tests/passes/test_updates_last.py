from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxfuser import observe
from fxfuser.passes.updates_last import updates_last
from tests.passes.rewriting import apply, targets, trace

PASS = (updates_last,)
aten = torch.ops.aten


def test_an_update_waits_for_readers_of_the_old_value() -> None:
    def function(step: Tensor, x: Tensor) -> Tensor:
        new = step + 1
        y = x * step
        step.copy_(new)
        return y

    inputs = [torch.tensor(3.0), torch.randn(4)]
    module = trace(function, inputs)
    before = targets(module)
    assert before.index("add.Tensor") < before.index("mul.Tensor") and apply(module, PASS) == 1
    assert targets(module) == ["mul.Tensor", "add.Tensor", "copy_.default"]
    step, x = (v.clone() for v in inputs)
    torch.testing.assert_close(module(step, x), inputs[1] * 3)
    assert step == 4 and apply(module, PASS) == 0


def read_again(step: Tensor, x: Tensor) -> Tensor:
    new = step + 1
    y = x * step + new  # somebody else reads the new value
    step.copy_(new)
    return y


def from_elsewhere(step: Tensor, x: Tensor) -> Tensor:
    new = step + torch.relu(x).sum()  # what it is computed of would be held
    y = x * step
    step.copy_(new)
    return y


def large(step: Tensor, x: Tensor) -> Tensor:
    new = x + 1  # what reads the old elements can do it in the same kernel
    y = x * step
    x.copy_(new)
    return y


def written_before(step: Tensor, x: Tensor) -> Tensor:
    new = step + 1
    step.copy_(new)
    return x * step  # it reads the new value, through the input


@pytest.mark.parametrize("function", [read_again, from_elsewhere, large, written_before])
def test_what_stays(function: object) -> None:
    module = trace(function, [torch.randn(()), torch.randn(4)])  # type: ignore[arg-type]
    before = targets(module)
    assert apply(module, PASS) == 0 and targets(module) == before


class Layer(nn.Module):
    """Each layer counts, and all read the first one's count after that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        old = self.count.clone()
        self.count.add_(1)
        return self.linear(x) * (old + 2)


def test_counters_of_all_layers_are_one_kernel() -> None:
    torch.manual_seed(0)
    ours, eager = (nn.Sequential(*(Layer() for _ in range(3))) for _ in range(2))
    eager.load_state_dict(ours.state_dict())
    call = torch.compile(ours, backend="fxfuser", options={"executor": "interpret", "strict": True})
    x = torch.randn(4, 8)
    with torch.no_grad(), observe.recording() as recorded:
        for _ in range(3):
            torch.testing.assert_close(call(x), eager(x))
    assert all(isinstance(m, Layer) and m.count.item() == 3 for m in ours)
    (graph,) = recorded.graphs
    assert graph.segmentation is not None
    counting = [s for s in graph.segmentation.segments if any(o.meta["val"].dtype == torch.int64 for o in s.outputs)]
    assert [len(s.outputs) for s in counting] == [3]
    assert graph.plan.count("# in place") == 3 and "copy_" not in graph.plan
