"""Calls of the ops for which passes/ has bodies in files of their own: pooling, resampling, distances, searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True, eq=False)
class Call:
    """An op and its arguments; tensors among them are the inputs of `function`."""

    op: OpOverload
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def inputs(self) -> list[Tensor]:
        return [a for a in (*self.arguments, *self.named.values()) if isinstance(a, Tensor)]

    def function(self, *inputs: Tensor) -> Any:
        given = iter(inputs)
        arguments = [next(given) if isinstance(a, Tensor) else a for a in self.arguments]
        named = {k: next(given) if isinstance(a, Tensor) else a for k, a in self.named.items()}
        return self.op(*arguments, **named)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(*shape: int, low: int = -3, high: int = 4) -> Tensor:
    """Numbers of which many are equal."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))


def special(*shape: int) -> Tensor:
    """Equal numbers, several nan, and -inf in whole windows."""
    x = whole(*shape).float()
    x[..., :4, :4], x[..., 5, 2:6], x[..., -2:, -3:] = -INF, NAN, NAN
    return x


X, X3 = drawn(2, 3, 9, 8), drawn(1, 2, 5, 6, 7)
SPECIAL, TIES = special(2, 2, 9, 8), whole(2, 3, 9, 8)
SLIDING: tuple[tuple[Any, ...], ...] = (
    ([2, 2], [2, 2], [0, 0]), ([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 3], [1, 0]), ([4, 3], [], [1]),
    ([5, 3], [3, 2], [2, 1]))
AVERAGED: tuple[tuple[Any, ...], ...] = (
    (False, True, None), (True, True, None), (True, False, None), (False, False, None), (True, True, 5))
POOLED = ([3, 3], [2, 2], [1, 1], [1, 1]), ([3, 2], [1, 2], [1, 0], [2, 3]), ([2, 2], [], [0, 0], [1, 1])
SIZES = [4, 3], [3, 4], [9, 2], [1, 1], [5, 8]
SORTED = torch.tensor([-1.5, -1.0, -1.0, 0.0, 0.25, 2.0, 2.0])
SOUGHT = torch.cat((SORTED, torch.tensor([NAN, INF, -INF, 0.1, 5.0, -2.0])))
ROWS = whole(3, 7).sort(1)[0]


def _pooling() -> list[Call]:
    calls = [Call(aten.avg_pool2d.default, (X, *sliding, *kind), {}) for sliding in SLIDING for kind in AVERAGED]
    calls += [Call(aten.avg_pool2d.default, (x, [3, 3], [2, 2], [1, 1]), {}) for x in (
        X[0], TIES, X.to(memory_format=torch.channels_last))]
    calls += [Call(aten.avg_pool3d.default, (X3, [2, 3, 2], [], [1, 1, 0], True, include), {}) for include in (0, 1)]
    calls += [Call(aten._adaptive_avg_pool2d.default, (X, size), {}) for size in SIZES]
    calls.append(Call(aten._adaptive_avg_pool3d.default, (X3, [2, 3, 5]), {}))
    for x in (X, SPECIAL, TIES, X[0], torch.full((1, 1, 9, 8), -INF)):
        calls += [Call(aten.max_pool2d_with_indices.default, (x, *pooled, ceil), {})
                  for pooled in POOLED for ceil in (False, True)]
        if x.is_floating_point():
            calls += [Call(aten.adaptive_max_pool2d.default, (x, size), {}) for size in SIZES[:3]]
    calls.append(Call(aten.max_pool3d_with_indices.default, (X3, [2, 3, 2], [2, 1, 2], [1, 1, 0], [1, 2, 1]), {}))
    calls.append(Call(aten.adaptive_max_pool3d.default, (X3, [2, 3, 5]), {}))
    numbers = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(2))
    calls += [Call(aten.fractional_max_pool2d.default, (x, [2, 3], size, numbers[:n]), {})
              for x, n in ((X, 2), (X[0], 1)) for size in ([4, 3], [1, 5])]
    three = torch.rand(1, 2, 3, generator=torch.Generator().manual_seed(2))
    calls.append(Call(aten.fractional_max_pool3d.default, (X3, [2, 2, 2], [2, 3, 4], three), {}))
    return calls


