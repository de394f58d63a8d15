"""A graph as text: all that the segmenter and lowering read of it, and nothing of where it stands in the model.

Enters: an ATen graph with fake tensors in meta["val"], after the passes.  Leaves: one line per node, then what is known
of the sizes.  Invariant: graphs of equal text have equal segments and kernels, in any process of this installation.
Numbers are written with their type and all their bits, nodes by place and name, size symbols by name with their ranges,
example values and every fact that the shape environment may prove something from.  What has no such text (`Untold`) is
a graph that says more than its nodes do: subgraphs, Python functions of others, nested tensors.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
from functools import lru_cache
from types import EllipsisType
from typing import Any, Iterator, Mapping, Sequence

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxfuser.errors import FxfuserError
from fxfuser.ops import HALF_MARK, REFUSED, UPDATE_MARK, blocks_of

READ = ("val", "custom", HALF_MARK, REFUSED, UPDATE_MARK)  # of a node's meta

_NAMED = (type(None), bool, int, str, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Untold(FxfuserError):
    """Why a graph has no text that says all of it."""


def graph_text(graph: fx.Graph) -> str:
    """The graph's text.  Raises Untold."""
    writer = _Writer()
    lines = [writer.line(node) for node in graph.nodes]
    return "\n".join([*lines, *writer.facts()])


class _Writer:
    def __init__(self) -> None:
        self._place: dict[fx.Node, str] = {}
        self._blocks: dict[str, int] = {}
        self._numbers: dict[sympy.Basic, ShapeEnv | None] = {}
        self._examples: dict[sympy.Basic, object] = {}
        self._tensors: dict[int, str] = {}  # values that nodes share, by id: the graph keeps them alive

    def line(self, node: fx.Node) -> str:
        self._place[node] = f"%{len(self._place)}"
        told = [node.op, node.name, _target(node), self._constant(node.args), self._constant(node.kwargs)]
        if "val" in node.meta:
            told.append(self._value(node.meta["val"]))
        elif node.op in ("placeholder", "get_attr"):
            raise Untold(f"{node.name} is no tensor and no number")
        told.extend(f"block {self._blocks.setdefault(b, len(self._blocks))}" for b in blocks_of(node))
        if HALF_MARK in node.meta:
            told.append(repr(node.meta[HALF_MARK]))
        if UPDATE_MARK in node.meta:
            told.append(UPDATE_MARK)
        return " ".join(told)

    def facts(self) -> Iterator[str]:
        """What is known of the sizes that the graph names."""
        environments = {id(e): e for e in self._numbers.values() if e is not None}
        for expression, example in self._examples.items():
            yield f"{expression} is {example!r}"
        for environment in environments.values():
            yield from known(environment)

    def _constant(self, value: Any) -> str:
        """An argument of a call."""
        if isinstance(value, fx.Node):
            return self._place[value]
        if type(value) in _NAMED:
            return f"{type(value).__name__}:{value!r}"
        if isinstance(value, (float, complex)):
            parts = (value.real, value.imag) if isinstance(value, complex) else (value,)
            return f"{type(value).__name__}:{','.join(map(_bits, parts))}"
        if isinstance(value, (tuple, list)):
            return f"{_sequence(value)}({','.join(map(self._constant, value))})"
        if isinstance(value, slice):
            return f"slice({','.join(map(self._constant, (value.start, value.stop, value.step)))})"
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{k!r}={self._constant(v)}" for k, v in value.items()) + "}"
        if isinstance(value, OpOverload):
            return _overload(value)
        if isinstance(value, _SYMBOLIC):
            return self._number(value)
        raise Untold(f"a {type(value).__name__} is no constant")

    def _value(self, value: Any) -> str:
        """What a node computes."""
        if isinstance(value, torch.Tensor):
            key = id(value)
            if key not in self._tensors:
                self._tensors[key] = self._tensor(value)
            return self._tensors[key]
        if isinstance(value, (tuple, list)):
            return f"{_sequence(value)}({','.join(map(self._value, value))})"
        return self._constant(value)

    def _tensor(self, value: torch.Tensor) -> str:
        if value.is_nested:
            raise Untold("a nested tensor")
        told = [type(value).__name__, str(value.dtype), str(value.device), str(value.layout), self._sizes(value.shape)]
        if value.layout is torch.strided:
            told += [self._sizes(value.stride()), self._sizes((value.storage_offset(),))]
        flags = (value.requires_grad, value.is_neg(), value.is_conj(), value.is_quantized)
        return " ".join([*told, "".join("01"[flag] for flag in flags)])

    def _sizes(self, sizes: Sequence[Any]) -> str:
        return f"[{','.join(str(s) if type(s) is int else self._number(s) for s in sizes)}]"

    def _number(self, value: Any) -> str:
        """A number that is known at run time: its expression; what is known of it follows in `facts`."""
        node = value.node
        expression = sympy.sympify(node.expr)
        self._numbers[expression] = node.shape_env
        if expression not in self._examples:
            self._examples[expression] = node.hint if node.has_hint() else None
        return f"{type(value).__name__}:{sympy.srepr(expression)}"


def known(environment: ShapeEnv) -> Iterator[str]:
    """Everything that a shape environment may use in a proof.  More than needed: what it costs is a cache entry."""
    for symbol, bounds in sorted(environment.var_to_range.items(), key=lambda pair: str(pair[0])):
        yield f"{sympy.srepr(symbol)} in {bounds.lower}..{bounds.upper}{' size' * (symbol in environment.size_like)}"
    for symbol, other in sorted(environment.replacements.items(), key=lambda pair: str(pair[0])):
        yield f"{symbol} = {sympy.srepr(other)}"
    asserted = itertools.chain.from_iterable(environment.deferred_runtime_asserts.values())
    proven = (*(guard.expr for guard in environment.guards), *environment.divisible, *(a.expr for a in asserted))
    yield from sorted(map(sympy.srepr, proven))


def _bits(number: float) -> str:
    return number.hex() if math.isfinite(number) else repr(number)


def _sequence(value: Sequence[Any]) -> str:
    return "list" if isinstance(value, list) else "tuple"


def _target(node: fx.Node) -> str:
    """What a node calls, or the name of an input."""
    if node.op in ("placeholder", "get_attr", "output"):
        return str(node.target)
    if node.op != "call_function":
        raise Untold(f"the graph has a {node.op}")
    return _overload(node.target) if isinstance(node.target, OpOverload) else _function(node.target)


@lru_cache(maxsize=4096)
def _overload(op: OpOverload) -> str:
    """The schema and the tags: what is known of an op that another library has registered."""
    return f"{op._schema}{sorted(map(str, op.tags))}"


@lru_cache(maxsize=256)
def _function(function: Any) -> str:
    """A function of Python or torch that computes sizes; one of anybody else may be any."""
    for owner in (operator, math, builtins, torch):
        name = next((n for n, f in vars(owner).items() if f is function), "")
        if name:
            return f"{owner.__name__}.{name}"
    raise Untold(f"{function} may be any function")
