"""doctor: passes on this machine, and each fault that it knows is told with advice."""

from __future__ import annotations

import pytest
import torch

from fxfuser.cli import doctor
from fxfuser.cli.command import FAILED


def test_a_sound_machine(fxfuser) -> None:
    result = fxfuser("doctor")
    assert result.code == 0, result.out
    assert torch.__version__ in result.out
    assert "self-test, interpreter" in result.out
    assert "forward and backward equal eager's" in result.out
    assert "fxfuser works here" in result.out


def test_quick_leaves_the_self_test_out(fxfuser) -> None:
    assert "self-test" not in fxfuser("doctor", "--quick").out


def test_a_wrong_variable(fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXFUSER_EXECUTOR", "nonsense")
    result = fxfuser("doctor", "--quick")
    assert result.code == FAILED
    assert "FXFUSER_EXECUTOR must be one of" in result.out.replace("\n", " ")
    assert "correct or unset the variable" in result.out


def test_a_cache_that_cannot_be_written(fxfuser, folder, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("FXFUSER_CACHE_DIR", str(folder / "file" / "cache"))
    out = " ".join(fxfuser("doctor", "--quick").out.split())
    assert "cannot be written: Not a directory" in out
    assert "set FXFUSER_CACHE_DIR" in out


def test_an_old_triton_and_a_missing_entry_point(fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.triton, "__version__", "3.5.1")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    result = fxfuser("doctor", "--quick")
    assert result.code == FAILED
    assert "fxfuser needs 3.6 or later" in result.out
    assert "not registered" in result.out


def test_a_self_test_that_fails(fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(gm, inputs, **kwargs):
        return lambda *args: tuple(t * 2 if isinstance(t, torch.Tensor) else t for t in gm(*args))

    monkeypatch.setattr(doctor.fxfuser, "fxfuser", wrong)
    result = fxfuser("doctor")
    assert result.code == FAILED
    assert "does not work here yet" in result.out
