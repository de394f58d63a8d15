"""Graph, segments and kernels -> Plan.

Enters: an ATen GraphModule, its Segmentation and the lowered kernel of each segment (None: it runs as ATen ops).
Leaves: a Plan.  Segments run in the order given; host views and sizes are computed when something first needs
them; each name dies after its last use.  Invariant: every tensor that a kernel reads or writes has exactly the
strides of its meta["val"], since kernels are written for those.
"""

from __future__ import annotations

from typing import Callable, Iterator, Mapping, Sequence

import torch
from torch import fx

from fxfuser.config import Config
from fxfuser.errors import VerificationError
from fxfuser.lowering.kernel import Dependence, Kernel, Lowered, LoweredPrograms
from fxfuser.lowering.lower import size_hints
from fxfuser.ops import SCATTER_INTO, memory_of
from fxfuser.ops.products import IN_PLACE, end_of
from fxfuser.ops.scatter_into import scatter_into
from fxfuser.runtime import buffers, repro, rooms, write_backs
from fxfuser.runtime.ahead import FirstCall, build_ahead
from fxfuser.runtime.capturable import Boundary
from fxfuser.runtime.choice import Alternatives, choose
from fxfuser.runtime.executor import device_of, executor_of, on_cuda
from fxfuser.runtime.fallback import on_failure
from fxfuser.runtime.host import Host
from fxfuser.runtime.in_place import overwritten
from fxfuser.runtime.interpret import interpreted
from fxfuser.runtime.launcher import Failed
from fxfuser.runtime.library import Route, library
from fxfuser.runtime.literals import render, tuple_text
from fxfuser.runtime.lower_segments import AnyLowered, LoweredGemm
from fxfuser.runtime.plan import Plan, Step, StepKind
from fxfuser.runtime.programs import Arity, InterpretedProgram
from fxfuser.runtime.reference import Reference, References, dims_text, reference
from fxfuser.runtime.sizes import evaluate
from fxfuser.runtime.strides import fill, strided
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind

Bound = Callable[[Failed], str]  # what launches a segment, bound to what happens where it fails: its global name


def build(graph_module: fx.GraphModule, segmentation: Segmentation, lowered: Mapping[int, AnyLowered],
          config: Config, name: str, boundary: Boundary = Boundary()) -> Plan:
    """The plan of a graph; `lowered` is keyed by Segment.index.  `Plan.compile()` makes it callable.

    Inputs stay as they are unless `boundary.needed` says at run time that nothing needs them.

    Raises VerificationError where segments and kernels do not fit the graph, ExecutorError where the executor
    that was asked for does not exist on this machine.
    """
    host = Host(graph_module, {n for s in segmentation.segments for n in s.nodes})
    host.namespace.values.update(strided=strided, fill=fill, empty_strided=torch.empty_strided)
    build_segments = _Segments(host, config, size_hints(graph_module.graph), boundary)
    host.prepare_inputs(_kernel_inputs(segmentation, lowered, config))
    for segment in segmentation.segments:
        build_segments.add(segment, lowered.get(segment.index))
        build_segments.computed.update(segment.nodes)
        host.run_effects(last=False)
    host.run_effects(last=True, counted=boundary.retained is not None)
    output = next(n for n in graph_module.graph.nodes if n.op == "output")
    host.materialise(output)
    if boundary.retained is None:
        host.part_from_bases(output, boundary.results)
    result = render(output.args[0], host.text, host.namespace)
    host.emit(StepKind.RETURN, f"return {result}")
    steps = _with_frees(_without_unread([*host.prologue, *host.steps]), host.params)
    build_ahead(build_segments.first_calls)
    return Plan(name, host.params, steps, tuple(build_segments.functions), tuple(build_segments.header),
                host.namespace.values)


def fall_back(graph_module: fx.GraphModule, segment: Segment, config: Config, error: Exception) -> None:
    """For a segment that could not be lowered: raises LoweringError under `config.strict`, else warns.

    Either names a runnable repro file of the segment, which is written first.
    """
    host = Host(graph_module, set(segment.nodes))
    made = reference(segment, host.namespace, host.symbols, host.size_text)
    on_failure(segment, config, lambda reason: repro.text(segment.name, made, host.namespace, reason))(error)


