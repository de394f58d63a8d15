"""Shapes and strides of FX nodes as sizes, computed once per node."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxfuser.domain.size import Size, from_torch

_KEY = "fxfuser_geometry"


@dataclass(frozen=True, eq=False)
class Geometry:
    """`value` is the meta["val"] from which the rest was read: a pass may have replaced it since.

    Of a symbolic integer, `shape` holds that one size.
    """

    value: object
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]


def geometry(node: fx.Node) -> Geometry:
    """Shape and strides of a node whose value is one strided tensor."""
    value = node.meta["val"]
    known = node.meta.get(_KEY)
    if isinstance(known, Geometry) and known.value is value:
        return known
    assert isinstance(value, torch.Tensor), node
    found = Geometry(value, tuple(map(from_torch, value.shape)), tuple(map(from_torch, value.stride())))
    node.meta[_KEY] = found
    return found


def shape_of(node: fx.Node) -> tuple[Size, ...]:
    """The sizes of a tensor node."""
    return geometry(node).shape


def strides_of(node: fx.Node) -> tuple[Size, ...]:
    """The strides of a tensor node, in elements."""
    return geometry(node).strides


def dtype_of(node: fx.Node) -> torch.dtype:
    """The ATen dtype of a tensor node."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_tensor(node: fx.Node) -> bool:
    """Whether the node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def size_argument(argument: object) -> Size:
    """A size, an index or a step among an ATen call's arguments."""
    if isinstance(argument, fx.Node):
        value, known = argument.meta["val"], argument.meta.get(_KEY)
        if not isinstance(known, Geometry) or known.value is not value:
            known = argument.meta[_KEY] = Geometry(value, (from_torch(value),), ())
        return known.shape[0]
    assert isinstance(argument, (int, torch.SymInt)), argument
    return from_torch(argument)


def is_negative(argument: object) -> bool | None:
    """Whether a size argument is below zero; None where its sign is only known at run time."""
    value = argument.meta["val"] if isinstance(argument, fx.Node) else argument
    assert isinstance(value, (int, torch.SymInt)), argument
    if statically_known_true(value < 0):
        return True
    return False if statically_known_true(value >= 0) else None
