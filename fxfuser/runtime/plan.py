"""What runs: a frozen list of steps, and the one readable Python module that they are.

Enters: steps from `build_plan`.  Leaves: `Plan.source`, the file that a user opens to see what ran, and
`Plan.compile()`, the function in it.  Invariant: the source is the truth, nothing runs that does not stand in it;
each step is one statement, so its reads and writes can be read off the text.

    def call(args):
        primals_1, primals_2 = args
        args.clear()
        add = empty_strided((4, 8), (8, 1), dtype=torch.float32, device=cpu)
        segment0(primals_1, primals_2, add)
        del primals_1, primals_2
        mm = aten.mm.default(add, ...)
"""

from __future__ import annotations

import itertools
import linecache
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, Callable, Mapping

BoxedCallable = Callable[[list[Any]], Any]


class StepKind(Enum):
    SYMBOL = "symbol"  # a size is computed on the host
    ALLOC = "alloc"  # a buffer that a kernel will write
    LAUNCH = "launch"  # one kernel
    CHOICE = "choice"  # a matrix product and what is fused with it: a program of ours, or the library's route
    REFERENCE = "reference"  # a whole segment as ATen ops
    EXTERN = "extern"  # one ATen call, or any other op that is no kernel
    VIEW = "view"  # a host view, nothing moves
    STRIDE = "stride"  # a tensor is given the strides (or the device) that its readers assume
    FREE = "free"
    RETURN = "return"


@dataclass(frozen=True)
class Step:
    """One statement.  `segment` is the index of the segment that it serves, `note` a comment at the line's end."""

    kind: StepKind
    text: str
    segment: int | None = None
    note: str = ""

    def __str__(self) -> str:
        return f"{self.text}  # {self.note}" if self.note else self.text


@dataclass(frozen=True, eq=False)
class Plan:
    """A graph as straight-line Python.

    `params` name the graph's inputs in order; `functions` are the sources of segments that run as ATen ops;
    `namespace` holds every global name that the source uses and does not import.
    """

    name: str
    params: tuple[str, ...]
    steps: tuple[Step, ...]
    functions: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    namespace: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def source(self) -> str:
        """The module's text; deterministic."""
        head = f'"""Plan of {self.name}: {self._counted()}.'
        notes = ["\n", *self.header, '"""\n'] if self.header else ['"""\n']
        lines = [head + notes[0], *notes[1:], "import math", "import operator\n", "import torch\n",
                 "aten = torch.ops.aten", "empty_strided = torch.empty_strided\n"]
        for function in self.functions:
            lines += ["", function, ""]
        lines += ["", "def call(args):"]
        if self.params:
            lines.append(f"    {', '.join(self.params)}{',' * (len(self.params) == 1)} = args")
        lines += ["    args.clear()", *(f"    {step}" for step in self.steps)]
        return "\n".join(lines) + "\n"

    def _counted(self) -> str:
        """What the call does besides host views and buffers."""
        words = ((StepKind.LAUNCH, "kernel launch", "kernel launches"),
                 (StepKind.CHOICE, "fused product", "fused products"),
                 (StepKind.REFERENCE, "segment as ATen ops", "segments as ATen ops"),
                 (StepKind.EXTERN, "ATen call", "ATen calls"))
        found = [(sum(s.kind is kind for s in self.steps), one, many) for kind, one, many in words]
        return ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in found if n) or "nothing to compute"

    def compile(self) -> BoxedCallable:
        """The plan as a function of one list of inputs, which it empties so that inputs die at their last use."""
        filename = f"<fxfuser plan {self.name} {next(_serial)}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        scope = dict(self.namespace)
        exec(compile(self.source, filename, "exec"), scope)
        call: BoxedCallable = scope["call"]
        call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's mark of this convention
        return call

    def __str__(self) -> str:
        return self.source


_serial = itertools.count()
