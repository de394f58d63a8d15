"""Each segment's kernel, or None where it runs as its ATen ops.

Enters: a graph and its segmentation.  Leaves: Segment.index -> Lowered.  Segments with equal keys share one kernel,
so twelve equal layers are lowered once.  On CUDA a kernel begins to be built while the next is lowered.  A lowering
that fails raises under `config.strict`; else it warns, leaves a repro file, and the segment runs as ATen.
"""

from __future__ import annotations

from torch import fx

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.errors import user_location
from fxfuser.lowering.kernel import Lowered
from fxfuser.lowering.lower import lower, size_hints
from fxfuser.runtime import repro
from fxfuser.runtime.ahead import begin
from fxfuser.runtime.executor import device_of, executor_of, on_cuda
from fxfuser.runtime.fallback import on_failure
from fxfuser.runtime.host import Host
from fxfuser.runtime.reference import reference
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind


def lower_segments(graph: fx.GraphModule, segmentation: Segmentation, config: Config) -> dict[int, Lowered | None]:
    """Lowers every segment that is no extern call, and records kernels and reasons."""
    hints = size_hints(graph.graph)
    known: dict[str, Lowered] = {}
    found: dict[int, Lowered | None] = {}
    for segment in segmentation.segments:
        if segment.kind is SegmentKind.EXTERN:
            _record_extern(segment)
            continue
        lowered = known.get(segment.key)
        if lowered is None:
            lowered = _lower(graph, segmentation, segment, config, hints)
            if lowered is not None and executor_of(device_of(segment), config) == "triton":
                for call in on_cuda(segment, lowered, config, hints).first_calls:
                    begin(*call)
        if lowered is not None:
            observe.record(observe.KernelRecord(
                segment.name, lowered.kernel.name, lowered.kernel.source, lowered.kernel.notes, lowered.sizes))
            if segment.key and not lowered.sizes:  # sizes name this segment's own symbols
                known[segment.key] = lowered
        found[segment.index] = lowered
    return found


def _lower(
    graph: fx.GraphModule, segmentation: Segmentation, segment: Segment, config: Config, hints: dict[str, int]
) -> Lowered | None:
    try:
        return lower(segment, config, hints)
    except Exception as error:  # whatever went wrong, the user's model still runs
        def repro_text(reason: str) -> str:
            host = Host(graph, {n for s in segmentation.segments for n in s.nodes})
            made = reference(segment, host.namespace, host.symbols, host.size_text)
            return repro.text(segment.name, made, host.namespace, reason)

        on_failure(segment, config, repro_text)(error)
        return None


def _record_extern(segment: Segment) -> None:
    node = segment.nodes[0]
    observe.record(observe.ExternRecord(node.name, str(node.target), segment.reason, user_location(node.stack_trace)))
