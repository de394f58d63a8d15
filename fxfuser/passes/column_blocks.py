"""The gradients of a region of row-wise values, for some of its columns at a time.

    for columns a:b     l = x @ w[a:b].T;  g = exp(l - lse) * t - onehot;  dx += g @ w[a:b];  dw[a:b] = g.T @ x

The numbers of each row that the gradient needs, such as its logsumexp, are known: the forward has computed them.  So
a block needs nothing of the others, `dw` is written once, in its own dtype, and only `dx` grows in float32: where the
weights are large this needs less than pieces of rows, at the price of a fourth product.  Blocks follow one another
through `fxfuser::after`, and read what varies with the columns as tensors of their own, so that one kernel serves all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Mapping, Sequence

import torch
from torch import fx

from fxfuser.ops import Kind, kind_of, reduction_dims
from fxfuser.ops.products import ADD_PRODUCT, AFTER, PUT_PRODUCT
from fxfuser.passes.row_chunks import HALVES, Loop, Order, flattened, needed
from fxfuser.passes.row_region import How, Output, Region, descendants, factors
from fxfuser.passes.row_values import Writer, emit, rest_of

aten = torch.ops.aten


def statistics(region: Region, outputs: Sequence[Output], depends: Collection[fx.Node]) -> list[fx.Node] | None:
    """The numbers of each row that blocks of columns have to know; None where blocks cannot compute the outputs.

    `depends` are the nodes that depend on a tangent.
    """
    if not all(_serves(region, o) for o in outputs):
        return None
    wanted, below = needed(region, outputs), {region.product, *descendants(region.product)}
    members = [n for n in region.members if n in wanted and region.leads[n]]
    found = []
    for node in members:
        if node is region.product or is_wide(region, node):
            if rest_of(node, region.leads[node]) != [region.columns]:
                return None
        elif node in below and node not in depends:
            found.append(node)
        elif node in below and any(is_wide(region, n) for n in node.all_input_nodes if n in region.leads):
            return None  # a sum over all columns of what has to be known for each of them
    known = set(found)
    return [n for n in found if any(u in wanted and u not in known for u in n.users)]


def _serves(region: Region, output: Output) -> bool:
    if output.how is How.TOTAL:
        return list(reduction_dims(output.node)[0]) == list(range(region.leads[output.inside])) \
            and "sum" in str(output.node.target)
    return output.how is How.PUT or output.how is How.ADD and not output.turned


def is_wide(region: Region, node: fx.Node) -> bool:
    """Whether the node has an element for each column of a row."""
    return 2 * math.prod(rest_of(node, region.leads[node])) >= region.columns


def unroll_columns(
    region: Region, outputs: Sequence[Output], known: Mapping[fx.Node, fx.Node], order: Order, write: Writer
) -> Loop:
    """Computes `outputs` at the graph's insertion point; `known` has the statistics, [M, *rest].

    `order.size` is the number of columns of a block.
    """
    loop = _Blocks(region, outputs, dict(known), write, order.before)
    loop.prepare()
    for start in range(0, region.columns, order.size):
        loop.block(start, min(start + order.size, region.columns))
    return Loop({o.node: loop.finished(o) for o in outputs}, loop.done)


@dataclass
class _Blocks:
    region: Region
    outputs: Sequence[Output]
    rows: dict[fx.Node, fx.Node]  # what has a number for each row, for all rows
    write: Writer
    done: tuple[fx.Node, ...]
    sums: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pieces: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    wide: list[fx.Node] = field(default_factory=list)
    columns: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what has a number for each column
    narrow: dict[fx.Node, fx.Node] = field(default_factory=dict)  # numbers of columns and labels, as int32

    def prepare(self) -> None:
        """Narrow values, computed once; `wide` are the members that blocks compute."""
        region, given = self.region, frozenset(self.rows)
        wanted = needed(region, self.outputs)
        whole: dict[fx.Node, fx.Node] = {}
        for node in (n for n in region.members if n in wanted):
            lead = region.leads[node]
            if node is region.product or lead and is_wide(region, node):
                self.wide.append(node)
            elif lead and node not in given and any(
                    u in wanted and u not in given and u is not region.product for u in node.users):
                self.rows[node] = self._whole(node, whole)
        apart = {n: self.write.call(AFTER, v, [], like=region.product) for n, v in self.rows.items()}
        self.rows.update(apart)

    def _whole(self, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """A value for all rows, from leaves, statistics and, in a sum, wide values that are no logits."""
        region = self.region
        if node in self.rows:
            return self.rows[node]
        if node not in known:
            lead = region.leads.get(node, 0)
            if not lead:
                known[node] = node
            elif node not in region.members:
                known[node] = flattened(node, lead, region, self.write)
            else:
                operands = {n: self._whole(n, known) for n in node.all_input_nodes}
                known[node] = emit(node, lead, region.rows, operands, self.write)
        return known[node]

    def block(self, start: int, stop: int) -> None:
        region, write = self.region, self.write
        known: dict[fx.Node, fx.Node] = {}

        def part_of(node: fx.Node, dim: int) -> fx.Node:
            part = write.call(aten.slice.Tensor, node, dim, start, stop, like=region.product)
            return write.call(AFTER, part, list(self.done), like=region.product)

        def at_hand(node: fx.Node) -> fx.Node:
            if node not in known:
                known[node] = self._operand(node, part_of)
            return known[node]

        bias, left, right = factors(region.product)
        x = self._flat(left)
        arguments = [x, part_of(right, 1)] if bias is None else [part_of(bias, 0), x, part_of(right, 1)]
        for node in self.wide:
            if node is region.product:
                known[node] = write.call(node.target, *arguments, like=node)
                continue
            sides = self._compared(node, part_of)
            if sides is None:
                for operand in node.all_input_nodes:
                    at_hand(operand)
                sides = known
            known[node] = emit(node, region.leads[node], region.rows, sides, write, (region.columns, stop - start))
        done = []
        for output in self.outputs:
            inside = known[output.inside]
            if output.how is How.TOTAL:
                done.append(self._total(output, inside))
                continue
            assert output.other is not None
            if output.how is How.PUT:
                dtype = output.node.meta["val"].dtype
                found = write.call(ADD_PRODUCT, self.sums.get(output.node), inside, part_of(output.other, 0),
                                   torch.float32 if dtype in HALVES else dtype, like=output.node)
            else:
                across = write.call(aten.permute.default, inside, [1, 0], like=output.node)
                found = write.call(PUT_PRODUCT, self.sums.get(output.node), across, self._flat(output.other), start,
                                   region.columns, output.node.meta["val"].dtype, like=output.node)
            self.sums[output.node] = found
            done.append(found)
        self.done = tuple(done)

    def _operand(self, node: fx.Node, part_of: Callable[[fx.Node, int], fx.Node]) -> fx.Node:
        lead = self.region.leads.get(node, 0)
        if lead:
            return self.rows[node] if node in self.rows else self._flat(node)
        shape = node.meta["val"].shape
        if not shape or shape[-1] != self.region.columns:
            return node
        if node not in self.columns:  # made once: a factory with several readers would be made for each
            self.columns[node] = self.write.call(AFTER, node, [], like=self.region.product)
        return part_of(self.columns[node], len(shape) - 1)

    def _compared(self, node: fx.Node, part_of: Callable[[fx.Node, int], fx.Node]) -> dict[fx.Node, fx.Node] | None:
        """The columns' numbers and the rows' labels that `node` compares, as int32: half the work for each element.

        The numbers of a block are loaded, so that one kernel serves all: no bounds of theirs are known below.
        """
        if node.target is not aten.eq.Tensor or len(node.all_input_nodes) != 2:
            return None
        number = next((n for n in node.all_input_nodes if self._counts(n)), None)
        label = next((n for n in node.all_input_nodes if n in self.rows), None)
        if number is None or label is None or label.meta["val"].dtype is not torch.int64:
            return None
        if number not in self.narrow:
            value = number.meta["val"]
            numbers = self._call(aten.arange.start_step, 0, self.region.columns, 1, dtype=torch.int32,
                                 device=value.device, pin_memory=False)
            if value.dim() > 1:
                numbers = self._call(aten.view.default, numbers, list(value.shape))
            self.narrow[number] = self._call(AFTER, numbers, [])
        if label not in self.narrow:
            self.narrow[label] = self._call(AFTER, self._narrowed(self.rows[label]), [])
        last = number.meta["val"].dim() - 1
        return {number: part_of(self.narrow[number], last), label: self.narrow[label]}

    def _counts(self, node: fx.Node) -> bool:
        """Whether a leaf numbers the columns from 0 on, in its last dimension."""
        if self.region.leads.get(node) or node.meta["val"].dtype is not torch.int64:
            return False
        while kind_of(node) is Kind.VIEW and node.all_input_nodes[0].meta["val"].numel() == node.meta["val"].numel():
            node = node.all_input_nodes[0]
        return node.target is aten.arange.start_step and node.args in ((0, self.region.columns),
                                                                       (0, self.region.columns, 1))

    def _narrowed(self, label: fx.Node) -> fx.Node:
        """Labels as int32, -1 where they are no column's."""
        value = label.meta["val"]
        inside = self._call(aten.bitwise_and.Tensor, self._call(aten.ge.Scalar, label, 0),
                            self._call(aten.lt.Scalar, label, self.region.columns))
        none = self._call(aten.full.default, [], -1, dtype=value.dtype, device=value.device, pin_memory=False)
        return self._call(aten._to_copy.default, self._call(aten.where.self, inside, label, none), dtype=torch.int32)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.write.call(target, *args, like=self.region.product, **kwargs)

    def _flat(self, leaf: fx.Node) -> fx.Node:
        if leaf not in self.rows:
            self.rows[leaf] = flattened(leaf, self.region.leads.get(leaf, 1), self.region, self.write)
        return self.rows[leaf]

    def _total(self, output: Output, inside: fx.Node) -> fx.Node:
        dtype = output.node.meta["val"].dtype
        wide = torch.float32 if dtype in HALVES else dtype
        part = self.write.call(aten.sum.dim_IntList, inside, [0], dtype=wide, like=output.node)
        self.pieces.setdefault(output.node, []).append(part)
        return part

    def finished(self, output: Output) -> fx.Node:
        node, value = output.node, output.node.meta["val"]
        if output.how is How.TOTAL:
            apart = [self.write.call(AFTER, p, [], like=node) for p in self.pieces[node]]
            found = self.write.call(aten.cat.default, apart, 0, like=node)
            if list(found.meta["val"].shape) != list(value.shape):
                found = self.write.call(aten.view.default, found, list(value.shape), like=node)
        else:
            found = self.sums[node]
        if found.meta["val"].dtype is not value.dtype:
            found = self.write.call(aten._to_copy.default, found, dtype=value.dtype, like=node)
        return found

