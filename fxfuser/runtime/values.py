"""Values of the compiler as bytes, and only such values back again.

Enters: frozen values of fxfuser that hold nodes, ops and dtypes of one process.  Leaves: bytes, and in another process
equal values over that process's nodes.  Invariants: no tensor, no number of a call and no remembered hash is written;
reading makes nothing but values of fxfuser, plain containers, ops that exist and nodes that were handed in.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from fxfuser.lowering.kernel import Kernel

CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
CLASSES = {"torch": ("device", "Size"), "builtins": ("frozenset", "set", "slice", "complex"),
           "torch.fx.immutable_collections": ("immutable_list", "immutable_dict")}


class Unstorable(Exception):
    """A value means nothing in another process."""


# what writing raises of values that it cannot write; of a class or a function within a function, AttributeError
UNWRITABLE = (Unstorable, pickle.PicklingError, AttributeError, TypeError, RecursionError)


class Writer(pickle.Pickler):
    """Nodes by their place, ops by name; values without what they remember of themselves."""

    def __init__(self, file: io.BytesIO, place: Mapping[fx.Node, int]) -> None:
        super().__init__(file, protocol=5)
        self._place = place

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._place[value]
        if isinstance(value, OpOverload):
            return (value.namespace, value._schema.name.partition("::")[2], value._overloadname)
        return str(value) if isinstance(value, CONSTANTS) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, HigherOrderOperator)):
            raise Unstorable(f"a {type(value).__name__} belongs to this process")
        if isinstance(value, Enum):  # some versions of Python would store a call of getattr
            return _member, (type(value), value.name)
        if isinstance(value, type) or not is_dataclass(value) or type(value).__module__.split(".")[0] != "fxfuser":
            return NotImplemented
        # a hash that a value has remembered is of this process
        held = {f.name: vars(value)[f.name] for f in fields(value)}
        if isinstance(value, Kernel):  # its notes name lines of the user's files
            held["notes"] = ()
        return _made, (type(value), held)


def _member(kind: type[Enum], name: str) -> Enum:
    return kind[name]


def _made(kind: type[Any], held: Mapping[str, Any]) -> Any:
    value = object.__new__(kind)
    vars(value).update(held)
    return value


class Reader(pickle.Unpickler):
    """Reads what a Writer wrote; `nodes` are those of this process, at the same places."""

    def __init__(self, data: bytes, nodes: Sequence[fx.Node]) -> None:
        super().__init__(io.BytesIO(data))
        self._nodes = nodes

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, int):
            return self._nodes[name]
        if isinstance(name, str):
            found = vars(torch)[name.removeprefix("torch.")]
            assert isinstance(found, CONSTANTS), name
            return found
        space, op, overload = name
        return getattr(getattr(getattr(torch.ops, space), op), overload)

    def find_class(self, module: str, name: str) -> Any:
        if name in CLASSES.get(module, ()) or module == __name__ and name in (_made.__name__, _member.__name__):
            return super().find_class(module, name)
        found = super().find_class(module, name) if module.startswith("fxfuser.") else None
        if not isinstance(found, type) or found.__module__ != module or not (
                is_dataclass(found) or issubclass(found, Enum)):
            raise pickle.UnpicklingError(f"{module}.{name} is no value of fxfuser")
        return found
