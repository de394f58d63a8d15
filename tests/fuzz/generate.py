"""Random programs over the op table: `program(seed)`, or `draw(rng)` with a generator whose draws hypothesis shrinks.

Every seed has a row of its own that its program must hold if it can, so that a run over consecutive seeds meets every
row; the other lines are drawn evenly over the rows.  Some lines write to what they read, and some inputs are views of
one base.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from torch._ops import OpOverload

from fxfuser.ops import TABLE, Kind
from tests.fuzz import pointwise, structure
from tests.fuzz.drafting import Draft, Refused
from tests.fuzz.program import Program, Ref, op_name, overload

KINDS = (Kind.POINTWISE, Kind.VIEW, Kind.LAYOUT, Kind.FACTORY, Kind.REDUCTION, Kind.GATHER)
ROWS: Mapping[str, OpOverload] = {
    op_name(op): op for op, row in TABLE.items()
    if row.kind in KINDS and op.namespace in ("aten", "prims") and op_name(op) not in structure.NOT_DRAWN}
NAMES = tuple(ROWS)
IN_PLACE = ("add_.Tensor", "mul_.Tensor", "sub_.Tensor", "copy_.default", "clamp_.default", "relu_.default",
            "neg_.default", "fill_.Scalar", "add_.Scalar", "masked_fill_.Scalar", "zero_.default", "sin_.default",
            "bitwise_and_.Scalar")
ATTEMPTS = 12


def program(seed: int) -> Program:
    """The program of a seed."""
    made = draw(random.Random(seed), NAMES[seed % len(NAMES)])
    return Program(made.inputs, made.lines, made.results, f"seed {seed}")


def draw(rng: random.Random, row: str | None = None) -> Program:
    """A program with 6 to 16 drawn lines (and what these need), `row` among them if it can be."""
    draft = Draft(rng)
    draft.fresh(draft.shape)
    if draft.chance(0.5):
        draft.fresh(draft.shape)
    if draft.chance(0.12):
        draft.alias()
    if draft.chance(0.01):
        draft.shape = draft.value(draft.far()).shape  # later inputs go with it
    wanted = rng.randint(6, 14)
    turn = rng.randrange(wanted)
    for i in range(wanted):
        if i == turn and row is not None:
            attempt_row(draft, row)
        if draft.chance(0.06):
            in_place(draft)
        else:
            attempt_row(draft, rng.choice(NAMES))
    return draft.program()


def attempt_row(draft: Draft, name: str) -> Ref | None:
    """A line with this row, after a few tries; None where none is to be had."""
    for attempt in range(ATTEMPTS):
        before = len(draft.lines)
        try:
            if name in structure.RECIPES:
                return structure.RECIPES[name](draft, name)
            return pointwise.line(draft, ROWS[name], attempt)
        except Refused:
            draft.back_to(before)
    return None


def in_place(draft: Draft) -> Ref | None:
    """A line that writes to a value there is: an input, a view of one, or what a line made."""
    for _ in range(ATTEMPTS):
        name = draft.rng.choice(IN_PLACE)
        before = len(draft.lines)
        # PyTorch refuses to write where elements share memory, here or when the program is traced
        x = draft.pick(lambda t: not t.dtype.is_complex and 0 not in t.stride())
        if x is None:
            return None
        try:
            return _write(draft, x, f"aten.{name}")
        except Refused:
            draft.back_to(before)
    return None


def _write(draft: Draft, x: Ref, op: str) -> Ref:
    t = draft.value(x)
    if op.endswith(".Tensor") or op == "aten.copy_.default":
        return draft.add(op, x, draft.partner(x))
    if op == "aten.clamp_.default":
        return draft.add(op, x, -1, 1)
    if op == "aten.masked_fill_.Scalar":
        mask = draft.add("aten.gt.Scalar", x, 0)
        return draft.add(op, x, mask, 1)
    if op.endswith(".Scalar"):
        return draft.add(op, x, draft.rng.choice((1, 2)) if not t.dtype.is_floating_point else 0.5)
    return draft.add(op, x)


def rows_of(program: Program) -> list[str]:
    """The rows of the table that a program's lines are, in order."""
    return [line.op for line in program.lines if line.op in ROWS]


def interesting(program: Program) -> bool:
    """Whether it holds a reduction, a view or an alias."""
    kinds = {TABLE[ROWS[r]].kind for r in rows_of(program)}
    bases = [i.base for i in program.inputs]
    return bool(kinds & {Kind.REDUCTION, Kind.VIEW}) or len(set(bases)) < len(bases) or any(
        overload(line.op)._schema.is_mutable for line in program.lines)
