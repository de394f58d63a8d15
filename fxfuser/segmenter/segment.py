"""What the segmenter returns: segments, the boundaries between them, and the reasons for both.

A graph's call nodes fall into three classes: *compute* nodes belong to exactly one segment; *view* nodes
(op-table kind VIEW, and getitem) move no data, so kernels see through them and the plan runs them on the
host where an extern call or the graph's output needs them; *symbolic* nodes compute sizes on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import fx

from fxfuser.domain.points import Domain
from fxfuser.segmenter.cost import DeviceRates


class SegmentKind(Enum):
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    GEMM = "gemm"  # a matrix product with what is fused around it
    ATTENTION = "attention"  # one node, for which there is a kernel
    EXTERN = "extern"  # one node, called as its ATen op


@dataclass(frozen=True)
class Reject:
    """Why two groups stay apart."""

    rule: str  # the rule's name, as `explain` prints it
    producer: str  # node names, one of each side
    consumer: str
    reason: str
    bytes: int = 0  # that cross the boundary and would not, were it gone
    microseconds: float = 0.0  # that this costs, estimated
    remedy: str = ""  # what the user can do about it


@dataclass(frozen=True, eq=False)
class Segment:
    """One kernel's worth of nodes, or one extern call.

    `nodes` are compute nodes in topological order; `inputs` the tensors the segment reads that something
    outside materialises (views already looked through, unless a view must be made on the host); `outputs`
    the nodes whose values are written, each with exactly the strides of its meta["val"].

    A GEMM segment has `alternatives`: other ways to compute its outputs, each a tuple of segments over the same nodes,
    in the order in which they run (the library's product, then kernels for the rest), `part` being "_0", "_1", ...
    `fused` says that the cost model prefers the segment's own kernel to all of them.
    """

    index: int
    kind: SegmentKind
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    domain: Domain | None = None
    reason: str = ""  # of a single node: why nothing is fused with it
    key: str = ""  # structural hash; equal keys have equal kernels
    alternatives: tuple[tuple[Segment, ...], ...] = ()
    fused: bool = False
    part: str = ""

    @property
    def name(self) -> str:
        return f"segment{self.index}{self.part}"

    @property
    def single(self) -> bool:
        """Whether it is one node with which nothing is fused."""
        return self.kind in (SegmentKind.EXTERN, SegmentKind.ATTENTION)


@dataclass(frozen=True)
class Request:
    """One context of `fxfuser.fuse()`: its compute nodes, their lines in the model, and why it was not granted."""

    nodes: tuple[str, ...]
    locations: tuple[str, ...]
    refusals: tuple[Reject, ...]

    @property
    def granted(self) -> bool:
        return not self.refusals


@dataclass(frozen=True, eq=False)
class Segmentation:
    """All segments of a graph in an order in which they may run, and the final boundaries between them.

    `requests` are the contexts of `fxfuser.fuse()`, `rates` what merges were priced with, `gemm` the option of this
    name.
    """

    segments: tuple[Segment, ...]
    boundaries: tuple[Reject, ...]
    requests: tuple[Request, ...] = ()
    rates: DeviceRates = DeviceRates()
    gemm: str = "library"
