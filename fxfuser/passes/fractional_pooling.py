"""Bodies of fractional max pooling: windows that begin where random numbers say (Graham, 2014).

    y, i = aten.fractional_max_pool2d(x, [2, 2], [3, 3], u)    ->    s = floor((o + u) * alpha) - floor(u * alpha)
                                                                     w = aten.index(x, [n, c, s + j, s + k])
                                                                     y = aten.amax(w, [-2, -1])

The starts are computed as ATen's kernels do.  A body answers NotImplemented where a pooled length is symbolic.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxfuser.ops.promotion import opmath
from fxfuser.ops.window_place import WINDOW_PLACE
from fxfuser.passes.windows import along

aten = torch.ops.aten
Ints = Sequence[int]


def _starts(samples: Tensor, size: int, outputs: int, kernel: int) -> Tensor:
    """Where each window begins: [N, C, outputs], the last at the end."""
    i = torch.arange(outputs, device=samples.device)
    last = size - kernel
    if outputs == 1:
        return (i + last).expand(*samples.shape, 1)
    # the CPU's kernel rounds each step to a half, the GPU's none
    wide = opmath(samples.dtype)
    kept = samples.dtype if samples.device.type == "cpu" else wide
    alpha = (torch.full((), last, dtype=wide, device=samples.device) / (outputs - 1)).to(kept).to(wide)
    u = samples.to(wide).unsqueeze(-1)
    begins = [(step.to(kept).to(wide) * alpha).to(kept).to(torch.int64) for step in (i + u, u)]
    return torch.where(i == outputs - 1, last, begins[0] - begins[1])


def _pool(x: Tensor, kernel: Ints, outputs: Ints, samples: Tensor) -> Any:
    rank = len(kernel)
    sizes = list(x.shape[x.dim() - rank:])
    if not all(isinstance(s, int) and s > 0 for s in (*sizes, *outputs)):
        return NotImplemented
    batched = x if x.dim() == rank + 2 else x.unsqueeze(0)
    total = 2 + 2 * rank  # batch, channel, results, places in a window
    at: list[Tensor] = [along(torch.arange(n, device=x.device), d, total) for d, n in enumerate(batched.shape[:2])]
    for d, (size, k) in enumerate(zip(sizes, kernel)):
        which = rank - 1 - d if rank == 2 else d  # of an image's two numbers the first belongs to the width
        starts = _starts(samples[..., which], size, outputs[d], k)
        shape = [*starts.shape[:2], *(-1 if e == d else 1 for e in range(rank)), *[1] * rank]
        at.append(starts.reshape(shape) + along(torch.arange(k, device=x.device), 2 + rank + d, total))
    windows = aten.index.Tensor(batched, at)
    position: Any = 0
    for size, p in zip(sizes, at[2:]):
        position = position * size + p
    dims = list(range(2 + rank, total))
    chosen = WINDOW_PLACE(windows, dims).unsqueeze(-1)
    flat = position.expand(windows.shape).flatten(2 + rank)
    found = torch.gather(flat, -1, chosen).squeeze(-1)
    values = torch.amax(windows, dims)
    return (values, found) if batched is x else (values.squeeze(0), found.squeeze(0))


BODIES: Mapping[OpOverload, Callable[..., Any]] = {
    aten.fractional_max_pool2d.default: _pool,
    aten.fractional_max_pool3d.default: _pool,
}
