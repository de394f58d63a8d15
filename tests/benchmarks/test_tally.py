"""Figures of graphs as lines, and their sums."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import tally
from fxfuser import backend, observe


def test_a_line_for_each_graph(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "float32.jsonl"
    with observe.recording() as recording:
        monkeypatch.setattr(backend, "compile_graph", tally.counting(backend.compile_graph, recording, path))
        compiled = torch.compile(lambda a: (a @ a).relu().sort()[0] + 1, backend="fxfuser")
        compiled(torch.randn(4, 4, requires_grad=True)).sum().backward()
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert [line["graph"] for line in lines] == ["forward", "backward"]
    assert lines[0]["extern"].get("aten.sort.default") == 1
    assert 0 < lines[0]["lowered"] < lines[0]["compute"]
    text = tally.table([path])
    assert f"{sum(line['compute'] for line in lines)}" in text and "aten.sort.default" in text and "float32" in text
