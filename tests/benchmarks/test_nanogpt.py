"""The training benchmark at its smallest: processes, rows, tables; and how kernels are told apart."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import nanogpt, transformer_models

ROW = {"case": "nanogpt", "status": "ok", "compile_s": 1.0}


def _run(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> tuple[int, dict]:
    fixed = ["--size", "tiny", "--device", "cpu", "--step-seconds", "0.01", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["nanogpt", *fixed, *options])
    return nanogpt.main(), json.loads(path.read_text())


@pytest.mark.slow
def test_two_backends_on_equal_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    status, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "eager,fxfuser", "--steps", "3", "--profile")
    eager, ours = results["rows"]
    assert status == 0
    assert len(ours["losses"]) == 3
    assert nanogpt.curve_distance(ours["losses"], eager["losses"])[1] < 1e-4
    assert ours["warm_compile_s"] > 0
    assert "warm_compile_s" not in eager
    assert any(site["graph"] == "backward" for site in ours["segments"].values())
    assert not eager["segments"]
    assert str(tmp_path) not in json.dumps(results)
    assert "fxfuser" in capsys.readouterr().out


@pytest.mark.slow
def test_models_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    status, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "fxfuser", "--models", "llama")
    assert status == 0
    assert [row["case"] for row in results["rows"]] == [f"llama {k}" for k in ("training", "inference", "decoding")]
    assert all(0 < row["error_to_float32"] < 0.05 for row in results["rows"])


def test_a_worker_that_crashes_or_has_no_time_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "eager,fxfuser", "--seconds", "1")
    assert status == 1
    assert [row["status"] for row in results["rows"]] == ["skipped", "skipped"]
    monkeypatch.setattr(sys, "executable", "false")
    _, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "eager")
    assert [row["status"] for row in results["rows"]] == ["crashed"]


def test_a_failure_in_a_worker_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nanogpt, "measure_nanogpt", lambda backend, args: 1 // 0)
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["nanogpt", "--worker", "eager", "--device", "cpu", "--json", str(path)])
    assert nanogpt.main() == 0
    assert json.loads(path.read_text())[0]["error"].startswith("ZeroDivisionError")


def test_a_case_past_the_limit_costs_its_row_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(work: str, backend: str, args: object) -> dict:
        if work.startswith("gpt2"):
            time.sleep(5)
        return {"compile_s": 1.0}

    monkeypatch.setattr(nanogpt, "measure_model", measured)
    monkeypatch.setattr(nanogpt.transformer_models, "workload", lambda name, kind, *rest: f"{name} {kind}")
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["nanogpt", "--worker", "eager", "--device", "cpu", "--json", str(path),
                                      "--models", "llama,gpt2", "--kinds", "training,inference", "--seconds", "0.5"])
    assert nanogpt.main() == 0
    assert [(r["case"], r["status"]) for r in json.loads(path.read_text())] == [
        ("llama training", "ok"), ("llama inference", "ok"), ("gpt2 training", "out of time"),
        ("gpt2 inference", "out of time")]


def test_models_compile_beside_each_other_and_share_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(backend: str, args: argparse.Namespace, caches: Path, seconds: float, *extra: str) -> list[dict]:
        asked.append((backend, extra, seconds))
        models = extra[1:2] if extra else args.models
        took = 20.0 if extra else 2.0
        return [{**ROW, "case": f"{m} training", "backend": backend, "compile_s": took} for m in models]

    monkeypatch.setattr(nanogpt, "in_process", answer)
    monkeypatch.setattr(nanogpt.os, "cpu_count", lambda: 16)
    status, results = _run(monkeypatch, tmp_path / "r.json", "--backends", "eager,inductor,fxfuser", "--models",
                           "llama,gpt2", "--seconds", "90")
    assert status == 0
    beside = {(b, extra[1]) for b, extra, _ in asked if "--compile-only" in extra}
    assert beside == {(b, m) for b in ("inductor", "fxfuser") for m in ("llama", "gpt2")}
    shares = [seconds for _, extra, seconds in asked if not extra]
    assert [round(s) for s in shares] == [30, 45, 90], "each gets what is left over those that are left"
    assert [(r["backend"], r["compile_s"], r.get("warm_compile_s")) for r in results["rows"][::2]] == [
        ("eager", 2.0, None), ("inductor", 20.0, 2.0), ("fxfuser", 20.0, 2.0)]


@pytest.mark.parametrize(("kernel", "kind"), [
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "product"),
    ("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
    ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
    ("reduction_add_mean_sub_mul_95afdb8a", "generated"), ("triton_per_fused_add_native_layer_norm_3", "generated"),
    ("Memset (Device)", "copy or fill"), ("void at::native::vectorized_elementwise_kernel<4>", "other"),
])
def test_kernels_are_told_apart(kernel: str, kind: str) -> None:
    assert nanogpt.class_of(kernel) == kind


def test_the_profile_lists_kernels_by_time_with_their_floor() -> None:
    row = {**ROW, "backend": "fxfuser", "copy_bytes_per_us": 1000,
           "busy": {"microseconds": 30.0, "kernels": 3, "by_name": {"nvjet_a": [1, 10.0], "pointwise_b": [2, 20.0]}},
           "segments": {"pointwise_b": {"bytes": 5000, "graph": "forward", "first": "segment3", "ops": "mul"}}}
    lines = nanogpt.profile(row, 5).splitlines()
    assert "product 0.01 ms in 1" in lines[0]
    assert lines[3].split()[:4] == ["20.0", "2", "10.0", "0.50"]
    assert "forward segment3: mul" in lines[3]
    assert "nvjet_a" in lines[4]
    assert len(nanogpt.profile(row, 1).splitlines()) == 4


def test_the_table_compares_with_eager_and_inductor() -> None:
    rows = [{**ROW, "backend": name, "step": {"median": us}, "losses": [2.0, loss]}
            for name, us, loss in (("eager", 3000.0, 1.0), ("inductor", 2000.0, 1.0), ("fxfuser", 1500.0, 1.1))]
    last = nanogpt.table(rows).splitlines()[-1].split()
    assert last[1:5] == ["fxfuser", "1.500", "2.000", "1.333"]
    assert "5.0e-02" in last
    assert nanogpt.curve_table(rows).splitlines()[-1].split() == ["2", "1.0000", "1.0000", "1.1000"]


def test_a_result_may_be_as_far_from_float32_as_eager() -> None:
    exact = [torch.ones(3), torch.ones(4)]
    assert transformer_models.error(exact, exact) == 0.0
    assert transformer_models.error([torch.ones(3), torch.full((4,), 1.1)], exact) == pytest.approx(0.1)
    assert transformer_models.error([torch.full((3,), float("nan")), torch.ones(4)], exact) == float("inf")
    assert transformer_models.verdict(0.02, 0.019)["status"] == "ok"
    assert transformer_models.verdict(0.05, 0.01)["status"] == "wrong"
