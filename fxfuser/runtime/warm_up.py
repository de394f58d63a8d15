"""What CUDA's libraries do at their first call, done beside the tracing of the graph that will call them.

Enters: Dynamo's graph.  Leaves: nothing.  The first product, attention and convolution of a process take a second and
more: handles, modules of kernels, what cuDNN compiles.  None of it needs Python's lock, and tracing is nothing but
Python.  So a thread calls each kind of function that the graph calls, on small tensors, and has ended when the graph is
compiled.

Invariants: no error leaves; no random number is drawn; a library is called ahead once per process and device, never
during a capture, and not where the process has run a model: then it is ready.  A thread inherits none of torch's modes,
so nothing that it calls is traced.  Its handles go back to torch's pool, from which the next thread that asks gets them
with their workspaces: nothing stays that would not have been made later.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

log = logging.getLogger("fxfuser")

SIDE = 128  # of the matrices that are multiplied
LONGEST = 256  # positions that attend to each other, at most
CHANNELS, PIXELS, WINDOW = 8, 16, 3  # of what is convolved: channels, and sizes along each dimension

Made = tuple[torch.Tensor, Sequence[torch.Tensor]]  # a result, and what it was made of


@dataclass(frozen=True)
class Sample:
    """One kind of call; `sizes` are those of its result that may decide which kernels are chosen."""

    make: Callable[[Sample], Made]
    device: torch.device
    dtype: torch.dtype
    trained: bool
    sizes: tuple[int, ...] = ()
    causal: bool = False

    def call(self) -> None:
        """Forward and, of what is trained, backward, on this thread: autograd's own may be tracing a backward."""
        with torch.set_grad_enabled(self.trained), torch.autograd.set_multithreading_enabled(False):
            made, leaves = self.make(self)
            if self.trained:
                torch.autograd.grad(made, leaves, torch.zeros_like(made))

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device, requires_grad=self.trained)


def _product(sample: Sample) -> Made:
    """With a bias and without one, which are two libraries."""
    x, weight, bias = sample.zeros(SIDE, SIDE), sample.zeros(SIDE, SIDE), sample.zeros(SIDE)
    return torch.mm(F.linear(x, weight, bias), weight), (x, weight, bias)


def _attention(sample: Sample) -> Made:
    q, k, v = (sample.zeros(2, 2, *sample.sizes) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=sample.causal), (q, k, v)


def _convolution(sample: Sample) -> Made:
    convolve = (F.conv1d, F.conv2d, F.conv3d)[len(sample.sizes) - 1]
    x = sample.zeros(1, CHANNELS, *sample.sizes)
    weight = sample.zeros(CHANNELS, CHANNELS, *(WINDOW for _ in sample.sizes))
    return convolve(x, weight), (x, weight)


# functions, and names of methods
MAKERS: Mapping[Any, Callable[[Sample], Made]] = {
    **dict.fromkeys((F.linear, torch.matmul, operator.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
                     torch.einsum, "matmul", "mm", "bmm", "addmm", "baddbmm"), _product),
    F.scaled_dot_product_attention: _attention,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution)}


def samples(module: fx.GraphModule) -> tuple[Sample, ...]:
    """One of each kind of call that Dynamo's graph, or one inside it, makes on a CUDA device, in their order."""
    graphs = (m.graph for m in module.modules() if isinstance(m, fx.GraphModule))
    found = (_sample(n) for graph in graphs for n in graph.nodes if n.op in ("call_function", "call_method"))
    return tuple(dict.fromkeys(s for s in found if s is not None))


def _sample(node: fx.Node) -> Sample | None:
    make, value = MAKERS.get(node.target), node.meta.get("example_value")
    if make is None or not isinstance(value, torch.Tensor) or not _on_cuda(value) or not value.is_floating_point():
        return None
    sizes: tuple[int, ...] = ()
    if make is _attention:
        length, depth = (n if type(n) is int else LONGEST for n in value.shape[-2:])
        sizes = (min(length, LONGEST), depth)
    elif make is _convolution:
        sizes = (PIXELS,) * (value.dim() - 2)
    causal = node.kwargs.get("is_causal", node.args[5] if make is _attention and len(node.args) > 5 else False)
    return Sample(make, value.device, value.dtype, value.requires_grad, sizes, causal is True)


def _on_cuda(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"


@contextmanager
def libraries(module: fx.GraphModule) -> Iterator[None]:
    """Inside, a thread makes ready the libraries that Dynamo's graph will call; afterwards they are."""
    thread = _started(samples(module))
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


def _started(wanted: Iterable[Sample]) -> threading.Thread | None:
    """The thread that calls what is new among these, None where nothing is or nothing may be called."""
    try:
        ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        if not ready or torch.cuda.is_current_stream_capturing():
            return None
        new = [s for s in _claimed(wanted) if not _has_run(s.device)]
        if not new:
            return None
        # a workspace belongs to a stream: to the one on which the graph will run
        streams = {s.device: torch.cuda.current_stream(s.device) for s in new}
        thread = threading.Thread(target=_call, args=(new, streams), name="fxfuser-warm-up", daemon=True)
        thread.start()
        return thread
    except Exception:
        log.info("libraries are not made ready ahead", exc_info=True)
        return None


def _claimed(wanted: Iterable[Sample]) -> list[Sample]:
    """Those of libraries that no other compilation has called; another thread might need another handle."""
    with _lock:
        new = [s for s in wanted if (s.make, s.device) not in _called]
        _called.update((s.make, s.device) for s in new)
    return new


def _has_run(device: torch.device) -> bool:
    """Whether the process has run a model here: it has then given back about as many tensors as the model holds."""
    counts = torch.cuda.memory_stats(device)
    freed, held = (counts.get(f"allocation.all.{what}", 0) for what in ("freed", "current"))
    return bool(2 * freed > held)


def _call(wanted: Sequence[Sample], streams: Mapping[torch.device, torch.cuda.Stream]) -> None:
    for sample in wanted:
        try:
            with torch.cuda.stream(streams[sample.device]):  # and on its device
                sample.call()
        except Exception as error:  # the graph's own call meets the same fault, where there is somebody to tell
            log.info("%s is not made ready: %s: %s", sample, type(error).__name__, error)


def _after_fork() -> None:
    """A forked child does not have the thread that held the lock."""
    global _lock
    _lock = threading.Lock()


_called: set[tuple[Callable[[Sample], Made], torch.device]] = set()
_lock = threading.Lock()
os.register_at_fork(after_in_child=_after_fork)
