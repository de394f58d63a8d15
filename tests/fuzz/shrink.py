"""From a program that fails to a small one, and to the text of a test.

Enters: a program and a predicate that holds for it.  Leaves: a program for which it still holds, where lines have
been dropped, or replaced by an operand or by a new input like their result, and inputs have plain strides where
that does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.data import Base
from tests.fuzz.program import Eager, Input, Line, Program, Ref

Fails = Callable[[Program], bool]
MOST_CHECKS = 120

TEST = '''\
"""Found by the fuzzer ({note}): {fault}"""

import torch

from tests.fuzz.compare import assert_as_eager
from tests.fuzz.data import Base
from tests.fuzz.program import Input

{inputs}

{program}

def test_{name}() -> None:
    assert_as_eager(program, INPUTS, executor="{executor}")
'''


def shrunk(program: Program, fails: Fails) -> Program:
    """A smaller program that fails as well; deterministic."""
    best, checks = program, 0
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(best):
            checks += 1
            if checks > MOST_CHECKS:
                return best
            if fails(candidate):
                best, progress = candidate, True
                break
    return best


def test_text(program: Program, fault: str, executor: str, name: str = "program") -> str:
    """A test file that fails as the program does."""
    one = " ".join(fault.split())[:160].replace('"', "'").replace("\\", "/")
    return TEST.format(note=program.note or "drawn", fault=one, inputs=program.inputs_text(), name=name,
                       program=program.source(), executor=executor)


def _smaller(program: Program) -> Iterator[Program]:
    """Candidates, the most promising first."""
    if len(program.results) > 1:
        half = len(program.results) // 2
        yield _tidy(replace(program, results=program.results[:half]))
        yield _tidy(replace(program, results=program.results[half:]))
    try:
        values = program.run(Eager(), program.tensors(torch.device("cpu")))
    except Exception:  # nothing to replace lines with
        return
    for line in program.lines:  # early lines first: all before them goes
        if (made := _as_input(program, line, values)) is not None:
            yield made
    for line in reversed(program.lines):
        yield _without(program, line)
        for operand in line.reads():
            if line.result in program.results:
                yield _tidy(replace(program, results=tuple(operand if r == line.result else r
                                                           for r in program.results)))
            if values[operand].shape == values[line.result].shape:
                yield _renamed(_without(program, line), line.result, operand)
    for one in program.inputs:
        if one.view:
            t = values[one.name]
            plain = Input(one.name, Base(one.base.seed, tuple(t.shape), t.dtype, one.base.kind, one.base.high))
            yield replace(program, inputs=tuple(plain if i is one else i for i in program.inputs))


def _tidy(program: Program) -> Program:
    """Without lines that nothing reads (unless they write) and inputs that nothing reads."""
    wanted, kept = set(program.results), []
    for line in reversed(program.lines):
        if line.result in wanted or line.op.split(".")[1].endswith("_"):
            kept.append(line)
            wanted |= set(line.reads())
    inputs = tuple(i for i in program.inputs if i.name in wanted)
    return replace(program, inputs=inputs, lines=tuple(reversed(kept)))


def _without(program: Program, line: Line) -> Program:
    """The line gone, results that needed it too; what reads it makes the candidate meaningless, which fails()."""
    results = tuple(r for r in program.results if r != line.result)
    lines = tuple(other for other in program.lines if other is not line)
    return _tidy(replace(program, lines=lines, results=results or tuple(line.reads()[:1])))


def _renamed(program: Program, old: str, new: str) -> Program:
    def rename(value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(new) if value.name == old else value
        return [rename(v) for v in value] if isinstance(value, list) else value

    lines = tuple(replace(other, args=tuple(map(rename, other.args)),
                          kwargs=tuple((k, rename(v)) for k, v in other.kwargs)) for other in program.lines)
    return _tidy(replace(program, lines=lines, results=tuple(new if r == old else r for r in program.results)))


def _as_input(program: Program, line: Line, values: dict[str, Tensor]) -> Program | None:
    """The line's result as an input of its shape and dtype."""
    t = values[line.result]
    if line.result in program.results and len(program.results) == 1:
        return None
    kind, high = "plain", 0
    if not t.dtype.is_floating_point and t.dtype != torch.bool and t.numel() and not t.dtype.is_complex:
        kind, high = ("index", int(t.max()) + 1) if int(t.min()) >= 0 else ("plain", 0)
    made = Input(line.result, Base(len(program.inputs), tuple(t.shape), t.dtype, kind, high))
    lines = tuple(other for other in program.lines if other is not line)
    results = tuple(r for r in program.results if r != line.result)
    smaller = _tidy(replace(program, inputs=(*program.inputs, made), lines=lines, results=results))
    return smaller if len(smaller.lines) < len(program.lines) and results else None
