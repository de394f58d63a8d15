"""The domain of a matrix product and what is fused around it.

Enters: nodes, among them matrix products of one shape of tile, and their outputs.  Leaves: a `GemmDomain`, or a
`Reject` that says what stands in the way.  The walk and the points are those of any group (see resolve.py); what
differs is what becomes of the axes.  A program owns a tile of rows x columns, so nothing may be needed beyond it:
a reduction of the epilogue folds the tile's part and leaves states, one per tile, which a finaliser combines.

    logsumexp(x @ w.T)    rows m, columns n; states (maximum, scaled sum) for each m and each tile of n
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Collection, Iterable, Sequence

from torch import fx

from fxfuser.domain.build import Builder
from fxfuser.domain.coalesce import Group, coalesce
from fxfuser.domain.index import Axis, Form, lookups_of, within
from fxfuser.domain.joint import Pair, joint_folds
from fxfuser.domain.parts import LEAST_ROWS, Parts, count, light, with_vector
from fxfuser.domain.pattern import Pattern, ordered
from fxfuser.domain.points import FOLDS, Domain, Point, PointKind, Reject, Store, needed_by, over, points_of
from fxfuser.domain.products import matrix_product
from fxfuser.domain.resolve import axes_in, resolve, settled_walk
from fxfuser.domain.roles import PERSISTENT_ELEMENTS
from fxfuser.domain.size import hint
from fxfuser.domain.space import Space
from fxfuser.domain.sums import Sums
from fxfuser.domain.tensors import shape_of
from fxfuser.domain.walk import Rejected
from fxfuser.ops import Kind, is_view, kind_of, reduction_dims, row

LEAST_PROGRAMS = 128  # of a tail; with fewer it would leave most of a device idle
MOST_DOTS = 4  # accumulators of one tile: each takes registers of its own


@dataclass(frozen=True, eq=False)
class GemmDomain(Domain):
    """A domain whose programs own tiles of a product: `rows` x `columns` for each step of `batch`.

    A product of a vector has no axis for its rows or none for its columns: a tile's only row, or column, is the first.
    Each dot is evaluated at rows, columns and batch alone; its own axes, `inner`, are walked by the kernel's main loop.
    Reductions of the epilogue run over all rows or all columns (or both); they become partial states per tile, which a
    finaliser combines, so nothing that depends on one is needed along the axes it reduces.

    What needs a whole row's result at its elements is the `tail`, a domain of its own: a kernel that reads the product
    and the results of reductions, which the tiles have `passed` to it, or that of another product (see chained.py).

    Other kernels that compute the same: `parts`, two of them (see parts.py), and `rowwise`, one that sums over k in
    loops of its own, for a matrix and a vector.  Where a group is not `tiled`, only these are there: its stores and
    axes are those of the kernel that reads the factors.
    """

    batch: tuple[Axis, ...] = ()
    rows: tuple[Axis, ...] = ()
    columns: tuple[Axis, ...] = ()
    inner: tuple[Axis, ...] = ()
    tail: Domain | None = None
    passed: tuple[fx.Node, ...] = ()
    parts: Parts | None = None
    rowwise: Domain | None = None
    tiled: bool = True

    def dots(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points() if p.kind is PointKind.DOT)

    def pairs(self) -> tuple[Pair, ...]:
        """Reductions that are folded together, as the second needs the first's result within the tile."""
        return tuple(joint_folds(self.points(), lambda axis: True))


def gemm_domain(nodes: Collection[fx.Node], outputs: Sequence[fx.Node]) -> GemmDomain | Reject:
    """The domain of `nodes`, at least one of which is a product, whose results `outputs` are stored.

    Nodes outside the group are looked through where they are views, else read.
    """
    if any(0 in shape_of(n) for n in nodes) or any(0 in shape_of(n) for n in outputs):
        return Reject("one of its tensors is empty", "")
    in_order = ordered(nodes)
    products = [n for n in in_order if kind_of(n) is Kind.GEMM]
    tiles = one_pass(in_order, outputs)
    if isinstance(tiles, Reject):
        tiles = _two_passes(in_order, outputs) or tiles
    rowwise = _rowwise(in_order, outputs, products)
    parts = _parts(in_order, outputs, products) if rowwise is None else None
    # keys and values of decoding share positions, so a group: tiles would be of one of the products, parts are of both
    joins = parts is not None and isinstance(tiles, GemmDomain) and any(
        s.value.kind is PointKind.SCATTERED for s in tiles.stores)
    if isinstance(tiles, GemmDomain) and not joins:
        return replace(tiles, parts=parts, rowwise=rowwise)
    reads = rowwise or (parts.head if parts is not None else None)
    if reads is None:
        return tiles
    if not isinstance(reads, GemmDomain):
        reads = GemmDomain(reads.stores, reads.program, reads.axes, reads.looped)
    return replace(reads, parts=parts, rowwise=rowwise, tiled=False)


