"""The kernel of a matrix product with its epilogue.

Enters: a `GemmDomain` and its `Epilogue`.  Leaves: a `GemmKernel`.  The main loop multiplies what two emitters make of
the factors (see main_loop.py); a third turns the accumulators into stores and into the partial states of reductions.
The three share names and sizes, as they write one text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping

import torch
from torch import fx

from fxfuser.config import Config
from fxfuser.domain.gemm import GemmDomain
from fxfuser.domain.points import Point, PointKind, Store, needed_by, points_of
from fxfuser.domain.size import Size, Symbol
from fxfuser.domain.sums import elements, place_in
from fxfuser.domain.tensors import shape_of
from fxfuser.lowering.dependent import DEPENDENT
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.gemm.descriptors import Descriptors, start
from fxfuser.lowering.gemm.folded import SCRATCH, most_states
from fxfuser.lowering.gemm.main_loop import ADD, Factors, MainLoop
from fxfuser.lowering.gemm.part import Lanes, Names, Part
from fxfuser.lowering.gemm.partials import Epilogue, Partial, pointer_name
from fxfuser.lowering.gemm.schedule import GemmSchedule, gemm_schedule
from fxfuser.lowering.gemm.sliced import sliced_estimate, sliced_tiles
from fxfuser.lowering.gemm.states import TileStates
from fxfuser.lowering.gemm.text import PLACE, STRIPS, Policy, add_other, fill, keep
from fxfuser.lowering.gemm.tile_emitter import TileEmitter
from fxfuser.lowering.gemm.tiles import SHARED, Product, estimate, gemm_tiles, part_tiles, split_tiles
from fxfuser.lowering.kernel import STATES, Dependence, Kernel, Note, Tile
from fxfuser.lowering.lower import extent_of, module
from fxfuser.lowering.pointers import pointers_to
from fxfuser.lowering.products import scaled
from fxfuser.lowering.schedule import Dim, Schedule
from fxfuser.lowering.scope import Scope, Value
from fxfuser.lowering.tiles import size_hint
from fxfuser.ops import memory_of, row


@dataclass(frozen=True, eq=False)
class GemmKernel:
    """A kernel, the tensors that its pointers are, and the symbol of each of its sizes; `dots` is how many accumulators
    a tile has, `estimate` what it takes beside those of other policies, `product` what its tiles were chosen for."""

    kernel: Kernel
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    sizes: tuple[Symbol, ...]
    dots: int
    estimate: float
    product: Product


@dataclass(frozen=True)
class Context:
    """What a kernel depends on beside its segment; `hints` are example values of the graph's size symbols, `shared` the
    bytes of shared memory that one program can have."""

    config: Config
    hints: Mapping[str, int]
    shared: int = SHARED


def gemm_kernel(part: Part, policy: Policy, context: Context) -> GemmKernel | None:
    """The product's kernel under a policy; None where no tile of that policy is worth a try.

    Its pointers: tensors read, buffers of states that it combines, tensors written, the partial states of reductions,
    and where k is split, a buffer of parts for each accumulator and the arrival counters.
    """
    domain, epilogue = part.domain, part.epilogue
    if policy.sliced and not (domain.rows and domain.columns):
        return None  # a matrix and a vector: a kernel that reads rows takes k apart in any case
    plan, names = gemm_schedule(domain, policy.sliced), _names(part, policy)
    sized = replace(_sizes(domain, plan, epilogue, context.hints), shared=context.shared,
                    scratch=SCRATCH if part.folded else 0, outnumbered=bool(part.folded) or _scaled_rows(domain))
    choices = _choices(part, policy, sized)
    if not choices:
        return None
    blocks = {name: max(dict(t.blocks)[name] for t in choices) for name, _ in choices[0].blocks} | {"1": 1}
    blocks[plan.strip.block] = blocks[plan.columns.block]  # a whole strip may lie past the end
    overlapping = _overlapping(plan, epilogue, blocks)
    lanes = blocks | {dim.block: 1 for dim in overlapping}  # of which none lies past the end
    lanes[plan.strip.block] = lanes[plan.columns.block]
    writer = _Writer(part, plan, names, Lanes(lanes, overlapping, policy.described), context.config)
    lines = writer.lines(policy)
    inputs, outputs = names.inputs, names.outputs
    pointers = [*inputs.values(), *names.states.values(), *outputs.values()]
    buffers = [dtype for p in epilogue.partials for dtype in p.dtypes]
    if policy.splits:
        buffers += [torch.float32] * len(domain.dots()) + ([] if policy.leaves else [torch.int32])
    sizes, moved = writer.sizes, writer.descriptors.pointers()
    extent = extent_of(sizes, blocks, (plan.batch, plan.rows, plan.columns, plan.left_inner),
                       [*inputs, *map(memory_of, outputs)])
    for one in part.folded.values():
        extent = f"max({extent}, {dict(choices[0].blocks)[STATES]} * {sizes.text(one.partial.width)})"
    tiles = f"{_times(sizes, plan.batch.size)}cdiv({sizes.text(plan.rows.size)}, MBLOCK)" \
            f" * cdiv({sizes.text(plan.columns.size)}, NBLOCK)"
    parameters = [*pointers, *(f"out{len(outputs) + i}" for i in range(len(buffers))), *sizes.names.values(),
                  "INDEX: tl.constexpr", *(["DESCRIPTORS: tl.constexpr"] if moved else []),
                  *(f"{name}: tl.constexpr" for name, _ in choices[0].blocks),
                  *([f"{DEPENDENT}: tl.constexpr"] if policy.leaves else [])]
    source, name = module(part.stem, lines, writer.combines(), parameters)
    kernel = Kernel(
        name=name, source=source, inputs=(*(n.meta["val"].dtype for n in inputs), *part.states().values()),
        outputs=(*(n.meta["val"].dtype for n in outputs), *buffers),
        sizes=len(sizes.names), grid=policy.grid.format(tiles=tiles), extent=extent, tile=choices[0],
        candidates=choices[1:], notes=writer.notes(),
        aligned=tuple(i for i, p in enumerate(pointers) if p in moved) if moved else None,
        divisible=tuple(i for i, s in enumerate(sizes.names) if s in writer.descriptors.divisible),
        dependence=Dependence.ALONE if policy.leaves else None)
    return GemmKernel(kernel, tuple(inputs), tuple(outputs), tuple(sizes.names), len(domain.dots()),
                      _estimate(policy, sized) * policy.handicap, sized)


def _names(part: Part, policy: Policy) -> Names:
    """The pointers of a kernel to what it reads, as far as it does under this policy, and to what it writes."""
    epilogue = part.epilogue
    points = points_of([*epilogue.stores, *(_state(p) for p in epilogue.partials)])
    if policy.leaves:
        points = tuple(p for dot in part.domain.dots() for factor in dot.operands[:2] for p in needed_by(factor))
    read = {p.node for p in points if p.kind is PointKind.LOAD}
    inputs = {node: f"in{i}" for i, node in enumerate(n for n in part.inputs if n in read)}
    states = {pointer_name(b): f"in{len(inputs) + i}" for i, b in enumerate(part.states())}
    outputs = {node: f"out{i}" for i, node in enumerate(dict.fromkeys(s.node for s in epilogue.stores))}
    return Names(inputs, outputs, states)


def _choices(part: Part, policy: Policy, sized: Product) -> tuple[Tile, ...]:
    """The tiles of a policy, and in them how many states a kernel combines at most."""
    if policy.sliced:
        choices = sliced_tiles(sized)
    else:
        choices = part_tiles(sized) if policy.leaves else split_tiles(sized) if policy.splits else gemm_tiles(sized)
    if not part.folded:
        return choices
    most = most_states(part.folded.values())  # how many they are follows from the first kernel's tile
    return tuple(replace(t, blocks=(*t.blocks, (STATES, most))) for t in choices)


def _estimate(policy: Policy, sized: Product) -> float:
    return sliced_estimate(sized) if policy.sliced else estimate(sized, policy.splits, policy.leaves)


def _scaled_rows(domain: GemmDomain) -> bool:
    """Whether a left factor is computed from numbers that its rows have."""
    return any(p.kind is PointKind.LOAD and p.deps and p.deps <= frozenset((*domain.batch, *domain.rows))
               for dot in domain.dots() for p in needed_by(dot.operands[0]))


def _overlapping(plan: GemmSchedule, epilogue: Epilogue, blocks: dict[str, int]) -> tuple[Dim, ...]:
    """The dims whose last tile may share elements with the one before it, where it would else need a mask.

    Folds that take an element twice as they take it once need no mask then.  Stores do as well as before with theirs.
    """
    if epilogue.stores or not all(partial.monoid.idempotent for partial in epilogue.partials):
        return ()
    return tuple(dim for dim in (plan.rows, plan.columns)
                 if isinstance(dim.size, int) and dim.size >= blocks[dim.block] and dim.size % blocks[dim.block])


def _state(partial: Partial) -> Store:
    """A store that needs what a partial reduction needs."""
    assert partial.reduction.node is not None
    return Store(partial.reduction.node, (), partial.reduction)


def _sizes(domain: GemmDomain, plan: GemmSchedule, epilogue: Epilogue, hints: Mapping[str, int]) -> Product:
    """What the tile choice asks: sizes, and bytes of a tile that wait in shared memory to be stored or were loaded."""
    dots = domain.dots()
    tile = frozenset((*domain.rows, *domain.columns))
    stored = sum(s.node.meta["val"].dtype.itemsize for s in epilogue.stores if s.axes >= tile)
    factors = {id(p) for d in dots for o in d.operands[:2] for p in (o, *o.inputs)}
    read = sum(p.dtype.itemsize for p in domain.points()
               if p.kind is PointKind.LOAD and p.deps >= tile and id(p) not in factors)
    columnwise = [p for p in epilogue.partials if p.over == frozenset(domain.rows)]
    stored += 2 * any(p.monoid.adds for p in columnwise)  # halves on their way to the tensor cores that sum them
    passed = sum(dtype.itemsize for p in columnwise if not p.monoid.adds for dtype in p.dtypes)
    states = sum(d.itemsize for p in epilogue.partials if p.over == frozenset(domain.columns) for d in p.dtypes)
    batch, rows, columns, depth = (
        max(1, size_hint(d.size, hints)) for d in (plan.batch, plan.rows, plan.columns, plan.left_inner))
    work = sum(_instructions(found.cost) for p in domain.points() if p.kind is PointKind.OP and p.node is not None
               and id(p) not in factors and p.deps >= tile and (found := row(p.node.target)) is not None)
    return Product(batch, rows, columns, depth, dots[0].operands[0].dtype.itemsize, len(dots), stored + read, 4 + work,
                   passed, readers=epilogue.readers, states=states)


def _instructions(cost: int) -> int:
    """About how many instructions an op of this cost takes: an exponential five, a function of several more."""
    return 1 if cost <= 1 else 6 if cost <= 16 else 20


def _times(sizes: Sizes, size: Size) -> str:
    return "" if size == 1 else f"{sizes.text(size)} * "


class _Writer:
    """The lines of one kernel."""

    def __init__(self, part: Part, plan: GemmSchedule, names: Names, lanes: Lanes, config: Config) -> None:
        self.part, self.domain, self.plan = part, part.domain, plan
        self.inputs, self.outputs, self.states = names.inputs, names.outputs, names.states
        self.blocks, self.overlapping, self.precise = lanes.blocks, lanes.overlapping, config.numerics == "eager"
        self.sizes = Sizes()
        self.descriptors = Descriptors(self.sizes, lanes.described)
        self.counts: dict[str, int] = {}
        self.tile = self._emitter(plan.epilogue)
        self.tile_states = TileStates(self.tile, part.domain, len(names.outputs))
        self.factors = Factors(part.domain, plan, lambda schedule: self._emitter(schedule, padded=True))

    def _emitter(self, schedule: Schedule, padded: bool = False) -> TileEmitter:
        return TileEmitter(self.domain, schedule, self.inputs, self.outputs, self.blocks, self.precise, self.sizes,
                           counts=self.counts, joint=self.domain.pairs(), dims=schedule.dims,
                           descriptors=self.descriptors, padded=padded, buffers=self.states, folded=self.part.folded,
                           ahead=Scope() if self.domain.columns and not padded else None)

    def combines(self) -> dict[str, str]:
        own = {ADD.combine: ADD.source}  # what no line calls is left out
        folded = {f.monoid.combine: f.monoid.source for f in self.part.folded.values()}
        return {**own, **folded, **self.tile.reducer.combines(), **self.tile_states.functions}

    def notes(self) -> tuple[Note, ...]:
        return tuple((self.factors.left.notes | self.factors.right.notes | self.tile.notes).values())

    def lines(self, policy: Policy) -> list[str]:
        """The kernel's body."""
        epilogue = self.part.epilogue
        dims = (self.plan.rows, self.plan.columns, self.plan.left_inner)
        rows, columns, depth = (self.sizes.text(d.size) for d in dims)
        alone = policy.splits or policy.sliced
        main = (None if alone else self.factors.joined_loop()) or self.factors.main_loop()
        tiles = {dot: f"tile_{i}" for i, dot in enumerate(main.names)}
        accumulators = list(main.sums)
        first = len(self.outputs) + sum(len(p.buffers) for p in epilogue.partials)
        parts = [f"out{first + i}" for i in range(len(accumulators))]
        if policy.leaves:
            self._leave(tiles, parts)
        else:
            self._epilogue(epilogue, tiles)
        ahead = [] if self.tile.ahead is None else self.tile.ahead.lines
        before, behind = ([], ahead) if policy.splits else (ahead, [])  # of all parts of a tile one has an epilogue
        return fill(policy.text, {
            "rows": rows, "columns": columns, "depth": depth, "batch": _times(self.sizes, self.plan.batch.size),
            "descriptors": self._descriptors(), "flatten": self._flatten(main),
            "place": self._place(), "vectors": self._vectors(), "before": before + main.before, "loop": main.lines,
            "zeros": [f"{name} = tl.full({shape}, 0.0, tl.float32)" for name, shape in main.sums.items()],
            "epilogue": main.after + behind + self._strips(main),
            "keep": keep(policy, accumulators, parts),
            "keep_bundle": keep(policy, accumulators, parts, "SPLITS + bundle"),
            "add_other": add_other(policy, accumulators, parts), "counters": f"out{first + len(accumulators)}"})

    def _flatten(self, main: MainLoop) -> str:
        """Whether the loop over tiles and the main loop are one."""
        return "DESCRIPTORS" if self.descriptors.names and len(main.sums) == 1 else "False"

    def _descriptors(self) -> list[str]:
        lines = self.descriptors.lines()
        return ["if DESCRIPTORS:", *(f"    {line}" for line in lines)] if lines else []

    def _place(self) -> list[str]:
        starts = {"m_start": self._start(self.plan.rows, "row_tile * MBLOCK"),
                  "n_start": self._start(self.plan.columns, "column_tile * NBLOCK")}
        if not self.plan.batch.axes:
            return PLACE.format(tile="tile", **starts).splitlines()
        within = ["batch_start = tile // (row_tiles * column_tiles)", "in_batch = tile % (row_tiles * column_tiles)"]
        return within + PLACE.format(tile="in_batch", **starts).splitlines()

    def _start(self, dim: Dim, usual: str) -> str:
        """Where a tile starts; the last of those that may overlap ends where the dim does."""
        return f"min({usual}, {self.sizes.text(dim.size)} - {dim.block})" if dim in self.overlapping else usual

    def _vectors(self) -> list[str]:
        left, right = self.factors.left, self.factors.right
        plan = self.plan
        lines = [line for dim, emitter in ((plan.batch, left), (plan.rows, left), (plan.columns, right)) if dim.axes
                 for line in _lanes(emitter, dim, plan.of_factor(dim))]
        if plan.sliced:  # the epilogue's tiles have another rank
            lines += [line for dim in (plan.batch, plan.rows) if dim.axes for line in _lanes(self.tile, dim, dim)]
        return lines

    def _strips(self, main: MainLoop) -> list[str]:
        """The epilogue of each strip of the tile's columns, of which a vector has but one."""
        if not self.plan.columns.axes:
            return [*(f"tile_{i} = {name}" for i, name in enumerate(main.names.values())), *self.tile.top.lines]
        strips = [f"tile_{i} = column_strip({name}, number, STRIPBLOCK)" for i, name in enumerate(main.names.values())]
        return fill(STRIPS, {"vectors": _lanes(self.tile, self.plan.strip, self.plan.strip), "strips": strips,
                             "epilogue": self.tile.top.lines, "end": self.tile_states.behind})

    def _epilogue(self, epilogue: Epilogue, names: dict[Point, str]) -> None:
        emitter = self.tile
        for dot, name in names.items():
            added = [emitter.emit(p) for p in dot.operands[2:]]
            total = Value(name, torch.float32, frozenset(self.domain.program))
            emitter.accumulators[id(dot)] = scaled(emitter, dot, total, added)
        for store in epilogue.stores:
            emitter.store(store)
        for partial in epilogue.partials:
            self.tile_states.leave(partial)

    def _leave(self, names: dict[Point, str], parts: list[str]) -> None:
        """Stores a part of each sum where its element of the product would be."""
        emitter = self.tile
        for (dot, name), buffer in zip(names.items(), parts):
            assert dot.node is not None
            shape, axes = shape_of(dot.node), frozenset(self.domain.program)
            pointer = pointers_to(emitter, buffer, place_in(shape, dot.index), axes)
            masks = emitter.mask(axes)
            part = f"part.to(INDEX) * {self.sizes.text(elements(shape))}"
            arguments = [f"{pointer} + {part}", name, *([" & ".join(masks)] if masks else [])]
            emitter.top.lines.append(f"tl.store({', '.join(arguments)})")


def _lanes(emitter: TileEmitter, dim: Dim, name: Dim) -> list[str]:
    """The indices of a program's block of a dim, as the emitter's tiles have them."""
    return emitter.vectors.lines(name, f"{start(dim)} + tl.arange(0, {dim.block}).to(INDEX)")
