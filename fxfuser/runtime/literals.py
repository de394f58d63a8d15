"""Arguments of FX nodes as Python source.

Enters: any nesting of nodes, numbers, symbolic sizes, dtypes, devices, slices and opaque objects.  Leaves: one
expression.  What has no literal form becomes a constant of the generated module's namespace.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
import re
from typing import Any, Callable, Mapping

import sympy
import torch
from torch import fx

from fxfuser.runtime import sizes

_TORCH_LITERALS = (torch.dtype, torch.layout, torch.memory_format)


class Namespace:
    """The global names of a generated module, and a guard against clashes with its local ones."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self.values: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "operator": operator, "math": math,
                                       **sizes.FUNCTIONS}
        self._reserved = set(reserved)
        self._everywhere: set[str] = set()  # names of all functions, which a new global must not hide behind
        self._taken: set[str] = set()
        self._constants: dict[Any, str] = {}

    def function(self) -> Namespace:
        """The names inside one function of the module: its globals are this namespace's, its locals its own."""
        inner = Namespace(frozenset(self._reserved))
        inner.values, inner._everywhere = self.values, self._everywhere
        return inner

    def local(self, wanted: str) -> str:
        """A local name like `wanted` that no global, symbol, keyword or other local has."""
        name = re.sub(r"\W", "_", wanted)
        while name in self._taken or name in self.values or name in self._reserved or _is_word(name):
            name += "_"
        self._taken.add(name)
        self._everywhere.add(name)
        return name

    def constant(self, value: Any, wanted: str) -> str:
        """The global name that holds `value`; the same object, or an equal device, gets one name."""
        key = value if isinstance(value, torch.device) else id(value)
        if key not in self._constants:
            while wanted in self._everywhere:
                wanted += "_"
            name = self.local(wanted)
            self.values[name] = value
            self._constants[key] = name
        return self._constants[key]


def _is_word(name: str) -> bool:
    return keyword.iskeyword(name) or name in vars(builtins) or not name.isidentifier()


def render(value: Any, node_text: Callable[[fx.Node], str], namespace: Namespace) -> str:
    """Source of `value`; `node_text` gives the name or expression of a node."""
    def inner(v: Any) -> str:
        return render(v, node_text, namespace)

    if isinstance(value, fx.Node):
        return node_text(value)
    if value is None or isinstance(value, (bool, int, str, bytes)) or value is Ellipsis:
        return "..." if value is Ellipsis else repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    if isinstance(value, (torch.SymInt, sympy.Expr)):
        return sizes.source(value)
    if isinstance(value, _TORCH_LITERALS):
        return str(value)
    if isinstance(value, torch.device):
        return namespace.constant(value, f"{value.type}{'' if value.index is None else value.index}")
    if isinstance(value, slice):
        return f"slice({inner(value.start)}, {inner(value.stop)}, {inner(value.step)})"
    if isinstance(value, tuple) and type(value).__name__ in ("tuple", "Size"):
        return tuple_text([inner(v) for v in value])
    if isinstance(value, list):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items()) + "}"
    if isinstance(value, torch._ops.OpOverload):
        return target_text(value, namespace)
    return namespace.constant(value, f"const_{type(value).__name__.lower()}")


def tuple_text(parts: list[str]) -> str:
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def target_text(target: Any, namespace: Namespace) -> str:
    """Source of what a call_function node calls."""
    if isinstance(target, torch._ops.OpOverload):
        space, _, rest = target._schema.name.partition("::")
        overload = target._schema.overload_name or "default"
        if all(p.isidentifier() and not keyword.iskeyword(p) for p in (space, rest, overload)):
            return f"{'aten' if space == 'aten' else f'torch.ops.{space}'}.{rest}.{overload}"
        return namespace.constant(target, rest)
    name = target.__name__ if callable(target) else str(target)
    module = {operator: "operator", math: "math"}
    for owner, text in module.items():
        if vars(owner).get(name) is target:
            return f"{text}.{name}"
    if vars(builtins).get(name) is target:
        return str(name)
    return namespace.constant(target, str(name))


def call_text(node: fx.Node, node_text: Callable[[fx.Node], str], namespace: Namespace,
              instead: Callable[..., Any] | None = None) -> str:
    """Source of the value of a call_function node, or of `instead` with its arguments; a getitem reads as `x[i]`."""
    def inner(v: Any) -> str:
        return render(v, node_text, namespace)

    if node.target is operator.getitem and len(node.args) == 2:
        return f"{inner(node.args[0])}[{inner(node.args[1])}]"
    args = [*map(inner, node.args), *(f"{k}={inner(v)}" for k, v in node.kwargs.items())]
    if any(not k.isidentifier() or keyword.iskeyword(k) for k in node.kwargs):
        args = [*map(inner, node.args), f"**{inner(dict(node.kwargs))}"]
    return f"{target_text(node.target if instead is None else instead, namespace)}({', '.join(args)})"
