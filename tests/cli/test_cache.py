"""cache: what it holds, what clearing removes, and a directory that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxfuser.cli.command import FAILED, USAGE
from fxfuser.runtime.store import Store


@pytest.fixture
def directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = folder / "cache"
    monkeypatch.setenv("FXFUSER_CACHE_DIR", str(found))
    return found


def test_an_empty_cache(directory: Path, fxfuser) -> None:
    result = fxfuser("cache", "info")
    assert result.code == 0 and str(directory) in result.out and not directory.exists()
    assert "removed 0 files" in fxfuser("cache", "clear").out


def test_what_it_holds_and_clearing_it(directory: Path, fxfuser) -> None:
    store = Store(directory / "kernels")
    store.put("a", bytes(3000))
    store.put("b", bytes(50))
    Store(directory / "segments").put("c", bytes(10))
    (directory / "repro").mkdir()
    (directory / "repro" / "segment0_1.py").write_text("x = 1\n")
    found = json.loads(fxfuser("cache", "info", "--json").out)
    assert found["kernels"]["entries"] == 2 and found["kernels"]["bytes"] == store.usage().bytes
    assert found["segments"]["entries"] == 1
    assert found["repro"] == {"entries": 1, "bytes": 6} and found["faults"] == []
    assert ["kernels", "2"] in [line.split()[:2] for line in fxfuser("cache", "info").out.splitlines()]
    assert "removed 3 files, 3" in fxfuser("cache", "clear").out
    assert store.get("a") is None and (directory / "repro" / "segment0_1.py").exists()
    assert "removed 1 file," in fxfuser("cache", "clear", "--repros").out
    assert not (directory / "repro" / "segment0_1.py").exists()


def test_a_cache_that_others_can_write(directory: Path, fxfuser) -> None:
    Store(directory / "kernels").put("a", b"")
    (directory / "kernels").chmod(0o777)
    result = fxfuser("cache", "info")
    assert result.code == FAILED and "not used:" in result.out and "written by others" in result.out


def test_an_action_is_needed(fxfuser) -> None:
    assert fxfuser("cache").code == USAGE and fxfuser("cache", "nonsense").code == USAGE
