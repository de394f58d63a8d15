"""What eager refuses is refused, in eager's words; what it takes is lowered."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F

from fxfuser import observe

Function = Callable[[torch.Tensor], Any]

REFUSED: dict[str, tuple[Function, torch.dtype]] = {
    "full": (lambda x: torch.full((2,), 300, dtype=torch.int8), torch.int8),
    "full of a half": (lambda x: torch.full((2,), 1e6, dtype=torch.float16), torch.float16),
    "full_like": (lambda x: torch.full_like(x, 300), torch.int8),
    "fill": (lambda x: x.clone().fill_(300), torch.int8),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 300), torch.int8),
    "masked_fill of a half": (lambda x: x.masked_fill(x > 0, -1e9), torch.float16),
    "pad": (lambda x: F.pad(x, (1, 1), value=-1), torch.uint8),
    "where": (lambda x: torch.where(x > 0, x, 300), torch.int8),
    "clamp": (lambda x: x.clamp(max=1000), torch.int8),
    "threshold": (lambda x: F.threshold(x, 5, 300), torch.int8),
    "addcmul": (lambda x: x.addcmul(x, x, value=300), torch.int8),
    "large alpha": (lambda x: x.add(x, alpha=300), torch.int8),
    "alpha of bool": (lambda x: x.sub(x, alpha=True), torch.int64),
    "fraction of bool": (lambda x: torch.add(x, x, alpha=1.5), torch.bool),
    "negative power": (lambda x: x ** -2, torch.int64),
    "large power": (lambda x: x ** 300, torch.int8),
    "bool less a number": (lambda x: x - 1, torch.bool),
    "a number less bool": (lambda x: 1 - x, torch.bool),
    "lerp": (lambda x: x.lerp(x, 0.5), torch.int64),
    "softmax": (lambda x: x.softmax(0), torch.int64),
    "log_softmax": (lambda x: x.log_softmax(0), torch.int64),
    "cross entropy": (lambda x: F.cross_entropy(x, x[0]), torch.int64),
    "nll_loss": (lambda x: F.nll_loss(x, x[0]), torch.int64),
    "hardswish": (F.hardswish, torch.int64),
    "logsigmoid": (F.logsigmoid, torch.int64),
    "smooth_l1_loss": (lambda x: F.smooth_l1_loss(x, x), torch.int64),
    "huber_loss": (lambda x: F.huber_loss(x, x), torch.int64),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x, x), torch.int64),
    "logaddexp": (lambda x: torch.logaddexp(x, x), torch.int64),
    "frac": (lambda x: x.frac(), torch.int64),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_in_eager(name: str) -> None:
    function, dtype = REFUSED[name]
    x = torch.tensor([[1, 0], [2, 1]]).to(dtype)
    with pytest.raises((RuntimeError, NotImplementedError)) as eager:
        function(x)
    with pytest.raises(type(eager.value)) as ours:
        torch.compile(function, backend="fxfuser", options={"executor": "interpret"})(x)
    assert str(eager.value).splitlines()[0] in str(ours.value)


@pytest.mark.parametrize("function, dtype", [
    (lambda x: torch.full((2,), 127, dtype=torch.int8) + x[0], torch.int8),
    (lambda x: x.masked_fill(x > 0, float("-inf")), torch.float16),
    (lambda x: x.masked_fill(x > 0, -1e30), torch.bfloat16),
    (lambda x: x * 1e6, torch.float16),
    (lambda x: x + 300, torch.int8),
    (lambda x: x == 300, torch.int8),
    (lambda x: x.clamp(-128, 127), torch.int8),
    (lambda x: x.add(x, alpha=-128), torch.int8),
    (lambda x: x.add(x, alpha=True), torch.bool),
    (lambda x: x ** -2, torch.float32),
    (lambda x: x ** 2, torch.int64),
    (lambda x: 1 - x, torch.uint8),
    (lambda x: x.masked_fill(x > 0, -1), torch.uint8),
    (lambda x: x.softmax(0, dtype=torch.float32), torch.int64),
])
def test_taken_as_in_eager(function: Function, dtype: torch.dtype) -> None:
    x = torch.tensor([[1, 0], [2, 1]]).to(dtype)
    with observe.recording() as records:
        got = torch.compile(function, backend="fxfuser", options={"executor": "interpret"})(x)
    assert not records.graphs[0].externs
    torch.testing.assert_close(got, function(x))
