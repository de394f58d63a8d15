"""Default tiles beside a search's: which cases, what rows say, and how they are summed up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory_bound, readme_table, suite, tiles
from fxfuser import observe
from tests.benchmarks.test_readme_table import ENVIRONMENT


def _row(case: str, backend: str, us: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "size": "64MB", "backend": backend, "status": "ok", "copy_us": 1.0,
            "call": {"median": us + 30}, "graph": {"median": us}, "busy": {"microseconds": us, "kernels": 1.0}, **more}


FOUND = [{"kernel": "k", "default": "128 x 1", "chosen": "64 x 2", "times": [["128 x 1", 12.0], ["64 x 2", 10.0]],
          "remembered": False}]
ROWS = [_row("row_sum", "fxfuser", 12.0), _row("row_sum", "fxfuser-autotune", 10.0, tiles=FOUND),
        _row("softmax", "fxfuser", 10.0), _row("softmax", "fxfuser-autotune", 10.0),
        _row("transpose", "fxfuser", 10.0)]  # its search failed


def test_ratios_and_the_chosen_tiles() -> None:
    assert tiles.ratios(ROWS) == {("row_sum", "64MB"): 1.2, ("softmax", "64MB"): 1.0}
    (line,) = (row for row in tiles.table(ROWS).splitlines() if row.startswith("row_sum"))
    assert line.split()[2:] == ["12.0", "10.0", "1.20", "64", "x", "2", "for", "128", "x", "1"]
    assert "transpose" not in tiles.table(ROWS)
    said = tiles.summary(ROWS)
    assert "1.10 of the time" in said and "1.20 at worst (row sum); 1 of them over 1.1" in said
    assert tiles.summary(ROWS[:1]) == "nothing was measured with both"


def test_the_readme_has_a_line_of_it(tmp_path: Path) -> None:
    content = {"environment": ENVIRONMENT, "command": "python -m benchmarks.tiles", "rows": ROWS}
    (tmp_path / "2026-11-29-tiles.json").write_text(json.dumps(content))
    assert readme_table.figures(tmp_path).startswith("Default tiles take 1.10 of the time")


def test_every_chosen_case_exists() -> None:
    names = [t.name for t in tiles.tasks(64, 4096, False)]
    assert len(names) == len(tiles.CASES) + 2 * len(tiles.MODULES)
    assert len(tiles.tasks(64, 4096, True)) > len(memory_bound.CASES) and set(names) <= {
        t.name for t in tiles.tasks(64, 4096, True)}


def test_a_search_is_part_of_its_row() -> None:
    with suite.searches("fxfuser-autotune") as found:
        with observe.graph("forward", 0):
            observe.record(observe.TuningRecord("segment0", "k", "", "b", (("a", 2.0), ("b", 1.234))))
        assert found()["tiles"] == [{"kernel": "k", "chosen": "b", "default": "a", "times": [["a", 2.0], ["b", 1.23]],
                                     "remembered": False}]
    with suite.searches("fxfuser") as found:
        assert not observe.active() and found() == {}


def test_it_runs_where_nothing_can_be_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    path = tmp_path / "tiles.json"
    monkeypatch.setattr(sys, "argv", ["tiles", "--device", "cpu", "--mb", "0.01", "--only", "=row_sum/0.01MB",
                                      "--clock-seconds", "0", "--json", str(path)])
    assert tiles.main() == 0
    default, searched = json.loads(path.read_text())["rows"]
    assert (default["backend"], searched["backend"]) == ("fxfuser", "fxfuser-autotune")
    assert searched["tiles"] == [] and "tiles" not in default
    assert "default tiles take" in capsys.readouterr().out