def _rowwise(nodes: list[fx.Node], outputs: Sequence[fx.Node], products: Sequence[fx.Node]) -> Domain | None:
    """A kernel that reads a matrix once, row by row, if it multiplies a vector."""
    if not all(light(n) and with_vector(n) for n in products):
        return None
    found = resolve(nodes, outputs, Sums.LOOPED)
    if isinstance(found, Reject) or count(a.size for a in found.program) < LEAST_ROWS:
        return None
    return found


def _parts(nodes: list[fx.Node], outputs: Sequence[fx.Node], products: Sequence[fx.Node]) -> Parts | None:
    """The products apart from all else, if that pays and nothing multiplies what depends on another product."""
    inside, apart = frozenset(nodes), frozenset(products)
    before = above(products, inside)
    if not all(map(light, products)) or any(apart & (above([n], inside) - {n}) for n in products):
        return None
    added = [f.added for f in map(matrix_product, products) if f is not None and f.added is not None]
    between = above(outputs, inside, apart) | above(added, inside)
    first = [n for n in nodes if n in before]
    head = _rowwise(first, products, products) or one_pass(first, products)
    if isinstance(head, Reject) or not apart <= between:
        return None
    left = Sums.LEFT if isinstance(head, GemmDomain) else Sums.ONE
    rest = resolve([n for n in nodes if n in between], outputs, left)
    return None if isinstance(rest, Reject) else Parts(head, rest)


def one_pass(nodes: list[fx.Node], outputs: Sequence[fx.Node]) -> GemmDomain | Reject:
    try:
        walk = settled_walk(Pattern(nodes, outputs), Space())
        stores = _flat(Builder(walk).stores())
    except Rejected as rejected:
        return rejected.reject
    tile = _tile_axes(stores)
    if isinstance(tile, Reject):
        return tile
    group = coalesce(Group(stores, tile.program, tile.inner))
    tile = _tile_axes(group.stores)
    if isinstance(tile, Reject):
        return tile
    domain = GemmDomain(group.stores, tile.program, axes_in(replace(group, program=tile.program)), tile.inner,
                        tile.batch, tile.rows, tile.columns, tuple(_by_name(tile.inner)))
    return _refused(domain) or domain


def _two_passes(nodes: list[fx.Node], outputs: Sequence[fx.Node]) -> GemmDomain | None:
    """The reductions with the product, all else behind them; None where nothing is gained by it or no domain found.

    A row that one program holds is read once anyway.  A longer one would be read for its reductions and again for what
    needs their results: the first of these is what the product's kernel saves.
    """
    inside = frozenset(nodes)
    fed: set[fx.Node] = set()
    for node in nodes:
        if kind_of(node) is Kind.GEMM or any(n in fed for n in made_of(node, inside)):
            fed.add(node)
    products = [n for n in nodes if kind_of(n) is Kind.GEMM]
    reductions = {n for n in nodes if n in fed and kind_of(n) is Kind.REDUCTION and of_elements(n, products[0])}
    results = [n for n in nodes if n in reductions and any(u not in reductions for u in used_by(n, inside))]
    if not results or not any(_long(n) for n in results):
        return None
    wanted = above(outputs, inside, frozenset((*products, *results)))
    passed = tuple(n for n in nodes if n in wanted and n in (*products, *results))
    before, between = above(passed, inside), wanted.difference(passed)
    head = one_pass([n for n in nodes if n in before], passed)
    behind = [n for n in outputs if n not in passed]
    if isinstance(head, Reject) or not behind:
        return None
    tail = resolve([n for n in nodes if n in between], behind)
    if isinstance(tail, Reject) or count(a.size for a in tail.program) < min(LEAST_PROGRAMS, count(
            a.size for a in (*head.batch, *head.rows))):
        return None
    return replace(head, tail=tail, passed=passed)


def of_elements(node: fx.Node, product: fx.Node) -> bool:
    """Whether a reduction folds elements of the product, not what another has made of its rows."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return 2 * count(shape_of(operand)) > count(shape_of(product))


def _long(node: fx.Node) -> bool:
    """Whether a reduction's row is too long for one program to hold."""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return count(shape_of(operand)[d] for d in reduction_dims(node)[0]) > PERSISTENT_ELEMENTS


