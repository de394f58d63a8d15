"""The stages of a compilation add up, in a first process and in one that finds its caches."""

from __future__ import annotations

import time

import pytest

from benchmarks import compile_time
from benchmarks.compile_time import Stages


def test_a_stage_is_without_those_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stages = Stages()
    inner = stages._timed(lambda: 3, "plan")
    assert stages._timed(lambda: inner() + 1, "segment")() == 4
    assert stages.seconds["plan"] == 3.0 and stages.seconds["segment"] == 3.0


def test_every_stage_is_found_where_it_is_looked_up() -> None:
    assert all(callable(vars(module)[name]) for module, name in compile_time.STAGES)


@pytest.mark.slow
def test_cold_and_warm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_time.sys, "argv", ["compile_time", "--device", "cpu", "--layers", "1"])
    monkeypatch.setenv("FXFUSER_STRICT", "0")
    assert compile_time.main() == 0
    names, _, cold, warm = (line.split() for line in capsys.readouterr().out.splitlines())
    found = {row[0]: dict(zip(names[1:], map(float, row[1:]))) for row in (cold, warm)}
    assert min(found["cold"][stage] for stage in ("passes", "cut", "segment", "plan")) > 0
    assert found["warm"]["plan"] > 0
    assert all(found["warm"][stage] == 0 for stage in ("passes", "cut", "segment", "lower"))
