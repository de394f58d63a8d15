"""GEMM segment to programs.

Enters: a segment with a `GemmDomain`.  Leaves: its programs: the product with its epilogue in one kernel; where it
reduces, kernels that combine the partial states of the tiles; what needs these at each element, another kernel or the
kernel of a second product, which combines them itself if it can; the product's parts in one kernel and all else in a
second, and both in one grid; of few rows, warps with slices of k; for a matrix and a vector, one kernel with loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Iterator, Mapping

import torch
from torch import fx

from fxfuser.config import Config
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.index import Axis, linear
from fxfuser.domain.parts import Parts, count
from fxfuser.domain.points import Domain, Point, PointKind, needed_by, points_of
from fxfuser.domain.size import Poly, Size, Symbol, hint, positive
from fxfuser.domain.sums import COUNT, elements, parts_read
from fxfuser.domain.tensors import shape_of
from fxfuser.lowering.dependent import dependent
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.gemm import one_grid
from fxfuser.lowering.gemm.folded import Folded, few_states, folded_results
from fxfuser.lowering.gemm.kernel import Context, GemmKernel, gemm_kernel
from fxfuser.lowering.gemm.part import Part
from fxfuser.lowering.gemm.partials import Epilogue, Finish, pointer_name, split_epilogue
from fxfuser.lowering.gemm.text import LAST_ARRIVER, PARTS, PERSISTENT, SLICED, TURNSTILE, Policy
from fxfuser.lowering.gemm.tiles import SHARED, Product, joined_estimate, joined_tiles
from fxfuser.lowering.kernel import Launch, LoweredPrograms, Place, Program, Scratch
from fxfuser.lowering.lower import Body, kernel_of, loaded, stem
from fxfuser.lowering.schedule import product, strides_of
from fxfuser.ops import memory_of
from fxfuser.segmenter.segment import Segment

POLICIES = (PERSISTENT, LAST_ARRIVER, TURNSTILE, SLICED)
# Times the best estimate: what is estimated beyond is measured under max-autotune alone.  So are parts that meet in
# their tile, where they are not expected to beat one grid: there they lost wherever both were measured, by 5 to 50%; or
# slices, which have nothing to meet for; and what takes turns, which lost to the last arriver
SPARE = 1.6
SECOND_TILES = 3  # of a second product's kernel, that are measured without max-autotune


def lower_gemm(segment: Segment, config: Config, hints: Mapping[str, int], shared: int = SHARED) -> LoweredPrograms:
    """The programs of a GEMM segment; `hints` are example values of the graph's size symbols, `shared` the bytes of
    shared memory that one program can have on its device.

    Errors: none for a domain that `gemm_domain` accepted; any exception here is a fault.
    """
    domain = segment.domain
    assert isinstance(domain, GemmDomain), f"{segment.name} has no domain of a product"
    builder = _Builder(segment, domain, tuple(loaded(_points(domain), segment)), Context(config, hints, shared))
    policies = POLICIES if domain.tiled else ()
    whole = [(time, program, policy) for policy in policies for time, program in builder.programs(policy)]
    made = [] if domain.parts is None else builder.apart(domain.parts)
    others = [time for time, program in made if program.name.endswith(one_grid.NAME)]
    others += [time for time, _, policy in whole if policy.sliced]
    met = {program.name for time, program, policy in whole
           if policy.ordered or (policy.splits and time >= min(others, default=math.inf))}
    made = [(time, program) for time, program, _ in whole] + made
    if domain.rowwise is not None:
        made.append(builder.rowwise(domain.rowwise))
    made.sort(key=lambda found: found[0])
    programs = [replace(program, spare=program.spare or time > SPARE * made[0][0] or program.name in met)
                for time, program in made]
    return LoweredPrograms(tuple(programs), tuple(segment.inputs.index(n) for n in builder.inputs),
                           tuple(range(len(segment.outputs))), tuple(s.text for s in builder.sizes.names))


def _points(domain: GemmDomain) -> tuple[Point, ...]:
    """The points of all kernels that a domain may become."""
    behind = [d for d in (domain.tail, domain.rowwise) if d is not None]
    behind += [] if domain.parts is None else [domain.parts.head, domain.parts.rest]
    return (*domain.points(), *(p for d in behind for p in d.points()))


@dataclass(frozen=True, eq=False)
class _Head:
    """The launch that leaves sums in parts, `number` of each of `order`; a product's with its estimate and sizes."""

    launch: Launch
    order: tuple[fx.Node, ...]
    number: str
    estimate: float = 0.0
    product: Product | None = None


