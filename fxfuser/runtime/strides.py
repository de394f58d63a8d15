"""Tensors with exactly the strides, and for kernels the dtype, that the graph promises."""

from __future__ import annotations

from typing import Sequence

import torch


def strided(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`tensor` itself where its strides are `stride` and its dtype is `dtype`, else a tensor that has them.

    Strides of dimensions of size 1 and of empty tensors address nothing: there the storage is kept and only the
    view is replaced, else the data is copied.  A tensor that is no plain strided one is returned as it is.
    """
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    if tensor.layout is not torch.strided or tensor.stride() == stride:
        return tensor
    if tensor.shape != size:
        return tensor
    if tensor.numel() == 0 or all(n == 1 or a == b for n, a, b in zip(size, tensor.stride(), stride)):
        return tensor.as_strided(size, stride)
    result = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    # a stride of 0 means that elements share their place: writing one of each is enough
    narrow = tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)
    result[narrow].copy_(tensor[narrow])
    return result


def fill(outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes `values` into `outputs`, element by element; strides of the outputs stay."""
    for output, value in zip(outputs, values):
        output.copy_(value)
