"""bisect: planted faults of a pass and of a merge are named, in the forward and in the backward."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fxfuser import capture
from fxfuser.cli import bisect
from fxfuser.cli.command import FAILED, USAGE
from fxfuser.errors import LoweringError, Site
from fxfuser.runtime import lower_segments

aten = torch.ops.aten
INFERENCE, TRAINING = "cli_model:inference", "cli_model:training"  # (x.sin() + 1).cos()


def exchange(graph, scope) -> int:
    """A pass at fault: every cos becomes a sin."""
    changes = 0
    for node in graph.nodes:
        if node.target is aten.cos.default and scope.fuel.take():
            node.target = aten.sin.default
            changes += 1
    return changes


@pytest.fixture
def faulty_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "JOINT", (*capture.JOINT[:3], exchange, *capture.JOINT[3:]))


@pytest.fixture
def faulty_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel may hold a sine and a cosine."""
    lower = lower_segments.lower_kernel

    def refuses(segment, config, hints):
        if {aten.sin.default, aten.cos.default} <= {n.target for n in segment.nodes}:
            raise LoweringError("planted", Site())
        return lower(segment, config, hints)

    monkeypatch.setattr(lower_segments, "lower_kernel", refuses)


def test_a_pass_is_named_with_what_it_did(faulty_pass, fxfuser) -> None:
    result = fxfuser("bisect", INFERENCE)
    assert result.code == FAILED, result.err
    assert "pass exchange on region" in result.out
    assert "-cos = aten.cos.default(add)" in result.out and "+cos = aten.sin.default(add)" in result.out
    assert "breaks it: result 0 differs at 24 of 24 places" in result.out


def test_a_merge_is_named_with_both_sides(faulty_kernels, fxfuser) -> None:
    result = fxfuser("bisect", INFERENCE)
    assert result.code == FAILED, result.err
    assert "merge in region" in result.out
    assert "one side:" in result.out and "the other:" in result.out
    assert "aten.sin.default" in result.out and "aten.cos.default" in result.out and "cli_model.py:" in result.out


@pytest.mark.parametrize("target", [INFERENCE, TRAINING])
def test_nothing_to_find(target: str, fxfuser) -> None:
    result = fxfuser("bisect", target)
    assert result.code == 0, result.err
    assert "is right with all" in result.out


def test_a_check_of_the_users(folder, fxfuser) -> None:
    (folder / "checks.py").write_text("def small(results):\n    return results[0].abs().max() < 0.1\n")
    result = fxfuser("bisect", INFERENCE, "--check", "checks:small")
    assert result.code == FAILED
    assert "wrong before the first change: checks:small says no" in result.out


def test_a_script_is_right_where_it_ends_well(faulty_pass, folder, fxfuser) -> None:
    (folder / "asserts.py").write_text(
        "import torch\nx = torch.ones(3)\nf = torch.compile(lambda x: (x + 1).cos(), backend='fxfuser')\n"
        "assert torch.allclose(f(x), (x + 1).cos())\n")
    result = fxfuser("bisect", "asserts.py")
    assert result.code == FAILED
    assert "pass exchange" in result.out and "AssertionError" in result.out


@pytest.mark.parametrize("words", [("cli_model:broken",), (INFERENCE, "--check", "nothing"),
                                   (INFERENCE, "--check", "nothing:here")])
def test_what_cannot_be_bisected(words: tuple[str, ...], fxfuser) -> None:
    assert fxfuser("bisect", *words).code == USAGE


@dataclass
class Counting:
    """A trial that is wrong from `first` on, and how often it ran."""

    first: int
    runs: int = 0

    def __call__(self, given: int) -> bisect.Trial:
        self.runs += 1
        return bisect.Trial(given, bisect.Fuel(0), bisect.Outcome(None), "wrong" if given >= self.first else "")


@pytest.mark.parametrize("first", [1, 2, 3, 31, 32, 33])
def test_bisection_finds_the_first_in_few_runs(first: int) -> None:
    trial = Counting(first)
    right, wrong = bisect.bisect(33, trial, trial(0), bisect.Trial(None, bisect.Fuel(), bisect.Outcome(None), "wrong"))
    assert (right.given, wrong.given) == (first - 1, first)
    assert trial.runs <= 8
