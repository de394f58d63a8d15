"""Which executor runs a kernel, and the kernel ready for the one on CUDA.

Enters: segments, their lowered kernels and the Config.  Leaves: the executor's name, the device, the kernel ready to
be bound (with a search for its tile, if the Config asks for one) and the sizes that its first call is likely to have.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Callable, Mapping

import torch

from fxfuser.config import Config
from fxfuser.errors import ExecutorError
from fxfuser.lowering.kernel import Lowered
from fxfuser.runtime.ahead import FirstCall
from fxfuser.runtime.build import Options
from fxfuser.runtime.launcher import Failed, Launch, cuda
from fxfuser.runtime.sizes import evaluate
from fxfuser.runtime.store import store
from fxfuser.runtime.tune import tuned
from fxfuser.segmenter.segment import Segment


def executor_of(device: torch.device, config: Config) -> str:
    """Which executor runs a kernel whose outputs live on `device`: "triton", "interpret" or "reference"."""
    if config.executor in ("reference", "interpret"):
        return config.executor
    if device.type == "cuda" and torch.version.hip is None:
        return "triton"
    if config.executor == "triton":
        error = ExecutorError("triton", f"it serves CUDA tensors, not {device.type}",
                              'executor="auto" runs them as ATen ops, "interpret" in Triton\'s interpreter')
        if config.strict:
            raise error
        warnings.warn(f"{error}\n  they run as ATen ops", stacklevel=2)
    return "reference"


def device_of(segment: Segment) -> torch.device:
    """The device of a segment's outputs."""
    return next((n.meta["val"].device for n in segment.outputs if isinstance(n.meta.get("val"), torch.Tensor)),
                torch.device("cpu"))


@dataclass(frozen=True)
class OnCuda:
    """A segment's launch function on its device, and what is to be built before its first call."""

    first_calls: tuple[FirstCall, ...]
    bind: Callable[[Failed], Launch]


def on_cuda(segment: Segment, low: Lowered, config: Config, hints: Mapping[str, int]) -> OnCuda:
    """`hints` are example values of the size symbols, 16 where there is none."""
    options, device = Options(fp_fusion=config.numerics != "eager"), device_of(segment).index
    sizes = evaluate(low.sizes, hints) or (16,) * len(low.sizes)
    if config.max_autotune and low.kernel.candidates:
        search = tuned(low.kernel, device, options, config.cache_dir)
        return OnCuda(search.likely(sizes), partial(search.bind, segment=segment.name))
    kernel = cuda(low.kernel, device, options, store(config.cache_dir, "kernels"))
    return OnCuda((FirstCall(kernel, sizes),), kernel.bind)
