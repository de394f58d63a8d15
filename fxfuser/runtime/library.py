"""The library's route to the outputs of a GEMM segment: its products as ATen calls, then kernels for the rest.

Enters: a GEMM segment, how its programs take their arguments, and the kernels of its parts.  Leaves: a `Library`, the
source of a function in the plan that takes what the programs take and writes the same outputs.  It stands inside a
factory, since who measures routes binds kernels otherwise than who runs them:

    def segment0_library(failed, segment0_1):
        def launch(x, w, relu):
            try:
                mm = strided(aten.mm.default(x, aten.t.default(w)), (64, 32), (32, 1))
                if not segment0_1(mm, relu): return False
                return True
            except Exception as error:
                return failed(error)
        return launch
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import fx

from fxfuser.lowering.kernel import Lowered, LoweredPrograms
from fxfuser.ops import memory_of
from fxfuser.runtime import buffers, sizes
from fxfuser.runtime.ahead import FirstCall
from fxfuser.runtime.executor import OnCuda, device_of
from fxfuser.runtime.host import Host
from fxfuser.runtime.in_place import taken_by
from fxfuser.runtime.launcher import Failed, Launch
from fxfuser.runtime.literals import Namespace, call_text, render, target_text, tuple_text
from fxfuser.runtime.reference import closure, dims_text, reference, strided_text
from fxfuser.segmenter.segment import Segment, SegmentKind

Factory = Callable[..., Launch]

_SOURCE = '''\
def {name}({bound}):
    """{note}"""
    def launch({params}):
        try:
{body}
            return True
        except Exception as error:
            return failed(error)
    return launch'''


@dataclass(frozen=True)
class Library:
    """`source` defines the factory `name(failed, *launches)` of the route; the launches are those of `parts`, in
    order.  `functions` are sources of parts that run as ATen ops, which the source calls."""

    name: str
    source: str
    parts: tuple[Segment, ...]
    functions: tuple[str, ...]


def library(segment: Segment, programs: LoweredPrograms, kernels: Mapping[str, Lowered | None], host: Host,
            ) -> Library | None:
    """The route of the segment's first alternative; None where the programs' arguments do not tell all that it needs.

    `kernels` are those of the alternative's parts by name; a part whose is None runs as its ATen ops.
    """
    writer = _Writer(segment, programs, kernels, host)
    try:
        return writer.written()
    except _Unknown:
        return None


class Route:
    """The factory's place: the plan's text defines it after the plan has been told what is to be built ahead."""

    def __init__(self, kernels: tuple[OnCuda, ...]) -> None:
        self._kernels = kernels
        self._factory: Factory | None = None

    @property
    def on_cuda(self) -> OnCuda:
        calls: tuple[FirstCall, ...] = tuple(c for k in self._kernels for c in k.first_calls)
        return OnCuda(calls, self._bind)

    def defined(self, factory: Factory, bind: Callable[[], Launch]) -> Launch:
        """What `bind` makes of the routes now that the library's is known."""
        self._factory = factory
        return bind()

    def _bind(self, failed: Failed) -> Launch:
        assert self._factory is not None, "the plan's text defines it before anything is bound"
        return self._factory(failed, *(k.bind(failed) for k in self._kernels))


class _Unknown(Exception):
    """A tensor or a size that no argument of the programs tells."""


