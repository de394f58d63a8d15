"""calibrate: what it prints and keeps, and what it says where there is nothing to measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxfuser.cli import calibrate
from fxfuser.cli.command import FAILED
from fxfuser.runtime.rates import known_rates
from tests.runtime.test_calibrate import KNOWN, Known


@pytest.fixture
def directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = folder / "cache"
    monkeypatch.setenv("FXFUSER_CACHE_DIR", str(found))
    return found


def test_without_a_device(directory: Path, fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = fxfuser("calibrate")
    assert result.code == FAILED and "needs a CUDA device" in result.err and not directory.exists()


def test_rates_are_shown_and_kept(directory: Path, fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "cuda_bench", Known)
    result = fxfuser("calibrate")
    assert result.code == 0 and ["launch", "3.5", "2", "us"] in [line.split() for line in result.out.splitlines()]
    found = known_rates("known", directory)
    assert found is not None and found.bandwidth == pytest.approx(KNOWN.bandwidth)
    again = json.loads(fxfuser("calibrate", "--json").out)
    assert again["device"] == "known" and again["kept"] and again["processors"] == 80


def test_a_directory_that_cannot_be_written(directory: Path, fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write_text("a file")
    monkeypatch.setattr(calibrate, "cuda_bench", Known)
    result = fxfuser("calibrate")
    assert result.code == FAILED and "not kept" in result.err
