"""One segment by itself, on inputs made from its metadata: what `fxfuser bench` measures.

Enters: a segment of a segmented graph and the Config.  Leaves: a function that runs it, as its kernel on CUDA and as
its ATen ops elsewhere, and how much it computes.  Invariant: inputs have the sizes, strides, dtypes and device of the
metadata, symbolic sizes as they were when the graph was traced; integers are zero, which indexes anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable

import torch
from torch import fx
from torch.utils.flop_counter import FlopCounterMode

from fxfuser.config import Config
from fxfuser.lowering.families import lower_kernel
from fxfuser.lowering.gemm.lower import lower_gemm
from fxfuser.lowering.kernel import Lowered, LoweredPrograms
from fxfuser.lowering.lower import size_hints
from fxfuser.runtime.ahead import build_ahead
from fxfuser.runtime.choice import Alternatives, choose
from fxfuser.runtime.executor import OnCuda, device_of, executor_of, on_cuda
from fxfuser.runtime.host import Host
from fxfuser.runtime.launcher import shared_memory_of
from fxfuser.runtime.reference import Reference, reference
from fxfuser.runtime.repro import number
from fxfuser.runtime.sizes import FUNCTIONS, evaluate
from fxfuser.runtime.strides import strided
from fxfuser.runtime.timing import Run
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind


@dataclass(frozen=True)
class Alone:
    """`flops` are multiplications and additions of matrix products, else one operation per element and node."""

    run: Run
    device: torch.device
    kernel: bool  # one launch of its own kernel, not ATen ops
    flops: int
    products: bool  # whether `flops` are those of matrix products


def alone(segment: Segment, segmentation: Segmentation, config: Config) -> Alone:
    """Raises whatever its ops raise on such inputs."""
    module, device = segment.nodes[0].graph.owning_module, device_of(segment)
    assert module is not None, "the segmentation's graph belongs to a module"
    hints = size_hints(segment.nodes[0].graph)
    aten = _reference(segment, segmentation, module, hints)
    with FlopCounterMode(display=False) as counter:
        aten()
    products = counter.get_total_flops()
    is_kernel = segment.kind is not SegmentKind.EXTERN and executor_of(device, config) == "triton"
    run = _launch(segment, config, hints) if is_kernel else aten
    return Alone(run, device, is_kernel, products or _operations(segment), products > 0)


def _launch(segment: Segment, config: Config, hints: dict[str, int]) -> Run:
    low, ready = _ready(segment, config, hints)
    build_ahead(ready.first_calls)

    def refuse(error: Exception) -> bool:
        raise error

    launch = ready.bind(refuse)
    tensors = [*(example(segment.inputs[i]) for i in low.inputs), *(example(segment.outputs[i]) for i in low.outputs)]
    sizes = evaluate(low.sizes, hints) or (16,) * len(low.sizes)
    return lambda: launch(*tensors, *sizes)


def _ready(segment: Segment, config: Config, hints: dict[str, int]) -> tuple[Lowered | LoweredPrograms, OnCuda]:
    """A segment's kernel, or the program of ours that computes a product and what is fused around it."""
    if segment.kind is not SegmentKind.GEMM:
        low = lower_kernel(segment, config, hints)
        return low, on_cuda(segment, low, config, hints)
    programs = lower_gemm(segment, config, hints, shared_memory_of(device_of(segment)))
    sizes = evaluate(programs.sizes, hints) or (16,) * len(programs.sizes)
    alternatives = Alternatives(segment.name, programs, None, device_of(segment).index, sizes, True)
    return programs, choose(alternatives, config)


def _reference(segment: Segment, segmentation: Segmentation, module: fx.GraphModule, hints: dict[str, int]) -> Run:
    host = Host(module, {n for s in segmentation.segments for n in s.nodes})
    made: Reference = reference(segment, host.namespace, host.symbols, host.size_text)
    scope: dict[str, Any] = {**host.namespace.values, **FUNCTIONS, "strided": strided,
                             "empty_strided": torch.empty_strided}
    exec(made.source, scope)
    call: Callable[..., object] = scope[made.name]
    inputs = [*map(example, made.leaves), *(hints.get(s, 8) for s in made.symbols)]

    def run() -> object:
        with torch.no_grad():
            return call(*inputs)

    return run


def example(node: fx.Node) -> Any:
    """A value like the node's."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        return number(value)
    if not isinstance(value, torch.Tensor):
        return value
    size, stride = (tuple(map(number, dims)) for dims in (value.shape, value.stride()))
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else 0
    if value.dtype.is_floating_point or value.dtype.is_complex:
        data = torch.randn(extent, device=value.device).to(value.dtype)
    else:
        data = torch.zeros(extent, device=value.device, dtype=value.dtype)
    return data.as_strided(size, stride)


def _operations(segment: Segment) -> int:
    """One per element of the largest tensor that a node reads or writes."""
    return sum(max(map(_elements, (node, *node.all_input_nodes)), default=0) for node in segment.nodes)


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(map(number, value.shape)) if isinstance(value, torch.Tensor) else 0
