"""The fuzzer itself, a small run of it, and planted faults, each of which it must find."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fxfuser.lowering import emitter
from fxfuser.lowering.emitter import Emitter
from fxfuser.lowering.reducer import Reducer
from fxfuser.ops import TABLE, Kind
from fxfuser.runtime import interpret
from tests.fuzz import generate, structure
from tests.fuzz.__main__ import shrunk_alike
from tests.fuzz.compare import WITHOUT_US, Fault, check
from tests.fuzz.program import Program
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
    assert Program.of(program.source(), eval(program.inputs_text().partition("=")[2], vars(
        __import__("tests.fuzz.program", fromlist=["*"])) | {"torch": torch})) == program
    assert generate.program(seed) == program, "the same seed draws the same program"


# ---------------------------------------------------------------- planted faults


def found(rows: Iterable[str], seeds: int) -> tuple[Program, Fault]:
    """The first fault of programs that are to hold one of these rows."""
    for seed in range(seeds):
        for row in rows:
            program = generate.draw(random.Random(seed), row)
            fault = check(program, "interpret")
            if fault is not None and fault.kind not in WITHOUT_US:
                return program, fault
    pytest.fail(f"not found in {seeds} programs")


def test_rounding_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emitter, "rounded", lambda text, dtype: text)
    _, fault = found(["aten._to_copy.default"], 120)
    assert fault.kind == "wrong"


def test_mask_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Emitter, "masked", lambda self, dim: False)
    _, fault = found(["aten.sum.default"], 60)
    assert "outside of its tensors" in fault.text or fault.kind == "wrong"


def test_wrong_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    right = emitter.strides_of

    def wrong(node):
        strides = list(right(node))
        return tuple(sorted(strides, key=str, reverse=True)) if len(set(strides)) > 1 else tuple(strides)

    monkeypatch.setattr(emitter, "strides_of", wrong)
    program, fault = found(["aten.add.Tensor"], 60)
    small = shrunk_alike(program, fault, "interpret")
    assert len(small.lines) <= 2, text_of_test(small, fault.text, "interpret")


def test_nan_lost_in_a_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    combines: Callable[[Reducer], dict[str, str]] = Reducer.combines
    monkeypatch.setattr(Reducer, "combines", lambda self: {
        name: source.replace(" | (a != a)", "") for name, source in combines(self).items()})
    _, fault = found(["aten.amax.default", "aten.max.default"], 120)
    assert "NaN" in fault.text


def test_index_arithmetic_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpret, "is_wide", lambda extent: False)
    _, fault = found(["aten.mul.Tensor"], 1000)
    assert "outside of its tensors" in fault.text or fault.kind == "wrong"
