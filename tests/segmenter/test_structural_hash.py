"""Equal computations have equal keys, different ones do not."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch

from fxfuser.domain.resolve import resolve
from fxfuser.segmenter import domains
from fxfuser.segmenter.segment import SegmentKind
from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import trace


def keys(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> list[str]:
    found = segment(trace(function, *inputs, mode=mode)).segments
    return [s.key for s in found if s.kind is not SegmentKind.EXTERN]


def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    hidden = (x - mean) * b
    return torch.mm(hidden, w).sin() + x


def test_twelve_equal_layers_have_the_keys_of_one() -> None:
    def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = layer(x, w, b)
        return x

    inputs = torch.randn(64, 64), torch.randn(64, 64), torch.randn(64)
    found = keys(model, *inputs)
    assert len(found) == 13
    assert len(set(found[1:-1])) == 1


def test_a_transplanted_domain_is_what_resolving_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = layer(x.view(64, 8, 8).transpose(1, 2).reshape(64, 64), w, b)
        return x

    resolved = []
    monkeypatch.setattr(domains, "resolve", lambda n, o: resolved.append(n) or resolve(n, o))
    graph = trace(model, torch.randn(64, 64), torch.randn(64, 64), torch.randn(64))
    kernels = [s for s in segment(graph).segments if s.domain is not None]
    assert len(resolved) < len(kernels)
    for s in kernels:
        assert str(s.domain) == str(resolve(s.nodes, s.outputs))


def base(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x * 2, x)


@pytest.mark.parametrize("other", [
    lambda x: torch.where(x > 0, x * 3, x),  # scalar
    lambda x: torch.where(x > 0, x * 2.0, x),  # its type
    lambda x: torch.where(x > 0, x, x * 2),  # connectivity
    lambda x: torch.where(x < 0, x * 2, x),  # op
    lambda x: torch.where(x.view(8, 4) > 0, x.view(8, 4) * 2, x.view(8, 4)),  # shape of the result
])
def test_a_changed_computation_changes_the_key(other: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(4, 8)
    assert keys(base, x) == keys(base, x)
    assert keys(base, x) != keys(other, x)


def test_dtype_stride_and_shape_of_inputs_change_the_key() -> None:
    x = torch.randn(8, 8)
    different = [x, x.half(), x.t(), torch.randn(8, 9)]
    assert len({keys(base, i)[0] for i in different}) == len(different)


def test_which_values_are_written_changes_the_key() -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.sin(x)
        return y, torch.cos(y)

    assert keys(both, torch.randn(8)) != keys(lambda x: torch.cos(torch.sin(x)), torch.randn(8))


def test_names_of_size_symbols_do_not_enter() -> None:
    def two(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.mm(torch.sin(x), w), torch.mm(torch.sin(y), w)

    one, other = keys(two, torch.randn(5, 64), torch.randn(7, 64), torch.randn(64, 64), mode="symbolic")
    assert one == other
