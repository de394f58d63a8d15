"""What fxfuser raises and warns: few classes, each with one message template whose fields are filled.

Enters: what a stage knows about the place that failed.  Leaves: an exception whose text names the ATen op, the
user's own file and line, the segment, where the dump is and what to try next.  Invariant: a field that is not
known is left out of the message, never printed empty.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Iterable

import torch
from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_FOREIGN = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def user_location(stack_trace: str | None) -> str:
    """`file:line` of the innermost frame of `fx.Node.stack_trace` that is neither PyTorch's nor ours; "" if there is
    none."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(stack_trace or "")]
    own = [f for f in frames if not f[0].startswith(_FOREIGN)]
    return ":".join((own or frames)[-1]) if frames else ""


@dataclass(frozen=True)
class Site:
    """The place in the user's model and in the compiler that a message speaks of.  Empty fields are not printed."""

    op: str = ""  # ATen overload, such as aten.add.Tensor
    node: str = ""  # FX node name
    location: str = ""  # the user's file:line
    segment: str = ""
    dump: str = ""  # a file or directory with the graph, the kernel or a repro

    @staticmethod
    def of(node: fx.Node, segment: str = "", dump: str = "") -> Site:
        """The site of an FX node; its op and location come from the node itself."""
        return Site(str(node.target), node.name, user_location(node.stack_trace), segment, dump)

    def lines(self) -> list[str]:
        op = f"{self.op} ({self.node})" if self.op and self.node else self.op or self.node
        rows = (("op", op), ("model", self.location), ("segment", self.segment), ("dump", self.dump))
        return [f"  {label + ':':<9}{text}" for label, text in rows if text]


def _message(head: str, site: Site, hint: str) -> str:
    return "\n".join([head, *site.lines(), *([f"  {'try:':<9}{hint}"] if hint else [])])


class FxfuserError(Exception):
    """Everything that fxfuser raises by intent.

    `args` are the constructor's own, so that an error crosses a process boundary; `str()` is the message.
    """


class UnknownOption(FxfuserError):
    """A mode or an option that does not exist; the message lists those that do."""

    def __init__(self, kind: str, name: object, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        super().__init__(kind, name, self.known)

    def __str__(self) -> str:
        return f"fxfuser has no {self.kind} {self.name!r}; known: {', '.join(self.known)}"


class InvalidOption(FxfuserError):
    """An option or an environment variable that exists, with a value that it cannot have."""

    def __init__(self, name: str, value: object, expected: str) -> None:
        self.name, self.value, self.expected = name, value, expected
        super().__init__(name, value, expected)

    def __str__(self) -> str:
        return f"fxfuser: {self.name} must be {self.expected}, not {self.value!r}"


class LoweringError(FxfuserError):
    """A segment for which no kernel could be written, built or loaded.

    Unless `strict` holds, the runtime catches it, warns once and runs the segment as its ATen ops.
    """

    def __init__(self, reason: str, site: Site = Site(), hint: str = "") -> None:
        self.reason, self.site, self.hint = reason, site, hint
        super().__init__(reason, site, hint)

    def __str__(self) -> str:
        return _message(f"cannot lower to a kernel: {self.reason}", self.site, self.hint)

    def at(self, segment: str = "", dump: str = "") -> LoweringError:
        """The same error with what only an outer stage knows; fields already filled are kept."""
        site = replace(self.site, segment=self.site.segment or segment, dump=self.site.dump or dump)
        return LoweringError(self.reason, site, self.hint)


class OutOfRange(FxfuserError, IndexError):
    """The user's program looks up a position that is not in its table, which eager refuses too."""

    def __init__(self, reason: str, site: Site = Site()) -> None:
        self.reason, self.site = reason, site
        super().__init__(reason, site)

    def __str__(self) -> str:
        return _message(f"index out of range: {self.reason}", self.site, "")


class VerificationError(FxfuserError):
    """A stage handed on a value that breaks its invariant: always a fault of the compiler, never of the model."""

    HINT = "halve FXFUSER_FUEL until the fault goes: it is the number of pass changes that are made"

    def __init__(self, stage: str, reason: str, site: Site = Site(), hint: str = HINT) -> None:
        self.stage, self.reason, self.site, self.hint = stage, reason, site, hint
        super().__init__(stage, reason, site, hint)

    def __str__(self) -> str:
        return _message(f"{self.stage} broke an invariant: {self.reason}", self.site, self.hint)


class ExecutorError(FxfuserError):
    """The executor that was asked for cannot serve these tensors on this machine."""

    def __init__(self, executor: str, reason: str, hint: str = "") -> None:
        self.executor, self.reason, self.hint = executor, reason, hint
        super().__init__(executor, reason, hint)

    def __str__(self) -> str:
        return _message(f"executor {self.executor!r} cannot run here: {self.reason}", Site(), self.hint)


class FallbackWarning(UserWarning):
    """A segment runs as ATen ops because it could not be lowered; its text is that of the `LoweringError`."""

    def __init__(self, error: LoweringError) -> None:
        self.error = error
        super().__init__(error)

    def __str__(self) -> str:
        return f"{self.error}\n  the segment runs as ATen ops; FXFUSER_STRICT=1 makes this an error"
