"""Bodies of pairwise distances and their gradients: differences by broadcast, reduced over the last dimension.

    d = aten._cdist_forward(a, b, 1, None)    ->    s = a.unsqueeze(-2) - b.unsqueeze(-3);  d = aten.sum(s.abs(), [-1])

Where eager takes the Euclidean distance from a product of matrices, so does the body.  The formulas, and what counts
where a difference or a distance is 0, are those of ATen's kernels.  A body answers NotImplemented where a tensor is
empty.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
INFINITY = float("inf")
FEW = 25  # rows up to which eager does not multiply matrices
ALWAYS, NEVER = 1, 2  # modes of cdist: whether it multiplies matrices


def _norm(difference: Tensor, p: float) -> Tensor:
    """The p-norm over the last dimension."""
    size = difference.abs()
    if p == 0:
        return torch.sum((size != 0).to(size.dtype), [-1])
    if p == 1:
        return torch.sum(size, [-1])
    if p == 2:
        return torch.sum(difference * difference, [-1]).sqrt()
    if p == INFINITY:
        return torch.amax(size, [-1])
    return torch.sum(size.pow(p), [-1]).pow(1 / p)


def _slope(difference: Tensor, grad: Tensor, distance: Tensor, p: float) -> Tensor:
    """What each difference adds to the gradient; `grad` and `distance` have size 1 in the last dimension."""
    size = difference.abs()
    if p == 1:
        return grad * difference.sign()
    if p == INFINITY:
        return grad * difference.sign() * (1 - (size - distance).abs().ceil().clamp_max(1))
    if p == 2:
        slope = grad * difference / distance
    elif p < 2:
        slope = difference.sign() * size.pow(p - 1) * grad / distance.pow(p - 1)
    else:
        slope = difference * size.pow(p - 2) * grad / distance.pow(p - 1)
    none = distance == 0
    return torch.where(none | (difference == 0) if p < 1 else none, 0, slope)


def _product_distance(a: Tensor, b: Tensor) -> Tensor:
    """sqrt(a² - 2ab + b²), the squares as two more columns of the product."""
    left, right = (torch.sum(x * x, [-1], True) for x in (a, b))
    a = torch.cat((a * -2, left, torch.ones_like(left)), -1)
    b = torch.cat((b, torch.ones_like(right), right), -1)
    return torch.matmul(a, b.mT).clamp_min(0).sqrt()


def _empty(*tensors: Tensor) -> bool:
    return any(isinstance(s, int) and s == 0 for x in tensors for s in x.shape)


def _cdist(a: Tensor, b: Tensor, p: float, mode: int | None = None) -> Any:
    if _empty(a, b):
        return NotImplemented
    many = [isinstance(x.shape[-2], int) and x.shape[-2] > FEW for x in (a, b)]
    if p == 2 and mode != NEVER and (mode == ALWAYS or any(many)):
        return _product_distance(a, b)
    return _norm(a.unsqueeze(-2) - b.unsqueeze(-3), p)


def _cdist_backward(grad: Tensor, a: Tensor, b: Tensor, p: float, distance: Tensor) -> Any:
    if _empty(a, b):
        return NotImplemented
    if p == 0:
        return torch.zeros_like(a)
    slopes = _slope(a.unsqueeze(-2) - b.unsqueeze(-3), grad.unsqueeze(-1), distance.unsqueeze(-1), p)
    return torch.sum(slopes, [-2])


def _pdist(x: Tensor, p: float = 2) -> Any:
    if _empty(x) or x.shape[0] < 2:
        return NotImplemented
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1, device=x.device)
    return _norm(x[first] - x[second], p)


def _pdist_backward(grad: Tensor, x: Tensor, p: float, distance: Tensor) -> Any:
    """Row i is part of one pair with each other row j; the pairs stand in row-major order of i < j."""
    rows = x.shape[0]
    if _empty(x) or rows < 2:
        return NotImplemented
    if p == 0:
        return torch.zeros_like(x)
    i = torch.arange(rows, device=x.device)
    low, high = torch.minimum(i[:, None], i), torch.maximum(i[:, None], i)
    other = i[:, None] != i
    pair = torch.where(other, low * (2 * rows - 1 - low) // 2 + high - low - 1, 0)
    slopes = _slope(x[:, None] - x, grad[pair].unsqueeze(-1), distance[pair].unsqueeze(-1), p)
    return torch.sum(torch.where(other.unsqueeze(-1), slopes, 0), [1])


BODIES: Mapping[OpOverload, Callable[..., Any]] = {
    aten._cdist_forward.default: _cdist,
    aten._cdist_backward.default: _cdist_backward,
    aten._pdist_forward.default: _pdist,
    aten._pdist_backward.default: _pdist_backward,
}
