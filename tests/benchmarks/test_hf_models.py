"""The run over transformers models: its yardstick, its rows, one model through all of it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import hf_models

ARGUMENTS = argparse.Namespace(device="cpu", backend="aot_eager", executor="auto", dtype="float32", attention="eager",
                               limit=60.0)


def test_distances() -> None:
    exact = {"the loss": torch.tensor(2.0), "w": torch.ones(4), "b": torch.zeros(3)}
    near = {"the loss": torch.tensor(2.2), "w": torch.ones(4) * 1.5, "b": torch.full((3,), 1e-3)}
    found = dict(hf_models.distances(near, {n: t.double() for n, t in exact.items()}))
    assert found["the loss"] == pytest.approx(0.1) and found["w"] == pytest.approx(0.5)
    assert found["b"] == pytest.approx(1e-3 * math.sqrt(3) / 0.02), "beside the largest gradient"
    broken = dict(hf_models.distances({"the loss": torch.tensor(math.nan), "b": exact["b"]}, exact))
    assert broken == {"the loss": math.inf, "w": math.inf, "b": 0.0}


def test_batches_differ_from_step_to_step_in_values_alone() -> None:
    for kind in {a.feed for a in hf_models.ARCHITECTURES.values()}:
        first, second = hf_models.feed(kind, 0), hf_models.feed(kind, 1)
        assert {n: t.shape for n, t in first.items()} == {n: t.shape for n, t in second.items()}
        assert any(not torch.equal(first[n], second[n]) for n in first)
        assert all(torch.equal(t, hf_models.feed(kind, 0)[n]) for n, t in first.items())


def test_a_worker_that_dies_or_has_no_time_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    rows = [hf_models.supervise("opt", ARGUMENTS, time.monotonic() + left) for left in (60, -1)]
    assert [row["status"] for row in rows] == ["crash", "skipped"]
    assert "0 of 2 models equal to eager" in hf_models.table(rows)


@pytest.mark.slow
def test_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["hf_models", "--device", "cpu", "--only", "opt", "--json", str(path)])
    assert hf_models.main() == 0
    row = json.loads(path.read_text())["rows"][0]
    assert row["status"] == "ok" and row["kernels"] > 0 and 0.5 < row["lowered"] / row["compute"] <= 1
    assert "1 of 1 models equal to eager" in capsys.readouterr().out
