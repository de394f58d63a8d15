"""A region of row-wise values, computed for some rows at a time.

    for rows a:b    l = x[a:b] @ w.T;  loss[a:b], g = ...;  dx[a:b] = g @ w;  dw += g.T @ x[a:b]

The loop is unrolled into the graph.  Invariant: no piece begins before everything of the piece before has been
computed (`fxfuser::after`), so that one piece's wide values are all that ever stand.  `dw` accumulates in float32
where there is more than one piece; pieces have equal sizes but for the last, and read their rows through `after` as
tensors of their own, so that one kernel serves all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Iterable, Mapping, Sequence

import torch
from torch import fx

from fxfuser.ops import reduction_dims
from fxfuser.ops.products import ADD_PRODUCT, AFTER, PUT_PRODUCT
from fxfuser.passes.layout import is_contiguous
from fxfuser.passes.picks import Picker, reads_unrounded, wide_product
from fxfuser.passes.row_region import How, Output, Region, factors
from fxfuser.passes.row_values import Writer, emit

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Loop:
    """What the unrolled loop left: the value of each output and, for the next loop, what has to be done before."""

    values: Mapping[fx.Node, fx.Node]
    done: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Order:
    """`size`: rows of a piece; `before`: what is computed before the first of them; `wide`: products of half types are
    handed out as float32, unrounded, where there is more than one piece."""

    size: int
    before: tuple[fx.Node, ...] = ()
    wide: bool = False


def unroll(
    region: Region, outputs: Sequence[Output], stand_ins: Mapping[fx.Node, fx.Node], order: Order, write: Writer
) -> Loop:
    """Computes `outputs` of the region at the graph's insertion point.

    `stand_ins` replace leaves, such as a tangent by a number.  Values have the rows in their first dimension, as
    [M, *rest], and the dtype of the output's node, unless the order is for wide ones.
    """
    loop = _Loop(region, outputs, stand_ins, write, order.wide, order.before)
    bounds = [(a, min(a + order.size, region.rows)) for a in range(0, region.rows, order.size)]
    for start, stop in bounds:
        loop.piece(start, stop, len(bounds))
    values = {o.node: loop.finished(o) for o in outputs}
    return Loop(values, loop.done)


def needed(region: Region, outputs: Iterable[Output]) -> set[fx.Node]:
    """The members and leaves on which these outputs stand."""
    members = set(region.members)
    found: set[fx.Node] = set()
    stack = [n for o in outputs for n in (o.inside, o.other) if n is not None]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node in members and region.leads[node]:
                stack.extend(factors_of(region) if node is region.product else node.all_input_nodes)
    return found


def flattened(leaf: fx.Node, lead: int, region: Region, write: Writer) -> fx.Node:
    """A leaf with its rows in one dimension."""
    value = leaf.meta["val"]
    shape = [region.rows, *value.shape[lead:]]
    if not is_contiguous(value):
        leaf = write.call(aten.clone.default, leaf, memory_format=torch.contiguous_format, like=region.product)
    return leaf if list(value.shape) == shape else write.call(aten.view.default, leaf, shape, like=region.product)


def factors_of(region: Region) -> list[fx.Node]:
    return [n for n in factors(region.product) if n is not None]


@dataclass
class _Loop:
    region: Region
    outputs: Sequence[Output]
    stand_ins: Mapping[fx.Node, fx.Node]
    write: Writer
    wide: bool
    done: tuple[fx.Node, ...] = ()
    flat: dict[fx.Node, fx.Node] = field(default_factory=dict)  # leaves as [M, *rest]
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)  # PUT, ADD and TOTAL outputs so far
    pieces: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = needed(self.region, self.outputs)
        self.members = [n for n in self.region.members if n in wanted]

    def piece(self, start: int, stop: int, count: int) -> None:
        """All outputs for the rows from `start` to `stop`; `count` pieces there are."""
        region, write = self.region, self.write
        known: dict[fx.Node, fx.Node] = {}
        done: list[fx.Node] = []

        def rows_of(leaf: fx.Node, lead: int) -> fx.Node:
            whole = self._flat(leaf, lead)
            if count == 1:
                return whole
            part = write.call(aten.slice.Tensor, whole, 0, start, stop, like=region.product)
            return write.call(AFTER, part, list(self.done), like=region.product)

        def at_hand(node: fx.Node) -> fx.Node:
            if node not in known:
                lead = region.leads.get(node, 0)
                known[node] = rows_of(node, lead) if lead else self._constant(node)
            return known[node]

        bias, left, right = factors(region.product)
        own = rows_of(left, 1)
        known[left] = own
        for node in self.members:
            if node is region.product:
                known[node] = self._product(bias, own, right)
            elif not region.leads[node]:
                known[node] = write.call(node.target, *node.args, like=node, **node.kwargs)
            else:
                for operand in node.all_input_nodes:
                    at_hand(operand)
                known[node] = self._picked(node, known) or emit(node, region.leads[node], stop - start, known, write)
        for output in self.outputs:
            inside = known[output.inside]
            if output.how is How.ROWS:
                self.pieces.setdefault(output.node, []).append(inside)
                done.append(inside)
                continue
            if output.how is How.PUT:
                found = self._put(output, inside, start, count)
            elif output.how is How.ADD:
                assert output.other is not None
                if output.other not in known:
                    known[output.other] = rows_of(output.other, 1)
                found = self._add(output, inside, known[output.other], count)
            else:
                found = self._total(output, inside)
            self.sums[output.node] = found
            done.append(found)
        self.done = tuple(dict.fromkeys(done))

    def _picked(self, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node | None:
        """A gather of one element from each wide row, without a read of its own."""
        if node.target is not aten.gather.default:
            return None
        source, index = known[node.all_input_nodes[0]], known[node.all_input_nodes[1]]
        if source.meta["val"].dim() != 2 or list(index.meta["val"].shape[1:]) != [1]:
            return None
        return Picker(index, node, self.write, self.kept).pick(source)

    @property
    def kept(self) -> bool:
        """Whether something reads the logits beside what makes numbers of rows of them."""
        return any(o.how is not How.ROWS for o in self.outputs)

    def _product(self, bias: fx.Node | None, left: fx.Node, right: fx.Node) -> fx.Node:
        """The product for one piece's rows."""
        product = self.region.product
        picks = not self.kept and any(n.target is aten.gather.default for n in self.members)
        if picks and reads_unrounded(product, self.write.scope):
            return wide_product(self.write, product, bias, left, right)
        arguments = [left, right] if bias is None else [bias, left, right]
        return self.write.call(product.target, *arguments, like=product)

    def _constant(self, leaf: fx.Node) -> fx.Node:
        """A leaf that is the same for all rows; what stands in for one is computed once, not by every piece."""
        stand_in = self.stand_ins.get(leaf)
        if stand_in is None:
            return leaf
        if leaf not in self.flat:
            self.flat[leaf] = self.write.call(AFTER, stand_in, [], like=self.region.product)
        return self.flat[leaf]

    def _flat(self, leaf: fx.Node, lead: int) -> fx.Node:
        if leaf not in self.flat:
            self.flat[leaf] = flattened(self.stand_ins.get(leaf, leaf), lead, self.region, self.write)
        return self.flat[leaf]

    def _put(self, output: Output, inside: fx.Node, start: int, count: int) -> fx.Node:
        if count == 1:
            return self.write.call(aten.mm.default, inside, output.other, like=output.node)
        dtype = output.node.meta["val"].dtype
        wide = torch.float32 if self.wide and dtype in HALVES else dtype
        return self.write.call(PUT_PRODUCT, self.sums.get(output.node), inside, output.other, start, self.region.rows,
                               wide, like=output.node)

    def _add(self, output: Output, inside: fx.Node, other: fx.Node, count: int) -> fx.Node:
        first, second = (other, inside) if output.turned else (inside, other)
        across = self.write.call(aten.permute.default, first, [1, 0], like=output.node)
        if count == 1:
            return self.write.call(aten.mm.default, across, second, like=output.node)
        dtype = output.node.meta["val"].dtype
        wide = torch.float32 if dtype in HALVES else dtype
        return self.write.call(ADD_PRODUCT, self.sums.get(output.node), across, second, wide, like=output.node)

    def _total(self, output: Output, inside: fx.Node) -> fx.Node:
        """The sum over the piece's rows, added to those before."""
        dims, _ = reduction_dims(output.node)
        lead = self.region.leads[output.inside]
        moved = [0, *(d - lead + 1 for d in dims if d >= lead)]
        dtype = output.node.meta["val"].dtype
        wide = torch.float32 if dtype in HALVES else dtype
        part = self.write.call(aten.sum.dim_IntList, inside, moved, dtype=wide, like=output.node)
        before = self.sums.get(output.node)
        return part if before is None else self.write.call(aten.add.Tensor, before, part, like=output.node)

    def finished(self, output: Output) -> fx.Node:
        """The output for all rows."""
        if output.how is How.ROWS:
            pieces = self.pieces[output.node]
            if len(pieces) == 1:
                return pieces[0]
            apart = [self.write.call(AFTER, p, [], like=output.node) for p in pieces]  # or the last would be larger
            return self.write.call(aten.cat.default, apart, 0, like=output.node)
        found = self.sums[output.node]
        value = output.node.meta["val"]
        if output.how is How.TOTAL:
            found = self._shaped_total(output, found)
        kept = self.wide and output.how in (How.PUT, How.ADD)
        if found.meta["val"].dtype is not value.dtype and not kept:
            found = self.write.call(aten._to_copy.default, found, dtype=value.dtype, like=output.node)
        return found

    def _shaped_total(self, output: Output, total: fx.Node) -> fx.Node:
        node, shape = output.node, list(output.node.meta["val"].shape)
        if "mean" in str(node.target):
            size = output.inside.meta["val"].shape
            count = math.prod(size[d] for d in reduction_dims(node)[0])
            total = self.write.call(aten.div.Tensor, total, count, like=node)
        if list(total.meta["val"].shape) != shape:
            total = self.write.call(aten.view.default, total, shape, like=node)
        return total
