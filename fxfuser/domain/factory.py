"""Factories: values that follow from their own index alone.

Enters: a FACTORY node and an index.  Leaves: a number, a form (an integer that is the index itself, scaled
and shifted), a ramp (the same in floating point), or a condition that separates ones from zeros; None where the
node has no such description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, Union

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.domain.index import Form, Index
from fxfuser.domain.points import Bound
from fxfuser.domain.tensors import size_argument
from fxfuser.ops import argument, named_argument

aten, prims = torch.ops.aten, torch.ops.prims

Number = Union[bool, int, float]


@dataclass(frozen=True)
class Ramp:
    """start + step * form, computed in the node's dtype."""

    form: Form
    start: Number
    step: Number


Made = Union[Number, Form, Ramp, Bound]  # a Bound is 1 where it holds and 0 elsewhere


def factory_value(node: fx.Node, index: Index) -> Made | None:
    """What a FACTORY node holds at `index`."""
    if isinstance(node.target, OpOverload) and node.target in _FILLS:
        return _fill(argument(node, _FILLS[node.target]))
    if isinstance(node.target, OpOverload) and node.target in _VALUES:
        return _VALUES[node.target]
    made = _MAKERS.get(node.target) if isinstance(node.target, OpOverload) else None
    return None if made is None else made(node, index)


def _fill(value: object) -> Made | None:
    if isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.SymInt):
        return Form((), size_argument(value))
    return None


def _is_size(value: object) -> bool:
    held = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(held, (int, torch.SymInt)) and not isinstance(held, bool)


def _arange(node: fx.Node, index: Index) -> Made | None:
    start, step = named_argument(node, "start", 0), named_argument(node, "step", 1)
    if not _is_size(start) or not _is_size(step):
        fixed = isinstance(start, (int, float)) and isinstance(step, (int, float))
        return Ramp(index[0], start, step) if fixed else None
    return index[0].scale(size_argument(step)) + size_argument(start)


def _eye(node: fx.Node, index: Index) -> Made:
    return Bound(index[1] - index[0], 0, 1)


_FILLS: Mapping[OpOverload, int] = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
    aten.fill.Scalar: 1,
    prims.full.default: 1,
    prims.full_like.default: 1,
    prims.scalar_tensor.default: 0,
}

_VALUES: Mapping[OpOverload, int] = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}

_MAKERS: Mapping[OpOverload, Callable[[fx.Node, Index], Made | None]] = {
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    prims.iota.default: _arange,
    aten.eye.default: _eye,
    aten.eye.m: _eye,
}
