"""repro: a segment as a file that runs alone, and that fails where the kernel is wrong."""

from __future__ import annotations

import runpy

import pytest

from fxfuser.cli import repro
from fxfuser.cli.command import FAILED, USAGE
from fxfuser.runtime import lower_segments

TRAINING = "cli_model:training"


@pytest.mark.parametrize("segment", ["forward.1", "backward.segment0", "1"])
def test_a_segment_runs_alone(segment: str, fxfuser, folder, capsys) -> None:
    result = fxfuser("repro", TRAINING, "--segment", segment, "--out", "alone.py")
    assert (result.code, result.out) == (0, "alone.py\n"), result.err
    runpy.run_path(str(folder / "alone.py"), run_name="__main__")
    assert "as eager" in capsys.readouterr().out


@pytest.mark.parametrize("function", ["attention", "cache"])
def test_ops_of_our_own_run_alone(function: str, fxfuser, folder, capsys) -> None:
    """A call of one, and a write in place, which must not meet what the first call has written."""
    (folder / "own_model.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\n\ndef attention():\n"
        "    q, k, v = (torch.randn(1, 2, n, 16).bfloat16() for n in (3, 150, 150))\n"
        "    return F.scaled_dot_product_attention, (q, k, v)\n\n\ndef cache():\n"
        "    def step(c, k, i):\n        c.index_copy_(1, i, k * 2)\n        return c + 1\n\n"
        "    return step, (torch.randn(3, 16, 40), torch.randn(3, 2, 40), torch.tensor([3, 7]))\n")
    result = fxfuser("repro", f"own_model.py:{function}", "--segment", "0", "--out", "alone.py")
    assert result.code == 0, result.err
    assert ("import fxfuser" in (folder / "alone.py").read_text()) is (function == "attention")
    runpy.run_path(str(folder / "alone.py"), run_name="__main__")
    assert "as eager" in capsys.readouterr().out


def test_without_a_file_it_is_printed(fxfuser) -> None:
    out = fxfuser("repro", TRAINING, "--segment", "forward.1").out
    assert out.startswith('"""fxfuser repro of segment1')
    assert "cli_model.py:6-7" in out


def test_without_a_name_the_one_that_fell_back(fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args):
        raise NotImplementedError("a made-up fault")

    monkeypatch.setenv("FXFUSER_STRICT", "0")
    monkeypatch.setattr(lower_segments, "lower_kernel", fails)
    with pytest.warns(UserWarning, match="a made-up fault"):
        result = fxfuser("repro", "cli_model:inference")
    assert result.code == 0
    assert "a made-up fault" in result.out
    assert "aten.sin.default" in result.out


def test_without_a_name_and_a_fault_the_segments_are_shown(fxfuser) -> None:
    result = fxfuser("repro", "cli_model:inference")
    assert (result.code, result.out) == (FAILED, "")
    assert "name one with --segment" in result.err
    assert "pointwise" in result.err


@pytest.mark.parametrize("name", ["9", "nograph.0", "nonsense"])
def test_a_segment_that_is_none(name: str, fxfuser) -> None:
    result = fxfuser("repro", TRAINING, "--segment", name)
    assert result.code == USAGE
    assert f"no segment {name!r}; there are region" in result.err


def test_the_module_is_a_command() -> None:
    assert repro.COMMAND.name == "repro"
