"""What a block of columns of a region of row-wise values reads, and its values.

    l = x @ w[a:b].T;  g = exp(l - lse) * t - (numbers[a:b] == label)

Enters: a region and what is known of its rows.  Leaves: `Block`s, whose values are those of the region for their
columns.  Invariant: what varies with the columns is read through `fxfuser::after` as a tensor of its own, behind what
has to be done before, so that one kernel serves all blocks of a size; labels and numbers of columns are compared as
int32, half the work for each element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Sequence

import torch
from torch import fx

from fxfuser.ops import Kind, kind_of
from fxfuser.ops.products import AFTER
from fxfuser.passes.row_chunks import flattened
from fxfuser.passes.row_region import Region, factors
from fxfuser.passes.row_values import Writer, emit, rest_of

aten = torch.ops.aten


def is_wide(region: Region, node: fx.Node) -> bool:
    """Whether the node has an element for each column of a row."""
    return 2 * math.prod(rest_of(node, region.leads[node])) >= region.columns


@dataclass
class Operands:
    """`rows`: what has a number for each row, for all rows, as [M, *rest]."""

    region: Region
    write: Writer
    rows: dict[fx.Node, fx.Node]
    constants: dict[fx.Node, fx.Node] = field(default_factory=dict)
    columns: dict[fx.Node, fx.Node] = field(default_factory=dict)  # what has a number for each column
    numbered: dict[tuple[int, ...], fx.Node] = field(default_factory=dict)  # numbers of columns by shape, as int32
    labels: dict[fx.Node, fx.Node] = field(default_factory=dict)  # as int32

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.write.call(target, *args, like=self.region.product, **kwargs)

    def flat(self, leaf: fx.Node) -> fx.Node:
        """A leaf with its rows in one dimension."""
        if leaf not in self.rows:
            self.rows[leaf] = flattened(leaf, self.region.leads.get(leaf, 1), self.region, self.write)
        return self.rows[leaf]

    def whole(self, node: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
        """A value for all rows, from leaves, known numbers of rows and, in a sum, wide values that are no logits."""
        region = self.region
        if node in self.rows:
            return self.rows[node]
        if node not in known:
            lead = region.leads.get(node, 0)
            if not lead:
                known[node] = self.constant(node)
            elif node not in region.members:
                known[node] = flattened(node, lead, region, self.write)
            else:
                operands = {n: self.whole(n, known) for n in node.all_input_nodes}
                known[node] = emit(node, lead, region.rows, operands, self.write)
        return known[node]

    def constant(self, node: fx.Node) -> fx.Node:
        """What is the same for all rows: a factory of the region's may follow where its value is wanted."""
        if node not in self.region.members:
            return node
        if node not in self.constants:
            self.constants[node] = self.write.call(node.target, *node.args, like=node, **node.kwargs)
        return self.constants[node]

    def counts(self, node: fx.Node) -> bool:
        """Whether a leaf numbers the columns from 0 on, in its last dimension."""
        if self.region.leads.get(node) or node.meta["val"].dtype is not torch.int64:
            return False
        while kind_of(node) is Kind.VIEW and node.all_input_nodes[0].meta["val"].numel() == node.meta["val"].numel():
            node = node.all_input_nodes[0]
        return node.target is aten.arange.start_step and node.args in ((0, self.region.columns),
                                                                       (0, self.region.columns, 1))

    def numbers(self, shape: tuple[int, ...], device: torch.device) -> fx.Node:
        """The numbers of the columns as int32; loaded, so that no bounds of a block's are known in its kernel."""
        if shape not in self.numbered:
            numbers = self.call(aten.arange.start_step, 0, self.region.columns, 1, dtype=torch.int32, device=device,
                                pin_memory=False)
            if len(shape) > 1:
                numbers = self.call(aten.view.default, numbers, list(shape))
            self.numbered[shape] = self.call(AFTER, numbers, [])
        return self.numbered[shape]

    def label(self, label: fx.Node) -> fx.Node:
        """Labels of all rows, int64, as int32, -1 where they are no column's."""
        if label not in self.labels:
            inside = self.call(aten.bitwise_and.Tensor, self.call(aten.ge.Scalar, label, 0),
                               self.call(aten.lt.Scalar, label, self.region.columns))
            value = label.meta["val"]
            none = self.call(aten.full.default, [], -1, dtype=value.dtype, device=value.device, pin_memory=False)
            chosen = self.call(aten.where.self, inside, label, none)
            self.labels[label] = self.call(AFTER, self.call(aten._to_copy.default, chosen, dtype=torch.int32), [])
        return self.labels[label]

    def column(self, node: fx.Node) -> fx.Node:
        """What has a number for each column, made once: a factory with several readers would be made for each."""
        if node not in self.columns:
            self.columns[node] = self.call(AFTER, self.constant(node), [])
        return self.columns[node]


@dataclass
class Block:
    """The columns from `start` to `stop`, which are computed after `done`."""

    operands: Operands
    start: int
    stop: int
    done: Sequence[fx.Node]
    known: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def part_of(self, node: fx.Node, dim: int) -> fx.Node:
        part = self.operands.call(aten.slice.Tensor, node, dim, self.start, self.stop)
        return self.operands.call(AFTER, part, list(self.done))

    def product(self) -> fx.Node:
        """The logits of these columns, [M, stop - start]."""
        product = self.operands.region.product
        bias, left, right = factors(product)
        arguments = [self.operands.flat(left), self.part_of(right, 1)]
        if bias is not None:
            arguments.insert(0, self.part_of(bias, 0))
        return self.operands.write.call(product.target, *arguments, like=product)

    def value(self, node: fx.Node) -> fx.Node:
        """A wide value of the region, or what such a value reads."""
        if node not in self.known:
            self.known[node] = self._value(node)
        return self.known[node]

    def _value(self, node: fx.Node) -> fx.Node:
        operands, region = self.operands, self.operands.region
        if node is region.product:
            return self.product()
        lead = region.leads.get(node, 0)
        if not lead:
            shape = node.meta["val"].shape
            last = len(shape) - 1
            varies = shape and shape[-1] == region.columns
            return self.part_of(operands.column(node), last) if varies else operands.constant(node)
        if node not in region.members or not is_wide(region, node):
            return operands.flat(node)
        sides = self._compared(node) or {n: self.value(n) for n in node.all_input_nodes}
        return emit(node, lead, region.rows, sides, operands.write, (region.columns, self.stop - self.start))

    def _compared(self, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
        """The columns' numbers and the rows' labels that `node` compares, as int32."""
        if node.target is not aten.eq.Tensor or len(node.all_input_nodes) != 2:
            return None
        operands = self.operands
        number = next((n for n in node.all_input_nodes if operands.counts(n)), None)
        label = next((n for n in node.all_input_nodes if n in operands.rows), None)
        if number is None or label is None or operands.rows[label].meta["val"].dtype is not torch.int64:
            return None
        value = number.meta["val"]
        numbers = self.part_of(operands.numbers(tuple(value.shape), value.device), value.dim() - 1)
        return {number: numbers, label: operands.label(operands.rows[label])}
