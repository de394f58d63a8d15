"""An explicit model of how programs that share a tile hand their parts over, run on the kernels' own text.

Enters: the filled text of a policy (lowering/gemm/text.py) or of one grid of two kernels (one_grid.py), how many tiles,
parts and resident programs there are.
Leaves: every result that any interleaving can give, or a `Violation`.  The text is executed, not transcribed: `tl` is a
stand-in whose memory operations are the steps of the search, so what the text does not do, the model does not do.

Memory is as weak as PTX lets it be between threads, in terms of views (Kang et al., A promising semantics for
relaxed-memory concurrency, 2017, without promises): each address has the list of all values stored there, each thread
a least position per address that it may still read.  A load may return anything from there on.  A barrier joins the
views of a program's threads.  A release leaves the thread's view with the value that it writes, an acquire takes the
view that it finds.  A load that may hit L1 (no `.cg`) may return anything stored since the launch began.

One thread executes a scalar atomic.  Where its result is used, Triton hands it to the others through shared memory and
a barrier; else nobody waits.  Programs start in the order of their numbers, as many at once as are resident.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fxfuser.lowering.gemm import one_grid
from fxfuser.lowering.gemm.text import Policy, add_other, fill, keep
from fxfuser.lowering.products import ADD

THREADS = 2
Address = tuple[str, int]
View = frozenset[tuple[Address, int]]
NOTHING: View = frozenset()


class Violation(Exception):
    """What went wrong in some interleaving."""


class Number(int):
    """A scalar of the kernel."""

    def to(self, dtype: object) -> Number:
        return self

    def __getitem__(self, place: object) -> Number:
        return self


class Lanes(Number):
    """A block of which this thread has one element."""


def _arithmetic(name: str) -> Callable[[Number, int], Any]:
    plain = getattr(int, name)

    def operate(self: Number, other: int) -> Any:
        kind = Lanes if Lanes in (type(self), type(other)) else Number
        result = plain(self, other)
        return result if result is NotImplemented else kind(result)

    return operate


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__floordiv__", "__rfloordiv__",
              "__mod__", "__rmod__"):
    setattr(Number, _name, _arithmetic(_name))


class Sum(tuple[Any, ...]):
    """A sum as the list of its terms, in order."""

    def __add__(self, other: tuple[Any, ...]) -> Sum:  # type: ignore[override]
        return Sum((*self, *other))


@dataclass(frozen=True)
class Place:
    """A pointer; `spread` where each thread has its own."""

    address: Address
    spread: bool = False

    def __add__(self, offset: int) -> Place:
        name, at = self.address
        return Place((name, at + int(offset)), self.spread or isinstance(offset, Lanes))


@dataclass(frozen=True)
class Operation:
    """One step of a thread: load, store, atomic or barrier."""

    kind: str
    address: Address = ("", 0)
    spread: bool = True
    value: Any = None
    sem: str = "relaxed"
    cached: bool = False  # a load that may hit L1
    used: bool = True  # an atomic whose result is used
    adds: bool = False  # what an atomic does with its value
    awaits: Any = None  # the only result with which an atomic goes on
    least: bool = False  # or any that is not below it

    @property
    def alone(self) -> bool:
        """Whether the first thread does it and the others go on."""
        return not self.spread and (self.kind == "store" or self.kind == "atomic" and not self.used)


class _Pending(Exception):
    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation


class _Language:
    """`tl` for one thread of which `results` are known."""

    int32 = float32 = None

    def __init__(self, programs: int, program: int, thread: int, results: tuple[Any, ...]) -> None:
        self.programs, self.program, self.thread, self.left = programs, program, thread, list(results)

    def _step(self, operation: Operation) -> Any:
        if not self.left:
            raise _Pending(operation)
        return self.left.pop(0)

    def program_id(self, axis: int) -> Number:
        return Number(self.program)

    def arange(self, start: int, stop: int) -> Number:
        assert start == 0 and stop in (1, THREADS)
        return Lanes(self.thread if stop == THREADS else 0)

    def range(self, start: int, stop: int, loop_unroll_factor: int) -> range:
        """Unrolling changes no order: a compiler may move loads up, to where all they read has been acquired."""
        return range(start, stop)

    def static_range(self, stop: int) -> range:
        return range(stop)

    def full(self, shape: object, value: float, dtype: object) -> Sum:
        return Sum()

    def num_programs(self, axis: int) -> Number:
        return Number(self.programs)

    def load(self, place: Place, mask: bool = True, other: float = 0.0, cache_modifier: str = "") -> Any:
        if not mask:
            return Sum()
        return self._step(Operation("load", place.address, place.spread, cached=cache_modifier != ".cg"))

    def store(self, place: Place, value: Any, cache_modifier: str = "") -> None:
        self._step(Operation("store", place.address, place.spread, value))

    def debug_barrier(self) -> None:
        self._step(Operation("barrier"))

    def atomic_add(self, place: Place, value: int, sem: str = "acq_rel", used: bool = True, awaits: Any = None,
                   least: bool = False) -> Any:
        return self._step(Operation("atomic", place.address, place.spread, value, sem, used=used, adds=True,
                                    awaits=awaits, least=least))

    def atomic_xchg(self, place: Place, value: int, sem: str = "acq_rel", used: bool = True) -> Any:
        return self._step(Operation("atomic", place.address, place.spread, value, sem, used=used))


class _Marked(ast.NodeTransformer):
    """Atomics that say whether their result is used, and polling as one step that waits."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith("tl.atomic"):
            node.value.keywords.append(ast.keyword("used", ast.Constant(False)))
        return node

    def visit_While(self, node: ast.While) -> ast.Expr:
        match node.test, node.body:
            case ast.Compare(ast.Call() as call, [ast.NotEq() | ast.Lt() as sign], [wanted]), [ast.Pass()]:
                assert ast.unparse(call.func) == "tl.atomic_add" and ast.unparse(call.args[1]) == "0"
                least = ast.keyword("least", ast.Constant(isinstance(sign, ast.Lt)))
                return ast.Expr(ast.Call(call.func, call.args, [*call.keywords, ast.keyword("awaits", wanted), least]))
        raise AssertionError(f"no loop that polls: {ast.unparse(node)}")


