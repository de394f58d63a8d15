"""Coverage: which share of the ATen compute nodes ran inside Triton kernels.

Enters: what was recorded of graphs.  Leaves: a `Coverage` for each and for all.  Compute nodes are those of ATen (and
of PyTorch's and our own prims) that make tensors; views, getitem, sizes and asserts are none, and a custom op is no
ATen node.  A segment counts as a kernel only where a kernel was generated for it and it did not fall back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable

import torch
from torch import fx

from fxfuser import ops
from fxfuser.observe import GraphTrace, KernelRecord
from fxfuser.passes.aliasing import is_write_back
from fxfuser.segmenter.segment import Segment

NAMESPACES = frozenset({"aten", "prims", "fxfuser"})


@dataclass(frozen=True)
class Coverage:
    """`lowered` of `compute` nodes are in kernels."""

    lowered: int = 0
    compute: int = 0

    @property
    def ratio(self) -> float:
        """0 to 1; 1 where there is nothing to compute."""
        return self.lowered / self.compute if self.compute else 1.0

    def __add__(self, other: Coverage) -> Coverage:
        return Coverage(self.lowered + other.lowered, self.compute + other.compute)

    def __str__(self) -> str:
        return f"{self.lowered} of {self.compute} ATen compute nodes in Triton kernels, coverage {self.ratio:.3f}"


def is_compute(node: fx.Node) -> bool:
    """Whether a node of an ATen graph computes a tensor with an ATen op."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    return (target.namespace in NAMESPACES and not ops.is_view(node) and not is_write_back(node)
            and _has_tensor(node.meta.get("val")))


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def running(trace: GraphTrace) -> tuple[Segment, ...]:
    """The segments as they run: a product for which no program of ours was made is the parts of its alternative."""
    if trace.segmentation is None:
        return ()
    own = {k.segment for k in trace.kernels}
    found: list[Segment] = []
    for segment in trace.segmentation.segments:
        apart = segment.alternatives and segment.name not in own
        found.extend(segment.alternatives[0] if apart else (segment,))
    return tuple(found)


def kernels_by_segment(trace: GraphTrace) -> dict[str, tuple[KernelRecord, ...]]:
    """The kernels of each segment that runs and has any: one, or those of a product's program."""
    segments = running(trace)
    own: dict[str, dict[str, KernelRecord]] = {}
    for kernel in trace.kernels:
        own.setdefault(kernel.segment, {})[kernel.name] = kernel
    shared = {s.key: own[s.name] for s in reversed(segments) if s.key and s.name in own}
    failed = {f.segment for f in trace.fallbacks}
    found = ((s.name, own.get(s.name) or shared.get(s.key)) for s in segments if s.name not in failed)
    return {name: tuple(kernels.values()) for name, kernels in found if kernels is not None}


def coverage(trace: GraphTrace) -> Coverage:
    """The figure of one graph; nothing for a joint graph, whose nodes are counted after the cut."""
    kernels = kernels_by_segment(trace)
    counts = [(s.name in kernels, sum(map(is_compute, s.nodes))) for s in running(trace)]
    return Coverage(sum(n for lowered, n in counts if lowered), sum(n for _, n in counts))


def total(traces: Iterable[GraphTrace]) -> Coverage:
    """The figure of several graphs together."""
    return sum(map(coverage, traces), Coverage())