@dataclass
class _Writer:
    segment: Segment
    programs: LoweredPrograms
    kernels: Mapping[str, Lowered | None]
    host: Host
    parts: list[Segment] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = {p.name for p in self.segment.alternatives[0]}
        self.scope: Namespace = self.host.namespace.function()
        for name in ("failed", "launch", "error", *sorted(names)):
            self.scope.local(name)
        self.local: dict[fx.Node, str] = {}
        self.params = [self._define(self.segment.inputs[i]) for i in self.programs.inputs]
        self.params += [self._define(self.segment.outputs[i]) for i in self.programs.outputs]
        self.numbers = [s if s in self.host.symbols else self.scope.local(f"n{i}")
                        for i, s in enumerate(self.programs.sizes)]

    def written(self) -> Library:
        ready = {self.segment.inputs[i] for i in self.programs.inputs}
        for part in self.segment.alternatives[0]:
            if part.kind is SegmentKind.EXTERN:
                self._call(part, ready)
            else:
                self._compute(part, ready)
            ready.update(part.outputs)
        name = self.host.namespace.local(f"{self.segment.name}_library")
        note = "; ".join(", ".join(str(n.target).removeprefix("aten.") for n in p.nodes)
                         for p in self.segment.alternatives[0])
        body = [f"            {line}" for line in (*self._symbols(), *self.lines)]
        source = _SOURCE.format(
            name=name, bound=", ".join(["failed", *(p.name for p in self.parts)]), note=note,
            params=", ".join([*self.params, *self.numbers]), body="\n".join(body))
        return Library(name, source, tuple(self.parts), tuple(self.functions))

    def _define(self, node: fx.Node) -> str:
        if node not in self.local:
            self.local[node] = self.scope.local(node.name)
        return self.local[node]

    def _text(self, node: fx.Node) -> str:
        if node in self.local:
            return self.local[node]
        text = self.host.size_text(node)
        if text is None:
            raise _Unknown
        return text

    def _call(self, part: Segment, ready: set[fx.Node]) -> None:
        """A product and the views that it reads, into the segment's output where it is one."""
        node, = part.nodes
        order, leaves = closure(replace(part, inputs=tuple(ready)), self.host.size_text)
        if not ready.issuperset(leaves):
            raise _Unknown
        for view in order[:-1]:
            text = call_text(view, self._text, self.scope)
            self.lines.append(f"{self._define(view)} = {text}")
        if node not in self.segment.outputs and (output := self._overwriting(node)) is not None:
            self.local[node] = self.local[output]
        if node in self.local and "out" in node.target.overloadpacket.overloads():  # type: ignore[union-attr]
            self.lines.append(self._into(node))
            return
        text = call_text(node, self._text, self.scope)
        if node in self.local:
            self.lines.append(f"{self.local[node]}.copy_({text})")
            return
        name = self._define(node)
        self.lines += [f"{name} = {text}", f"{name} = {strided_text(name, node.meta['val'])}"]

    def _overwriting(self, node: fx.Node) -> fx.Node | None:
        """The segment's output that the only reader of a product writes over it."""
        readers = [p for p in self.segment.alternatives[0] if node in p.inputs]
        low = self.kernels.get(readers[0].name) if len(readers) == 1 else None
        output = None if low is None else taken_by(node, readers[0], low)
        return output if output in self.segment.outputs else None

    def _into(self, node: fx.Node) -> str:
        """A product's call that writes an output."""
        packet = node.target.overloadpacket  # type: ignore[union-attr]
        words = [render(a, self._text, self.scope) for a in node.args]
        words += [f"{k}={render(v, self._text, self.scope)}" for k, v in node.kwargs.items()]
        return f"{target_text(packet.out, self.scope)}({', '.join([*words, f'out={self.local[node]}'])})"

    def _compute(self, part: Segment, ready: set[fx.Node]) -> None:
        """A kernel, or the ATen ops of a part that has none, with buffers for what only later parts read."""
        for node in part.outputs:
            if node not in self.segment.outputs:
                self._allocate(node)
        low = self.kernels.get(part.name)
        outputs = [self.local[n] for n in part.outputs]
        if low is None:
            made = reference(part, self.host.namespace, self.host.symbols, self.host.size_text)
            if not ready.issuperset(made.leaves):
                raise _Unknown
            self.functions.append(made.source)
            values = ", ".join([*(self.local[n] for n in made.leaves), *made.symbols])
            self.lines.append(f"fill({tuple_text(outputs)}, {made.name}({values}))")
            return
        inputs = [part.inputs[i] for i in low.inputs]
        if not ready.issuperset(inputs):
            raise _Unknown
        written = [outputs[i] for i in low.outputs]
        arguments = ", ".join([*(self.local[n] for n in inputs), *written, *low.sizes])
        self.parts.append(part)
        self.lines.append(f"if not {part.name}({arguments}): return False")

    def _allocate(self, node: fx.Node) -> None:
        value = node.meta["val"]
        device = render(device_of(self.segment), self._text, self.scope)
        self.lines.append(f"{self._define(node)} = empty_strided({dims_text(value.shape)}, {dims_text(value.stride())},"
                          f" dtype={value.dtype}, device={device})")

    def _symbols(self) -> Iterator[str]:
        """Statements that bind the size symbols of the body, each from a tensor that tells it."""
        read = frozenset[str]().union(*(buffers.names(line).read for line in self.lines))
        missing = read.intersection(self.host.symbols) - set(self.numbers)
        tensors = [self.segment.inputs[i] for i in self.programs.inputs] + \
            [self.segment.outputs[i] for i in self.programs.outputs]
        known: dict[str, str] = {}
        for node in tensors:
            for dim, text in _dims(memory_of(node).meta.get("val"), self.local[node]):
                solved = sizes.solve(dim, text) if sizes.symbols(dim) else None
                if solved is not None:
                    known.setdefault(*solved)
        if missing - known.keys():
            raise _Unknown
        for symbol in sorted(missing):
            yield f"{symbol} = {known[symbol]}"


def _dims(value: Any, text: str) -> Iterator[tuple[Any, str]]:
    """(symbolic number, its source) for all that a tensor tells of sizes."""
    if isinstance(value, torch.Tensor):
        yield from ((n, f"{text}.size({i})") for i, n in enumerate(value.shape) if type(n) is not int)
        yield from ((n, f"{text}.stride({i})") for i, n in enumerate(value.stride()) if type(n) is not int)
