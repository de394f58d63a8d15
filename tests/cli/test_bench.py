"""bench: segments beside their floor, totals, backends, and what a machine without CUDA says."""

from __future__ import annotations

import json

import pytest
import torch

from fxfuser.cli import bench, chart, contest
from fxfuser.cli.bench import Ceilings, Row
from fxfuser.cli.command import FAILED, USAGE
from fxfuser.cli.contest import Side
from fxfuser.runtime.alone import Alone
from fxfuser.runtime.timing import Busy, Clock, Measurement

TRAINING = "cli_model:training"


def row(time: float | None, floor: float | None, segment: str = "segment0") -> Row:
    return Row("region0.forward", segment, "pointwise", "pointwise_add", "add", 4096, 2_500_000, floor, time)


def test_segments_of_forward_and_backward(fxfuser) -> None:
    result = fxfuser("bench", TRAINING, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    segments = {(s["graph"].partition(".")[2], s["segment"]): s for s in found["segments"]}
    assert set(segments) == {(g, f"segment{i}") for g in ("forward", "backward") for i in (0, 1)}
    product, softmax = segments["forward", "segment0"], segments["forward", "segment1"]
    assert product["flops"] == 2 * 8 * 16 * 32 and product["ops"] == "mm"
    assert softmax["bytes"] == 4 * (8 * 32 + 32 + 8 * 32)
    assert all(s["microseconds"] > 0 for s in segments.values()) and found["versus"] == {}
    assert found["totals"]["microseconds"] == pytest.approx(sum(s["microseconds"] for s in segments.values()))


def test_ops_are_named_as_in_the_dump(fxfuser) -> None:
    found = json.loads(fxfuser("bench", "cli_model:step_of_decoding", "--json").out)
    assert found["segments"][0]["ops"] == "fxfuser.attend_pieces"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA has a floor")
def test_without_cuda_it_says_so(fxfuser) -> None:
    out = fxfuser("bench", "cli_model:dynamic").out
    assert "No CUDA device: the times are call times of ATen ops on the CPU" in out
    assert out.splitlines()[2].split()[-4:] == ["-", "as", "ATen", "ops"]  # no percentage


def test_backends_with_their_clocks_apart(fxfuser) -> None:
    result = fxfuser("bench", TRAINING, "--versus", "eager", "--json", "--graph", "forward")
    versus = json.loads(result.out)["versus"]
    assert list(versus) == ["fxfuser", "eager"] and all(v["call"]["median"] > 0 for v in versus.values())
    if not torch.cuda.is_available():
        assert all(v["graph"] is None and v["busy"] is None for v in versus.values())


def test_a_backend_that_fails_is_a_failure(fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args, **kwargs):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(contest.timing, "measure", fails)
    result = fxfuser("bench", "cli_model:inference", "--versus", "eager")
    assert result.code == FAILED and result.out.count("RuntimeError: no such thing") == 2


@pytest.mark.parametrize("words, reason", [
    (("script.py", "--versus", "eager", "--", "--size", "3"), "name one, as in"),
    ((TRAINING, "--versus", "nonsense"), "not one of eager, inductor"),
])
def test_what_cannot_be_compared(words: tuple[str, ...], reason: str, fxfuser) -> None:
    result = fxfuser("bench", *words)
    assert result.code == USAGE and reason in result.err


def test_a_target_that_fails(fxfuser) -> None:
    assert fxfuser("bench", "cli_model:broken").code == FAILED
    assert fxfuser("bench", "plain.py").code == FAILED


def test_a_chart(fxfuser, folder, monkeypatch: pytest.MonkeyPatch) -> None:
    if chart.AVAILABLE:
        assert fxfuser("bench", TRAINING, "--png", "bars.png", "--versus", "eager").code == 0
        assert (folder / "bars.png").read_bytes()[:4] == b"\x89PNG"
        chart.draw(folder / "floors.png", "floors", [("a", 3.0, 1.0), ("b", 2.0, None)], {})
        assert (folder / "floors.png").stat().st_size > 1000
    monkeypatch.setattr(chart, "AVAILABLE", False)
    result = fxfuser("bench", TRAINING, "--png", "bars.png")
    assert result.code == USAGE and "pip install matplotlib" in result.err


def test_percent_and_totals() -> None:
    rows = [row(20.0, 10.0), row(30.0, 30.0, "segment1")]
    assert [r.percent for r in rows] == [50.0, 100.0]
    assert bench.totals(rows) == {
        "bytes": 8192, "flops": 5_000_000, "floor": 40.0, "microseconds": 50.0, "percent": 80.0}
    failed = bench.totals([*rows, row(None, None)])
    assert failed["percent"] == 80.0 and failed["microseconds"] == 50.0  # of what could be measured
    assert bench.totals([row(20.0, None)])["percent"] is None and bench.totals([])["microseconds"] is None
    assert "2.5 M" in bench.text(rows, ()) and "total" in bench.text(rows, ())


def test_the_floor_is_the_larger_of_bytes_and_products() -> None:
    ceilings, device = Ceilings(), torch.device("cuda", 0)
    ceilings.bandwidth[device], ceilings.products[device, torch.bfloat16] = 4e6, 7e8

    def floor(flops: int, products: bool) -> float | None:
        return ceilings.floor(Alone(int, device, True, flops, products), 8_000_000, torch.bfloat16)

    assert floor(7 * 10**9, True) == 10.0 and floor(7 * 10**8, True) == 2.0 and floor(7 * 10**9, False) == 2.0
    assert ceilings.floor(Alone(int, torch.device("cpu"), False, 1, False), 1, torch.float32) is None


def test_a_segment_keeps_its_time_where_the_floor_cannot_be_measured(fxfuser, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args):
        raise torch.OutOfMemoryError("no room for the copy")

    monkeypatch.setattr(Ceilings, "floor", fails)
    found = json.loads(fxfuser("bench", "cli_model:inference", "--json").out)
    (only,) = found["segments"]
    assert only["microseconds"] > 0 and only["percent"] is None
    assert only["note"] == "no floor: OutOfMemoryError: no room for the copy"


def test_clocks_are_never_mixed() -> None:
    whole = Measurement(Clock((9.0,)), Clock((5.0,)), Busy({"k": (2.0, 4.0)}), 2048)
    sides = (Side("fxfuser", whole), Side("eager", Measurement(Clock((20.0,)), notes=("graph: refused",))),
             Side("inductor", None, "RuntimeError: no"))
    assert bench.clocks(sides) == {"fxfuser": {"call": 9.0, "graph": 5.0, "busy": 4.0}, "eager": {"call": 20.0}}
    lines = bench.text([row(1.0, 1.0)], sides).splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert cells["fxfuser"] == ["9.0", "5.0", "4.0", "2", "2.0", "KB"]
    assert cells["eager"][:4] == ["20.0", "-", "-", "-"] and cells["inductor"][-1] == "no"


@pytest.mark.gpu
def test_on_a_gpu_kernels_have_a_floor(fxfuser, folder) -> None:
    (folder / "gpu_model.py").write_text(
        "import torch\n\n\ndef large():\n"
        "    return lambda x, w: torch.softmax(x.sin() @ w, -1), (torch.randn(4096, 1024, device='cuda'),\n"
        "        torch.randn(1024, 4096, device='cuda'))\n")
    result = fxfuser("bench", "gpu_model.py:large", "--versus", "eager,inductor", "--json")
    found = json.loads(result.out)
    assert not any(s["note"] for s in found["segments"]), found["segments"]
    assert all(5 < s["percent"] < 130 for s in found["segments"]), found["segments"]
    assert all(v["graph"]["median"] > 0 and v["busy"]["kernels"] >= 2 for v in found["versus"].values())