def made_of(node: fx.Node, inside: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes inside that a node reads, through views."""
    found: dict[fx.Node, None] = {}
    pending = list(node.all_input_nodes)
    while pending:
        read = pending.pop()
        if read in inside:
            found[read] = None
        elif read.op == "call_function" and is_view(read):
            pending.extend(read.all_input_nodes)
    return list(found)


def used_by(node: fx.Node, inside: frozenset[fx.Node]) -> list[fx.Node]:
    """The nodes inside that read a node, through views; the graph's output where that reads it."""
    found: dict[fx.Node, None] = {}
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user in inside or user.op == "output":
            found[user] = None
        elif user.op == "call_function" and is_view(user):
            pending.extend(user.users)
    return list(found)


def above(nodes: Iterable[fx.Node], inside: frozenset[fx.Node], stop: frozenset[fx.Node] = frozenset(),
          ) -> frozenset[fx.Node]:
    """What nodes need inside, themselves included; beyond the nodes of `stop` nothing is needed."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            if node not in stop:
                pending.extend(made_of(node, inside))
    return frozenset(found)


@dataclass(frozen=True)
class _Tile:
    """What the dots say of the axes."""

    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    inner: frozenset[Axis]

    @property
    def program(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.rows, *self.columns)


def _tile_axes(stores: Sequence[Store]) -> _Tile | Reject:
    """The axes of the tile, each kind as the dots' indices lay them out: outermost first."""
    dots = [p for p in points_of(stores) if p.kind is PointKind.DOT]
    if not dots:
        return Reject("its results need no element of the product", "")
    for dot in dots:
        if lookups_of(dot.index):
            return Reject("it reads the product at positions that a tensor holds",
                          "reduce over a comparison of positions instead of gathering", dot.node)
        if not all(form.affine for form in dot.index):
            return Reject("it reads the product through a view that does not factor", "", dot.node)
    found = _Tile(_ordered(f for p in dots for f in p.index[:-2]), _ordered(p.index[-2] for p in dots),
                  _ordered(p.index[-1] for p in dots), frozenset(a for p in dots for a in p.axes[0]))
    narrow = not found.rows or not found.columns
    if narrow and not ((found.rows or found.columns) and all(p.node is not None and light(p.node) for p in dots)):
        return Reject("the product of a matrix and a vector has no tiles", "", dots[0].node)
    if not found.inner:
        return Reject("the product sums nothing", "", dots[0].node)
    parts = (frozenset(found.batch), frozenset(found.rows), frozenset(found.columns), found.inner)
    if sum(map(len, parts)) != len(frozenset().union(*parts)):
        return Reject("one axis runs along two dimensions of the product", "", dots[0].node)
    return found


def _ordered(forms: Iterable[Form]) -> tuple[Axis, ...]:
    found: dict[Axis, int] = {}
    for form in forms:
        for atom, k in form.terms:
            if isinstance(atom, Axis):
                found[atom] = max(found.get(atom, 0), abs(hint(k, {})))
    return tuple(sorted(found, key=lambda a: (-found[a], a.name)))


def _by_name(axes: Iterable[Axis]) -> list[Axis]:
    return sorted(axes, key=lambda a: a.name)


def _refused(domain: GemmDomain) -> Reject | None:
    """What the tiles cannot hold."""
    points = domain.points()
    return _too_often(domain) or _outside(points) or _beyond_tile(domain, points) or _unfit_reduction(domain, points)


def _outside(points: Sequence[Point]) -> Reject | None:
    """A product that only some lanes of a tile need: the main loop has no lanes, so it would read past its factors."""
    for select in points:
        if select.kind is not PointKind.SELECT:
            continue
        for dot in needed_by(select):
            if dot.kind is PointKind.DOT and dot.node is not None and \
                    not all(within(form, size) for form, size in zip(dot.index, shape_of(dot.node))):
                return Reject("only a part of the result is read from the product",
                              "join or pad after another operation", dot.node)
    return None


def _too_often(domain: GemmDomain) -> Reject | None:
    """Dots of one shape, each element of a product computed once."""
    dots = domain.dots()
    if len(dots) > MOST_DOTS:
        return Reject(f"it reads the product at {len(dots)} places for each result",
                      "slice the product into fewer parts", dots[0].node)
    full = frozenset(domain.program)
    elements = count(a.size for a in domain.program)
    products = {p.node: count(shape_of(p.node)) for p in dots if p.node is not None}
    for dot in dots:
        if dot.deps - domain.looped != full:
            return Reject("two products have tiles of different shapes", "give both products one shape", dot.node)
        if frozenset(dot.axes[0]) != frozenset(dots[0].axes[0]):
            return Reject("two products sum over different dimensions", "", dot.node)
    if elements * len(dots) > sum(products.values()):
        return Reject("it would compute elements of the product more than once",
                      "use each element of the product at one place", dots[0].node)
    return None


def _beyond_tile(domain: GemmDomain, points: Sequence[Point]) -> Reject | None:
    """Axes that no tile has, and folds that no tile can make."""
    tile = frozenset(domain.program)
    for store in domain.stores:
        if store.axes - tile:
            return Reject("one of its results has an axis that the product lacks",
                          "do what has the product's own shape first, and repeat the result behind it", store.node)
    prologue = {id(p) for dot in domain.dots() for operand in dot.operands[:2] for p in needed_by(operand)}
    for point in points:
        if point.kind is PointKind.SCAN:
            return Reject("a running value needs the whole row before it", "", point.node)
        if id(point) in prologue and point.kind in FOLDS:
            return Reject("a factor of the product is reduced first", "", point.node)
        if id(point) not in prologue and point.deps - tile:
            reduced = frozenset(a for p in points if p.kind is PointKind.REDUCE for axes in p.axes for a in axes)
            if point.deps - tile - reduced:
                return Reject("it needs an axis that the product lacks", "", point.node)
    return None


def _unfit_reduction(domain: GemmDomain, points: Sequence[Point]) -> Reject | None:
    """Reductions that are no fold of whole rows or columns, or whose result is needed within the tile."""
    rows, columns, batch = frozenset(domain.rows), frozenset(domain.columns), frozenset(domain.batch)
    whole = {over for over in (rows, columns, rows | columns, rows | columns | batch) if over}
    pairs = domain.pairs()
    joint, folded = {id(p.second): p.first for p in pairs}, _folded_with(pairs, domain)
    before: dict[int, frozenset[Axis]] = {}  # axes over which what a point's operands depend on was reduced
    below: dict[int, frozenset[Axis]] = {}  # the same of the point itself
    for point in points:
        before[id(point)] = below[id(point)] = frozenset().union(*(below[id(p)] for p in point.inputs))
        if point.kind is PointKind.REDUCE:
            over = frozenset().union(*point.axes)
            if len(point.axes) != 1 or over not in whole:
                return Reject("a reduction takes part of a row or of a column",
                              "reduce over whole rows or columns of the product", point.node)
            first = joint.get(id(point))
            if before[id(point)] != (frozenset() if first is None else below[id(first)]) or \
                    first is not None and before[id(first)]:
                return Reject("a reduction needs another's result first", "", point.node)
            below[id(point)] = over
        elif point.deps & below[id(point)] and id(point) not in folded:
            return Reject("it needs the whole row of the product before its elements",
                          "return the row's result, and use it in another call", point.node)
    return None


def _folded_with(pairs: Sequence[Pair], domain: GemmDomain) -> frozenset[int]:
    """The exponents and distances that are folded with the result on which they depend, and that nothing else reads."""
    inside: set[int] = set()
    for pair in pairs:
        inside |= {id(p) for p in needed_by(pair.second)} - {id(p) for p in needed_by(pair.first)}
    elsewhere = {id(s.value) for s in domain.stores}
    elsewhere.update(id(p) for point in domain.points() if id(point) not in inside for p in point.inputs)
    return frozenset(inside - elsewhere)


def _flat(stores: tuple[Store, ...]) -> tuple[Store, ...]:
    """Stores in which a sum of sums is one sum: long ones reach the segmenter in two steps."""
    points = points_of(stores)
    readers: dict[int, int] = {}
    for point in points:
        for operand in point.inputs:
            readers[id(operand)] = readers.get(id(operand), 0) + 1
    for store in stores:
        readers[id(store.value)] = readers.get(id(store.value), 0) + 1
    moved: dict[int, Point] = {}
    for point in points:
        now = over(point, moved)
        inner = now.operands[0] if now.kind is PointKind.REDUCE and len(now.axes) == 1 else None
        if inner is not None and readers.get(id(point.operands[0])) == 1 and _one_fold(now, inner):
            now = replace(now, operands=inner.operands, axes=((*now.axes[0], *inner.axes[0]),))
        moved[id(point)] = now
    return tuple(replace(s, value=moved[id(s.value)]) for s in stores)


def _one_fold(outer: Point, inner: Point) -> bool:
    """Whether folding partial folds is folding everything."""
    if inner.kind is not PointKind.REDUCE or len(inner.axes) != 1 or inner.node is None or outer.node is None:
        return False
    rows = [row(p.node.target) for p in (outer, inner) if p.node is not None]
    monoids = [r.monoid for r in rows if r is not None]
    plain = all(m is not None and m.states == 1 and m.finish == ("{0}",) and not m.indexed for m in monoids)
    return plain and len(monoids) == 2 and monoids[0] is monoids[1] and outer.dtype is inner.dtype
