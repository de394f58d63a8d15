"""Bodies of searches in sorted sequences: as many steps as the length has bits, each of which reads one element.

    i = aten.searchsorted(s, x)    ->    m = (low + high) // 2;  v = s.gather(-1, m);  low = where(v < x, m + 1, low)

The steps are eager's, so that nan and sequences that are not sorted lead to the same places.  A body answers
NotImplemented where the length is symbolic.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _search(sequence: Tensor, x: Tensor | bool | int | float, right: bool, sorter: Tensor | None) -> Any:
    """Where in the last dimension of `sequence` each element of `x` would stand; right of equal ones if `right`."""
    length = sequence.shape[-1]
    if not isinstance(length, int):
        return NotImplemented
    shape = x.shape if isinstance(x, Tensor) else ()
    low = torch.zeros(shape, dtype=torch.int64, device=sequence.device)
    high = torch.full(shape, length, dtype=torch.int64, device=sequence.device)
    for _ in range(length.bit_length()):
        middle = low + (high - low) // 2
        value = _read(sequence, middle.clamp_max(length - 1), sorter)
        passed = (value > x if right else value >= x).logical_not()
        searching = low < high
        low, high = torch.where(searching & passed, middle + 1, low), torch.where(searching & ~passed, middle, high)
    return low


def _read(sequence: Tensor, at: Tensor, sorter: Tensor | None) -> Tensor:
    if sorter is not None:
        at = _read(sorter, at, None)
    if sequence.dim() == 1:
        return torch.take(sequence, at)
    return torch.gather(sequence, -1, at)


def _searchsorted(
    sequence: Tensor, x: Tensor | bool | int | float, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Tensor | None = None,
) -> Any:
    found = _search(sequence, x, right or side == "right", sorter)
    return found.to(torch.int32) if found is not NotImplemented and out_int32 else found


def _bucketize(
    x: Tensor | bool | int | float, boundaries: Tensor, *, out_int32: bool = False, right: bool = False
) -> Any:
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


BODIES: Mapping[OpOverload, Callable[..., Any]] = {
    aten.searchsorted.Tensor: _searchsorted,
    aten.searchsorted.Scalar: _searchsorted,
    aten.bucketize.Tensor: _bucketize,
    aten.bucketize.Scalar: _bucketize,
}