@dataclass
class _Builder:
    """One program of a segment.  `sizes` are the program's own, which its launches' are expressions of."""

    segment: Segment
    domain: GemmDomain
    inputs: tuple[fx.Node, ...]
    context: Context
    sizes: Sizes = field(default_factory=Sizes)
    passed: dict[fx.Node, tuple[Place, int]] = field(default_factory=dict)
    folded: dict[fx.Node, Folded] = field(default_factory=dict)

    def programs(self, policy: Policy) -> Iterator[tuple[float, Program]]:
        """The programs of a policy with their estimates; none where it has no tile."""
        epilogue, tail = split_epilogue(self.domain), self.domain.tail
        made = gemm_kernel(Part(self.domain, epilogue, self.inputs, stem(self.segment)), policy, self.context)
        if made is None:
            return
        made = self._with_folded(made, epilogue)
        states = self._states(epilogue)
        parts = self._parts(made) if policy.splits else ()
        self.passed = self._passed(len(states) + len(parts))
        launches = [self._product(made, len(states) + len(parts))]
        launches += [self._finish(finish) for finish in epilogue.finishes if not self.folded]
        if isinstance(tail, GemmDomain):
            launches.append(self._second(tail).behind(made.kernel.tile))
        elif tail is not None:
            launches.append(self._tail(tail))
        buffers = [self._buffer(n) for n, (place, _) in self.passed.items() if place is Place.SCRATCH]
        program = Program(f"{made.kernel.name}_{policy.name}", tuple(launches), (*states, *parts, *buffers),
                          len(self.sizes.names))
        yield made.estimate, program
        if isinstance(tail, GemmDomain) and not policy.splits:
            yield from ((made.estimate, other) for other in _with_second_tiles(program))

    def _with_folded(self, made: GemmKernel, epilogue: Epilogue) -> GemmKernel:
        """Decides on `folded`; the kernel with those of its tiles that leave few states."""
        self.folded = folded_results(self.domain, epilogue, frozenset(self.segment.outputs))
        kernel = few_states(self.folded, made.kernel)
        if kernel is None:
            self.folded = {}
            return made
        return replace(made, kernel=kernel)

    def _second(self, tail: GemmDomain) -> Launch:
        """The kernel of a product that needs what the first product's tiles have passed."""
        read = {p.node: None for p in tail.points() if p.kind is PointKind.LOAD and p.node is not None}
        inputs = tuple(n for n in read if n not in self.folded)
        part = Part(tail, split_epilogue(tail), inputs, f"second_{stem(self.segment)}"[:60], self.folded)
        made = gemm_kernel(part, PERSISTENT, self.context)
        assert made is not None, "a kernel that does not split k has a tile for any product"
        places = [self._place(n) for n in made.inputs]
        places += [(Place.SCRATCH, b) for b in part.states()]
        places += [self._place(n) for n in made.outputs]
        counts = {f.tiles: self._tiles(f.partial.over) for f in self.folded.values()}
        return Launch(made.kernel, tuple(places), tuple(counts.get(s) or self._symbol(s) for s in made.sizes),
                      next((f.cut for f in self.folded.values()), None))

    def rowwise(self, domain: Domain) -> tuple[float, Program]:
        """One kernel that reads the matrix row by row."""
        launch = self._kernel(domain, f"rows_{stem(self.segment)}"[:60])
        return 0.0, Program(f"{launch.kernel.name}_rowwise", (launch,), (), len(self.sizes.names))

    def apart(self, parts: Parts) -> list[tuple[float, Program]]:
        """A kernel that leaves the sums of products and one that reads them, then both in one grid; nothing where no
        tile is worth a try."""
        head = self._head(parts)
        if head is None:
            return []
        buffers = {p: head.order.index(p) for p in parts_read(parts.rest.points())}
        second = self._rest(parts.rest, buffers, head.number)
        scratch = tuple(Scratch(torch.float32, f"{head.number} * {self.sizes.text(elements(shape_of(n)))}")
                        for n in head.order)
        program = Program(f"{head.launch.kernel.name}_{PARTS.name}", (head.launch, second), scratch,
                          len(self.sizes.names))
        some = all(positive(size) for node in head.order for size in shape_of(node))  # then the first has programs
        return [(head.estimate, dependent(program) if some else program), self._joined(program, head.product)]

    def _head(self, parts: Parts) -> _Head | None:
        """What leaves the sums; None where no tile is worth a try."""
        if not isinstance(parts.head, GemmDomain):
            order = tuple(parts_read(parts.rest.points()))
            return _Head(self._sums(parts.head, order, f"parts_{stem(self.segment)}"[:60]), order, "1")
        part = Part(parts.head, Epilogue(readers=_count(parts.rest)), self.inputs, stem(self.segment))
        made = gemm_kernel(part, PARTS, self.context)
        if made is None:
            return None
        places = [*(self._place(n) for n in made.inputs), *((Place.SCRATCH, i) for i in range(made.dots))]
        launch = Launch(made.kernel, tuple(places), tuple(map(self._symbol, made.sizes)))
        order = tuple(d.node for d in parts.head.dots() if d.node is not None)
        return _Head(launch, order, "SPLITS", made.estimate, made.product)

    def _joined(self, program: Program, shape: Product | None) -> tuple[float, Program]:
        """The two launches in one grid; where the first is a product's, with the tiles that are good for both first."""
        first, second = program.launches
        kernel, estimate = first.kernel, 0.0
        if shape is not None:
            best, *others = joined_tiles(shape, (kernel.tile, *kernel.candidates))
            kernel, estimate = replace(kernel, tile=best, candidates=tuple(others)), joined_estimate(shape)
        sizes = [hint(Poly((((symbol,), 1),)), self.context.hints) for symbol in self.sizes.names]
        return estimate, one_grid.one_grid(replace(program, launches=(replace(first, kernel=kernel), second)), sizes)

    def _sums(self, head: Domain, products: tuple[fx.Node, ...], name: str) -> Launch:
        """The kernel that leaves one part of each sum, row by row of the matrix."""
        inputs = tuple(loaded([p for s in head.stores for p in needed_by(s.value.operands[0])], self.segment))
        made = kernel_of(Body(head, inputs, products, name, sums=True), self.context.config, self.context.hints)
        places = [*map(self._place, inputs), *((Place.SCRATCH, i) for i in range(len(products)))]
        return Launch(made.kernel, tuple(places), tuple(map(self._symbol, made.sizes)))

    def _rest(self, rest: Domain, buffers: Mapping[fx.Node, int], number: str) -> Launch:
        """The kernel that reads parts, `number` of each sum, from these scratch buffers."""
        partials = {n.name: torch.float32 for n in buffers}
        return self._kernel(rest, f"rest_{stem(self.segment)}"[:60], partials, tuple(buffers.values()), number)

    def _kernel(self, domain: Domain, name: str, partials: Mapping[str, torch.dtype] = MappingProxyType({}),
                scratch: tuple[int, ...] = (), number: str = "1") -> Launch:
        """A kernel without tiles of a product: it reads tensors, then parts from scratch, and writes outputs."""
        outputs = tuple(dict.fromkeys(s.node for s in domain.stores))
        inputs = tuple(loaded(domain.points(), self.segment))
        made = kernel_of(Body(domain, inputs, outputs, name, partials), self.context.config, self.context.hints)
        places = [*map(self._place, inputs), *((Place.SCRATCH, i) for i in scratch), *map(self._place, outputs)]
        return Launch(made.kernel, tuple(places),
                      tuple(number if s == COUNT else self._symbol(s) for s in made.sizes))

    def _passed(self, first: int) -> dict[fx.Node, tuple[Place, int]]:
        """Where what the tiles pass to the tail lies: in an output that the tail then overwrites, or in a buffer."""
        found: dict[fx.Node, tuple[Place, int]] = {}
        taken: set[fx.Node] = set()
        for node in self.domain.passed:
            if node in self.segment.outputs or node in self.folded:
                continue
            output = next((o for o in self.segment.outputs if o not in taken and self._overwrites(o, node)), None)
            if output is not None:
                taken.add(output)
                found[node] = Place.OUTPUT, self.segment.outputs.index(output)
            else:
                found[node] = Place.SCRATCH, first + sum(place is Place.SCRATCH for place, _ in found.values())
        return found

    def _overwrites(self, output: fx.Node, node: fx.Node) -> bool:
        """Whether the tail reads of `node` just what it writes of `output`, element by element, in equal memory.

        And for nothing else, as another store might come after the write.  What this one needs of its row is read
        before: a program that folds a row has all of it.
        """
        tail, values = self.domain.tail, (output.meta["val"], node.meta["val"])
        if tail is None or isinstance(tail, GemmDomain) or memory_of(output) is not output:
            return False
        alike = values[0].dtype is values[1].dtype and \
            linear_size(output) == linear_size(node) and all(v.is_contiguous() for v in values)
        stores = [s for s in tail.stores if s.node is output]
        others = [s for s in tail.stores if s.node is not output]
        if any(p.node is node and p.kind is PointKind.LOAD for p in points_of(others)):
            return False
        loads = [p for p in tail.points() if p.node is node and p.kind is PointKind.LOAD]
        reads = {linear(p.index, strides_of(node)) for p in loads}
        return alike and len(stores) == 1 and reads == {linear(stores[0].index, strides_of(output))} \
            and stores[0].axes >= frozenset(tail.program)

    def _buffer(self, node: fx.Node) -> Scratch:
        return Scratch(node.meta["val"].dtype, self.sizes.text(linear_size(node)))

    def _place(self, node: fx.Node) -> tuple[Place, int]:
        """Where a tensor that a launch reads or writes lies."""
        if node in self.segment.outputs:
            return Place.OUTPUT, self.segment.outputs.index(node)
        return self.passed[node] if node in self.passed else (Place.INPUT, self.inputs.index(node))

    def _tail(self, tail: Domain) -> Launch:
        """The kernel that reads what the tiles have passed."""
        outputs = tuple(dict.fromkeys(s.node for s in tail.stores))
        inputs = tuple(dict.fromkeys(p.node for p in tail.points() if p.kind is PointKind.LOAD and p.node is not None))
        made = kernel_of(Body(tail, inputs, outputs, f"tail_{stem(self.segment)}"[:60]), self.context.config,
                         self.context.hints)
        return Launch(made.kernel, tuple(map(self._place, (*inputs, *outputs))), tuple(map(self._symbol, made.sizes)))

    def _product(self, made: GemmKernel, scratch: int) -> Launch:
        places = [self._place(n) for n in (*made.inputs, *made.outputs)]
        places += [(Place.SCRATCH, i) for i in range(scratch)]
        return Launch(made.kernel, tuple(places), tuple(map(self._symbol, made.sizes)))

    def _parts(self, made: GemmKernel) -> tuple[Scratch, ...]:
        """Tiles of unfinished sums, and the counters of those who have arrived."""
        tiles = self._tiles(frozenset(self.domain.program))
        each = Scratch(torch.float32, f"{tiles} * (SPLITS + cdiv(SPLITS, JOIN)) * MBLOCK * NBLOCK")
        return (*[each] * made.dots, Scratch(torch.int32, f"{tiles} * (1 + cdiv(SPLITS, JOIN))", kept=True))

    def _finish(self, finish: Finish) -> Launch:
        outputs = tuple(dict.fromkeys(s.node for s in finish.domain.stores))
        inputs = tuple(loaded(finish.domain.points(), self.segment))
        buffers = {pointer_name(b): dtype for p in finish.partials for b, dtype in zip(p.buffers, p.dtypes)}
        hints = dict(self.context.hints)
        counts = {symbol: self._tiles(over) for symbol, over in finish.tiles.items()}
        hints |= {symbol.text: self._tiles_hint(over) for symbol, over in finish.tiles.items()}
        body = Body(finish.domain, inputs, outputs, f"finish_{stem(self.segment)}"[:60], buffers, finish.pairs)
        made = kernel_of(body, self.context.config, hints)
        places = [self._place(n) for n in inputs]
        places += [(Place.SCRATCH, b) for p in finish.partials for b in p.buffers]
        places += [self._place(n) for n in outputs]
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


def _with_second_tiles(program: Program) -> Iterator[Program]:
    """The program, its first kernel with its default tile, with other tiles of its last kernel."""
    first, *others, second = program.launches
    alone = replace(first, kernel=replace(first.kernel, candidates=()))
    for i, tile in enumerate(second.kernel.candidates, 2):
        other = replace(second, kernel=replace(second.kernel, tile=tile, candidates=())).behind(first.kernel.tile)
        launches = (alone, *others, other)
        kernel, _, policy = program.name.rpartition("_")
        yield replace(program, name=f"{kernel}_tile{i}_{policy}", launches=launches, spare=i > SECOND_TILES)


def _count(domain: Domain) -> int:
    """About how many programs a kernel without tiles has."""
    return count(a.size for a in domain.program)


def linear_size(node: fx.Node) -> Size:
    """Elements from a tensor's first to its last."""
    total: Size = 1
    for size, stride in zip(shape_of(node), strides_of(node)):
        total = total + (size - 1) * stride
    return total
