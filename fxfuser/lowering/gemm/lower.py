"""GEMM segment to programs.

Enters: a segment with a `GemmDomain`.  Leaves: its programs: the product with its epilogue in one kernel, and where it
reduces, kernels that combine the partial states of the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Mapping

from torch import fx

from fxfuser.config import Config
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.gemm.kernel import GemmKernel, gemm_kernel
from fxfuser.lowering.gemm.partials import Epilogue, Finish, pointer_name, split_epilogue
from fxfuser.lowering.kernel import Launch, LoweredPrograms, Place, Program, Scratch
from fxfuser.lowering.lower import Body, kernel_of, loaded, stem
from fxfuser.lowering.schedule import product
from fxfuser.segmenter.segment import Segment


def lower_gemm(segment: Segment, config: Config, hints: Mapping[str, int]) -> LoweredPrograms:
    """The programs of a GEMM segment; `hints` are example values of the graph's size symbols.

    Errors: none for a domain that `gemm_domain` accepted; any exception here is a fault.
    """
    domain = segment.domain
    assert isinstance(domain, GemmDomain), f"{segment.name} has no domain of a product"
    inputs = loaded(domain.points(), segment)
    builder = _Builder(segment, domain, tuple(inputs), config, hints)
    program = builder.program()
    return LoweredPrograms((program,), tuple(segment.inputs.index(n) for n in inputs),
                           tuple(range(len(segment.outputs))), tuple(s.text for s in builder.sizes.names))


@dataclass
class _Builder:
    """One program of a segment.  `sizes` are the program's own, which its launches' are expressions of."""

    segment: Segment
    domain: GemmDomain
    inputs: tuple[fx.Node, ...]
    config: Config
    hints: Mapping[str, int]
    sizes: Sizes = field(default_factory=Sizes)

    def program(self) -> Program:
        epilogue = split_epilogue(self.domain)
        made = gemm_kernel(self.segment, self.domain, epilogue, self.config, self.hints)
        launches = [self._product(made, epilogue)]
        launches += [self._finish(finish, epilogue) for finish in epilogue.finishes]
        return Program(made.kernel.name, tuple(launches), self._scratch(epilogue), len(self.sizes.names))

    def _product(self, made: GemmKernel, epilogue: Epilogue) -> Launch:
        places = [(Place.INPUT, self.inputs.index(n)) for n in made.inputs]
        places += [(Place.OUTPUT, self.segment.outputs.index(n)) for n in made.outputs]
        places += [(Place.SCRATCH, b) for p in epilogue.partials for b in p.buffers]
        return Launch(made.kernel, tuple(places), tuple(map(self._symbol, made.sizes)))

    def _finish(self, finish: Finish, epilogue: Epilogue) -> Launch:
        outputs = tuple(dict.fromkeys(s.node for s in finish.domain.stores))
        inputs = tuple(loaded(finish.domain.points(), self.segment))
        buffers = {pointer_name(b): dtype for p in finish.partials for b, dtype in zip(p.buffers, p.dtypes)}
        hints = dict(self.hints)
        counts = {symbol: self._tiles(over) for symbol, over in finish.tiles.items()}
        hints |= {symbol.text: self._tiles_hint(over) for symbol, over in finish.tiles.items()}
        body = Body(finish.domain, inputs, outputs, f"finish_{stem(self.segment)}"[:60], buffers, finish.pairs)
        made = kernel_of(body, self.config, hints)
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

    def _scratch(self, epilogue: Epilogue) -> tuple[Scratch, ...]:
        found: list[Scratch] = []
        for partial in epilogue.partials:
            width: Size = partial.width
            size = f"{self._tiles(partial.over)} * {self.sizes.text(width)}"
            found += [Scratch(dtype, size) for dtype in partial.dtypes]
        return tuple(found)
