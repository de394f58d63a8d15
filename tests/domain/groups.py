"""Graphs as groups: traces a function, takes all its lowered nodes as one group, and compares."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, Sequence

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxfuser.domain.points import Domain, Reject
from fxfuser.domain.resolve import resolve
from fxfuser.domain.views import transparent
from fxfuser.ops import Kind, kind_of

from .evaluate import Evaluator

aten = torch.ops.aten
LOWERED = (Kind.POINTWISE, Kind.LAYOUT, Kind.FACTORY, Kind.REDUCTION)


@dataclass(eq=False)
class Traced:
    graph: fx.GraphModule
    nodes: list[fx.Node]
    outputs: list[fx.Node]

    def resolve(self) -> Domain | Reject:
        return resolve(self.nodes, self.outputs)


def trace(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[Sequence[int]] = ()) -> Traced:
    """The ATen graph of `fn`; `dynamic` names the symbolic dimensions of each argument."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    wanted = [*dynamic, *[()] * (len(args) - len(dynamic))]
    fakes = [mode.from_tensor(a.detach(), symbolic_context=StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(a.dim())]))
        .requires_grad_(a.requires_grad) for a, dims in zip(args, wanted)]
    table = {**core_aten_decompositions(), **get_decompositions([
        aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten.native_layer_norm,
        aten.native_group_norm, aten.native_layer_norm_backward, aten.var_mean])}
    table = {op: rule for op, rule in table.items() if kind_of_target(op) not in LOWERED}
    with mode:
        graph = make_fx(fn, decomposition_table=table, tracing_mode="symbolic")(*fakes)
    graph.graph.eliminate_dead_code()
    outputs = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    outputs = [outputs] if isinstance(outputs, fx.Node) else list(outputs)
    nodes = [n for n in graph.graph.nodes if kind_of(n) in LOWERED]
    stored = [n for n in outputs if n in nodes]
    return Traced(graph, nodes, stored)


def kind_of_target(op: Any) -> Kind | None:
    from_row = __import__("fxfuser.ops", fromlist=["row"]).row(op)
    return from_row.kind if from_row else None


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
    for node, got in zip(traced.outputs, found, strict=True):
        torch.testing.assert_close(got, values[node].reshape(got.shape) if got.dim() == 0 else values[node], equal_nan=True)
