"""dump: each stage in each format says what was compiled."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from fxfuser.cli.dump import STAGES, graph_text
from fxfuser.observe import GraphRecord, GraphTrace

TRAINING = "cli_model:training"


def test_text_has_every_stage_of_both_graphs(fxfuser) -> None:
    result = fxfuser("dump", TRAINING)
    assert result.code == 0, result.err
    for kind in ("forward", "backward"):
        assert "=== region" in result.out
        for stage in STAGES:
            assert f"# --- {stage} of region" in result.out
            assert f".{kind}" in result.out
    assert "cli_model.py:6" in result.out, "the model's own lines"
    assert "@triton.jit" in result.out
    assert "+amax" in result.out, "softmax is taken apart by a pass"


def test_the_graph_reads_as_assignments_with_types_and_lines(fxfuser) -> None:
    out = fxfuser("dump", TRAINING, "--stage", "graph", "--graph", "forward").out
    assert "mm: f32[8,32] = aten.mm.default(primals_1, primals_2)  # cli_model.py:6" in out
    assert "inputs primals_1: f32[8,16], primals_2: f32[16,32]" in out


def test_kernels_carry_the_models_names_and_lines(fxfuser) -> None:
    out = fxfuser("dump", TRAINING, "--stage", "kernels", "--graph", "forward").out
    assert "# in0 = mm: f32[8,32]" in out
    assert "# relu: aten.relu.default" in out
    assert "cli_model.py:6" in out
    assert "# --- plan" not in out


def test_kernels_say_what_their_sizes_are(fxfuser) -> None:
    out = fxfuser("dump", "cli_model:dynamic", "--stage", "kernels").out
    sizes = re.findall(r"# n\d+ = (.+)", out)
    assert sizes
    assert all(re.search(r"\bs\d+\b", size) for size in sizes)
    kernels = json.loads(fxfuser("dump", "cli_model:dynamic", "--format", "json").out)["graphs"][0]["kernels"]
    assert [size for kernel in kernels for size in kernel["sizes"]] == sizes


def test_a_pass_that_only_marks_nodes_says_so(fxfuser) -> None:
    out = fxfuser("dump", "cli_model:marks", "--stage", "passes").out
    assert re.search(r"recompute_from_less: \d+ changes?, .*\n  marks on nodes, which stay as they are\n", out)


def test_the_plan_says_what_it_does(fxfuser) -> None:
    out = fxfuser("dump", TRAINING, "--stage", "plan", "--graph", "forward", "--executor", "interpret").out
    assert re.search(r'"""Plan of region\d+.forward: 1 kernel launch, 1 ATen call.\n\nsegment1: kernel ', out)
    out = fxfuser("dump", "cli_model:inference", "--stage", "plan").out
    assert re.search(r'"""Plan of region\d+.inference: 1 segment as ATen ops."""\n', out)


def test_json_is_one_object(fxfuser) -> None:
    result = fxfuser("dump", TRAINING, "--format", "json")
    found = json.loads(result.out)
    forward, backward = found["graphs"]
    assert 0 < found["coverage"] < 1
    assert [g["kind"] for g in found["joint"]] == ["joint"]
    assert [s["kind"] for s in forward["segments"]] == ["extern", "reduction"]
    assert [k["segment"] for k in forward["kernels"]] == ["segment1"]
    ast.parse(forward["kernels"][0]["source"])
    assert forward["extern"][0]["node"] == "mm"
    assert forward["extern"][0]["reason"]
    assert forward["boundaries"][0]["rule"] == "epilogue"
    assert {n["op"] for s in backward["segments"] for n in s["nodes"]} >= {"aten.mm.default"}
    assert forward["segments"][1]["bytes_in"] == 8 * 32 * 4 + 32 * 4
    ast.parse(backward["plan"])


def test_a_product_has_its_kernels_and_what_may_run_in_their_place(fxfuser) -> None:
    found = json.loads(fxfuser("dump", "cli_model:product", "--format", "json").out)["graphs"][0]
    (row,) = found["segments"]
    assert (row["kind"], found["coverage"]) == ("gemm", 1.0) and len(row["kernels"]) == 2, "the product, then the sums"
    assert [k["name"] for k in found["kernels"]] == row["kernels"]
    ((library, kernel),) = row["alternatives"]
    assert (library["kind"], library["kernel"], kernel["name"]) == ("extern", "", "segment0_1")
    assert found["extern"] == []
    out = fxfuser("dump", "cli_model:product").out
    assert re.search(r"\n +0  gemm ", out) and re.search(r"\n *or 0_0  extern", out) and re.search(r"\n +0_1  ", out)
    assert "+ 1 kernel" in out and "or: what a measurement" in out
    kernels = fxfuser("dump", "cli_model:product", "--stage", "kernels").out
    assert "# in0 = arg0_1: f32[8,16]" in kernels and "# out0 = scratch0" in kernels and "# in0 = scratch0" in kernels
    assert kernels.count("# kernel ") == 3 and "# segment0_1: cli_model.py:" in kernels


def test_attention_of_few_queries_names_its_operands_and_its_result(fxfuser) -> None:
    (kernel,) = re.findall(r"# kernel attention_\w+\n(.*?)\n\n\n# kernel", fxfuser(
        "dump", "cli_model:step_of_decoding", "--stage", "kernels").out, re.DOTALL)
    assert re.findall(r"# (\w+) = \w+: (\S+)", kernel) == [
        ("in0", "bf16[1,2,1,16]"), ("in1", "bf16[1,2,150,16]"), ("in2", "bf16[1,2,150,16]"),
        ("out0", "f32[1,2,3,1,18]")]
    assert kernel.count("# attend_pieces_default: fxfuser.attend_pieces.default, cli_model.py:") == 1
    assert kernel.count("fxfuser.attend_pieces.default") == 1


def test_dot(fxfuser) -> None:
    out = fxfuser("dump", TRAINING, "--format", "dot", "--graph", "forward").out
    assert out.startswith("digraph")
    assert "s0 -> s1" in out


def test_out_writes_files_and_names_them(fxfuser, tmp_path: Path) -> None:
    result = fxfuser("dump", TRAINING, "--out", "dumped")
    written = sorted(str(p.relative_to(tmp_path)) for p in (tmp_path / "dumped").rglob("*.*") if p.is_file())
    assert sorted(result.out.split()) == written
    plans = [p for p in written if p.endswith("plan.py")]
    assert len(plans) == 2
    ast.parse((tmp_path / plans[0]).read_text())


@pytest.mark.parametrize(("form", "name"), [("json", "dump.json"), ("dot", "00.region")])
def test_out_in_other_formats(form: str, name: str, fxfuser, tmp_path: Path) -> None:
    assert fxfuser("dump", "cli_model:inference", "--format", form, "--out", "d").out.startswith(f"d/{name}")


def test_a_line_that_fx_prints_in_another_way_is_kept() -> None:
    text = "graph():\n    %x : [num_users=1] = placeholder[target=x]\n    %c : = get_attr[target=c]\n    odd line"
    assert graph_text(GraphTrace(GraphRecord("joint", 0, text)), {}) == "inputs x\nc = self.c\nodd line"
