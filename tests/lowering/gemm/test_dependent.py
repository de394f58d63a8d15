"""A pair of kernels of which the second starts early: what it may read before it waits, and who is no such pair."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget

from fxfuser import observe
from fxfuser.errors import VerificationError
from fxfuser.lowering.dependent import dependent
from fxfuser.lowering.gemm import lower
from fxfuser.lowering.kernel import Dependence, Kernel, Place, Program
from fxfuser.runtime.binary import key_of
from fxfuser.runtime.build import Variant, recipe, report

from .harness import Blocks, check, made
from .test_parts import decode, softmax, tensors

Tensor = torch.Tensor
Shapes = tuple[tuple[int, ...], ...]
M, K, N = 5, 528, 272
LEAD, WAIT = "gdc_launch_dependents()", "gdc_wait()"
ROW: Shapes = ((1, K), (N, K), (1, N), (N,))  # its sums are made row by row of the matrix
TILES: Shapes = ((M, K), (N, K), (M, N), (N,))


def pair(fn: Callable[..., Any] = decode, shapes: Shapes = TILES, **arguments: Any) -> Program:
    return made(fn, tensors(shapes), **arguments).programs["parts"]


def body(kernel: Kernel) -> str:
    return kernel.source.rpartition("@triton.jit")[2].partition("):\n")[2]


def before_waiting(program: Program) -> str:
    before, waits, behind = body(program.launches[1].kernel).partition(WAIT)
    assert waits and "in2" in behind and "tl.store" in behind
    return before


@pytest.mark.parametrize("shapes", [ROW, TILES], ids=["rows", "tiles"])
def test_the_first_lets_the_second_start_and_the_second_waits_for_parts_alone(shapes: Shapes) -> None:
    first, second = (launch.kernel for launch in pair(shapes=shapes).launches)
    assert body(first).splitlines()[1].strip().endswith(LEAD) and WAIT not in first.source
    assert before_waiting(pair(shapes=shapes)).count("tl.load") == 2, "the residual and the weight"
    assert body(second).count("tl.load") == 3 and LEAD not in second.source
    assert (first.dependence, second.dependence) == (Dependence.LEADS, Dependence.FOLLOWS)


def test_whoever_waits_does_so_once_and_on_no_condition() -> None:
    """Of rows that no program holds too: then before the loops, as their loads come in these."""
    second = pair(shapes=((1, K), (20000, K), (1, 20000), (20000,)), blocks=None).launches[1].kernel
    before, _, behind = body(second).partition(WAIT)
    assert second.source.count(WAIT) == 1 and "for " not in before and behind.count("\n    for ") == 2
    assert before.splitlines()[-2].startswith("    if DEPENDENT:")


def test_loads_under_a_condition_or_at_a_position_come_behind_the_wait() -> None:
    def fn(x: Tensor, w: Tensor, bias: Tensor, table: Tensor, ids: Tensor) -> Tensor:
        return softmax(F.pad(bias, (3, -3)) + x @ w.t() + table[ids])

    args = [*tensors(((M, K), (N, K), (N,), (7, N))), torch.tensor([3, 0, 6, 6, 2])]
    found = check(fn, args, policies=("parts", "one_grid")).programs["parts"]
    before = body(found.launches[1].kernel).partition(WAIT)[0]
    assert before.count("tl.load") == 1, "the ids"


@pytest.mark.parametrize("some", [True, False])
def test_a_first_kernel_that_may_have_no_programs_leads_nobody(some: bool) -> None:
    """What ran before it might then still run when the second starts.  Symbolic rows are at least 2, unless nothing is
    known of them."""
    known = mock.patch.object(lower, "positive", lambda size: isinstance(size, int))
    with nullcontext() if some else known:
        program = pair(shapes=((M, K), (48, K), (M, 48), (48,)), dynamic=[{0}, set(), {0}])
    assert [launch.kernel.dependence for launch in program.launches] == (
        [Dependence.LEADS, Dependence.FOLLOWS] if some else [Dependence.ALONE] * 2)


def test_one_grid_has_no_pair() -> None:
    kernel = made(decode, tensors(TILES)).programs["one_grid"].launches[0].kernel
    assert kernel.dependence is None and kernel.source.count("DEPENDENT=False)") == 2
    assert "griddepcontrol" not in report(kernel).ptx


def rewritten(program: Program, launch: int, change: Callable[[str], str]) -> Program:
    """The program with another text of one of its kernels."""
    launches = list(program.launches)
    kernel = launches[launch].kernel
    launches[launch] = replace(launches[launch], kernel=replace(kernel, source=change(kernel.source)))
    assert launches[launch] != program.launches[launch]
    return replace(program, launches=tuple(launches))


def early(line: str) -> Callable[[str], str]:
    return lambda source: source.replace("    if DEPENDENT:", f"    {line}\n    if DEPENDENT:")


WRONG: dict[str, tuple[int, Callable[[str], str], str]] = {
    "the first starts nobody": (0, lambda s: s.replace(LEAD, "pass"), "does not let"),
    "not first of all": (0, early("early = tl.load(in0)"), "does not let"),
    "no wait": (1, lambda s: s.replace(WAIT, "pass"), "does not wait"),
    "parts are read early": (1, early("early = tl.load(in2)"), "does not wait"),
    "a write before the wait": (1, early("tl.store(out0, 0.0)"), "does not wait"),
}


@pytest.mark.parametrize("name", WRONG)
def test_texts_in_another_order_are_refused(name: str) -> None:
    launch, change, message = WRONG[name]
    with pytest.raises(VerificationError, match=message):
        dependent(rewritten(pair(), launch, change))


def test_a_first_kernel_that_writes_a_tensor_is_refused() -> None:
    first, second = pair().launches
    first = replace(first, pointers=(*first.pointers[:-1], (Place.OUTPUT, 0)))
    with pytest.raises(VerificationError, match="more than parts"):
        dependent(replace(pair(), launches=(first, second)))


@pytest.mark.parametrize("shapes", [ROW, TILES], ids=["rows", "tiles"])
def test_what_is_built(shapes: Shapes) -> None:
    """In the machine's order too, and only where both the device and the pair are such."""
    blocks = Blocks(16, 16, 16, warps=1)
    first, second = (launch.kernel for launch in pair(shapes=shapes, blocks=blocks).launches)
    leading, following = report(first).ptx, report(second).ptx
    touched = min(leading.index(access) for access in ("ld.global", "cp.async") if access in leading)
    assert leading.index("griddepcontrol.launch_dependents") < touched and "griddepcontrol.wait" not in leading
    before, _, behind = following.partition("griddepcontrol.wait")
    assert "ld.global" in before and "st.global" not in before and "ld.global.cg" not in before
    assert "ld.global.cg" in behind or "ld.relaxed.gpu.global" in behind
    for kernel, arch in ((first, 80), (second, 80), (replace(second, dependence=Dependence.ALONE), 90)):
        assert "griddepcontrol" not in report(kernel, arch).ptx


def test_how_it_is_launched() -> None:
    """The attribute is the second's alone; kernels that differ in it are kept apart."""
    first, second = (launch.kernel for launch in pair().launches)

    def wanted(kernel: Kernel, arch: int = 90) -> Any:
        return recipe(kernel, Variant.usual(kernel), GPUTarget("cuda", arch, 32))

    assert wanted(second)["options"]["launch_pdl"]
    alone = replace(second, dependence=Dependence.ALONE)
    assert not any(r["options"]["launch_pdl"] for r in (wanted(first), wanted(second, 80), wanted(alone)))
    assert key_of(wanted(second)) != key_of(wanted(alone))


def test_the_plan_names_it() -> None:
    with observe.recording() as recorded:
        torch.compile(decode, backend="fxfuser", dynamic=False, options={"executor": "interpret"})(*tensors(ROW))
    (graph,) = recorded.graphs
    header = next(line for line in graph.plan.splitlines() if line.startswith("segment0:"))
    first, second = header.split(", then ")
    assert "(dependent launch)" in second and "dependent" not in first
