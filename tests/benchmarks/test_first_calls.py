"""The rows of the benchmark of first calls."""

from __future__ import annotations

import pytest
import torch

from benchmarks import first_calls
from benchmarks.first_calls import ROWS, calls, measure
from examples import nanogpt as example


@pytest.mark.parametrize("row", ROWS)
def test_every_row_calls_what_it_says(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dict(example.SIZES)
    monkeypatch.setattr(example, "SIZES", {"gpt2": small["tiny"]})
    found = measure(row, torch.device("cpu"))
    assert found["row"] == row and min(found[name] for name in ("forward", "backward", "second")) > 0
    assert len(calls(row, small["tiny"], torch.device("cpu"))) == {"none": 0, "products": 1}.get(row, 2)


def test_what_fails_on_the_thread_is_no_row() -> None:
    """A benchmark says so, where the compiler would go on."""
    with pytest.raises(ZeroDivisionError):
        first_calls.on_thread([lambda: 1 // 0])
