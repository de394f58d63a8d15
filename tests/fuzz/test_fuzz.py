"""The fuzzer itself, a small run of it, and planted faults, each of which it must find."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fxfuser.lowering import emitter
from fxfuser.lowering.reducer import Reducer
from fxfuser.lowering.vectors import Vectors
from fxfuser.ops import TABLE, Kind
from fxfuser.runtime import build
from tests.fuzz import generate, structure
from tests.fuzz.__main__ import shrunk_alike
from tests.fuzz.compare import WITHOUT_US, Fault, check
from tests.fuzz.data import Base
from tests.fuzz.program import Input, Program
from tests.fuzz.shrink import shrunk
from tests.fuzz.shrink import test_text as text_of_test

pytestmark = pytest.mark.filterwarnings("ignore")


# ---------------------------------------------------------------- a small run


@settings(max_examples=32, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.sampled_from(generate.NAMES))
def test_programs_are_as_eager(rng: random.Random, row: str) -> None:
    program = generate.draw(rng, row)
    for executor in ("reference", "interpret") if rng.random() < 0.2 else ("interpret",):
        fault = check(program, executor)
        if fault is not None and fault.kind not in WITHOUT_US:
            pytest.fail(text_of_test(shrunk_alike(program, fault, executor), fault.text, executor))


# ---------------------------------------------------------------- what it draws


def test_every_row_has_a_recipe_or_a_reason() -> None:
    rows = {generate.op_name(op) for op, row in TABLE.items()
            if row.kind in generate.KINDS and op.namespace in ("aten", "prims")}
    drawn = {n for n in rows if TABLE[generate.overload(n)].kind is Kind.POINTWISE} | set(structure.RECIPES)
    assert rows <= drawn | set(structure.NOT_DRAWN)
    assert not drawn & set(structure.NOT_DRAWN)


def test_every_row_is_drawn_often_enough() -> None:
    """A tenth of the rows' own seeds: what 5,000 programs hold at least 50 times, these hold at least twice."""
    programs = [generate.program(seed) for seed in range(len(generate.NAMES))]
    counts = Counter(r for p in programs for r in generate.rows_of(p))
    assert {n: counts[n] for n in generate.NAMES if counts[n] < 2} == {}
    assert statistics.median(len(generate.rows_of(p)) for p in programs) >= 8
    assert statistics.mean(map(generate.interesting, programs)) >= 0.3


@pytest.mark.parametrize("seed", range(40))
def test_a_program_is_read_back_from_its_text(seed: int) -> None:
    program = generate.program(seed)
    inputs = eval(program.inputs_text().partition("=")[2], {"torch": torch, "Input": Input, "Base": Base})
    assert Program.of(program.source(), inputs) == program
    assert generate.program(seed) == program, "the same seed draws the same program"


# ---------------------------------------------------------------- planted faults


Plant = Callable[[pytest.MonkeyPatch], None]


def found(plant: Plant, row: str, could: Callable[[Program], bool]) -> tuple[Program, Fault]:
    """The first fault that the plant makes, among programs with this row that could show it."""
    for seed in range(4000):
        program = generate.draw(random.Random(seed), row)
        if not could(program):
            continue
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            fault = check(program, "interpret")
        if fault is not None and fault.kind not in WITHOUT_US and check(program, "interpret") is None:
            return program, fault
    pytest.fail("not found")


def has(program: Program, *ops: str) -> bool:
    return any(line.op in ops for line in program.lines)


def test_rounding_dropped() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(emitter, "rounded", lambda text, dtype: text)

    halves = (torch.bfloat16, torch.float16)
    _, fault = found(plant, "aten.to.dtype", lambda p: any(
        line.op == "aten.to.dtype" and line.args[1] in halves for line in p.lines))
    assert fault.kind == "wrong"


def test_mask_dropped() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Vectors, "masked", lambda self, dim: False)

    _, fault = found(plant, "aten.sum.default", lambda p: True)
    assert "outside of its tensors" in fault.text or fault.kind == "wrong"


def test_wrong_stride() -> None:
    right = emitter.strides_of

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(emitter, "strides_of", lambda node: tuple(sorted(right(node), key=str, reverse=True)))

    _, fault = found(plant, "aten.add.Tensor", lambda p: any(".permute" in i.view for i in p.inputs))
    assert "outside of its tensors" in fault.text or fault.kind == "wrong"


def test_nan_lost_in_a_maximum() -> None:
    combines: Callable[[Reducer], dict[str, str]] = Reducer.combines

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Reducer, "combines", lambda self: {
            name: source.replace(", tl.PropagateNan.ALL", "") for name, source in combines(self).items()})

    maxima = ("aten.amax.default", "aten.max.default", "aten.amin.default", "aten.min.default")
    _, fault = found(plant, "aten.amax.default", lambda p: has(p, *maxima) and any(
        i.base.kind == "special" for i in p.inputs))
    assert fault.kind == "wrong"


def test_index_arithmetic_in_32_bits() -> None:
    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(build, "is_wide", lambda extent: False)

    _, fault = found(plant, "aten.mul.Tensor", lambda p: any(i.base.kind == "far" for i in p.inputs))
    assert "outside of its tensors" in fault.text or fault.kind == "wrong"


def test_a_fault_shrinks_to_a_test() -> None:
    def fails(program: Program) -> bool:
        return any(line.op == "aten.sum.default" for line in program.lines)

    program = next(p for p in map(generate.program, range(300)) if fails(p) and len(p.lines) > 8)
    small = shrunk(program, fails)
    assert len(small.lines) == 1
    text = text_of_test(small, "planted", "interpret")
    scope: dict[str, object] = {}
    exec(text, scope)
    assert Program.of(small.source(), scope["INPUTS"]) == small  # type: ignore[arg-type]
