"""Products with their epilogues as programs: traced, lowered under every policy, interpreted, judged against fp64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from fxfuser.config import Config
from fxfuser.domain.chained import product_domain
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.views import source
from fxfuser.lowering.gemm import kernel as gemm_kernel
from fxfuser.lowering.gemm.lower import lower_gemm
from fxfuser.lowering.kernel import LoweredPrograms, Program, Tile
from fxfuser.lowering.lower import size_hints
from fxfuser.ops import Kind, kind_of
from fxfuser.runtime.programs import Arity, InterpretedProgram
from fxfuser.segmenter.segment import Segment, SegmentKind
from tests.lowering.harness import poisoned, symbols_of, trace

aten = torch.ops.aten
POLICIES = ("persistent", "last_arriver", "turnstile")  # of tiles; others come where they may pay
KINDS = (*POLICIES, "sliced", "parts", "one_grid", "rowwise")
HALF = (torch.bfloat16, torch.float16)
# an error that any result may have, relative to the largest: half a unit of a half's rounding, sums in another order
FLOOR = {torch.bfloat16: 2.0 ** -9, torch.float16: 2.0 ** -12, torch.float32: 2e-6, torch.float64: 1e-12}


@dataclass(frozen=True)
class Blocks:
    """A tile that is small enough to have borders in small matrices; its epilogue takes columns in `strips`."""

    rows: int = 16
    columns: int = 16
    depth: int = 16
    splits: int = 3
    group: int = 2
    warps: int = 1
    stages: int = 1
    strips: int = 2
    join: int = 2

    def tile(self, split: bool) -> Tile:
        last = (("SPLITS", self.splits), ("JOIN", self.join), ("TOGETHER", 2)) if split else (("RESIDENT", 1),)
        return Tile((("MBLOCK", self.rows), ("NBLOCK", self.columns), ("STRIPBLOCK", self.columns // self.strips),
                     ("KBLOCK", self.depth), ("GROUP", self.group), *last), self.warps, self.stages)

    def sliced(self) -> Tile:
        """Two slices of each step."""
        tile = self.tile(False)
        blocks = {**dict(tile.blocks), "KBLOCK": 2 * self.depth, "SLICES": 2}
        return replace(tile, blocks=tuple(blocks.items()), num_warps=2)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """The only tile that products get inside, under every policy."""
        with mock.patch.object(gemm_kernel, "gemm_tiles", lambda product: (self.tile(False),)), \
                mock.patch.object(gemm_kernel, "split_tiles", lambda product: (self.tile(True),)), \
                mock.patch.object(gemm_kernel, "part_tiles", lambda product: (self.tile(True),)), \
                mock.patch.object(gemm_kernel, "sliced_tiles", lambda product: (self.sliced(),)):
            yield


@dataclass(frozen=True, eq=False)
class Made:
    """A function as one segment, and its programs by policy."""

    fn: Callable[..., Any]
    graph: fx.GraphModule
    segment: Segment
    lowered: LoweredPrograms

    @property
    def programs(self) -> dict[str, Program]:
        return {next(name for name in KINDS if p.name.endswith(name)): p for p in self.lowered.programs}

    @property
    def domain(self) -> GemmDomain:
        assert isinstance(self.segment.domain, GemmDomain)
        return self.segment.domain

    def source(self, policy: str = "persistent", launch: int = 0) -> str:
        return self.programs[policy].launches[launch].kernel.source


def made(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[set[int]] = (),
         blocks: Blocks | None = Blocks(), config: Config = Config()) -> Made:
    """The function's programs; `blocks` None: with the tiles that its sizes get."""
    graph = trace(fn, args, dynamic)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function" and kind_of(n) not in (None, Kind.VIEW)]
    results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    outputs = tuple(dict.fromkeys(results if isinstance(results, (tuple, list)) else (results,)))
    domain = product_domain(nodes, outputs)
    assert isinstance(domain, GemmDomain), domain
    inputs = [n for n in graph.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], torch.Tensor)]
    segment = Segment(0, SegmentKind.GEMM, tuple(nodes), tuple(dict.fromkeys(map(source, inputs))), outputs, domain)
    if blocks is None:
        return Made(fn, graph, segment, lower_gemm(segment, config, size_hints(graph.graph)))
    with blocks.chosen():
        return Made(fn, graph, segment, lower_gemm(segment, config, size_hints(graph.graph)))


def run(of: Made, program: Program, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The program's outputs.  What it does not write is NaN or 77; what it leaves in a counter is an error."""
    symbols = symbols_of(of.graph, args)
    given = dict(zip((n for n in of.graph.graph.nodes if n.op == "placeholder"), args))
    outputs = [poisoned(node.meta["val"], symbols) for node in of.segment.outputs]
    pointers = [given[of.segment.inputs[i]] for i in of.lowered.inputs] + [outputs[i] for i in of.lowered.outputs]
    sizes = [eval(s, {}, symbols) for s in of.lowered.sizes]
    InterpretedProgram(program, Arity.of(of.lowered)).run([*pointers, *sizes])
    return outputs


class _Wide(TorchDispatchMode):
    """Computes in float64; a cast to a half rounds."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        if func is aten._to_copy.default and wanted is not None and wanted.is_floating_point:
            value = func(*args, **kwargs) if wanted in HALF else args[0]
            return func(value, **{**kwargs, "dtype": torch.float64})
        return func(*args, **kwargs)


def results(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    found = fn(*args)
    return list(found) if isinstance(found, (tuple, list)) else [found]


def exact(fn: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the function gives in float64."""
    wide = [a.double() if a.is_floating_point() else a for a in args]
    with _Wide():
        return results(fn, wide)


def close(got: torch.Tensor, want: torch.Tensor, true: torch.Tensor) -> None:
    """`got` is about as close to the truth as eager's `want`; integers and what is not finite are equal."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    if not got.dtype.is_floating_point:
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        return
    finite = want.isfinite()
    torch.testing.assert_close(got[~finite], want[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    ours, eager = ((x[finite].double() - true[finite]).abs().max() for x in (got, want))
    limit = 2 * eager + FLOOR[got.dtype] * true[finite].abs().max()
    assert ours <= limit, f"error {float(ours):.2e}, eager's {float(eager):.2e}, at most {float(limit):.2e}"


def check(fn: Callable[..., Any], args: Sequence[torch.Tensor], dynamic: Sequence[set[int]] = (),
          more: Sequence[Sequence[torch.Tensor]] = (), policies: Sequence[str] = POLICIES, blocks: Blocks = Blocks(),
          config: Config = Config()) -> Made:
    """Lowers once; compares each policy's program with eager and fp64, on `args` and on each of `more`."""
    found = made(fn, args, dynamic, blocks, config)
    assert set(policies) <= set(found.programs)
    for given in (args, *more):
        # of copies without gaps: oneDNN's product of bf16 reads beyond rows on some CPUs, and multiplies nan by 0 there
        wanted = list(zip(results(fn, [a.clone() for a in given]), exact(fn, given), strict=True))
        wanted = [pair for i, pair in enumerate(wanted) if all(pair[0] is not p[0] for p in wanted[:i])]
        for policy in policies:
            for got, (want, true) in zip(run(found, found.programs[policy], given), wanted, strict=True):
                close(got, want, true)
    return found
