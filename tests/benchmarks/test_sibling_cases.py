"""The checks of loops beside each other: that at a GPU's sizes each is what it says, and what small ones compute."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from benchmarks import checks, gpu_check, sibling_cases
from benchmarks.checks import Check
from benchmarks.kernel_loops import BESIDE, BORDER, FEATURES, NESTED, PIECES, REMAINDER, STAGED, features, loops
from fxfuser import observe
from fxfuser.domain import roles
from fxfuser.observe import KernelRecord

CPU = torch.device("cpu")
NAMES = checks.names(CPU, "siblings/")
SECTIONS = tuple(dict.fromkeys(name.split("/")[1] for name in NAMES))


def compiled(check: Check) -> list[observe.GraphTrace]:
    """What becomes of a check at the sizes of a GPU, on tensors without data."""
    with pytest.MonkeyPatch.context() as patch, observe.recording() as recording, FakeTensorMode():
        patch.setattr(sibling_cases, "large", lambda device, small, big: big)
        fn = gpu_check.compile_check(check, "fxfuser")
        for call in range(len(check.makers)):
            gpu_check.evaluate(check, fn, gpu_check.make_inputs(check, call, CPU))
    return recording.graphs


def kernel(text: str, **blocks: int) -> KernelRecord:
    return KernelRecord("segment0", "fused", text, blocks=tuple(blocks.items()))


STAGES = """
    for r0_start in tl.range(0, 37, R0BLOCK, num_stages=3 if XBLOCK * R0BLOCK <= 2048 else 1):
        r0_mask = r0 < 37
        load_0 = tl.load(in0 + (r0 * 64 + x), r0_mask).to(tl.float32)
        tl.store(out0 + (r0 * 64 + x), load_0, r0_mask)
"""


def test_what_a_text_says_of_its_loops() -> None:
    (loop,) = loops(kernel(STAGES, XBLOCK=64, R0BLOCK=16))
    assert (loop.dim, loop.length, loop.step, loop.stages) == ("r0", 37, 16, 3)
    assert features(kernel(STAGES, XBLOCK=64, R0BLOCK=16)) == {STAGED, REMAINDER}
    assert features(kernel(STAGES, XBLOCK=256, R0BLOCK=16)) == set()  # too large a tile for stages
    assert features(kernel(STAGES, XBLOCK=32, R0BLOCK=64)) == set()  # one iteration is all
    whole = STAGES.replace(", r0_mask)", ")", 1)  # a masked store is no masked load
    assert features(kernel(whole, XBLOCK=64, R0BLOCK=16)) == {STAGED}
    border = STAGES.replace("r0_mask)", "x_mask & r0_mask)")
    assert features(kernel(border, XBLOCK=64, R0BLOCK=16)) == {STAGED, REMAINDER, BORDER}


def test_loops_beside_and_within_each_other() -> None:
    second = STAGES.replace("r0", "r1").replace("R0", "R1")
    beside = kernel(STAGES + second, XBLOCK=64, R0BLOCK=16, R1BLOCK=16)
    assert BESIDE in features(beside) and NESTED not in features(beside)
    within = kernel(STAGES + second.replace("\n    ", "\n        "), XBLOCK=64, R0BLOCK=16, R1BLOCK=16)
    assert NESTED in features(within) and BESIDE not in features(within)
    pieces = STAGES + "        tl.store(out0 + (r0 * 64 + x + 32), load_0)\n"
    assert PIECES in features(kernel(pieces, XBLOCK=64, R0BLOCK=16))
    run = STAGES.replace("0, 37,", "0, n0,")
    assert STAGED in features(kernel(run, XBLOCK=1, R0BLOCK=512))  # a length that only the run tells


def test_the_family_asks_for_every_kind_of_loop() -> None:
    asked = Counter(feature for name in NAMES for feature in checks.CHECKS[name].shows)
    assert set(asked) == FEATURES
    assert asked[STAGED] > 40 and asked[REMAINDER] > 15 and asked[BORDER] > 20
    assert all(checks.CHECKS[name].launches == 1 for name in NAMES)


@pytest.mark.parametrize("name", ["plain/table", "heads/37_11/tables", "layout/strided", "complex/cache/packed"])
def test_one_launch_with_the_loops_that_are_asked_for(name: str) -> None:
    check = checks.CHECKS[f"siblings/{name}"]
    graphs = compiled(check)
    assert [g.graph.kind for g in graphs if g.segmentation is not None] == ["forward", "backward"]
    assert gpu_check.structure_fault(check, graphs) is None


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_each_section_is_one_launch_with_the_loops_that_are_asked_for(section: str) -> None:
    faults = {}
    for name in (n for n in NAMES if n.split("/")[1] == section):
        torch.compiler.reset()
        faults[name] = gpu_check.structure_fault(checks.CHECKS[name], compiled(checks.CHECKS[name]))
    assert not {name: fault for name, fault in faults.items() if fault}


def test_another_structure_is_a_fault() -> None:
    check = checks.CHECKS["siblings/plain/table"]
    graphs = compiled(check)
    fault = gpu_check.structure_fault(replace(check, launches=2), graphs)
    assert fault is not None and fault.endswith("1 kernels, not 2")
    assert gpu_check.structure_fault(replace(check, shows=frozenset({NESTED})), graphs) == "no kernel shows nested"
    called = replace(check, fn=lambda x, y, t: (torch.linalg.inv(x[:, :6, :6].float()), y * t[:, None]))
    fault = gpu_check.structure_fault(called, compiled(called))
    assert fault is not None and "linalg_inv" in fault


SMALL = ("plain/table", "plain/rows_one", "heads/5_5", "heads/5_5/tables", "repeated/10_5", "length/2/tables",
         "head/10/tables", "batch/3", "pairs/equal", "complex/cache/partial", "layout/one_head/tables", "dynamic/pairs")


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_ones_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads in loops, as they are where positions alone fill the device."""
    monkeypatch.setenv("FXFUSER_EXECUTOR", "interpret")
    monkeypatch.setattr(roles, "FILLED", 2)
    monkeypatch.setattr(roles, "READ_FILLED", 2)
    assert gpu_check.run_check(checks.CHECKS[f"siblings/{name}"], "fxfuser", CPU).fault is None


def test_a_loop_that_leaves_out_its_remainder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    check = checks.CHECKS["siblings/plain/table"]
    forward = check.fn

    def short(*inputs: Any) -> tuple[torch.Tensor, ...]:
        first, *others = forward(*inputs)
        left = torch.full_like(first, float("nan"))
        left[:, :-5] = first[:, :-5]
        return (left, *others)

    monkeypatch.setattr(gpu_check.backends, "with_dynamic", lambda name, dynamic: lambda fn: short)
    assert "NaN" in str(gpu_check.run_check(check, "planted", CPU).fault)


def test_tangents_lie_as_outputs_do() -> None:
    seen: list[tuple[int, ...]] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.t() * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(gradient.stride())
            return gradient.t() * 2

    check = Check("watched", Watched.apply, (checks.of((3, 5)),), grad=True)
    for one in (check, replace(check, as_outputs=True)):
        gpu_check.evaluate(one, one.fn, gpu_check.make_inputs(one, 0, CPU))
    assert seen == [(3, 1), (1, 5)]


def test_only_leaves_have_gradients() -> None:
    check = Check("two", lambda x, y: x * y, (checks.of((3,), (3,)),), grad=True, leaves=1)
    x, y = gpu_check.make_inputs(check, 0, CPU)
    assert x.requires_grad and not y.requires_grad
