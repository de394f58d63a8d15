"""Transformers' models beside other compilers: processes that compile at once and measure in turn."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import models, transformer_models


def _run(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> tuple[int, dict]:
    fixed = ["--size", "tiny", "--device", "cpu", "--step-seconds", "0.01", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["models", *fixed, *options])
    return models.main(), json.loads(path.read_text())


@pytest.mark.slow
def test_all_kinds_of_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    status, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "fxfuser", "--models", "llama")
    assert status == 0
    assert [row["case"] for row in results["rows"]] == [f"llama {k}" for k in ("training", "inference", "decoding")]
    assert all(0 < row["error_to_float32"] < 0.05 and row["step"]["median"] > 0 for row in results["rows"])
    assert str(tmp_path) not in json.dumps(results)
    assert "llama decoding" in capsys.readouterr().out


def test_a_case_past_the_limit_and_one_that_fails_cost_their_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prepared(work: str, args: object) -> object:
        if work == "gpt2 training":
            time.sleep(20)
        if work == "gpt2 inference":
            raise ValueError("no")
        return lambda: {"compile_s": 1.0} if work == "llama training" else 1 // 0

    monkeypatch.setattr(models, "prepared", prepared)
    monkeypatch.setattr(models.transformer_models, "workload", lambda name, kind, *rest: f"{name} {kind}")
    monkeypatch.setattr(models, "COMPILING", 0.2)
    monkeypatch.setattr(sys.stdin, "readline", lambda: "\n", raising=False)
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["models", "--worker", "eager", "--device", "cpu", "--json", str(path), "--models",
                                      "llama,gpt2", "--kinds", "training,inference", "--seconds", "5"])
    assert models.main() == 0
    assert {r["case"]: (r["status"], r.get("error", "")[:12]) for r in json.loads(path.read_text())} == {
        "llama training": ("ok", ""), "llama inference": ("failed", "ZeroDivision"),
        "gpt2 training": ("out of time", "ran past its"), "gpt2 inference": ("failed", "ValueError: ")}


SCRIPT = """import json, sys, time
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
note = lambda what: open({log!r}, "a").write(f"{{options['--worker']}} {{what}}\\n")
note("starts")
if options["--worker"] == "inductor":
    sys.exit(3)
time.sleep(1)
note("has compiled")
print("ready", flush=True)
sys.stdin.readline()
note("measures")
row = {{"backend": options["--worker"], "case": "llama training", "status": "ok", "compile_s": 1.0,
        "step": {{"median": 1000.0}}}}
open(options["--json"], "w").write(json.dumps([row]))
note("ends")
"""


def test_all_compile_before_any_measures_and_a_crash_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, script = tmp_path / "log", tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n" + SCRIPT.format(log=str(log)))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(models.os, "cpu_count", lambda: 8)
    status, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "eager,inductor,fxfuser", "--models",
                           "llama", "--seconds", "60")
    assert status == 1
    assert [(r["backend"], r["status"]) for r in results["rows"]] == [
        ("eager", "ok"), ("inductor", "crashed"), ("fxfuser", "ok")]
    lines = log.read_text().splitlines()
    assert sorted(lines[:5]) == ["eager has compiled", "eager starts", "fxfuser has compiled", "fxfuser starts",
                                 "inductor starts"]
    assert lines[5:] == ["eager measures", "eager ends", "fxfuser measures", "fxfuser ends"]


def test_no_more_at_once_than_there_are_cores_for(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [models.Job("llama", str(i), Path()) for i in range(7)]
    monkeypatch.setattr(models.os, "cpu_count", lambda: 6)
    assert [len(group) for group in models.batches(jobs)] == [3, 3, 1]
    monkeypatch.setattr(models.os, "cpu_count", lambda: 1)
    assert [len(group) for group in models.batches(jobs)] == [1] * 7


def test_a_result_may_be_as_far_from_float32_as_eager() -> None:
    exact = [torch.ones(3), torch.ones(4)]
    assert transformer_models.error(exact, exact) == 0.0
    assert transformer_models.error([torch.ones(3), torch.full((4,), 1.1)], exact) == pytest.approx(0.1)
    assert transformer_models.error([torch.full((3,), float("nan")), torch.ones(4)], exact) == float("inf")
    assert transformer_models.verdict(0.02, 0.019)["status"] == "ok"
    assert transformer_models.verdict(0.05, 0.01)["status"] == "wrong"
