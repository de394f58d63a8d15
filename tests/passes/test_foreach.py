"""Ops on lists of tensors give what eager gives, as ops on each tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxfuser.passes.foreach import bodies

BODIES = bodies()
SIZES = ((3, 4), (5,), ())


def _arguments(op: Any) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    words: dict[str, Any] = {}
    plain: list[Any] = []
    for a in op._schema.arguments:
        kind = str(a.type)
        if kind == "List[Tensor]":
            value: Any = [torch.rand(s) * 0.8 + 0.1 for s in SIZES]
        elif kind == "List[number]":
            value = [0.25, 2.0, 3]
        elif kind == "Tensor":
            value = torch.tensor(1.5)
        elif kind == "number":
            value = 2
        else:
            continue
        if a.kwarg_only:
            words[a.name] = value
        else:
            plain.append(value)
    return plain, words


@pytest.mark.parametrize("op", BODIES, ids=str)
def test_as_eager(op: Any) -> None:
    plain, words = _arguments(op)
    found, expected = BODIES[op](*plain, **words), op(*plain, **words)
    assert len(found) == len(expected) == len(SIZES)
    torch.testing.assert_close(found, list(expected))
    assert [f.dtype for f in found] == [e.dtype for e in expected]


def test_whole_numbers_are_promoted_as_in_eager() -> None:
    xs = [torch.arange(4), torch.rand(3).half()]
    for op, args in ((torch.ops.aten._foreach_add.Scalar, (xs, 1.5)), (torch.ops.aten._foreach_div.Scalar, (xs, 2)),
                     (torch.ops.aten._foreach_mul.ScalarList, (xs, [2, 0.5]))):
        found, expected = BODIES[op](*args), op(*args)
        assert [f.dtype for f in found] == [e.dtype for e in expected]
        torch.testing.assert_close(found, list(expected))


@pytest.mark.parametrize("factory", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_run_in_kernels(factory: Any) -> None:
    def trained(compile_it: bool) -> list[Tensor]:
        torch.manual_seed(0)
        torch.compiler.reset()
        net = torch.nn.Linear(8, 5)
        optimizer = factory(net.parameters(), lr=0.01, foreach=True)
        step: Any = optimizer.step
        if compile_it:
            step = torch.compile(step, backend="fxfuser", options={"executor": "interpret", "strict": True})
        for _ in range(3):
            net(torch.randn(4, 8)).square().sum().backward()
            step()
            optimizer.zero_grad()
        return [p.detach() for p in net.parameters()]

    torch.testing.assert_close(trained(True), trained(False))
