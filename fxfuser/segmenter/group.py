"""Groups of KERNEL vertices and what growth has to know of them.

A `Group` is a value: merging makes a new one.  Its `frame`, where it has one, stands for a domain during
growth, so that most merges need no resolving: one shape that all outputs have, and of every other value it is
known that the group needs each element once.  The final groups are resolved all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping

import torch
from torch import fx

from fxfuser import ops
from fxfuser.domain.size import Size
from fxfuser.ops import Kind
from fxfuser.segmenter.cost import CONTIGUOUS
from fxfuser.segmenter.facts import Facts
from fxfuser.segmenter.quotient import Quotient
from fxfuser.segmenter.sizing import Sizing

FOLDS = (Kind.REDUCTION, Kind.SCAN)


@dataclass(frozen=True)
class Frame:
    """All outputs have `shape`, or 1 in its dimensions `reduced`, which reductions fold."""

    shape: tuple[Size, ...]
    reduced: frozenset[int] = frozenset()

    def program(self) -> tuple[Size, ...]:
        """The dimensions along which programs can be laid out."""
        return tuple(s for d, s in enumerate(self.shape) if d not in self.reduced)

    def points(self, sizing: Sizing) -> int:
        """Independent pieces of work.  A reduction that leaves the last dimension takes it in runs."""
        points = sizing.product(self.program())
        if self.reduced and self.shape and len(self.shape) - 1 not in self.reduced:
            points //= min(CONTIGUOUS, max(1, sizing.number(self.shape[-1])))
        return max(1, points)


@dataclass(frozen=True, eq=False)
class Group:
    """`members` are vertices in topological order; `reads` maps each tensor read from outside to the views of
    it that are read; `points` independent pieces of work, `work` operations weighted by cost; `moved` bytes;
    `extent` the sizes (above 1) that all outputs have in common."""

    root: int
    members: tuple[int, ...]
    outputs: tuple[fx.Node, ...]
    reads: Mapping[fx.Node, frozenset[fx.Node]]
    device: torch.device
    reduces: bool
    frame: Frame | None
    points: int
    work: float
    moved: int
    extent: tuple[Size, ...]

    @property
    def pointers(self) -> int:
        """Tensors that the group's kernel is passed."""
        return len(self.reads) + len(self.outputs)

    def rooted(self, root: int) -> Group:
        """The same group under the root that the quotient gave it."""
        return self if root == self.root else replace(self, root=root)


def atom(vertex: int, facts: Facts) -> Group:
    """The group of one KERNEL vertex."""
    node = facts.vertices[vertex]
    sizing = facts.sizing
    reads: dict[fx.Node, frozenset[fx.Node]] = {}
    for read in facts.reads[node]:
        reads[read.source] = reads.get(read.source, frozenset()) | {read.via}
    frame = _atom_frame(node, facts)
    row = ops.row(node.target)
    evaluated = max([sizing.elements(node), *(sizing.elements(r.via) for r in facts.reads[node])]) \
        if frame is not None and frame.reduced else sizing.elements(node)
    return Group(
        vertex, (vertex,), (node,), reads, node.meta["val"].device, ops.kind_of(node) in FOLDS, frame,
        max(1, sizing.elements(node)) if frame is None else frame.points(sizing),
        float(evaluated * (row.cost if row else 1)), moved_bytes(reads, (node,), facts), _extent((node,), facts))


def _atom_frame(node: fx.Node, facts: Facts) -> Frame | None:
    kind = ops.kind_of(node)
    if kind in (Kind.POINTWISE, Kind.FACTORY, Kind.LAYOUT):
        return Frame(facts.sizing.shape(node))
    if kind not in FOLDS or len(facts.reads[node]) != 1:
        return None
    dims, _ = ops.reduction_dims(node)
    return Frame(facts.sizing.shape(facts.reads[node][0].via), frozenset(dims))


def _extent(outputs: tuple[fx.Node, ...], facts: Facts) -> tuple[Size, ...]:
    common: list[Size] | None = None
    for node in outputs:
        sizes = [s for s in facts.sizing.shape(node) if s != 1]
        common = sizes if common is None else shared_sizes(common, sizes)
    return tuple(common or ())


def shared_sizes(left: list[Size] | tuple[Size, ...], right: list[Size] | tuple[Size, ...]) -> list[Size]:
    """The sizes that both lists hold, with multiplicity, in the order of `left`."""
    rest = list(right)
    found = []
    for s in left:
        if s in rest:
            rest.remove(s)
            found.append(s)
    return found


def moved_bytes(reads: Mapping[fx.Node, frozenset[fx.Node]], outputs: tuple[fx.Node, ...], facts: Facts) -> int:
    """Bytes that a kernel with these operands and results reads and writes."""
    return sum(read_bytes(s, v, facts) for s, v in reads.items()) + sum(facts.sizing.bytes(n) for n in outputs)


def read_bytes(source: fx.Node, vias: frozenset[fx.Node], facts: Facts) -> int:
    """Bytes of `source` that are read through these views of it, each byte once."""
    whole = facts.sizing.bytes(source)
    if source in vias:
        return whole
    return min(whole, sum(facts.sizing.bytes(v) for v in vias))


def inner(node: fx.Node, a: Group, b: Group, facts: Facts, quotient: Quotient) -> bool:
    """Whether nobody outside the two groups reads `node`, which is in one of them."""
    if node in facts.exported:
        return False
    find = quotient.find
    return all(find(r) in (a.root, b.root) for r in facts.readers.get(node, ()))


