"""Targets: scripts and functions, what is found, what goes through fxfuser, and how failures read."""

from __future__ import annotations

import json
import re

import pytest
import torch

from fxfuser.cli.command import FAILED, USAGE


def names(result) -> list[str]:
    return [g["kind"] for g in json.loads(result.out)["graphs"]]


@pytest.mark.parametrize(("target", "message"), [
    ("missing.py", "no script 'missing.py'"),
    ("missing:f", "no module 'missing'"),
    ("missing.py:f", "no file 'missing.py'"),
    ("cli_model:absent", "has no function 'absent'; it has broken, decorated"),
    ("cli_model:no_pair", "must return (callable, example_inputs), not 3"),
    ("cli_model:no_inputs", "must be a tuple, not 3"),
])
def test_a_target_that_is_none(target: str, message: str, fxfuser) -> None:
    result = fxfuser("dump", target)
    assert (result.code, result.out) == (USAGE, "")
    assert message in result.err


def test_an_import_error_is_the_targets_own(fxfuser) -> None:
    result = fxfuser("dump", "no_import:f")
    assert result.code == USAGE
    assert "importing no_import failed" in result.err
    assert 'no_import.py", line 1' in result.err
    assert "a_module_that_is_not_there" in result.err
    assert "importlib" not in result.err


def test_a_script_that_raises(fxfuser) -> None:
    result = fxfuser("dump", "raises.py")
    assert result.code == FAILED
    assert result.err.count('raises.py"') == 2  # the call and the function, and no frame of ours
    assert "ValueError: from the script" in result.err
    assert "runpy" not in result.err


def test_a_function_that_cannot_run(fxfuser) -> None:
    result = fxfuser("dump", "cli_model:broken")
    assert result.code == FAILED
    assert "cli_model:broken failed" in result.err
    assert "return lambda x: x.view(5)" in result.err, "the user's line"
    assert result.out == ""
    assert "torch/_dynamo/" not in result.err


def test_a_script_that_compiles_nothing(fxfuser) -> None:
    result = fxfuser("dump", "plain.py")
    assert result.code == FAILED
    assert "nothing in it was compiled" in result.err


@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "fxfuser"])
def test_a_script_goes_through_fxfuser_whatever_backend_it_names(backend: str, fxfuser) -> None:
    original = torch.compile
    result = fxfuser("dump", "--format", "json", "script.py", "--size", "5", "--backend", backend)
    assert result.code == 0, result.err
    assert names(result) == ["inference", "inference"]  # f, and the module's own compile()
    assert json.loads(result.out)["coverage"] == 1.0
    assert "from the script torch.Size([5])" in result.err, "its output must not mix with ours"
    assert torch.compile is original


def test_words_after_the_dashes_are_the_scripts(fxfuser) -> None:
    result = fxfuser("dump", "script.py", "--format", "json", "--", "--size", "4")
    assert result.code == 0, result.err
    assert "torch.Size([4])" in result.err


def test_a_script_that_leaves_with_a_code_is_still_dumped(fxfuser) -> None:
    result = fxfuser("dump", "script.py", "--stage", "segments", "--size", "4", "--leave", "3")
    assert result.code == FAILED
    assert "script.py left with exit code 3" in result.err
    assert "pointwise" in result.out


def test_a_function_takes_no_arguments(fxfuser) -> None:
    result = fxfuser("dump", "cli_model:inference", "--size", "3")
    assert result.code == USAGE
    assert "takes no arguments: --size 3" in result.err


@pytest.mark.parametrize("target", ["cli_model:single", "cli_model.py:single"])
def test_one_tensor_is_one_input(target: str, fxfuser) -> None:
    assert names(fxfuser("dump", target, "--format", "json")) == ["inference"]


def test_the_backward_of_a_function_is_compiled_too(fxfuser) -> None:
    assert names(fxfuser("dump", "cli_model:training", "--format", "json")) == ["forward", "backward"]


def test_options_reach_the_compilation(fxfuser) -> None:
    plan = fxfuser("dump", "cli_model:inference", "--stage", "plan", "--executor", "interpret").out
    assert "1 kernel" in plan.replace("\n", " ")


@pytest.mark.parametrize("function", ["dynamic", "decorated"])
def test_a_function_that_is_compiled_keeps_its_arguments(function: str, fxfuser) -> None:
    result = fxfuser("dump", f"cli_model:{function}", "--format", "json")
    assert names(result) == ["inference"], result.err
    shape = json.loads(result.out)["graphs"][0]["segments"][0]["outputs"][0]["type"]
    assert re.fullmatch(r"f32\[s\d+,s\d+\]", shape)
