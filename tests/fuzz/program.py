"""Programs as values: inputs, then lines that each call one ATen op, then what is returned.

A `Program` prints as a runnable Python function and is read back from one, so that a failure that the fuzzer finds
is the text of a test.  `Program.run` evaluates line by line under an `Evaluation`, which a reference or a yardstick
replaces to compute in other dtypes.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from tests.fuzz.data import Base


@dataclass(frozen=True)
class Ref:
    """An operand that a line reads by name."""

    name: str


@dataclass(frozen=True)
class Device:
    """The device of the program's inputs."""


@dataclass(frozen=True)
class Input:
    """A view of a base tensor; inputs with equal bases share its storage.  `view` is Python text after the base."""

    name: str
    base: Base
    view: str = ""

    def of(self, base: Tensor) -> Tensor:
        made: Tensor = eval(f"base{self.view}", {"base": base})
        return made


@dataclass(frozen=True)
class Line:
    """`result = op(*args, **kwargs)`, or the `index`-th of its results."""

    result: str
    op: str  # as in aten.add.Tensor
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    index: int | None = None

    def text(self) -> str:
        words = [literal(a) for a in self.args] + [f"{k}={literal(v)}" for k, v in self.kwargs]
        index = "" if self.index is None else f"[{self.index}]"
        return f"{self.result} = torch.ops.{self.op}({', '.join(words)}){index}"

    def reads(self) -> tuple[str, ...]:
        found: list[str] = []

        def note(value: Any) -> None:
            if isinstance(value, Ref):
                found.append(value.name)
            elif isinstance(value, list):
                for item in value:
                    note(item)

        for value in (*self.args, *(v for _, v in self.kwargs)):
            note(value)
        return tuple(found)


class Evaluation(Protocol):
    """How a line's call is made: `args` hold tensors, `line` says what for."""

    def call(self, line: Line, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Tensor: ...


class Eager:
    """As PyTorch does."""

    def call(self, line: Line, op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        result = op(*args, **kwargs)
        return result if line.index is None else result[line.index]


@dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]
    note: str = field(default="", compare=False)

    def source(self) -> str:
        """The function's text."""
        head = f"def program({', '.join(i.name for i in self.inputs)}):"
        body = [*(line.text() for line in self.lines), f"return ({''.join(r + ', ' for r in self.results)})"]
        return "\n    ".join([head, *body]) + "\n"

    def inputs_text(self) -> str:
        return "INPUTS = (\n" + "".join(f"    {i!r},\n" for i in self.inputs) + ")\n"

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        """The function, with its text in linecache for tracebacks and `inspect`."""
        text = self.source()
        filename = f"<fuzz {hash(self.source()) & 0xFFFFFFFF:08x}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
        scope: dict[str, Any] = {"torch": torch, "DEVICE": torch.device("cpu")}
        exec(compile(text, filename, "exec"), scope)
        made: Callable[..., tuple[Tensor, ...]] = scope["program"]
        return made

    def on(self, device: torch.device) -> Callable[..., tuple[Tensor, ...]]:
        made = self.function()
        made.__globals__["DEVICE"] = device
        return made

    def tensors(self, device: torch.device, change: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Fresh inputs; `change` is applied to each base, before views are taken."""
        bases: dict[Base, Tensor] = {}
        for one in self.inputs:
            if one.base not in bases:
                made = one.base.tensor()
                bases[one.base] = (change(made) if change else made).to(device)
        return [one.of(bases[one.base]) for one in self.inputs]

    def run(self, evaluation: Evaluation, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The value of every name."""
        scope = {i.name: t for i, t in zip(self.inputs, inputs)}
        device = inputs[0].device if inputs else torch.device("cpu")
        for line in self.lines:
            args = [bind(a, scope, device) for a in line.args]
            kwargs = {k: bind(v, scope, device) for k, v in line.kwargs}
            scope[line.result] = evaluation.call(line, overload(line.op), args, kwargs)
        return scope

    @staticmethod
    def of(function: Callable[..., Any] | str, inputs: Sequence[Input]) -> Program:
        """The program that a function's text states; inverse of `source`."""
        text = function if isinstance(function, str) else textwrap.dedent(inspect.getsource(function))
        definition = ast.parse(text).body[0]
        assert isinstance(definition, ast.FunctionDef)
        lines, results = [], ()
        for statement in definition.body:
            if isinstance(statement, ast.Return):
                assert isinstance(statement.value, ast.Tuple)
                results = tuple(e.id for e in statement.value.elts if isinstance(e, ast.Name))
            else:
                assert isinstance(statement, ast.Assign), ast.unparse(statement)
                lines.append(_line(statement))
        return Program(tuple(inputs), tuple(lines), results)


def overload(name: str) -> OpOverload:
    namespace, packet, which = name.split(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), which)
    return found


def op_name(op: OpOverload) -> str:
    return str(op)


def bind(value: Any, scope: dict[str, Tensor], device: torch.device) -> Any:
    if isinstance(value, Ref):
        return scope[value.name]
    if isinstance(value, Device):
        return device
    if isinstance(value, list):
        return [bind(v, scope, device) for v in value]
    return value


def literal(value: Any) -> str:
    """The Python text of an argument."""
    if isinstance(value, Ref):
        return value.name
    if isinstance(value, Device):
        return "DEVICE"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


def _line(statement: ast.Assign) -> Line:
    target, value, index = statement.targets[0], statement.value, None
    assert isinstance(target, ast.Name)
    if isinstance(value, ast.Subscript):
        assert isinstance(value.slice, ast.Constant)
        index, value = value.slice.value, value.value
    assert isinstance(value, ast.Call)
    op = ast.unparse(value.func).removeprefix("torch.ops.")
    kwargs = tuple((str(k.arg), _argument(k.value)) for k in value.keywords)
    return Line(target.id, op, tuple(map(_argument, value.args)), kwargs, index)


def _argument(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return Device() if node.id == "DEVICE" else Ref(node.id)
    if isinstance(node, ast.List):
        return [_argument(e) for e in node.elts]
    if isinstance(node, ast.Attribute):
        return getattr(torch, node.attr)  # a dtype or a memory format
    if isinstance(node, ast.Call):
        assert isinstance(node.args[0], ast.Constant)
        return float(node.args[0].value)
    return ast.literal_eval(node)
