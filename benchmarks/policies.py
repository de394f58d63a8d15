"""Backends that compute products by our programs of one policy alone, for measurements and checks of that program.

Leaves: functions that torch.compile takes as a backend.  They are fxfuser's own spine with one thing changed: of a
product's programs those of one policy are kept, and where a tile is named, that tile alone.  Nothing is measured then
and the library takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxfuser import observe
from fxfuser.capture import Compiled, capture
from fxfuser.config import Config
from fxfuser.fuel import Fuel
from fxfuser.lowering.gemm import one_grid
from fxfuser.lowering.gemm.lower import POLICIES
from fxfuser.lowering.gemm.text import SLICED
from fxfuser.lowering.kernel import LoweredPrograms
from fxfuser.runtime.build_plan import build
from fxfuser.runtime.capturable import Boundary
from fxfuser.runtime.lower_segments import AnyLowered, LoweredGemm, lower_segments
from fxfuser.runtime.programs import tiles_of, with_tile
from fxfuser.runtime.rates import rates_for
from fxfuser.segmenter.segmenter import segment

NAMES = tuple(p.name for p in POLICIES if not p.sliced)  # of one kernel, tiles of products of any size
SLICES = SLICED.name  # of products of few rows or columns
SINGLE = (*NAMES, SLICES, one_grid.NAME)  # one kernel of any kind that multiplies tiles
APART = ("parts", one_grid.NAME)  # parts that others than those who leave them add up
EVERY = (*SINGLE, "parts", "rowwise")


class NoProgram(Exception):
    """The graph has no product that a program of this policy computes."""


def backend(policy: str, tile: int | None = None) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """`tile` counts the policy's tiles, the default being 0, beyond the last from the start again; None: the fastest of
    the first few, by measurement.
    """

    def compile_graph(graph: fx.GraphModule, config: Config, name: str, boundary: Boundary = Boundary(),
                      fuel: Fuel | None = None) -> Compiled:
        segmentation = segment(graph, rates_for(graph.graph, config), fuel, config.gemm)
        observe.record(observe.SegmentationRecord(segmentation))
        lowered = lower_segments(graph, segmentation, config)
        kept = {i: _kept(low, policy, tile) for i, low in lowered.items()}
        if not any(isinstance(low, LoweredGemm) for low in kept.values()):
            raise NoProgram(f"no product is fused with anything{_reasons(segmentation.boundaries)}")
        return build(graph, segmentation, kept, config, name, boundary).compile()

    def compile_region(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        config = Config.resolve(options={"gemm": "fused", "strict": True})
        return capture(module, inputs, config, compile_graph)

    return compile_region


def _reasons(boundaries: Sequence[Any]) -> str:
    found = dict.fromkeys(b.reason for b in boundaries if b.rule in ("gemm", "epilogue", "prologue"))
    return "".join(f"; {reason}" for reason in found)


def _kept(low: AnyLowered, policy: str, tile: int | None) -> AnyLowered:
    if not isinstance(low, LoweredGemm):
        return low
    assert low.programs is not None, "fused products have programs"
    return replace(low, programs=_of_policy(low.programs, policy, tile))


def _of_policy(lowered: LoweredPrograms, policy: str, tile: int | None) -> LoweredPrograms:
    """The program of a policy, and of its tiles the one with that number."""
    found = [p for p in lowered.programs if p.name.endswith(f"_{policy}")]
    if not found:
        raise NoProgram(f"no tile of {policy} is worth a try at these sizes")
    program = found[0]  # the others have other tiles of a second product
    if tile is None:
        return replace(lowered, programs=(program,))
    tiles = tiles_of(program)
    first, *others = with_tile(program, tiles[tile % len(tiles)]).launches
    alone = replace(first, kernel=replace(first.kernel, candidates=()))
    return replace(lowered, programs=(replace(program, launches=(alone, *others)),))
