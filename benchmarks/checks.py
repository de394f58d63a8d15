"""What gpu_check compiles: functions with the makers of their inputs, by name.

`CHECKS` maps names to `Check`s; the *_cases modules add theirs.  Makers draw on the CPU after a fixed seed, so that
every device and every call of a maker sees the same values; sizes are smaller where kernels are interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64
Inputs = Callable[[torch.device], tuple[Any, ...]]


@dataclass(frozen=True)
class Check:
    """`fn` on the inputs of each maker in turn, compiled once.

    grad: also the gradients of all floating inputs, or of those among the first `leaves`, for tangents that are
    contiguous, or lie as outputs do with `as_outputs`.  reference: False where a float64 run is no reference (a
    rounding in the middle decides the result); then eager's values are.  repeatable: results must be bitwise equal from
    run to run.  threads: how many threads call the compiled function at once, each on a stream of its own.  policy:
    products are computed by our program of this policy with the tile of this number (see `policies`).  launches: of how
    many kernels each graph must be, with no ATen call beside them, and shows: features of loops (see `kernel_loops`)
    that they must have, both at the sizes of a GPU.
    """

    name: str
    fn: Callable[..., Any]
    makers: tuple[Inputs, ...]
    grad: bool = False
    leaves: int | None = None
    as_outputs: bool = False
    dynamic: bool | None = False
    reference: bool = True
    repeatable: bool = True
    risky: bool = False
    cuda_only: bool = False
    threads: int = 0
    policy: str = ""
    tile: int = 0
    launches: int | None = None
    shows: frozenset[str] = frozenset()


CHECKS: dict[str, Check] = {}


def add(name: str, fn: Callable[..., Any], *makers: Inputs, **settings: Any) -> None:
    assert name not in CHECKS, name
    CHECKS[name] = Check(name, fn, makers, **settings)


def draw(device: torch.device, *shape: int, dtype: torch.dtype = F32) -> Tensor:
    """Random values of the dtype: normal, whole numbers around 0, or a coin."""
    if dtype == torch.bool:
        return (torch.rand(shape) < 0.5).to(device)
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64).to(dtype).to(device)
    low = 0 if dtype == torch.uint8 else -20
    return torch.randint(low, 21, shape).to(dtype).to(device)


def of(*shapes: tuple[int, ...], dtype: torch.dtype = F32, dtypes: tuple[torch.dtype, ...] = ()) -> Inputs:
    """A maker of contiguous tensors of these shapes."""
    kinds = dtypes or (dtype,) * len(shapes)
    return lambda device: tuple(draw(device, *s, dtype=d) for s, d in zip(shapes, kinds))


def large(device: torch.device, small: int, big: int) -> int:
    return big if device.type == "cuda" else small


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shift(t: Tensor, by: int = 1) -> Tensor:
    """The same values at a storage offset, so that the address is not aligned to 16 bytes."""
    base = torch.empty(t.numel() + by, dtype=t.dtype, device=t.device)
    view = base[by:].view(t.shape)
    return view.copy_(t)


def names(device: torch.device, only: str | None = None) -> list[str]:
    """The checks for a device that contain one of the comma-separated texts."""
    texts = only.split(",") if only else [""]
    return [c.name for c in CHECKS.values()
            if (device.type == "cuda" or not c.cuda_only) and any(t in c.name for t in texts)]
