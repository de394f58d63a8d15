"""Questions about sizes and strides that never add a guard.

Enters: meta values (fake tensors), whose sizes may be symbolic.  Leaves: True only where the answer holds for every
size that the graph admits.
"""

from __future__ import annotations

from typing import Iterable

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxfuser.domain.size import example

Dim = int | torch.SymInt


def known_equal(left: Dim, right: Dim) -> bool:
    """Whether two sizes are equal for every admitted value of their symbols."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return bool(statically_known_true(left == right))


def all_equal(left: Iterable[Dim], right: Iterable[Dim]) -> bool:
    """The same of two lists of sizes."""
    a, b = list(left), list(right)
    return len(a) == len(b) and all(known_equal(x, y) for x, y in zip(a, b))


def same_shape(left: torch.Tensor, right: torch.Tensor) -> bool:
    return all_equal(left.shape, right.shape)


def same_strides(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal strides; those of dimensions of size 1 count too, as a reader may show them to the user."""
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return left.layout is right.layout
    return all_equal(left.stride(), right.stride())


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, device, shape and strides."""
    return (left.dtype is right.dtype and left.device == right.device
            and same_shape(left, right) and same_strides(left, right))


def is_contiguous(value: torch.Tensor) -> bool:
    """Row-major without gaps, as far as it is known."""
    if value.layout is not torch.strided:
        return False
    expected: Dim = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride())):
        if known_equal(size, 1):
            continue
        if not known_equal(stride, expected):
            return False
        expected = expected * size
    return True


def bytes_of(value: object) -> int:
    """The bytes of a tensor's elements, symbolic sizes by their hints, without a guard; 0 for what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    total = value.dtype.itemsize
    for size in value.shape:
        known = size if isinstance(size, int) else example(size)
        total *= 1 if known is None else known
    return total
