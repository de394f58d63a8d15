"""The spine: Dynamo's graph in, a callable out.

    GraphModule --capture--> joint ATen graph --passes--> ATen graph --segmenter--> Segmentation
        --lowering--> Kernels --plan--> Plan --runtime--> callable

Nothing flows back: each stage sees what the one before it returned, and only the passes change a graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Mapping, Sequence

from torch import fx

from fxfuser import observe
from fxfuser.capture import Compiled, capture
from fxfuser.config import Config
from fxfuser.fuel import Fuel
from fxfuser.runtime.build_plan import build
from fxfuser.runtime.capturable import Boundary
from fxfuser.runtime.cuda_graphs import graphed
from fxfuser.runtime.lower_segments import lower_segments
from fxfuser.runtime.rates import rates_for
from fxfuser.runtime.stored_segments import entry
from fxfuser.segmenter.segmenter import segment


def fxfuser(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The torch.compile backend.  Raises UnknownOption or InvalidOption for a `mode` or an option it does not know."""
    return capture(gm, example_inputs, Config.resolve(mode, options), compile_graph)


def compile_graph(
    graph: fx.GraphModule, config: Config, name: str, boundary: Boundary = Boundary(), fuel: Fuel | None = None
) -> Compiled:
    """One ATen graph, after the passes, to a function of one list; `name` is what its plan is called.

    `boundary` is what AOTAutograd knows of the graph's inputs and outputs; `fuel` is what the passes left of it.
    """
    stored = entry(graph.graph, config, rates_for(graph.graph, config), fuel)
    found = stored.load()
    if found is None:
        segmentation = segment(graph, stored.rates, fuel, config.products)
        observe.record(observe.SegmentationRecord(segmentation))
        found = segmentation, lower_segments(graph, segmentation, config)
        stored.keep(*found)
    # a replay would not ask whether anything still needs what was saved
    plan = build(graph, *found, config, name, replace(boundary, needed=None) if config.cuda_graphs else boundary)
    if observe.active():
        observe.record(observe.PlanRecord(plan.source))
    if config.cuda_graphs and config.executor != "interpret":  # which computes on the host
        return graphed(plan.compile(), graph, boundary, name)
    return plan.compile()