def _pooling_backward() -> list[Call]:
    calls = []
    for forward in _pooling():
        name = forward.op._schema.name.removeprefix("aten::")
        if name.startswith("fractional") or not forward.inputs[0].is_floating_point():
            continue
        x, *rest = forward.arguments
        made = forward.function(x)
        op = getattr(aten, f"{name}_backward").default
        if "adaptive" in name:
            rest = []
        elif name.startswith("avg"):
            rest = [*rest, *(False, True, None)[len(rest) - 3:]] if len(rest) < 6 else rest
        else:
            rest = [*rest, False] if len(rest) < 5 else rest
        grad = drawn(*(made[0] if isinstance(made, tuple) else made).shape, seed=3)
        calls.append(Call(op, (grad, x, *rest, *([made[1]] if isinstance(made, tuple) else [])), {}))
    return calls


def _resampling() -> list[Call]:
    calls = []
    unscaled = None, None
    for size, align, scales in (([5, 4], False, unscaled), ([18, 5], False, unscaled), ([4, 4], True, unscaled),
                                ([15, 13], False, (1.7, 1.7)), ([6, 5], False, (0.7, 0.7))):
        for name in ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"):
            calls.append(Call(getattr(aten, name).default, (X[:1], size, align, *scales), {}))
            backward, grad = getattr(aten, f"{name}_backward").default, drawn(1, 3, *size, seed=3)
            calls.append(Call(backward, (grad, size, [1, 3, 9, 8], align, *scales), {}))
        calls.append(Call(aten.upsample_bilinear2d.default, (X, size, align, *scales), {}))
    return calls


def _grids() -> list[Call]:
    flat = torch.rand(2, 4, 5, 2, generator=torch.Generator().manual_seed(4)) * 3 - 1.5
    deep = torch.rand(1, 3, 4, 5, 3, generator=torch.Generator().manual_seed(4)) * 3 - 1.5
    ways = [(0, 0, False), (0, 1, True), (0, 2, False), (1, 0, True), (1, 2, True), (1, 1, False)]
    return [Call(aten.grid_sampler_2d.default, (X, flat, *way), {}) for way in (*ways, (2, 0, False))] + \
        [Call(aten.grid_sampler_3d.default, (X3, deep, *way), {}) for way in ways]


def _distances() -> list[Call]:
    calls = []
    for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF):
        for a, b in ((drawn(5, 4), drawn(3, 4, seed=1)), (whole(2, 6, 4).float(), whole(2, 3, 4).float())):
            calls.append(Call(aten._cdist_forward.default, (a, b, p, None), {}))
            distance = calls[-1].function(a, b)
            calls.append(Call(aten._cdist_backward.default, (drawn(*distance.shape, seed=2), a, b, p, distance), {}))
        for x in (drawn(5, 4), whole(6, 3).float(), drawn(2, 1)):
            calls.append(Call(aten._pdist_forward.default, (x, p), {}))
            distance = calls[-1].function(x)
            calls.append(Call(aten._pdist_backward.default, (drawn(*distance.shape, seed=2), x, p, distance), {}))
    calls += [Call(aten._cdist_forward.default, (drawn(n, 4), drawn(3, 4, seed=1), 2.0, mode), {})
              for n, mode in ((30, None), (30, 2), (5, 1))]
    return calls


def _searches() -> list[Call]:
    calls = []
    for right in (False, True):
        calls.append(Call(aten.bucketize.Tensor, (SOUGHT, SORTED), {"right": right, "out_int32": right}))
        calls.append(Call(aten.bucketize.Scalar, (0.25, SORTED), {"right": right}))
        calls.append(Call(aten.searchsorted.Tensor, (ROWS, whole(3, 5)), {"right": right}))
        calls.append(Call(aten.searchsorted.Scalar, (ROWS[0], 1.5), {"right": right}))
    mixed = whole(3, 7)
    calls.append(Call(aten.searchsorted.Tensor, (mixed, whole(3, 2)), {"side": "right", "sorter": mixed.argsort(1)}))
    calls.append(Call(aten.searchsorted.Tensor, (SORTED[:0], SOUGHT), {}))
    calls.append(Call(aten.searchsorted.Tensor, (SORTED.flip(0), SOUGHT), {}))  # in disorder the same steps are taken
    return calls


def _hashes() -> list[Call]:
    tensors = (X, TIES, TIES > 0, TIES.to(torch.uint8), X.half())
    return [Call(aten.hash_tensor.default, (x, dim), {"keepdim": keep})
            for x in tensors for dim, keep in (([], False), ([1], False), ([0, -1], True))]


GROUPS: dict[str, Callable[[], list[Call]]] = {
    "pooling": _pooling, "pooling backward": _pooling_backward, "resampling": _resampling, "grids": _grids,
    "distances": _distances, "searches": _searches, "hashes": _hashes}
