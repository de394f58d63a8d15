"""`fxfuser.explain(fn, *args)`: what stays apart in a function's kernels, why, and what would join it.

Enters: a function and its arguments.  Leaves: an `Explanation`, a value that prints as `fxfuser explain` does.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping

import torch

from fxfuser import observe, report, rewrites
from fxfuser.backend import fxfuser
from fxfuser.observe import GraphTrace, LossRecord, MaskRecord
from fxfuser.report import BoundaryRow, RequestRow


@dataclass(frozen=True)
class GraphExplanation:
    """One graph: its final boundaries and what became of each context of `fxfuser.fuse()`."""

    name: str
    boundaries: tuple[BoundaryRow, ...]
    requests: tuple[RequestRow, ...]
    text: str

    @staticmethod
    def of(trace: GraphTrace) -> GraphExplanation:
        return GraphExplanation(trace.name, report.boundary_rows(trace), report.request_rows(trace),
                                report.boundary_report(trace))


@dataclass(frozen=True)
class Explanation:
    """The graphs of one call, forward and backward, in the order in which they were compiled."""

    graphs: tuple[GraphExplanation, ...]
    losses: tuple[LossRecord, ...] = ()  # of linear layers with their cross entropy
    masks: tuple[MaskRecord, ...] = ()  # of attention

    @property
    def boundaries(self) -> tuple[BoundaryRow, ...]:
        return tuple(b for g in self.graphs for b in g.boundaries)

    @property
    def requests(self) -> tuple[RequestRow, ...]:
        return tuple(r for g in self.graphs for r in g.requests)

    def __str__(self) -> str:
        graphs = [f"=== {g.name}\n\n{g.text}" for g in self.graphs]
        told = [*map(rewrites.layer, self.losses), rewrites.masks(self.masks), *graphs]
        return "\n\n".join(filter(None, told)) or "nothing was compiled"


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Compiles and calls `fn` once, with the gradients of its results; no `.grad` changes.

    Raises what `fn` raises.
    """
    backend = functools.partial(fxfuser)  # a backend of its own: what was compiled before is compiled again
    functools.update_wrapper(backend, fxfuser)
    with observe.recording() as recording:
        results = torch.compile(fn, backend=backend)(*args, **kwargs)
        outputs = [t for t in tensors_in(results) if t.requires_grad]
        parameters = fn.parameters() if isinstance(fn, torch.nn.Module) else ()
        leaves = [t for t in (*tensors_in((args, kwargs)), *parameters) if t.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(t) for t in outputs], allow_unused=True)
    graphs = tuple(GraphExplanation.of(t) for t in recording.graphs if t.segmentation is not None)
    return Explanation(graphs, tuple(loss for t in recording.graphs for loss in t.losses),
                       tuple(mask for t in recording.graphs for mask in t.masks))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