def _kernel_inputs(segmentation: Segmentation, lowered: Mapping[int, AnyLowered], config: Config) -> set[fx.Node]:
    """Every node that a kernel reads, and what those are views of."""
    found: set[fx.Node] = set()
    stack = [n for s in segmentation.segments if executor_of(device_of(s), config) != "reference"
             for n in _read(s, lowered.get(s.index))]
    owned = {n for s in segmentation.segments for n in s.nodes}
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node.op == "call_function" and node not in owned:
                stack.extend(node.all_input_nodes)
    return found


def _read(segment: Segment, low: AnyLowered) -> Iterator[fx.Node]:
    """What a segment's kernels read."""
    if isinstance(low, LoweredGemm):
        yield from _read_by(segment, low.programs)
        for part in segment.alternatives[0]:
            yield from _read_by(part, low.parts.get(part.name))
    else:
        yield from _read_by(segment, low)


def _read_by(segment: Segment, low: Lowered | LoweredPrograms | None) -> Iterator[fx.Node]:
    yield from (segment.inputs[i] for i in (low.inputs if low is not None else ()))


class _Segments:
    """Adds the steps of segments to a host program."""

    def __init__(self, host: Host, config: Config, hints: Mapping[str, int], boundary: Boundary) -> None:
        self.host, self.config, self.hints, self.boundary = host, config, hints, boundary
        self.computed: set[fx.Node] = set()
        self.made: set[fx.Node] = set()  # by what has been computed inside them
        self.references = References(host.namespace, host.symbols, host.size_text)
        self.functions: dict[str, None] = {}  # in the order of the plan
        self.header: list[str] = []
        self.first_calls: list[FirstCall] = []

    def add(self, segment: Segment, low: AnyLowered) -> None:
        if isinstance(low, LoweredGemm):
            self._add_product(segment, low)
            return
        if low is None and len(segment.nodes) == 1 and segment.kind is SegmentKind.EXTERN:
            node = segment.nodes[0]
            if node in self.made:
                return
            update = write_backs.by_call(node, self.computed)
            in_place = IN_PLACE.get(node.target) if rooms.may_write(node, self.computed) else None
            if node.target is SCATTER_INTO:
                in_place = scatter_into
            self.host.call(node, segment, in_place if update is None else write_backs.TWINS[node.target])
            if update is not None:
                self.host.written_back(update)
            return
        executor = "reference" if low is None else executor_of(device_of(segment), self.config)
        made = self.references.of(segment)
        if low is None or executor == "reference":
            self._call_reference(segment, made)
        else:
            self._launch(segment, low, made, lambda failed: self._kernel(segment, low, executor, failed))
            if self.config.strict:
                return
        self.functions[made.source] = None

    def _add_product(self, segment: Segment, low: LoweredGemm) -> None:
        """A program of ours or the library's route, whichever is faster; the library's, spelled out, where there is no
        program or the cost model alone decides."""
        executor = executor_of(device_of(segment), self.config)
        if executor != "reference" and low.programs is None:
            for part in segment.alternatives[0]:
                self.add(part, low.parts.get(part.name))
            return
        made = self.references.of(segment)
        if low.programs is None or executor == "reference":
            self._call_reference(segment, made)
        else:
            self._launch(segment, low.programs, made, lambda failed: self._programs(segment, low, executor, failed))
            if self.config.strict:
                return
        self.functions[made.source] = None

    def _call_reference(self, segment: Segment, made: Reference) -> None:
        call = self._reference_call(made)
        targets = [self.host.define(node) for node in segment.outputs]
        left = ", ".join(targets) + "," * (len(targets) == 1)
        self.host.emit(StepKind.REFERENCE, f"{left} = {call}", segment.index, _note(segment))
        for node in segment.outputs:
            self.host.bind_symbols(node)

    def _reference_call(self, made: Reference) -> str:
        for leaf in made.leaves:
            self.host.materialise(leaf)
        return f"{made.name}({', '.join([*map(self.host.text, made.leaves), *made.symbols])})"

    def _launch(self, segment: Segment, low: Lowered | LoweredPrograms, made: Reference, bound: Bound) -> None:
        host, device = self.host, device_of(segment)
        if sorted(low.outputs) != list(range(len(segment.outputs))):
            raise VerificationError("lowering", f"{segment.name} has {len(segment.outputs)} outputs, its kernel writes "
                                    f"{low.outputs}")
        spare = "" if self.config.strict else self._reference_call(made)
        inputs = [host.on_device(segment.inputs[i], device) for i in low.inputs]
        may_take = self.boundary.needed is not None
        taken = overwritten(segment, low, self.computed, may_take) if isinstance(low, Lowered) else {}
        for node in segment.outputs:
            if memory_of(node) is not node:
                host.scatter(node, segment.index)
                continue
            update = write_backs.by_kernel(segment, node, low, self.computed) if isinstance(low, Lowered) else None
            if update is not None:
                host.write_back(node, update, segment.index)
                if self.boundary.retained is not None:
                    host.count(update, segment.index)
            elif (room := rooms.room_for(node)) is not None:
                self._make_inside(node, room, segment, low)
            elif node in taken:
                self._take(node, taken[node], segment)
            else:
                self._allocate(node, [segment.inputs[i] for i in low.inputs], segment)
        outputs = [host.text(segment.outputs[i]) for i in low.outputs]
        launch = bound(on_failure(
            segment, self.config, lambda reason: repro.text(segment.name, made, host.namespace, reason)))
        text = f"{launch}({', '.join([*inputs, *outputs, *low.sizes])})"
        if spare:
            text += f" or fill({tuple_text([host.text(n) for n in segment.outputs])}, {spare})"
        kind = StepKind.CHOICE if isinstance(low, LoweredPrograms) else StepKind.LAUNCH
        host.emit(kind, text, segment.index, _note(segment))

    def _make_inside(self, node: fx.Node, room: fx.Node, segment: Segment, low: Lowered | LoweredPrograms) -> None:
        """The node's buffer is the end of its room's, which may be one that the kernel reads at the same place."""
        host = self.host
        former = rooms.former(segment, low, node, self.computed, self.boundary.needed is not None) \
            if isinstance(low, Lowered) else None
        if former is None:
            self._allocate(room, [], segment)
        else:
            self._take(room, former, segment)
        end = host.namespace.constant(end_of, "end_of")
        shape = dims_text(node.meta["val"].shape)
        host.emit(StepKind.VIEW, f"{host.define(node)} = {end}({host.text(room)}, {shape})", segment.index)
        self.made.add(room)

    def _take(self, node: fx.Node, source: fx.Node, segment: Segment) -> None:
        """The buffer of an input that nothing reads later becomes the output's."""
        host, value = self.host, node.meta["val"]
        text = host.text(source)
        if list(value.shape) != list(source.meta["val"].shape):
            text += f".view({dims_text(value.shape)})"
        if source.op == "placeholder":
            assert self.boundary.needed is not None
            needed, given = host.held_elsewhere(source, self.boundary.needed), host.text(source)
            size, stride = dims_text(value.shape), dims_text(value.stride())
            text = f"{given}.new_empty_strided({size}, {stride}) if {needed} else {text}"
        host.emit(StepKind.ALLOC, f"{host.define(node)} = {text}", segment.index, "in place")

    def _allocate(self, node: fx.Node, inputs: Sequence[fx.Node], segment: Segment) -> None:
        """`inputs` are at hand; one of the same dtype and device saves a third of the call that names both."""
        value, host = node.meta["val"], self.host
        size, stride = dims_text(value.shape), dims_text(value.stride())
        like = next((host.text(n) for n in inputs if _same_kind(n.meta.get("val"), value)), None)
        if like is not None:
            call = f"{like}.new_empty_strided({size}, {stride})"
        else:
            device = render(value.device, host.text, host.namespace)
            call = f"empty_strided({size}, {stride}, dtype={value.dtype}, device={device})"
        host.emit(StepKind.ALLOC, f"{host.define(node)} = {call}", segment.index)

    def _kernel(self, segment: Segment, low: Lowered, executor: str, failed: Failed) -> str:
        """The global name of the segment's launch function."""
        kernel = low.kernel
        if executor == "interpret":
            launch = interpreted(kernel).bind(failed)
        else:
            ready = on_cuda(segment, low, self.config, self.hints)
            self.first_calls.extend(ready.first_calls)
            launch = ready.bind(failed)
        searched = bool(executor == "triton" and self.config.max_autotune and kernel.candidates)
        self.header.append(f"{segment.name}: kernel {_described(kernel)}"
                           f"{', unless a tile is measured to be faster' * searched}")
        return self.host.namespace.constant(launch, segment.name)

    def _programs(self, segment: Segment, low: LoweredGemm, executor: str, failed: Failed) -> str:
        """The global name of the launch function of a product and what is fused around it."""
        programs, namespace = low.programs, self.host.namespace
        assert programs is not None, "there are programs to launch"
        kernels = [launch.kernel for launch in programs.programs[0].launches]
        text = f"{segment.name}: {', then '.join(map(_described, kernels))}"
        if executor == "interpret":
            launch = InterpretedProgram(programs.programs[0], Arity.of(programs)).bind(failed)
            self.header.append(text)
            return namespace.constant(launch, segment.name)
        route = library(segment, programs, low.parts, self.host) if low.parts else None
        kept = [] if route is None else [low.parts[p.name] for p in route.parts]
        late = Route(tuple(on_cuda(p, k, self.config, self.hints) for p, k in zip(route.parts, kept) if k is not None)
                     if route is not None else ())
        sizes = evaluate(programs.sizes, self.hints) or (16,) * len(programs.sizes)
        ready = choose(Alternatives(segment.name, programs, late.on_cuda if route is not None else None,
                                    device_of(segment).index, sizes, segment.fused), self.config)
        self.first_calls.extend(ready.first_calls)
        if route is None:
            self.header.append(text)
            return namespace.constant(ready.bind(failed), segment.name)
        self.header.append(f"{text}; or {route.name}, whichever is measured to be faster")
        binder = namespace.constant(
            lambda factory: late.defined(factory, lambda: ready.bind(failed)), f"choose_{segment.name}")
        name = namespace.local(segment.name)
        namespace.values[name] = None  # until the plan's own text says what it is
        self.functions.update(dict.fromkeys(
            [*route.functions, f"{route.source}\n\n\n{name} = {binder}({route.name})"]))
        return name


