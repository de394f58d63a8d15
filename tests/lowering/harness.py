"""One function as one kernel: traced, resolved, lowered and run in the interpreter."""

from __future__ import annotations

from functools import cache
from typing import Any, Callable, Sequence

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxfuser.config import Config
from fxfuser.domain.points import Domain, Reject
from fxfuser.domain.resolve import resolve
from fxfuser.domain.views import source
from fxfuser.lowering.kernel import Lowered
from fxfuser.lowering.lower import lower, size_hints
from fxfuser.ops import Kind, kind_of
from fxfuser.runtime.interpret import Interpreted
from fxfuser.segmenter.segment import Segment, SegmentKind

WHOLE = (torch.ops.aten.roll.default, torch.ops.aten.baddbmm.default)  # lowered as they are


def trace(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[set[int]] = ()) -> fx.GraphModule:
    """The ATen graph of `fn`; `dynamic[i]` are the dimensions of argument i that are symbolic."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = []
    for i, arg in enumerate(args):
        wanted = dynamic[i] if i < len(dynamic) else set()
        sizes = [DimDynamic.DUCK if d in wanted else DimDynamic.STATIC for d in range(arg.dim())]
        fakes.append(mode.from_tensor(arg, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)))
    with mode:
        graph = make_fx(fn, decomposition_table=_decompositions(), tracing_mode="symbolic")(*fakes)
    graph.graph.eliminate_dead_code()
    return graph


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {op: rule for op, rule in core_aten_decompositions().items() if op not in WHOLE}


def segment_of(graph: fx.GraphModule) -> Segment:
    """All compute nodes of the graph as one segment."""
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and kind_of(n) not in (None, Kind.VIEW)]
    results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    outputs = list(dict.fromkeys(results if isinstance(results, (tuple, list)) else (results,)))
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)]
    domain = resolve(nodes, outputs)
    assert not isinstance(domain, Reject), str(domain)
    kind = SegmentKind.REDUCTION if any(domain.reductions()) else SegmentKind.POINTWISE
    return Segment(0, kind, tuple(nodes), tuple(dict.fromkeys(source(n) for n in inputs)), tuple(outputs), domain)


def run(graph: fx.GraphModule, lowered: Lowered, segment: Segment, args: Sequence[torch.Tensor],
        debug: bool = True) -> list[torch.Tensor]:
    """The kernel's outputs; every element that it does not write is NaN or 77.  `debug`: positions are checked."""
    symbols = symbols_of(graph, args)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    given = dict(zip(placeholders, args))
    outputs = [poisoned(node.meta["val"], symbols) for node in segment.outputs]
    pointers = [given[segment.inputs[i]] for i in lowered.inputs] + [outputs[i] for i in lowered.outputs]
    Interpreted(lowered.kernel).run([*pointers, *(eval(s, {}, symbols) for s in lowered.sizes)], debug)
    return outputs


def symbols_of(graph: fx.GraphModule, args: Sequence[torch.Tensor]) -> dict[str, int]:
    """The graph's size symbols with these arguments."""
    symbols: dict[str, int] = {}
    for node, arg in zip((n for n in graph.graph.nodes if n.op == "placeholder"), args):
        value = node.meta["val"]
        for size, actual in zip((*value.shape, *value.stride()), (*arg.shape, *arg.stride())):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                symbols[str(size.node.expr)] = actual
    return symbols


def poisoned(value: torch.Tensor, symbols: dict[str, int]) -> torch.Tensor:
    """A tensor like the fake one, all of whose elements are NaN, 77 or true."""
    sizes, strides = ([s if isinstance(s, int) else int(eval(str(s), {}, symbols)) for s in dims]
                      for dims in (value.shape, value.stride()))
    tensor = torch.empty_strided(sizes, strides, dtype=value.dtype)
    return tensor.fill_(float("nan") if value.dtype.is_floating_point else 77 if value.dtype != torch.bool else 1)


def compiled(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[set[int]] = (),
             config: Config | None = None) -> tuple[fx.GraphModule, Segment, Lowered]:
    """The function as one segment and its kernel."""
    graph = trace(fn, args, dynamic)
    segment = segment_of(graph)
    return graph, segment, lower(segment, config or Config(), size_hints(graph.graph))


def check(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[set[int]] = (),
          more: Sequence[Sequence[torch.Tensor]] = (), tolerance: float = 2e-6) -> tuple[Domain, Lowered]:
    """Compiles once and compares with eager on `args` and on each of `more`: values, dtypes and strides."""
    graph, segment, lowered = compiled(fn, args, dynamic)
    for given in (args, *more):
        expected = fn(*given)
        expected = expected if isinstance(expected, (tuple, list)) else (expected,)
        for got, want in zip(run(graph, lowered, segment, given), dict.fromkeys(expected), strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            if not got.dtype.is_floating_point:
                torch.testing.assert_close(got, want, rtol=0, atol=0)
                continue
            limit = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float64: 1e-12}.get(got.dtype, tolerance)
            scale = want[want.isfinite()].abs().max().item() if want.isfinite().any() else 1.0
            torch.testing.assert_close(got, want, rtol=limit, atol=limit * max(scale, 1.0), equal_nan=True)
    assert segment.domain is not None
    return segment.domain, lowered
