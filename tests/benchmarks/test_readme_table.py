"""The README's figures come from results files, newest first, and touch nothing else."""

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


def _write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    content = {"environment": ENVIRONMENT, "command": "python -m benchmarks.x", "rows": rows}
    (folder / name).write_text(json.dumps(content))


ROPE = [_row("mistral_nemo_forward", size, backend, us, copy) for size, backend, us, copy in (
    ("S4096", "eager", 400, 44), ("S4096", "inductor", 66, 44), ("S4096", "inductor-strongest", 65, 44),
    ("S4096", "fxfuser", 50, 44), ("S1024", "fxfuser", 9, 4))]
MEMORY = [_row("softmax", size, backend, us, 80) for size, backend, us in
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


def test_the_newest_results_count(tmp_path: Path) -> None:
    _write(tmp_path, "2026-11-28-rope.json", [])
    _write(tmp_path, "2026-11-30-rope.json", ROPE)
    assert readme_table.newest(tmp_path, "rope") == tmp_path / "2026-11-30-rope.json"
    assert readme_table.newest(tmp_path, "memory_bound") is None


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


def test_no_results_say_so(tmp_path: Path) -> None:
    assert readme_table.figures(tmp_path) == readme_table.NO_RESULTS


def test_the_readme_is_what_the_results_give() -> None:
    before = readme_table.README.read_text()
    after = readme_table.replaced(before, readme_table.figures(RESULTS))
    assert before == after, "run python -m benchmarks.readme_table"