def _described(kernel: Kernel) -> str:
    early = ", started while that runs if the device can (dependent launch)" * (kernel.dependence is Dependence.FOLLOWS)
    return f"{kernel.name}{early}, grid {kernel.grid}, {dict(kernel.tile.blocks)}, num_warps {kernel.tile.num_warps}"


def _same_kind(value: object, wanted: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and (value.dtype, value.device) == (wanted.dtype, wanted.device)


def _note(segment: Segment) -> str:
    ops = [str(n.target).removeprefix("aten.") for n in segment.nodes]
    shown = ", ".join(ops[:6]) + (f", {len(ops) - 6} more" if len(ops) > 6 else "")
    return " ".join(f"{shown}; {segment.reason}".split()) if segment.reason else shown


def _without_unread(steps: list[Step]) -> list[Step]:
    # a host view has no effect either, but is only made when something asks for it
    keep = buffers.without_unread([s.text for s in steps], [s.kind is StepKind.SYMBOL for s in steps])
    return [steps[i] for i in keep]


def _with_frees(steps: list[Step], params: tuple[str, ...]) -> tuple[Step, ...]:
    unread, frees = buffers.last_uses([s.text for s in steps], params)
    out = [Step(StepKind.FREE, f"del {', '.join(unread)}")] if unread else []
    for step, names in zip(steps, frees):
        out.append(step)
        if names:
            out.append(Step(StepKind.FREE, f"del {', '.join(names)}"))
    return tuple(out)

