"""The README's figures come from results files, each case's from the newest, and touch nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme_table
from benchmarks.readme_table import BEGIN, END, NoFigures
from benchmarks.record import RESULTS

ENVIRONMENT = {"gpu": "NVIDIA H200", "device": "cuda", "torch": "2.11.0", "triton": "3.6.0", "commit": "abc",
               "date": "2026-11-29 21:00 UTC"}


def _row(case: str, size: str, backend: str, graph: float, copy: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "size": size, "backend": backend, "status": "ok", "copy_us": copy,
            "call": {"median": graph + 30}, "graph": {"median": graph},
            "busy": {"microseconds": graph, "kernels": 1.0}, **more}


def _write(folder: Path, name: str, rows: list[dict[str, Any]], date: str = ENVIRONMENT["date"]) -> None:
    content = {"environment": {**ENVIRONMENT, "date": date}, "command": "python -m benchmarks.x", "rows": rows}
    (folder / name).write_text(json.dumps(content))


ROPE = [_row("mistral_nemo_forward", size, backend, us, copy) for size, backend, us, copy in (
    ("S4096", "eager", 400, 44), ("S4096", "inductor", 66, 44), ("S4096", "inductor-strongest", 65, 44),
    ("S4096", "fxfuser", 50, 44), ("S1024", "fxfuser", 9, 4))]
MEMORY = [_row("softmax", size, backend, us, 80, bytes=100) for size, backend, us in
          (("8MB", "inductor", 20), ("8MB", "fxfuser", 10), ("256MB", "inductor", 90), ("256MB", "fxfuser", 100))]


def test_rotary_figures_name_the_best_inductor_and_the_share_of_copy(tmp_path: Path) -> None:
    _write(tmp_path, "2026-11-29-rope.json", ROPE)
    text = readme_table.figures(tmp_path)
    line = next(row for row in text.splitlines() if "mistral nemo" in row)
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "mistral nemo forward", "1", "50.0", "400.0", "65.0", "0.88", "80"]
    assert "NVIDIA H200, torch 2.11.0, triton 3.6.0, 2026-11-29, commit abc" in text


def test_memory_bound_figures_are_geometric_means(tmp_path: Path) -> None:
    _write(tmp_path, "2026-11-29-memory_bound.json", MEMORY)
    text = readme_table.figures(tmp_path)
    line = next(row for row in text.splitlines() if "softmax" in row)
    assert [cell.strip() for cell in line.strip("|").split("|")] == ["softmax", "1.34", "0.90", "0.80"]


def test_a_large_size_is_compared_with_the_fastest_copy_of_its_size(tmp_path: Path) -> None:
    faster = _row("sum", "256MB", "fxfuser", 50, 20, bytes=50)
    _write(tmp_path, "2026-11-29-memory_bound.json", [*MEMORY, faster])
    line = next(row for row in readme_table.figures(tmp_path).splitlines() if "softmax" in row)
    assert line.strip("| ").endswith("0.40")


def test_the_newest_results_of_each_case_count(tmp_path: Path) -> None:
    """Whatever files are called; one in which ours failed is no result, and rows of two files never stand together."""
    other = [{**row, "case": "phi3_forward"} for row in ROPE]
    slow = [{**row, "graph": {"median": 99}} for row in ROPE if row["backend"] == "fxfuser"]
    failed = [{"case": "phi3_forward", "size": "S4096", "backend": "fxfuser", "status": "wrong", "error": "off"}]
    _write(tmp_path, "2026-11-28-z-rope.json", [*slow, *other], "2026-11-28 10:00 UTC")
    _write(tmp_path, "2026-11-28-a-rope.json", [*ROPE, *failed], "2026-11-28 11:00 UTC")
    results, sources = readme_table.collected(tmp_path, "rope") or ({}, [])
    assert [row["case"] for row in results["rows"]] == ["mistral_nemo_forward"] * 5 + ["phi3_forward"] * 5
    assert not any(row.get("graph", {}).get("median") == 99 for row in results["rows"])
    assert [line.endswith("(2 of 4 cases)") for line in sources] == [True, True]
    assert readme_table.collected(tmp_path, "memory_bound") is None


def test_losses_have_times_and_memory(tmp_path: Path) -> None:
    rows = [{"case": "12x7x5/both", "variant": "fxfuser-low-memory", "status": "ok", "ms": 7.0, "peak_mb": 158.7,
             "kernels": 106.99999}, {"case": "12x7x5/both", "variant": "inductor", "status": "failed", "error": "off"}]
    _write(tmp_path, "2026-11-29-linear_cross_entropy.json", rows)
    cells = [cell.strip() for cell in readme_table.figures(tmp_path).splitlines()[2].strip("|").split("|")]
    assert cells == ["12x7x5", "fxfuser low memory", "7.00", "159", "107"]


def test_rows_that_failed_are_left_out(tmp_path: Path) -> None:
    bad = {"case": "phi3_forward", "size": "S4096", "backend": "fxfuser", "status": "wrong", "error": "off"}
    _write(tmp_path, "2026-11-29-rope.json", [*ROPE, bad])
    assert "phi3" not in readme_table.figures(tmp_path)


def test_only_the_text_between_the_markers_changes() -> None:
    readme = f"# name\n\n{BEGIN}\nold\n{END}\n\nrest\n"
    assert readme_table.replaced(readme, "new") == f"# name\n\n{BEGIN}\nnew\n{END}\n\nrest\n"
    with pytest.raises(NoFigures, match="needs the lines"):
        readme_table.replaced("# name\n", "new")


def test_training_figures_have_no_column_that_nobody_measured(tmp_path: Path) -> None:
    rows = [{"case": "nanogpt", "backend": backend, "status": "ok", "step": {"median": us}, "compile_s": 20.0,
             "peak_bytes": 6_000_000_000, "step_kernels": 505.0}
            for backend, us in (("fxfuser", 25400), ("eager", 32600))]
    content = {"environment": ENVIRONMENT, "command": "python -m benchmarks.nanogpt --commit abc",
               "model": {"batch": 12, "context": 1024}, "rows": rows}
    (tmp_path / "2026-11-29-nanogpt.json").write_text(json.dumps(content))
    text = readme_table.figures(tmp_path)
    assert [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")] == [
        "fxfuser", "25.4", "6000", "505", "20.0"]
    assert "warm" not in text
    assert "--commit" not in text


def test_models_stand_beside_eager_and_inductor(tmp_path: Path) -> None:
    rows = [{"case": "llama training", "backend": backend, "status": "ok", "step": {"median": us}, "peak_bytes": peak}
            for backend, us, peak in (("eager", 30e3, 8e9), ("inductor", 21e3, 4e9), ("fxfuser", 20e3, 3e9))]
    _write(tmp_path, "2026-11-29-transformers.json", rows)
    assert [cell.strip() for cell in readme_table.figures(tmp_path).splitlines()[2].strip("|").split("|")] == [
        "llama training", "20.00", "1.50", "1.05", "3000", "0.75"]


def test_a_model_has_the_figures_of_the_size_that_ran_last(tmp_path: Path) -> None:
    for name, size, us in (("2026-11-29-transformers", "old", 20e3), ("2026-11-30-transformers", "full", 10e3)):
        row = {"case": "llama training", "size": size, "backend": "fxfuser", "status": "ok", "step": {"median": us}}
        content = {"environment": {**ENVIRONMENT, "date": name[:10]}, "command": "", "rows": [row]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert [cell.strip() for cell in readme_table.figures(tmp_path).splitlines()[2].strip("|").split("|")] == [
        "llama training", "10.00"]


def test_a_later_run_of_one_case_leaves_it_in_its_place(tmp_path: Path) -> None:
    first = [{"case": f"{name} training", "backend": "fxfuser", "status": "ok", "step": {"median": 1e4}}
             for name in ("gpt2", "llama", "vit")]
    for date, rows in (("2026-11-29", first), ("2026-11-30", [{**first[1], "step": {"median": 2e4}}])):
        content = {"environment": {**ENVIRONMENT, "date": date}, "command": "", "rows": rows}
        (tmp_path / f"{date}-transformers.json").write_text(json.dumps(content))
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in readme_table.figures(tmp_path).splitlines()]
    assert cells[2:5] == [["gpt2 training", "10.00"], ["llama training", "20.00"], ["vit training", "10.00"]]


def test_what_was_tried_on_a_cpu_is_no_figure(tmp_path: Path) -> None:
    row = {"case": "llama training", "backend": "fxfuser", "status": "ok", "step": {"median": 1e6}}
    content = {"environment": {**ENVIRONMENT, "device": "cpu"}, "command": "", "rows": [row]}
    (tmp_path / "2026-11-30-transformers.json").write_text(json.dumps(content))
    assert readme_table.figures(tmp_path) == readme_table.NO_RESULTS


def test_no_results_say_so(tmp_path: Path) -> None:
    assert readme_table.figures(tmp_path) == readme_table.NO_RESULTS


def test_the_readme_is_what_the_results_give() -> None:
    before = readme_table.README.read_text()
    after = readme_table.replaced(before, readme_table.figures(RESULTS))
    assert before == after, "run python -m benchmarks.readme_table"
