"""Variants that take turns: what is judged, how processes relieve each other, and what tables say."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import epilogue, lineup, readme_table, relay, split_k
from benchmarks.lineup import PRODUCT, Case, Operand, Settings
from fxfuser.runtime import timing
from fxfuser.runtime.timing import Clock
from tests.benchmarks.test_readme_table import ENVIRONMENT

CPU = torch.device("cpu")
QUICK = Settings(CPU, clock_seconds=0.0)


def _relu(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = x @ w.t()
    return torch.relu(h), h.argmax(-1)


CASE = Case("relu", "8x16x8", _relu, epilogue.product, (Operand((8, 16)), Operand((8, 16), 0.25)))


def _rows(case: Case, *names: str) -> dict[str, lineup.Row]:
    return {row["variant"]: row for row in lineup.measure(case, names, QUICK, lambda name: None)}


def test_good_wrong_unstable_and_failing_variants_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter(range(100))

    def refuse(fn: lineup.Function) -> lineup.Function:
        raise ValueError("no")

    def unstable(fn: lineup.Function) -> lineup.Function:
        return lambda x, w: (_relu(x, w)[0] + next(draws) // 2 * 2e-3, _relu(x, w)[1])

    planted = {
        "off": lambda fn: lambda x, w: (_relu(x, w)[0] * 1.1, _relu(x, w)[1]),
        "other": lambda fn: lambda x, w: (_relu(x, w)[0], _relu(x, w)[1] + 1),
        "strides": lambda fn: lambda x, w: (_relu(x, w)[0].t().contiguous().t(), _relu(x, w)[1]),
        "unstable": unstable, "refuses": refuse}
    monkeypatch.setattr(lineup, "VARIANTS", {**lineup.VARIANTS, **planted})
    rows = _rows(CASE, PRODUCT, "eager", *planted)
    assert {name: row["status"] for name, row in rows.items()} == {
        PRODUCT: "ok", "eager": "ok", "off": "wrong", "other": "wrong", "strides": "wrong", "unstable": "ok",
        "refuses": "failed"}
    assert rows["eager"]["runs_that_differ"] == rows["eager"]["differs"] == 0
    assert rows["other"]["differs"] == 1.0 and "strides" in rows["strides"]["error_text"]
    assert rows["unstable"]["runs_that_differ"] > 0
    assert all(lineup.microseconds(row) for name, row in rows.items() if name != "refuses")
    assert PRODUCT in lineup.note(rows["refuses"]) or "no" in lineup.note(rows["refuses"])


def test_the_distance_is_relative_and_piecewise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineup, "PIECE", 8)
    x = torch.randn(10, 4)
    assert lineup.distance(x * 1.01, x.double()) == pytest.approx(0.01, rel=1e-3)
    assert lineup.distance(torch.tensor(1.0), torch.tensor(2.0)) == 0.5
    assert lineup.distance(x, x[:5]) == float("inf")


def test_a_copy_of_a_function_is_compiled_apart() -> None:
    copy = lineup.fresh(_relu)
    assert copy.__code__ is not _relu.__code__
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(copy(x, w)[0], _relu(x, w)[0])


@pytest.mark.parametrize("case", [*epilogue.cases(False), *split_k.cases(False)], ids=lambda c: c.key)
def test_every_case_has_its_product_in_float64_too(case: Case) -> None:
    small = case.shrunk(8)
    inputs = [o.draw(CPU) for o in small.operands]
    yardstick = lineup.Yardstick.of(small, inputs)
    assert yardstick.judge(yardstick.eager)["status"] == "ok"
    assert all(t.dtype == torch.float64 for t in yardstick.exact if t.is_floating_point())
    assert lineup.suite.tensors(small.product(*inputs))
    assert split_k.bytes_of(small) > sum(t.numel() * t.element_size() for t in inputs)


def test_sizes_are_those_of_the_names() -> None:
    for case in (*epilogue.cases(False), *split_k.cases(False)):
        numbers = sorted(int(n) for n in case.size.rpartition("_")[2].split("x"))
        assert set(numbers) == {n for o in case.operands for n in o.shape}, case.key
    keys = [c.key for c in (*epilogue.cases(False), *split_k.cases(False))]
    assert len(keys) == len(set(keys)) == 12 + 20 + 3 * 7 + 4 * 3
    assert {c.key for c in split_k.cases(False) if c.repeats == split_k.MANY} == set(split_k.REPEATED)


def test_our_variants_fuse_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXFUSER_EXECUTOR", "interpret")
    long = Case("cast", "16x16x600", split_k.gradient_cast, split_k.gradient,
                (Operand((600, 16)), Operand((600, 16))), repeats=1)
    rows = _rows(long, "library", "fused", "turnstile")
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "ok")
    assert {name: row["fused"] for name, row in rows.items()} == {"library": 0, "fused": 1, "turnstile": 1}
    assert max(row["error"] for row in rows.values()) < 1e-6  # none rounds the product to bf16


def test_operands_that_are_written_to_are_fresh_for_every_check() -> None:
    case = Case("accumulate", "16x24x64", split_k.gradient_accumulate, split_k.gradient,
                (Operand((64, 16)), Operand((64, 24)), Operand((16, 24), 1.0, torch.float32)), repeats=3, mutated=(2,))
    rows = _rows(case, "mm", "eager", "library", "auto")  # timed one after the other
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert {row["runs_that_differ"] for name, row in rows.items() if name != "mm"} == {0}


def test_a_policy_without_a_program_says_why() -> None:
    rows = _rows(CASE, "turnstile")
    assert rows["turnstile"]["status"] == "no program" and "turnstile" in rows["turnstile"]["error_text"]


@pytest.mark.parametrize("module, only", [(epilogue, "amax,gate_halves"), (split_k, "gradient_cast/768x768x12288")])
def test_a_benchmark_runs_where_there_is_no_gpu(module: Any, only: str, tmp_path: Path, capsys: Any,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", [
        "x", "--device", "cpu", "--here", "--only", only, "--variants", "mm,eager,library,fused,auto",
        "--clock-seconds", "0", "--json", str(path), "--commit", "abc"])
    assert module.main() == 0
    written = json.loads(path.read_text())
    assert {r["status"] for r in written["rows"]} == {"ok"}
    assert len(written["rows"]) == 5 * (1 + only.count(","))
    table = capsys.readouterr().out.partition("peak MB")[2].splitlines()
    first = only.partition("/")[0].split(",")[0]
    assert any(row.split()[:3:2] == [first, "auto"] and "equal" in row for row in table)


def test_cases_are_listed_and_unknown_variants_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--list", "--only", "=argmax/8192x1024x50304"])
    assert epilogue.main() == 0
    assert capsys.readouterr().out.split() == ["argmax/8192x1024x50304"]
    with pytest.raises(ValueError, match="unknown variant foo; known: mm"):
        relay.names("mm,foo")


# ---------------------------------------------------------------- processes

JOBS = [relay.Job(Case(name, "1", _relu, epilogue.product, ()), ("mm", "eager", "auto")) for name in "abcd"]


class _Played:
    """A process that writes what a script says."""

    script: dict[tuple[str, ...], tuple[dict[str, Any], str]]
    log: list[tuple[str, ...]]

    def __init__(self, name: str, jobs: Any, args: Any, caches: Path, number: int) -> None:
        self.jobs = tuple(jobs)

    def measure(self, deadline: float) -> tuple[dict[str, Any], str]:
        key = tuple(f"{j.case.name}:{','.join(j.variants)}" for j in self.jobs)
        self.log.append(key)
        done = {"rows": [_row(j.case.name, v) for j in self.jobs for v in j.variants], "at": None,
                "finished": [j.case.key for j in self.jobs]}
        return self.script.get(key, (done, ""))

    def stop(self) -> None:
        pass


def _row(case: str, variant: str) -> dict[str, Any]:
    return {"case": case, "size": "1", "variant": variant, "status": "ok"}


def _played(script: Any, monkeypatch: pytest.MonkeyPatch, seconds: float = 100.0) -> tuple[list[Any], list[Any]]:
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(relay, "_Process", _Played)
    _Played.script, _Played.log = script, []
    args = argparse.Namespace(per_process=2)
    deadline = relay.time.monotonic() + seconds
    relay._Relay("x", args, Path("x"), deadline, rows.append).run(JOBS)
    return _Played.log, [(r["case"], r["variant"], r["status"]) for r in rows]


ALL = "mm,eager,auto"
GOOD = [(case, variant, "ok") for case in "abcd" for variant in ALL.split(",")]


def test_few_cases_to_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    log, rows = _played({}, monkeypatch)
    assert log == [(f"a:{ALL}", f"b:{ALL}"), (f"c:{ALL}", f"d:{ALL}")]
    assert rows == GOOD


def test_a_variant_that_crashes_costs_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = {"rows": [], "at": ["a/1", "eager"], "finished": []}
    log, rows = _played({(f"a:{ALL}", f"b:{ALL}"): (crash, "exit status -11")}, monkeypatch)
    assert log[1:] == [("a:mm,auto",), (f"b:{ALL}", f"c:{ALL}"), (f"d:{ALL}",)]
    assert sorted(rows) == sorted([r for r in GOOD if r[:2] != ("a", "eager")] + [("a", "eager", "crashed")])


def test_a_crash_while_variants_take_turns_costs_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = {"rows": [_row("a", "mm")], "at": ["a/1", "clocks"], "finished": []}
    log, rows = _played({(f"a:{ALL}", f"b:{ALL}"): (crash, "exit status -11")}, monkeypatch)
    assert log[1] == (f"b:{ALL}", f"c:{ALL}")
    assert [r for r in rows if r[0] == "a"] == [("a", "mm", "ok"), ("a", "eager", "crashed"), ("a", "auto", "crashed")]


def test_what_no_time_is_left_for_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    log, rows = _played({}, monkeypatch, seconds=1)
    assert log == [] and {status for *_, status in rows} == {"skipped"} and len(rows) == len(GOOD)


def test_a_process_that_cannot_start_is_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"rows": [], "at": None, "finished": []}

    class Dead(_Played):
        def measure(self, deadline: float) -> tuple[dict[str, Any], str]:
            return nothing, "exit status 1"

    monkeypatch.setattr(relay, "_Process", Dead)
    rows: list[dict[str, Any]] = []
    relay._Relay("x", argparse.Namespace(per_process=2), Path("x"), relay.time.monotonic() + 100, rows.append).run(JOBS)
    assert {r["status"] for r in rows} == {"crashed"} and len(rows) == len(GOOD)


@pytest.mark.slow
def test_processes_measure_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    args = relay.parser("", ("mm",)).parse_args(["--device", "cpu", "--variants", "mm,eager", "--clock-seconds", "0",
                                                 "--json", str(tmp_path / "r.json"), "--only", "amax,argmax"])
    results = relay.run("epilogue", args, epilogue.cases(True))
    assert results is not None
    assert [(r["case"], r["variant"], r["status"]) for r in results.rows] == [
        (case, variant, "ok") for case in ("argmax", "amax") for variant in ("mm", "eager")]


# ---------------------------------------------------------------- figures


def _timed(case: str, size: str, variant: str, us: float, **more: Any) -> dict[str, Any]:
    return {"case": case, "size": size, "variant": variant, "status": "ok", "ratio": us / 100,
            "graph": {"median": us, "samples": [us] * 3}, **more}


EPILOGUE_ROWS = [
    _timed("amax", "8x8x8", "mm", 100.0), _timed("amax", "8x8x8", "fused", 105.0), _timed("amax", "8x8x8", "auto", 110),
    _timed("plain", "gpt_up_8x8x8", "mm", 100.0), _timed("plain", "gpt_up_8x8x8", "eager", 100.0),
    _timed("plain", "gpt_up_8x8x8", "inductor", 90.0), _timed("plain", "gpt_up_8x8x8", "auto", 99.0)]
SPLIT_ROWS = [
    _timed("gradient_cast", "768x768x12288", "mm", 100.0), _timed("gradient_cast", "768x768x12288", "library", 110.0),
    _timed("gradient_cast", "768x768x12288", "turnstile", 104.0), _timed("gradient_cast", "768x768x12288", "auto", 104),
    _timed("decode", "1x4096x4096", "mm", 20.0), _timed("decode", "1x4096x4096", "inductor", 30.0),
    _timed("decode", "1x4096x4096", "auto", 18.0, kernels=3, by_name={"Memset (Device)": [1, 1.0]})]


def test_the_table_says_what_is_met() -> None:
    lines = {tuple(x.split()[:3]): x for x in epilogue.table(EPILOGUE_ROWS).splitlines() if x.split()}
    assert "met" in lines["amax", "8x8x8", "fused"] and "missed" in lines["amax", "8x8x8", "auto"]
    assert "missed" in lines["plain", "gpt_up_8x8x8", "auto"]  # 0.99 of mm, 1.1 of Inductor


def test_split_k_is_judged_by_its_bounds() -> None:
    said = "\n".join(split_k.verdicts(SPLIT_ROWS))
    assert "missed gradient_cast 768x768x12288, default over mm: 0.962, at least 0.97" in said
    assert "met    gradient_cast 768x768x12288, our kernel over mm: 0.962, at least 0.95" in said
    assert "met    decode 1x4096x4096, default x inductor: 0.600, at most 0.7" in said
    assert "missed decode 1x4096x4096, kernels: 3.000, at most 2" in said
    assert "missed decode 1x4096x4096 auto: Memset" in said
    assert "product in 0 of 1 weight gradients, and than that product with a kernel behind it in 1" in \
        split_k.wins(SPLIT_ROWS)
    table = split_k.table(SPLIT_ROWS, rate=4.3e6)
    floor = (4096 * 4096 + 5 * 4096) * 2 / 4.3e6 / 18
    assert f"{floor:.2f}" in next(x for x in table.splitlines() if x.startswith("decode") and " auto " in x)


def test_the_readme_has_both(tmp_path: Path) -> None:
    for name, rows in (("epilogue", EPILOGUE_ROWS), ("split_k", SPLIT_ROWS)):
        content = {"environment": ENVIRONMENT, "command": f"python -m benchmarks.{name}", "rows": rows}
        (tmp_path / f"2026-11-29-{name}.json").write_text(json.dumps(content))
    text = readme_table.figures(tmp_path)
    assert "| amax " in text and "1.10 at worst (plain, gpt_up_8x8x8)" in text
    assert "One kernel of ours is faster" in text and "`python -m benchmarks.split_k`" in text


# ---------------------------------------------------------------- clocks


def test_a_ratio_is_of_one_round() -> None:
    slow_then_fast = Clock((20.0, 10.0, 10.0)), Clock((10.0, 5.0, 5.0))
    assert timing.ratio(*slow_then_fast) == 2.0


@pytest.mark.gpu
def test_runs_take_turns_on_a_gpu() -> None:
    device = torch.device("cuda")
    with timing.stream(device):
        x = torch.randn(1 << 24, device=device)
        runs = [lambda: x * 2, lambda: (x * 2, x * 3, x * 4), lambda: x.cpu()]
        for run in runs:
            run()
        once, thrice, impossible = timing.interleaved(runs, device, 0.05)
    assert isinstance(once, Clock) and isinstance(thrice, Clock) and isinstance(impossible, RuntimeError)
    assert len(once.samples) == len(thrice.samples) >= timing.MIN_ROUNDS
    assert 2 < timing.ratio(thrice, once) < 4