def saved_bytes(a: Group, b: Group, facts: Facts, quotient: Quotient) -> int:
    """Bytes that one kernel for both moves less than one for each."""
    saved = 0
    for first, second in ((a, b), (b, a)):
        for source in first.outputs:
            vias = second.reads.get(source)
            if vias is not None:
                saved += read_bytes(source, vias, facts)
                if inner(source, a, b, facts, quotient):
                    saved += facts.sizing.bytes(source)
    few, many = (a.reads, b.reads) if len(a.reads) <= len(b.reads) else (b.reads, a.reads)
    for source, vias in few.items():
        other = many.get(source)
        if other is not None:
            both = read_bytes(source, vias, facts) + read_bytes(source, other, facts)
            saved += both - read_bytes(source, vias | other, facts)
    return saved


def merged(a: Group, b: Group, facts: Facts, quotient: Quotient) -> Group:
    """The group of both; its root is provisional, its frame None where only resolving can tell."""
    outputs = tuple(n for n in (*a.outputs, *b.outputs) if not inner(n, a, b, facts, quotient))
    reads = dict(a.reads)
    for source, vias in b.reads.items():
        reads[source] = reads[source] | vias if source in reads else vias
    for source in (*a.outputs, *b.outputs):
        reads.pop(source, None)
    frame = _merged_frame(a, b, outputs, facts)
    points = frame.points(facts.sizing) if frame is not None else max(a.points, b.points)
    return Group(
        a.root, tuple(sorted(a.members + b.members)), outputs, reads, a.device,
        a.reduces or b.reduces, frame, points,
        a.work * _repeats(a, b, outputs, facts) + b.work * _repeats(b, a, outputs, facts),
        moved_bytes(reads, outputs, facts), _extent(outputs, facts))


def _repeats(a: Group, b: Group, outputs: tuple[fx.Node, ...], facts: Facts) -> float:
    """How often `b` computes each element of `a`, at most, where it does so in place of loading them."""
    if a.frame is None or b.frame is None or any(n in outputs or n not in b.reads for n in a.outputs):
        return 1.0
    return max(1.0, facts.sizing.product(b.frame.shape) / max(1, facts.sizing.product(a.frame.shape)))


def _merged_frame(a: Group, b: Group, outputs: tuple[fx.Node, ...], facts: Facts) -> Frame | None:
    if a.frame is None or b.frame is None:
        return None
    if not a.frame.reduced and _absorbed(a, b, outputs, facts):
        return b.frame
    if not b.frame.reduced and _absorbed(b, a, outputs, facts):
        return a.frame
    if not _direct(a, b, facts) or not _direct(b, a, facts):
        return None
    if a.frame.reduced and b.frame.reduced and a.frame.reduced != b.frame.reduced:
        return None
    reduced = a.frame.reduced | b.frame.reduced
    if a.frame.shape == b.frame.shape:
        frame = Frame(a.frame.shape, reduced)
    elif not a.frame.reduced and _broadcasts(a.frame.shape, b.frame.shape):
        frame = Frame(b.frame.shape, reduced)
    elif not b.frame.reduced and _broadcasts(b.frame.shape, a.frame.shape):
        frame = Frame(a.frame.shape, reduced)
    else:
        return None
    return frame if all(_spans(node, frame, facts) for node in outputs) else None


def _absorbed(a: Group, b: Group, outputs: tuple[fx.Node, ...], facts: Facts) -> bool:
    """Whether `a` only feeds `b`, through one view or views that do not overlap: `b` computes where it loaded."""
    return all(n in b.reads and n not in outputs and _needed_once(n, b.reads[n], facts) for n in a.outputs)


def _needed_once(node: fx.Node, vias: frozenset[fx.Node], facts: Facts) -> bool:
    elements = facts.sizing.elements
    return len(vias) == 1 or sum(map(elements, vias)) <= elements(node)


def covering_frame(group: Group, programs: int, facts: Facts) -> Frame | None:
    """The frame of a group whose domain has this many points along its program axes, where all outputs have one
    shape and there is a point for each of its elements or, where the group reduces, of its leading dimensions."""
    shapes = {facts.sizing.shape(n) for n in group.outputs}
    if len(shapes) != 1 or any(_drops(n) for n in group.outputs):
        return None
    shape = shapes.pop()
    product = facts.sizing.product
    if not group.reduces:
        return Frame(shape) if product(shape) == programs else None
    for rank in reversed(range(len(shape))):
        if product(shape[:rank]) == programs:
            return Frame(shape, frozenset(range(rank, len(shape))))
    return None


def _direct(a: Group, b: Group, facts: Facts) -> bool:
    """Whether `b` reads what `a` makes without a view, and nothing whose reduced dimensions were dropped."""
    return all(b.reads.get(n, frozenset({n})) == {n} and not (n in b.reads and _drops(n)) for n in a.outputs)


def _drops(node: fx.Node) -> bool:
    return ops.kind_of(node) is Kind.REDUCTION and not ops.reduction_dims(node)[1]


def _broadcasts(small: tuple[Size, ...], large: tuple[Size, ...]) -> bool:
    return len(small) <= len(large) and all(s in (1, n) for s, n in zip(reversed(small), reversed(large)))


def _spans(node: fx.Node, frame: Frame, facts: Facts) -> bool:
    """Whether an output has every program dimension of the frame."""
    shape = facts.sizing.shape(node)
    if _drops(node) and frame.reduced:
        return shape == frame.program()
    if len(shape) != len(frame.shape):
        return False
    return all(s == n or (d in frame.reduced and s == 1) for d, (s, n) in enumerate(zip(shape, frame.shape)))
