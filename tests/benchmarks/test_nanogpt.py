"""The training benchmark at its smallest: processes, rows, tables; and how kernels are told apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import nanogpt

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
