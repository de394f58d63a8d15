"""Numbers of each row, such as its logsumexp, from some columns at a time, of which some logits are kept.

    for columns a:b     l = x @ w[a:b].T;  m_p = l.amax(1);  s_p = exp(l - m_p).sum(1);  p_p = (l * onehot).sum(1)
                        keep l.T
    m = max(m_p);  s = sum(s_p * exp(m_p - m));  p = sum(p_p)

Enters: a region and the numbers of its rows that are wanted.  Leaves: their values and what is `Kept`: logits
transposed, so that those of adjacent columns lie side by side and a product sums over all of them at once.  A fused
product keeps of other columns nothing but the numbers.  A region qualifies where each number follows from maxima,
sums of exponentials behind them and labels' elements of logits, or what is computed of these element by element.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Iterator, Sequence

import torch
from torch import fx

from fxfuser.ops import Kind, kind_of, reduction_dims
from fxfuser.ops.products import AFTER, WITH_ROOM
from fxfuser.passes.column_operands import Block, Operands, is_wide
from fxfuser.passes.row_chunks import HALVES, needed
from fxfuser.passes.row_region import How, Output, Region, descendants
from fxfuser.passes.row_values import RESHAPES, Writer, emit, rest_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Logits:
    """Those of `columns` columns, [columns, M]; `inside`: at the end of `node`, which becomes an output."""

    node: fx.Node
    columns: int
    inside: bool


@dataclass(frozen=True)
class Kept:
    """What the forward leaves of the logits, from the first column on."""

    parts: tuple[Logits, ...] = ()


def overwritten_rows(columns: int, rows: int, shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows of a matrix of `shape` that a product may write at a time while those of a [columns, rows] matrix at the end
    of its memory from the first of them on are still to be read; ends where not even one may be written."""
    room, start = shape[0] * shape[1] - columns * rows, 0
    while start < columns:
        stop = min((room + rows * start) // shape[1], columns)
        if stop <= start:
            break
        yield start, stop
        start = stop


@dataclass(frozen=True)
class Numbers:
    """What has to be known of all columns: `maxima` and, behind them, sums of exponentials of these wide values, and of
    others the elements that a label, [M, 1], chooses."""

    maxima: tuple[fx.Node, ...]
    summed: frozenset[fx.Node]
    picks: tuple[tuple[fx.Node, fx.Node], ...]


def numbers_for(region: Region, wanted: Sequence[fx.Node]) -> Numbers | None:
    """What the wanted numbers of rows follow from; None where some do not."""
    search = _Search(region)
    return search.found() if all(map(search.narrow, wanted)) else None


@dataclass
class _Search:
    region: Region
    maxima: dict[fx.Node, None] = field(default_factory=dict)
    summed: set[fx.Node] = field(default_factory=set)
    picks: dict[tuple[fx.Node, fx.Node], None] = field(default_factory=dict)
    seen: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.below = {self.region.product, *descendants(self.region.product)}

    def found(self) -> Numbers:
        return Numbers(tuple(self.maxima), frozenset(self.summed), tuple(self.picks))

    def narrow(self, node: fx.Node) -> bool:
        """Whether a number of each row follows."""
        if node in self.seen or node not in self.below or node not in self.region.members:
            return True
        self.seen.add(node)
        operands = [n for n in node.all_input_nodes if n in self.region.leads]
        if not any(n in self.below and is_wide(self.region, n) for n in operands):
            return all(map(self.narrow, operands))
        if node.target is aten.gather.default:
            source, index = node.all_input_nodes
            return index in self.region.leads and rest_of(index, self.region.leads[index]) == [1] \
                and index not in self.below and self._picked(source, index)
        if node.target not in (aten.amax.default, aten.sum.dim_IntList) or len(operands) != 1:
            return False
        if reduction_dims(node)[0] != (self.region.leads[operands[0]],):
            return False
        return self._maximum(operands[0]) if node.target is aten.amax.default else self._sum(node)

    def _maximum(self, wide: fx.Node) -> bool:
        self.maxima[wide] = None
        return self._plain(wide) and wide.meta["val"].dtype in (torch.float32, torch.float64)

    def _sum(self, node: fx.Node) -> bool:
        """sum(exp(v - shift)), for any shift."""
        terms = shifted(node)
        if terms is None or terms[0].meta["val"].dtype is not node.meta["val"].dtype or not self._maximum(terms[0]):
            return False
        self.summed.add(terms[0])
        return terms[1] in self.region.leads and not is_wide(self.region, terms[1]) and self.narrow(terms[1])

    def _picked(self, node: fx.Node, index: fx.Node) -> bool:
        if self._plain(node):
            self.picks[node, index] = None
            return True
        if kind_of(node) is not Kind.POINTWISE and node.target not in RESHAPES:
            return False
        for operand in node.all_input_nodes:
            wide = self.region.leads.get(operand) and is_wide(self.region, operand)
            if wide and not (operand in self.below and self._picked(operand, index)):
                return False
            if not wide and operand in self.region.leads and not self.narrow(operand):
                return False
        return True

    def _plain(self, node: fx.Node) -> bool:
        return is_plain(self.region, node, self.below)


def is_plain(region: Region, node: fx.Node, below: set[fx.Node]) -> bool:
    """Whether a wide value follows from logits element by element, without other numbers of their rows."""
    stack = [node]
    while stack:
        one = stack.pop()
        if one in below:
            if rest_of(one, region.leads[one]) != [region.columns]:
                return False
            stack += [] if one is region.product else [n for n in one.all_input_nodes if n in region.leads]
    return True


def shifted(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(v, shift) of sum(exp(v - shift))."""
    exponential = node.all_input_nodes[0]
    difference = exponential.all_input_nodes[0] if exponential.target is aten.exp.default else None
    if difference is None or difference.target is not aten.sub.Tensor or difference.kwargs:
        return None
    value, shift = difference.args
    return (value, shift) if isinstance(value, fx.Node) and isinstance(shift, fx.Node) else None


# ---------------------------------------------------------------- in the graph


@dataclass(frozen=True)
class Cut:
    """Columns in the order of the plan: `inside` are kept at the end of a tensor of `room`'s shape, `beside` in one of
    their own, the others not, `size` at a time."""

    inside: int
    beside: int
    size: int
    room: tuple[int, ...] = ()


def unroll_parts(region: Region, wanted: Sequence[fx.Node], numbers: Numbers, cut: Cut, write: Writer,
                 before: tuple[fx.Node, ...] = ()) -> tuple[dict[fx.Node, fx.Node], Kept, tuple[fx.Node, ...]]:
    """(the wanted numbers of all rows, [M, *rest]; kept logits; what is done last) at the graph's insertion point."""
    parts = _Parts(region, numbers, Operands(region, write, {}), before)
    kept, start = [], 0
    for columns, inside in ((cut.inside, True), (cut.beside, False)):
        if columns:
            logits = parts.add(start, start + columns, kept=True)
            node = logits if not inside else write.call(WITH_ROOM, logits, list(cut.room), like=region.product)
            kept.append(Logits(node, columns, inside))
            start += columns
    while start < region.columns:
        stop = min(start + cut.size, region.columns)
        parts.add(start, stop, kept=False)
        start = stop
    values = {n: parts.whole(n) for n in wanted}
    return values, Kept(tuple(kept)), parts.done


@dataclass
class _Parts:
    region: Region
    numbers: Numbers
    operands: Operands
    done: tuple[fx.Node, ...]
    partial: dict[tuple[fx.Node, str], list[fx.Node]] = field(default_factory=dict)  # [M, 1] of each part
    picked: dict[tuple[fx.Node, fx.Node], fx.Node] = field(default_factory=dict)
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        region, rows = self.region, self.operands.rows
        self.below = {region.product, *descendants(region.product)}
        read = needed(region, [Output(n, How.ROWS, n) for n in (
            *self.numbers.maxima, *itertools.chain.from_iterable(self.numbers.picks))])
        for node in (n for n in region.members if n in read and region.leads[n] and n not in self.below):
            if not is_wide(region, node):
                rows[node] = self.operands.call(AFTER, self.operands.whole(node, self.known), [])

    def add(self, start: int, stop: int, kept: bool) -> fx.Node:
        """The numbers of some columns; leaves their logits, transposed where they are kept."""
        call, block = self.operands.call, Block(self.operands, start, stop, self.done)
        logits, done = block.value(self.region.product), []
        if kept and logits.meta["val"].dtype in HALVES:
            # the gradient reads them rounded: numbers of others would not belong to them
            logits = block.known[self.region.product] = call(
                aten._to_copy.default, logits, dtype=logits.meta["val"].dtype)
        for wide in self.numbers.maxima:
            value = block.value(wide)
            maximum = call(aten.amax.default, value, [1], True)
            done.append(self._add(wide, "maximum", maximum))
            if wide in self.numbers.summed:
                terms = call(aten.exp.default, call(aten.sub.Tensor, value, maximum))
                done.append(self._add(wide, "sum", call(aten.sum.dim_IntList, terms, [1], True)))
        for wide, index in self.numbers.picks:
            value = block.value(wide)
            found = call(aten.sum.dim_IntList, self._alone(block, value, index), [1], True)
            before = self.picked.get((wide, index))
            self.picked[wide, index] = found if before is None else call(aten.add.Tensor, before, found)
            done.append(found)
        if kept:
            logits = call(aten.clone.default, call(aten.permute.default, logits, [1, 0]),
                          memory_format=torch.contiguous_format)
            done.append(logits)
        self.done = tuple(done)
        return logits

    def _add(self, wide: fx.Node, what: str, partial: fx.Node) -> fx.Node:
        self.partial.setdefault((wide, what), []).append(partial)
        return partial

    def _alone(self, block: Block, value: fx.Node, index: fx.Node) -> fx.Node:
        """A row's element that its label chooses, where this block has it, and else zeros."""
        call, like = self.operands.call, value.meta["val"]
        label = self.operands.label(self.operands.flat(index))
        numbers = block.part_of(self.operands.numbers((1, self.region.columns), like.device), 1)
        zero = call(aten.full.default, [], 0, dtype=like.dtype, device=like.device, pin_memory=False)
        return call(aten.where.self, call(aten.eq.Tensor, numbers, label), value, zero)

    # ------------------------------------------------------------ all columns

    def whole(self, node: fx.Node) -> fx.Node:
        """A number of each row, [M, *rest]."""
        region = self.region
        if node not in self.known:
            if node not in self.below or node not in region.members:
                return self.operands.whole(node, self.known)
            elif any(n in self.below and n in region.leads and is_wide(region, n) for n in node.all_input_nodes):
                self.known[node] = self._shaped(node, self._reduced(node))
            else:
                operands = {n: self.whole(n) for n in node.all_input_nodes}
                self.known[node] = emit(node, region.leads[node], region.rows, operands, self.operands.write)
        return self.known[node]

    def _shaped(self, node: fx.Node, found: fx.Node) -> fx.Node:
        shape = [self.region.rows, *rest_of(node, self.region.leads[node])]
        return found if list(found.meta["val"].shape) == shape else self.operands.call(aten.view.default, found, shape)

    def _reduced(self, node: fx.Node) -> fx.Node:
        if node.target is aten.gather.default:
            return self._element(node)
        source = node.all_input_nodes[0]
        if node.target is aten.amax.default:
            return self._maximum(source)
        terms = shifted(node)
        assert terms is not None
        return self._sum(terms[0], self._shaped_column(self.whole(terms[1])))

    def _shaped_column(self, value: fx.Node) -> fx.Node:
        shape = [self.region.rows, 1]
        return value if list(value.meta["val"].shape) == shape else self.operands.call(aten.view.default, value, shape)

    def _maximum(self, wide: fx.Node) -> fx.Node:
        found, *others = self.partial[wide, "maximum"]
        for other in others:
            found = self.operands.call(aten.maximum.default, found, other)
        return found

    def _sum(self, wide: fx.Node, shift: fx.Node) -> fx.Node:
        """sum(exp(v - shift)) of sums behind other maxima; such a sum means nothing where its maximum is infinite."""
        call, total = self.operands.call, None
        for maximum, part in zip(self.partial[wide, "maximum"], self.partial[wide, "sum"]):
            infinite = call(aten.eq.Scalar, call(aten.abs.default, maximum), math.inf)
            finite = call(aten.masked_fill.Scalar, part, infinite, 1.0)
            scaled = call(aten.mul.Tensor, finite, call(aten.exp.default, call(aten.sub.Tensor, maximum, shift)))
            total = scaled if total is None else call(aten.add.Tensor, total, scaled)
        assert total is not None
        return total

    def _element(self, node: fx.Node) -> fx.Node:
        """What a gather chooses; a label that is no column's is refused by a gather of zeros, as eager refuses it."""
        source, index = node.all_input_nodes
        found = self._picked(source, index)
        value = found.meta["val"]
        zero = self.operands.call(aten.full.default, [], 0, dtype=value.dtype, device=value.device, pin_memory=False)
        row = self.operands.call(aten.expand.default, zero, [self.region.rows, self.region.columns])
        return self.operands.call(aten.add.Tensor, found, self.operands.call(
            aten.gather.default, row, 1, self.operands.flat(index)))

    def _picked(self, node: fx.Node, index: fx.Node) -> fx.Node:
        region = self.region
        if (node, index) in self.picked:
            return self.picked[node, index]
        lead = region.leads.get(node, 0)
        if not lead:
            shape = node.meta["val"].shape
            value = self.operands.constant(node)
            if not shape or shape[-1] != region.columns:
                return value
            row = self.operands.call(aten.expand.default, value, [region.rows, region.columns])
            return self.operands.call(aten.gather.default, row, 1, self.operands.flat(index))
        if not is_wide(region, node):
            return self.whole(node)
        operands = {n: self._picked(n, index) for n in node.all_input_nodes}
        return emit(node, lead, region.rows, operands, self.operands.write, (region.columns, 1))