@dataclass(frozen=True)
class Grid:
    """Tiles, parts of each, programs that are resident at once, and parts that one program adds up (0: all).

    Where tiles come `behind`, each program before them leaves a part of every tile, and each tile has a program.
    """

    tiles: int
    splits: int
    resident: int
    join: int = 0
    behind: bool = False

    @property
    def counters(self) -> int:
        """One; or of each tile one for each bundle of parts and one for the bundles."""
        return 1 if self.behind else self.tiles * (1 - (-self.splits // (self.join or self.splits)))

    @property
    def programs(self) -> int:
        return self.splits + self.tiles if self.behind else self.tiles * self.splits


SUMMED = "accumulator_0 = accumulator_0 + step_of(k_start)"


def filled(policy: Policy) -> str:
    """The policy's text for one accumulator of one row and as many columns as threads; each step of k adds its name."""
    accumulators, parts = ["accumulator_0"], ["out1"]
    return "\n".join(fill(policy.text, {
        "rows": "1", "columns": "COLUMNS", "depth": "DEPTH", "batch": "", "flatten": "False", "descriptors": [],
        "place": [], "vectors": [], "before": [], "loop": [SUMMED],
        "zeros": ["accumulator_0 = NO_SUM"], "keep": keep(policy, accumulators, parts),
        "keep_bundle": keep(policy, accumulators, parts, "SPLITS + bundle"),
        "add_other": add_other(policy, accumulators, parts), "counters": "out2",
        "epilogue": ["tl.store(out0 + tile * NBLOCK + lane, accumulator_0)"]}))


def one_grid_filled() -> str:
    """The text of one grid: programs that leave a part of each tile, with all steps of k that are theirs, and a program
    for each tile that adds up its parts with the text of kernels that do."""
    place = "(out1 + tile * NBLOCK + tl.arange(0, NBLOCK))"
    leave = ["part = tl.program_id(0)", "accumulator_0 = NO_SUM",
             "for k_start in range(DEPTH * part // SPLITS, DEPTH * (part + 1) // SPLITS):", f"    {SUMMED}",
             "for tile in range(0, TILES):",
             f"    tl.store({place} + part * (TILES * NBLOCK), accumulator_0)"]
    add = ADD.format(name="accumulator_0", tile="[NBLOCK]", count="SPLITS", pointer=place, width="(TILES * NBLOCK)",
                     mask="(first + other < SPLITS)")
    follow = ["tile = tl.program_id(0) - SPLITS", *add.splitlines(),
              "tl.store(out0 + tile * NBLOCK + tl.arange(0, NBLOCK), accumulator_0)"]
    return "\n".join(fill(one_grid.TEXT, {"leaving": "SPLITS", "counter": "out2", "leave": leave, "follow": follow}))


@dataclass(eq=False)
class Kernel:
    """Threads as functions from the results of their operations to the next operation."""

    text: str
    grid: Grid
    launch: int = 0
    known: dict[tuple[Any, ...], Operation | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tree = ast.fix_missing_locations(_Marked().visit(ast.parse(self.text)))
        self.code = compile(tree, "<policy>", "exec")

    @property
    def steps(self) -> int:
        return self.grid.splits + 1  # so that one part has two

    def next(self, program: int, thread: int, results: tuple[Any, ...]) -> Operation | None:
        """What a thread does next; None: it has ended."""
        key = (program, thread, results)
        if key not in self.known:
            self.known[key] = self._run(*key)
        return self.known[key]

    def _run(self, program: int, thread: int, results: tuple[Any, ...]) -> Operation | None:
        scope = {
            "tl": _Language(self.grid.programs, program, thread, results), "NO_SUM": Sum(), "DEPTH": self.steps,
            "SPLITS": self.grid.splits,
            "TOGETHER": 2, "TILES": self.grid.tiles, "JOIN": self.grid.join or self.grid.splits,
            "COLUMNS": self.grid.tiles * THREADS, "MBLOCK": 1, "NBLOCK": THREADS, "KBLOCK": 1, "INDEX": None,
            "step_of": lambda k: Sum([(self.launch, k)]), **{n: Place((n, 0)) for n in ("out0", "out1", "out2")}}
        try:
            exec(self.code, scope)
        except _Pending as pending:
            return pending.operation
        return None


@dataclass(frozen=True)
class Thread:
    """What a thread has got of its operations, and how far back it may read."""

    results: tuple[Any, ...] = ()
    view: View = NOTHING
    taken: Any = None  # the result of an atomic that the other threads wait for


Program = tuple[Thread, ...]
Cell = tuple[tuple[Any, View], ...]  # all values stored at an address, each with the view that was left with it


@dataclass(frozen=True)
class State:
    memory: frozenset[tuple[Address, Cell]]
    running: tuple[tuple[int, Program], ...] = ()
    started: int = 0


def join(*views: View) -> View:
    latest: dict[Address, int] = {}
    for view in views:
        for address, position in view:
            latest[address] = max(latest.get(address, 0), position)
    return frozenset(latest.items())


class Machine:
    """The steps that programs of one launch can take from any state."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def successors(self, state: State) -> Iterator[State]:
        """Starting a program and a step that only its own program sees commute with all others: they come first."""
        early = self._started(state) or self._private(state)
        if early is not None:
            yield early
            return
        for slot in range(len(state.running)):
            for thread in range(THREADS):
                yield from self._steps(state, slot, thread)

    def _started(self, state: State) -> State | None:
        grid = self.kernel.grid
        if state.started == grid.programs or len(state.running) == grid.resident:
            return None
        return replace(state, started=state.started + 1,
                       running=(*state.running, (state.started, (Thread(),) * THREADS)))

    def _private(self, state: State) -> State | None:
        """A barrier or an atomic that all have reached, what the first thread alone does, the end of a program."""
        for slot, (number, program) in enumerate(state.running):
            following = [self.kernel.next(number, t, p.results) for t, p in enumerate(program)]
            if all(operation is None for operation in following):
                return replace(state, running=state.running[:slot] + state.running[slot + 1:])
            for t, operation in enumerate(following):
                if t > 0 and operation is not None and operation.alone:
                    return _with(state, slot, t, _done(program[t], None))
            kinds = {o.kind if o is not None else None for o in following}
            if len(kinds) > 1 or (kinds == {"atomic"} and program[0].taken is None):
                continue
            if kinds <= {"barrier", "atomic"}:
                whole = join(*(p.view for p in program))
                result = program[0].taken
                met = tuple(replace(_done(p, result), view=whole, taken=None) for p in program)
                return replace(state, running=(*state.running[:slot], (number, met), *state.running[slot + 1:]))
        return None

    def _steps(self, state: State, slot: int, thread: int) -> Iterator[State]:
        number, program = state.running[slot]
        me = program[thread]
        operation = self.kernel.next(number, thread, me.results)
        if operation is None or operation.kind == "barrier":
            return
        memory = dict(state.memory)
        cell = memory.setdefault(operation.address, ((Sum(["poison"]), NOTHING),))
        seen = dict(me.view).get(operation.address, 0)
        if operation.kind == "load":
            for position in range(0 if operation.cached else seen, len(cell)):
                view = me.view if operation.cached else join(me.view, frozenset([(operation.address, position)]))
                yield _with(state, slot, thread, replace(_done(me, cell[position][0]), view=view))
            return
        if operation.kind == "store":
            entry, after = (operation.value, NOTHING), _done(me, None)
        else:
            if thread > 0 or me.taken is not None:
                return
            old, left = cell[-1]
            if operation.awaits is not None and old != operation.awaits and not (
                    operation.least and old > operation.awaits):
                return
            view = join(me.view, left) if operation.sem in ("acquire", "acq_rel") else me.view
            published = join(view, left) if operation.sem in ("release", "acq_rel") else left
            entry = (old + operation.value if operation.adds else operation.value, published)
            after = replace(me, view=view, taken=old) if operation.used else replace(_done(me, old), view=view)
        memory[operation.address] = (*cell, entry)
        own = join(after.view, frozenset([(operation.address, len(cell))]))
        if operation.kind == "atomic" and operation.sem in ("release", "acq_rel"):
            memory[operation.address] = (*cell, (entry[0], join(entry[1], own)))
        yield _with(replace(state, memory=frozenset(memory.items())), slot, thread, replace(after, view=own))


def _done(thread: Thread, result: Any) -> Thread:
    return replace(thread, results=(*thread.results, result))


def _with(state: State, slot: int, thread: int, new: Thread) -> State:
    number, program = state.running[slot]
    changed = (*program[:thread], new, *program[thread + 1:])
    return replace(state, running=(*state.running[:slot], (number, changed), *state.running[slot + 1:]))


def explore(text: str, grid: Grid, launches: int = 2) -> int:
    """Checks every interleaving of launches that follow each other; returns how many states there are.

    Raises Violation: a deadlock, a result that is not the sum of all parts, or not always the same one, a tile that is
    committed never or twice, a counter that is left behind.
    """
    counters = {("out2", place): ((0, NOTHING),) for place in range(grid.counters)}
    begin, count = State(frozenset(counters.items())), 0
    for launch in range(launches):
        machine = Machine(Kernel(text, grid, launch))
        seen, waiting = {begin}, [begin]
        ends: set[State] = set()
        while waiting:
            state = waiting.pop()
            following = list(machine.successors(state))
            if not following:
                if state.running:
                    raise Violation(f"programs {[n for n, _ in state.running]} wait for ever")
                ends.add(_settled(state, machine.kernel))
            fresh = set(following) - seen
            seen |= fresh
            waiting += fresh
        count += len(seen)
        if len(ends) != 1:
            raise Violation("the order in which programs run shows in the results")
        (begin,) = ends
    return count


def _settled(state: State, kernel: Kernel) -> State:
    """The state after a launch, of which only the last values are left."""
    memory, grid = dict(state.memory), kernel.grid
    if any(memory["out2", place][-1][0] != 0 for place in range(grid.counters)):
        raise Violation("a counter is not zero")
    for tile in range(grid.tiles):
        for lane in range(THREADS):
            stored = memory.pop(("out0", tile * THREADS + lane), ((None, NOTHING),))[1:]
            if len(stored) != 1:
                raise Violation(f"a tile is committed {len(stored)} times")
            ((result, _),) = stored
            if sorted(result, key=str) != [(kernel.launch, step) for step in range(kernel.steps)]:
                raise Violation(f"a result is the sum of {result}")
            memory["result", tile * THREADS + lane] = ((tuple(step for _, step in result), NOTHING),)
    return State(frozenset((address, ((cell[-1][0], NOTHING),)) for address, cell in memory.items()))
