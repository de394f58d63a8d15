"""Hand-made graphs, segments and kernels: the runtime's tests need no other stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser.lowering.kernel import Kernel, Lowered, Tile
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind

SOURCE = '''import triton
import triton.language as tl


@triton.jit
def scale(x):
    return x * 2.0


@triton.jit
def pointwise(in0, in1, out0, n0, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK).to(INDEX)
    live = i < n0
    a = tl.load(in0 + i, mask=live).to(tl.float32)
    b = tl.load(in1 + i, mask=live).to(tl.float32)
    tl.store(out0 + i, scale(a + b).to(out0.dtype.element_ty), mask=live)
'''


def pointwise(dtype: torch.dtype = torch.float32, block: int = 64, source: str = SOURCE) -> Kernel:
    """out0 = 2 * (in0 + in1) over n0 contiguous elements."""
    return Kernel("pointwise", source, (dtype, dtype), (dtype,), 1, "cdiv(n0, BLOCK)", f"n0 + {block}",
                  Tile((("BLOCK", block),)))


def trace(function: Callable[..., Any], *inputs: Any, symbolic: bool = False) -> fx.GraphModule:
    # copies: one tensor given twice would be one node
    copies = [i.clone(memory_format=torch.preserve_format) if isinstance(i, torch.Tensor) else i for i in inputs]
    return make_fx(function, tracing_mode="symbolic" if symbolic else "fake")(*copies)


def node(graph_module: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in graph_module.graph.nodes if n.name == name)


def segment(graph_module: fx.GraphModule, index: int, nodes: Sequence[str], inputs: Sequence[str],
            outputs: Sequence[str] | None = None, kind: SegmentKind = SegmentKind.POINTWISE) -> Segment:
    def pick(names: Sequence[str]) -> tuple[fx.Node, ...]:
        return tuple(node(graph_module, n) for n in names)

    return Segment(index, kind, pick(nodes), pick(inputs), pick(outputs or nodes[-1:]))


def extern(graph_module: fx.GraphModule, index: int, name: str) -> Segment:
    inputs = [n.name for n in node(graph_module, name).all_input_nodes]
    return segment(graph_module, index, [name], inputs, [name], SegmentKind.EXTERN)


def segmentation(*segments: Segment) -> Segmentation:
    return Segmentation(segments, ())


def lowered(kernel: Kernel, sizes: Sequence[str]) -> Lowered:
    return Lowered(kernel, (0, 1), (0,), tuple(sizes))
