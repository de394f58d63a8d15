"""GEMM segment to programs.

Enters: a segment with a `GemmDomain`.  Leaves: its programs: the product with its epilogue in one kernel, and where it
reduces, kernels that combine the partial states of the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

import torch
from torch import fx

from fxfuser.config import Config
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.gemm.kernel import Context, GemmKernel, gemm_kernel
from fxfuser.lowering.gemm.partials import Epilogue, Finish, pointer_name, split_epilogue
from fxfuser.lowering.gemm.text import LAST_ARRIVER, PERSISTENT, TURNSTILE, Policy
from fxfuser.lowering.kernel import Launch, LoweredPrograms, Place, Program, Scratch
from fxfuser.lowering.lower import Body, kernel_of, loaded, stem
from fxfuser.lowering.schedule import product
from fxfuser.segmenter.segment import Segment

POLICIES = (PERSISTENT, LAST_ARRIVER, TURNSTILE)


def lower_gemm(segment: Segment, config: Config, hints: Mapping[str, int]) -> LoweredPrograms:
    """The programs of a GEMM segment; `hints` are example values of the graph's size symbols.

    Errors: none for a domain that `gemm_domain` accepted; any exception here is a fault.
    """
    domain = segment.domain
    assert isinstance(domain, GemmDomain), f"{segment.name} has no domain of a product"
    builder = _Builder(segment, domain, tuple(loaded(domain.points(), segment)), Context(config, hints))
    programs = [p for policy in POLICIES if (p := builder.program(policy)) is not None]
    return LoweredPrograms(tuple(programs), tuple(segment.inputs.index(n) for n in builder.inputs),
                           tuple(range(len(segment.outputs))), tuple(s.text for s in builder.sizes.names))


@dataclass
class _Builder:
    """One program of a segment.  `sizes` are the program's own, which its launches' are expressions of."""

    segment: Segment
    domain: GemmDomain
    inputs: tuple[fx.Node, ...]
    context: Context
    sizes: Sizes = field(default_factory=Sizes)

    def program(self, policy: Policy) -> Program | None:
        epilogue = split_epilogue(self.domain)
        made = gemm_kernel(self.segment, self.domain, epilogue, policy, self.context)
        if made is None:
            return None
        states = self._states(epilogue)
        parts = self._parts(made) if policy.splits else ()
        launches = [self._product(made, len(states) + len(parts))]
        launches += [self._finish(finish) for finish in epilogue.finishes]
        return Program(f"{made.kernel.name}_{policy.name}", tuple(launches), (*states, *parts), len(self.sizes.names))

    def _product(self, made: GemmKernel, scratch: int) -> Launch:
        places = [(Place.INPUT, self.inputs.index(n)) for n in made.inputs]
        places += [(Place.OUTPUT, self.segment.outputs.index(n)) for n in made.outputs]
        places += [(Place.SCRATCH, i) for i in range(scratch)]
        return Launch(made.kernel, tuple(places), tuple(map(self._symbol, made.sizes)))

    def _parts(self, made: GemmKernel) -> tuple[Scratch, ...]:
        """Tiles of unfinished sums, and the counters of those who have arrived."""
        tiles = self._tiles(frozenset(self.domain.program))
        each = Scratch(torch.float32, f"{tiles} * SPLITS * MBLOCK * NBLOCK")
        return (*[each] * made.dots, Scratch(torch.int32, tiles, kept=True))

    def _finish(self, finish: Finish) -> Launch:
        outputs = tuple(dict.fromkeys(s.node for s in finish.domain.stores))
        inputs = tuple(loaded(finish.domain.points(), self.segment))
        buffers = {pointer_name(b): dtype for p in finish.partials for b, dtype in zip(p.buffers, p.dtypes)}
        hints = dict(self.context.hints)
        counts = {symbol: self._tiles(over) for symbol, over in finish.tiles.items()}
        hints |= {symbol.text: self._tiles_hint(over) for symbol, over in finish.tiles.items()}
        body = Body(finish.domain, inputs, outputs, f"finish_{stem(self.segment)}"[:60], buffers, finish.pairs)
        made = kernel_of(body, self.context.config, hints)
        places = [(Place.INPUT, self.inputs.index(n)) for n in inputs]
        places += [(Place.SCRATCH, b) for p in finish.partials for b in p.buffers]
        places += [(Place.OUTPUT, self.segment.outputs.index(n)) for n in outputs]
        return Launch(made.kernel, tuple(places), tuple(counts.get(s) or self._symbol(s) for s in made.sizes))

    def _symbol(self, symbol: Symbol) -> str:
        """A kernel's size in terms of the program's."""
        return self.sizes.text(Poly((((symbol,), 1),)))

    def _tiles(self, over: frozenset[Axis]) -> str:
        """How many tiles lie along these axes."""
        domain, parts = self.domain, []
        if over & frozenset(domain.batch):
            parts.append(self.sizes.text(product(a.size for a in domain.batch)))
        if over & frozenset(domain.rows):
            parts.append(f"cdiv({self.sizes.text(product(a.size for a in domain.rows))}, MBLOCK)")
        if over & frozenset(domain.columns):
            parts.append(f"cdiv({self.sizes.text(product(a.size for a in domain.columns))}, NBLOCK)")
        return " * ".join(parts)

    def _tiles_hint(self, over: frozenset[Axis]) -> int:
        total = 1
        for axis in over:
            total *= axis.size if isinstance(axis.size, int) else 1024
        return max(1, total // 128)

    def _states(self, epilogue: Epilogue) -> tuple[Scratch, ...]:
        found: list[Scratch] = []
        for partial in epilogue.partials:
            width: Size = partial.width
            size = f"{self._tiles(partial.over)} * {self.sizes.text(width)}"
            found += [Scratch(dtype, size) for dtype in partial.dtypes]
        return tuple(found)
