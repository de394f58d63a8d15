"""Graphs as groups: traces a function, takes all its lowered nodes as one group, and compares."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Callable, Sequence

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxfuser.domain.points import Domain, Reject
from fxfuser.domain.resolve import resolve
from fxfuser.domain.views import source
from fxfuser.ops import Kind, kind_of, row

from .evaluate import Evaluator

aten = torch.ops.aten
LOWERED = (Kind.POINTWISE, Kind.LAYOUT, Kind.FACTORY, Kind.REDUCTION, Kind.GATHER)
OWN = (*LOWERED, Kind.GEMM)


@dataclass(eq=False)
class Traced:
    graph: fx.GraphModule
    nodes: list[fx.Node]
    outputs: list[fx.Node]

    def resolve(self) -> Domain | Reject:
        return resolve(self.nodes, self.outputs)


def trace(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]] = ()) -> Traced:
    """The ATen graph of `fn`; `dynamic` names the symbolic dimensions of each argument."""
    if not dynamic:
        return _traced(make_fx(fn, decomposition_table=_table(), tracing_mode="real")(*args))
    mode = FakeTensorMode(shape_env=ShapeEnv())
    wanted = [*dynamic, *[()] * (len(args) - len(dynamic))]
    fakes = [mode.from_tensor(a.detach(), symbolic_context=StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(a.dim())]))
        .requires_grad_(a.requires_grad) for a, dims in zip(args, wanted)]
    with mode:
        return _traced(make_fx(fn, decomposition_table=_table(), tracing_mode="symbolic")(*fakes))


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    """Core ATen's decompositions and softmax's, but nothing that the op table lowers itself."""
    table = {**core_aten_decompositions(), **get_decompositions([aten._softmax, aten._log_softmax])}
    return {op: rule for op, rule in table.items() if (found := row(op)) is None or found.kind not in OWN}


def _traced(graph: fx.GraphModule) -> Traced:
    graph.graph.eliminate_dead_code()
    outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    outputs = [outputs] if isinstance(outputs, fx.Node) else list(outputs)
    nodes = [n for n in graph.graph.nodes if kind_of(n) in LOWERED]
    stored = list(dict.fromkeys(n for n in map(source, outputs) if n in nodes))
    return Traced(graph, nodes, stored)


def sizes_of(traced: Traced, args: Sequence[torch.Tensor]) -> dict[str, int]:
    """The size symbols' values with these arguments."""
    found: dict[str, int] = {}
    for node, arg in zip((n for n in traced.graph.graph.nodes if n.op == "placeholder"), args):
        for symbolic, size in zip(node.meta["val"].shape, arg.shape):
            found.setdefault(str(symbolic), size)
    return found


def check(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]] = (),
          others: Sequence[Sequence[torch.Tensor]] = ()) -> Domain:
    """Resolves the whole graph of `fn` as one group and compares its values, also for `others`' sizes."""
    traced = trace(fn, args, dynamic)
    domain = traced.resolve()
    assert isinstance(domain, Domain), domain
    for arguments in (args, *others):
        compare(traced, domain, arguments)
    return domain


def compare(traced: Traced, domain: Domain, args: Sequence[torch.Tensor]) -> None:
    values: dict[fx.Node, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Recorder(traced.graph, garbage_collect_values=False).run(*[a.detach() for a in args])
    tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
    found = Evaluator(domain, tensors, sizes_of(traced, args)).stores()
    assert list(found) == traced.outputs
    for node, got in found.items():
        torch.testing.assert_close(got, values[node], equal_nan=True)
