"""The stages of a compilation add up, in a first process and in one that finds its caches."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from torch._ops import OpOverload

from benchmarks import compile_time
from benchmarks.compile_time import Stages
from fxfuser.runtime.plan import Plan, Step, StepKind


def test_a_stage_is_without_those_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 6.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stages = Stages()
    inner = stages._timed(lambda: 3, "plan")
    assert stages._timed(lambda: inner() + 1, "segment")() == 4
    assert stages.seconds["plan"] == 3.0 and stages.seconds["segment"] == 3.0


def test_calls_of_aten_are_counted_inside_a_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_time, "STAGES", {})
    monkeypatch.setattr(Plan, "compile", Plan.compile)
    monkeypatch.setattr(OpOverload, "__call__", OpOverload.__call__)
    stages = Stages()
    stages.watch()
    torch.ops.aten.neg.default(torch.ones(2))
    made = Plan("p", ("x",), (Step(StepKind.EXTERN, "y = aten.exp.default(x)"), Step(StepKind.RETURN, "return y")))
    call = made.compile()
    assert not stages.first and call._boxed_call
    for _ in range(2):
        torch.testing.assert_close(call([torch.zeros(2)]), torch.ones(2))
    assert list(stages.first) == ["aten.exp.default"]
    assert 0 < stages.first["aten.exp.default"] < stages.seconds["libraries"] and stages.seconds["plan runs"] > 0


def test_every_stage_is_found_where_it_is_looked_up() -> None:
    assert all(callable(vars(owner)[name]) for owner, name in compile_time.STAGES)


@pytest.mark.slow
def test_cold_and_warm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--device", "cpu", "--layers", "1", "--json", str(tmp_path / "rows")]
    monkeypatch.setattr(compile_time.sys, "argv", ["compile_time", *options])
    monkeypatch.setenv("FXFUSER_STRICT", "0")
    assert compile_time.main() == 0
    rows = json.loads((tmp_path / "rows").read_text())
    assert [row["row"] for row in rows] == [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:6]]
    eager, cold, warm, alone = rows
    assert eager["total"] > 0
    assert all(cold[stage] > 0 for stage in ("dynamo", "aot", "passes", "cut", "segment", "plan"))
    for row in (warm, alone):
        assert row["plan"] > 0 and row["plan runs"] > 0 and "aten.mm.default" in row["first"]
        assert all(row[stage] == 0 for stage in ("passes", "cut", "segment", "lower"))
        stages = sum(s for name, s in row.items() if name not in ("row", "total", "first"))
        assert stages == pytest.approx(row["total"])


def test_an_unknown_row_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_time.sys, "argv", ["compile_time", "--rows", "warm,luke"])
    with pytest.raises(SystemExit):
        compile_time.main()
    assert "unknown row luke; known: eager, cold, warm, alone" in capsys.readouterr().err
