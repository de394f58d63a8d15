"""How tasks are counted, judged and kept from spoiling each other."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import backends, memory_bound, record, rope, rope_modules, suite
from benchmarks.suite import Problem, Task

CPU = torch.device("cpu")


def _arguments(path: Path, *options: str) -> argparse.Namespace:
    fixed = ["--device", "cpu", "--json", str(path), "--clock-seconds", "0"]
    return suite.parser("", "eager").parse_args([*fixed, *options])


def _double(device: torch.device) -> Problem:
    return Problem(lambda x: x * 2, (torch.randn(8, 4, device=device),))


def test_bytes_count_expanded_dimensions_once_and_aliases_not_at_all() -> None:
    x, row = torch.randn(6, 4), torch.randn(1, 4).expand(6, 4)
    assert suite.touched_bytes(row) == 4 * 4
    assert suite.moved_bytes([x, row], [x.t(), torch.empty(6, 4)]) == 6 * 4 * 4 + 4 * 4 + 6 * 4 * 4


def test_distance_is_infinite_where_results_do_not_fit() -> None:
    x = torch.randn(4, 4)
    assert suite.distance([x], [x]) == 0.0
    assert suite.distance([x * 1.01], [x]) == pytest.approx(0.01, rel=1e-3)
    for other in (x.t(), x.double(), x[:2], x * float("nan")):
        assert suite.distance([other], [x]) == float("inf")


def test_a_backward_run_gives_the_gradients_each_time() -> None:
    x = torch.randn(5, requires_grad=True)
    run = suite.backward_run(lambda t: t * t, (x,))
    first, second = run(), run()
    assert torch.equal(first[0], second[0])  # type: ignore[index]
    ratio = first[0] / (2 * x)  # type: ignore[index]
    assert ratio.std() > 0.1  # random tangents, not ones


def test_rows_of_good_wrong_and_failing_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.BACKENDS, "off", lambda fn: lambda x: fn(x) + 1)  # type: ignore[arg-type]
    monkeypatch.setitem(backends.BACKENDS, "broken", lambda fn: 1 // 0)  # type: ignore[arg-type]

    def unbuildable(device: torch.device) -> Problem:
        raise MemoryError("too large")

    tasks = [Task("double", "1MB", _double), Task("unbuildable", "1MB", unbuildable)]
    rows = suite.run("rope", _arguments(tmp_path / "r.json", "--backends", "eager,off,broken"), tasks)
    assert [(r["case"], r["backend"], r["status"]) for r in rows] == [
        ("double", "eager", "ok"), ("double", "off", "wrong"), ("double", "broken", "failed"),
        ("unbuildable", None, "failed")]
    assert rows[0]["bytes"] == 2 * 8 * 4 * 4 and rows[0]["call"]["median"] > 0
    assert json.loads((tmp_path / "r.json").read_text())["rows"] == rows


def test_a_spent_budget_skips_what_is_left(tmp_path: Path) -> None:
    rows = suite.run("rope", _arguments(tmp_path / "r.json", "--seconds", "0"), [Task("double", "1MB", _double)])
    assert [r["status"] for r in rows] == ["skipped"]


def test_a_task_that_does_not_end_is_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(suite.OutOfTime), suite.limit(0.05):
        time.sleep(5)
    assert time.monotonic() - start < 2
    time.sleep(0.06)  # and the alarm is off again


def test_only_selects_parts_of_names_or_exactly_one() -> None:
    tasks = [Task(name, "1MB", _double) for name in ("softmax", "softmax_backward", "outer")]
    assert [t.name for t in suite.selected(tasks, "soft")] == ["softmax", "softmax_backward"]
    assert [t.name for t in suite.selected(tasks, "=softmax/1MB,outer")] == ["softmax", "outer"]


def test_unknown_backends_are_named_beside_the_known() -> None:
    with pytest.raises(ValueError, match="unknown backend foo; known: eager"):
        backends.parse("eager,foo")


@pytest.mark.parametrize("name", memory_bound.CASES)
def test_every_memory_bound_case_runs(name: str) -> None:
    problem = memory_bound.CASES[name](CPU, 2048)
    run = suite.make_run(problem.fn, problem)
    results = suite.tensors(run())
    assert results and all(isinstance(t, Tensor) for t in results)
    assert suite.minimal_bytes(problem, run) > 0


@pytest.mark.parametrize("module", rope_modules.MODULES, ids=lambda m: m.name)
def test_rotary_modules_rotate(module: rope_modules.Module) -> None:
    """Position 0 is left alone, every position keeps each pair's length, and heads are repeated in order."""
    problem = rope_modules.problem(module, 3, False, CPU)
    q, k, *_ = problem.fn(*problem.inputs)
    assert q.shape == k.shape == (module.batch, module.queries, 3, module.head)
    projected = problem.inputs[0]
    if module.layout == "grouped":
        heads = projected.view(module.batch, 3, module.keys, -1, module.head)[:, :, :, :module.repeats].flatten(2, 3)
    else:
        heads = projected[..., :module.queries * module.head].view(module.batch, 3, module.queries, module.head)
    assert torch.equal(q[:, :, 0], heads[:, 0])
    assert not torch.equal(q[:, :, 1], heads[:, 1])
    pairs = [x.float().unflatten(-1, (2, -1)).square().sum(-2) for x in (q.transpose(1, 2), heads)]
    assert torch.allclose(*pairs, rtol=0.05, atol=0.05)
    assert torch.equal(k[:, 0], k[:, module.repeats - 1])
    if module.repeats < module.queries:
        assert not torch.equal(k[:, 0], k[:, module.repeats])


@pytest.mark.parametrize("module, microseconds", [
    ("llama2_7b", (63, 79)), ("llama3_8b", (103, 111)), ("phi3", (47, 70)), ("mistral_nemo", (35, 35)),
    ("litgpt_gemma2_9b", (40, 40)), ("litgpt_phi35_mini", (24, 36))])
def test_floors_of_the_rotary_modules(module: str, microseconds: tuple[int, int]) -> None:
    """Bytes over 4.3 TB/s, as computed by hand for each module's usual length."""
    found = next(m for m in rope_modules.MODULES if m.name == module)
    floors = [found.bytes(found.sequence, backward) / 4.3e6 for backward in (False, True)]
    assert floors == pytest.approx(microseconds, abs=0.7)


def test_tasks_cover_both_directions_and_all_lengths() -> None:
    tasks = rope.tasks((1024, 4096))
    assert len(tasks) == len({t.key for t in tasks}) == 2 * 2 * len(rope_modules.MODULES)


def test_results_hold_no_paths(tmp_path: Path) -> None:
    assert record.command_line("benchmarks.rope", ["--json", "/x/y.json", "--quick", "--json=/z"]) == \
        "python -m benchmarks.rope --quick"
    results = record.start("rope", CPU, tmp_path / "r.json")
    results.write()
    text = (tmp_path / "r.json").read_text()
    assert str(Path.home()) not in text and str(tmp_path) not in text
    assert results.head["environment"]["torch"] == torch.__version__  # type: ignore[index]
