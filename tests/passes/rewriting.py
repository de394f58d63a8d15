"""Before/Expected tests: functions are traced to ATen graphs, passes run over them, and two graphs are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser.capture import scope_of
from fxfuser.passes import Fuel, Pass, run


def trace(function: Callable[..., Any], inputs: Sequence[Any], dynamic: bool = False) -> fx.GraphModule:
    """The ATen graph of `function` on fake copies of `inputs`, nothing taken apart; sizes symbolic if `dynamic`."""
    module = make_fx(lambda *values: function(*values), tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    for node in module.graph.nodes:
        node.meta.setdefault("stack_trace", f'File "model.py", line 1, in {node.name}')
        node.meta.setdefault("partitioner_tag", "is_forward")
    return module


def apply(module: fx.GraphModule, passes: Sequence[Pass], fuel: int | None = None) -> int:
    """Runs the passes through the funnel; returns the number of changes."""
    return run(module, passes, scope_of(module, Fuel(fuel)))


def text(graph: fx.Graph) -> str:
    """One line per node, names by position, so that graphs with equal structure have equal text."""
    number: dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        number[node] = f"%{len(number)}"
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: Name(number[n]))
        kwargs = dict(sorted(kwargs.items()))
        lines.append(f"{number[node]} = {node.op if node.op != 'call_function' else node.target} {args} {kwargs}")
    return "\n".join(lines).replace("immutable_list", "")


class Name(str):
    """Prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def targets(module: fx.GraphModule) -> list[str]:
    """The overload names of the call nodes, in order, such as "mul.Tensor"."""
    return [str(n.target).removeprefix("aten.") for n in module.graph.nodes if n.op == "call_function"]


def assert_rewrites(
    before: Callable[..., Any], expected: Callable[..., Any], inputs: Sequence[Any], passes: Sequence[Pass],
    *, exact: bool = True, dynamic: bool = False,
) -> fx.GraphModule:
    """The passes turn `before` into the graph of `expected`, which computes the same with the same meta."""
    module = trace(before, inputs, dynamic)
    want = module(*inputs)
    assert apply(module, passes) > 0
    assert text(module.graph) == text(trace(expected, inputs, dynamic).graph), module.graph
    assert_meta(module)
    assert_same(module(*inputs), want, exact)
    return module


def assert_untouched(
    function: Callable[..., Any], inputs: Sequence[Any], passes: Sequence[Pass], dynamic: bool = False
) -> None:
    """The negative twin: no change at all."""
    module = trace(function, inputs, dynamic)
    before = text(module.graph)
    assert apply(module, passes) == 0, module.graph
    assert text(module.graph) == before


def assert_meta(module: fx.GraphModule) -> None:
    """Every call node says what it computes, where it comes from and on which side of the cut it is."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            assert {"val", "stack_trace", "partitioner_tag"} <= node.meta.keys(), node


def assert_same(got: Any, want: Any, exact: bool = True) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact else {}
    torch.testing.assert_close(got, want, equal_nan=True, **tolerance)
