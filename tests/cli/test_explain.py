"""explain: every boundary, and the relation of two names."""

from __future__ import annotations

import re

import pytest

from fxfuser.cli.command import FAILED, USAGE

TRAINING = "cli_model:training"


def test_boundaries_have_both_sides_costs_and_reason(fxfuser) -> None:
    result = fxfuser("explain", TRAINING, "--graph", "forward")
    assert result.code == 0, result.err
    assert "1 boundary, estimated" in result.out
    assert "epilogue" in result.out
    assert "f32[8,32]" in result.out
    assert "cli_model.py:6" in result.out
    assert "needs the whole row" in result.out


def test_nothing_is_apart(fxfuser) -> None:
    assert "no boundaries" in fxfuser("explain", "cli_model:inference").out


@pytest.mark.parametrize(("a", "b", "answer"), [
    ("relu", "add", "They are in one segment."),
    ("mm", "relu", "epilogue"),  # a boundary between their segments
    ("aten.relu", "mul", "They are in one segment."),
    ("cli_model.py:6", "cli_model.py:7", "They are in one segment."),
    ("relu", "relu", "the same node"),
])
def test_two_names(a: str, b: str, answer: str, fxfuser) -> None:
    result = fxfuser("explain", TRAINING, a, b, "--graph", "forward")
    assert result.code == 0, result.err
    assert answer in result.out


def test_two_that_are_apart_by_a_chain(fxfuser) -> None:
    out = fxfuser("explain", "chain:chain", "sin", "cos").out
    assert "The second depends on the first through segments 0 -> 1 -> 2" in out
    assert out.count("lowerable") == 2


def test_two_lines_whose_first_nodes_are_views(fxfuser) -> None:
    """What a line computes answers for it: nobody asks about the transpose of what it reads."""
    result = fxfuser("explain", "cli_model:step_of_decoding", "cli_model.py:21", "cli_model.py:22")
    assert "is in segment1, reduction" in result.out and "is in segment2, " in result.out, result.err
    assert "moves no data" in fxfuser("explain", "cli_model:step_of_decoding", "permute", "mm").out


def test_two_names_that_are_not_there(fxfuser) -> None:
    result = fxfuser("explain", TRAINING, "relu", "absent")
    assert result.code == FAILED
    assert re.search(r"no graph has both relu and absent; nodes come from \S+:\d+", result.err)


def test_one_name_is_too_few(fxfuser) -> None:
    result = fxfuser("explain", TRAINING, "relu")
    assert result.code == USAGE
    assert "no names or two" in result.err


@pytest.fixture(autouse=True)
def _chain(folder) -> None:
    (folder / "chain.py").write_text(
        "import torch\n\ndef chain():\n    return lambda x: x.sin().sort(0)[0].cos(), (torch.randn(4, 4),)\n")
