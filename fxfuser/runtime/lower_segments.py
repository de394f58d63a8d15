"""Each segment's kernel, or None where it runs as its ATen ops.

Enters: a graph and its segmentation.  Leaves: Segment.index -> Lowered, or LoweredGemm for a product with what is fused
around it.  Segments with equal keys share one kernel, so twelve equal layers are lowered once.  On CUDA a kernel begins
to be built while the next is lowered.  A lowering that fails raises under `config.strict`; else it warns, leaves a
repro file, and the segment runs as ATen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Mapping, TypeVar

from torch import fx

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.errors import user_location
from fxfuser.lowering.families import lower_kernel
from fxfuser.lowering.gemm.lower import lower_gemm
from fxfuser.lowering.kernel import Kernel, Lowered, LoweredPrograms, Note, Place
from fxfuser.lowering.lower import size_hints
from fxfuser.runtime import repro
from fxfuser.runtime.ahead import FirstCall, begin
from fxfuser.runtime.build import Options
from fxfuser.runtime.executor import device_of, executor_of, on_cuda
from fxfuser.runtime.fallback import on_failure
from fxfuser.runtime.host import Host
from fxfuser.runtime.launcher import shared_memory_of
from fxfuser.runtime.programs import Arity, cuda_program
from fxfuser.runtime.reference import reference
from fxfuser.runtime.sizes import evaluate
from fxfuser.runtime.store import store
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind

L = TypeVar("L", Lowered, LoweredPrograms)


@dataclass(frozen=True)
class LoweredGemm:
    """A product's own programs, None where the cost model alone decides against them or lowering failed, and the
    kernels of the parts of the segment's alternative, by their names: none where nothing but a program may run."""

    programs: LoweredPrograms | None
    parts: Mapping[str, Lowered | None]


AnyLowered = Lowered | LoweredGemm | None


def lower_segments(graph: fx.GraphModule, segmentation: Segmentation, config: Config) -> dict[int, AnyLowered]:
    """Lowers every segment that is no extern call, and records kernels and reasons."""
    work = _Work(graph, segmentation, config, size_hints(graph.graph))
    return {s.index: low for s in segmentation.segments for low in work.lowered(s)}


@dataclass
class _Work:
    graph: fx.GraphModule
    segmentation: Segmentation
    config: Config
    hints: dict[str, int]
    kernels: dict[str, Lowered] = field(default_factory=dict)
    programs: dict[str, LoweredPrograms] = field(default_factory=dict)

    def lowered(self, segment: Segment) -> Iterable[AnyLowered]:
        """What a segment becomes; nothing for an extern call."""
        if segment.kind is SegmentKind.EXTERN:
            _record_extern(segment)
        elif segment.kind is SegmentKind.GEMM:
            yield self._gemm(segment)
        else:
            yield self._kernel(segment)

    def _kernel(self, segment: Segment) -> Lowered | None:
        found = self._shared(segment, self.kernels, lambda: lower_kernel(segment, self.config, self.hints),
                             self._kernel_calls)
        if found is not None:
            _record_kernel(segment, found.kernel, found.sizes)
        return found

    def _gemm(self, segment: Segment) -> LoweredGemm:
        settled = self.config.deterministic  # then the cost model decides now, and the other way is not lowered
        programs = None
        if segment.fused or not settled:
            programs = self._shared(segment, self.programs, lambda: lower_gemm(
                segment, self.config, self.hints, shared_memory_of(device_of(segment))), self._program_calls)
        if programs is not None:
            _record_program(segment, programs)
        if programs is not None and (settled or self.config.gemm == "fused"):
            return LoweredGemm(programs, {})
        parts: dict[str, Lowered | None] = {}
        for part in segment.alternatives[0]:
            if part.kind is not SegmentKind.EXTERN:
                parts[part.name] = self._kernel(part)
            elif programs is None:
                _record_extern(part)
        return LoweredGemm(programs, parts)

    def _shared(self, segment: Segment, known: dict[str, L], make: Callable[[], L],
                first_calls: Callable[[Segment, L], Iterable[FirstCall]]) -> L | None:
        """What an equal segment has, or what `make` makes, which then begins to be built."""
        found = known.get(segment.key)
        if found is not None:
            return found
        try:
            found = make()
        except Exception as error:  # whatever went wrong, the user's model still runs
            on_failure(segment, self.config, lambda reason: self._repro(segment, reason))(error)
            return None
        if executor_of(device_of(segment), self.config) == "triton":
            for call in first_calls(segment, found):
                begin(*call)
        if segment.key and not found.sizes:  # sizes name this segment's own symbols
            known[segment.key] = found
        return found

    def _kernel_calls(self, segment: Segment, low: Lowered) -> Iterable[FirstCall]:
        return on_cuda(segment, low, self.config, self.hints).first_calls

    def _program_calls(self, segment: Segment, low: LoweredPrograms) -> Iterable[FirstCall]:
        options, kept = Options(fp_fusion=self.config.numerics != "eager"), store(self.config.cache_dir, "kernels")
        program = cuda_program(low.programs[0], Arity.of(low), device_of(segment).index, options, kept)
        return program.first_calls(evaluate(low.sizes, self.hints) or (16,) * len(low.sizes))

    def _repro(self, segment: Segment, reason: str) -> str:
        host = Host(self.graph, {n for s in self.segmentation.segments for n in s.nodes})
        made = reference(segment, host.namespace, host.symbols, host.size_text)
        return repro.text(segment.name, made, host.namespace, reason)


def _record_kernel(segment: Segment, kernel: Kernel, sizes: tuple[str, ...]) -> None:
    observe.record(observe.KernelRecord(segment.name, kernel.name, kernel.source, kernel.notes, sizes,
                                        kernel.tile.blocks))


def _record_program(segment: Segment, lowered: LoweredPrograms) -> None:
    """The kernels of the first program; the side table says what their pointers are, since each has some of them."""
    for launch in lowered.programs[0].launches:
        kernel, reads = launch.kernel, len(launch.kernel.inputs)
        pointers = tuple(Note(f"in{i}" if i < reads else f"out{i - reads}", _pointer(segment, lowered, *where), "")
                         for i, where in enumerate(launch.pointers))
        sizes = tuple(re.sub(r"\bn(\d+)\b", lambda m: lowered.sizes[int(m[1])], s) for s in launch.sizes)
        _record_kernel(segment, replace(kernel, notes=(*kernel.notes, *pointers)), sizes)


def _pointer(segment: Segment, lowered: LoweredPrograms, place: Place, number: int) -> str:
    """The node that a pointer of a program points to."""
    if place is Place.INPUT:
        return segment.inputs[lowered.inputs[number]].name
    return segment.outputs[lowered.outputs[number]].name if place is Place.OUTPUT else f"scratch{number}"


def _record_extern(segment: Segment) -> None:
    node = segment.nodes[0]
    observe.record(observe.ExternRecord(node.name, str(node.target), segment.reason, user_location(node.stack_trace)))
