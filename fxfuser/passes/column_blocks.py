"""The gradients of a region of row-wise values, for some of its columns at a time.

    for columns a:b     l = x @ w[a:b].T;  g = exp(l - lse) * t - onehot;  dx += g @ w[a:b];  dw[a:b] = g.T @ x

The numbers of each row that the gradient needs, such as its logsumexp, are known: the forward has computed them.  So
a block needs nothing of the others, `dw` is written once, in its own dtype, and only `dx` grows in float32: where the
weights are large this needs less than pieces of rows, at the price of a fourth product.  Blocks follow one another
through `fxfuser::after`.

Logits that the forward has kept (kept_logits.py) are not computed again.  Those that lie at the end of the memory of
`dw` become their gradient there, are multiplied by `w` at once, and then give way, row by row, to `dw` itself:

    dw:   | room |  g.T, [C, M]                  |      rows a:b of dw take the place of columns that have been
          | dw[:a]     |  g.T[a:]                |      multiplied already
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Collection, Mapping, Sequence

import torch
from torch import fx

from fxfuser.ops import reduction_dims
from fxfuser.ops.products import ADD_PRODUCT, AFTER, PUT_PRODUCT, WITH_ROOM
from fxfuser.passes.column_operands import Block, Operands, is_wide
from fxfuser.passes.kept_logits import Kept, overwritten_rows
from fxfuser.passes.row_chunks import HALVES, Loop, needed
from fxfuser.passes.row_region import How, Output, Region, descendants
from fxfuser.passes.row_values import Writer, rest_of

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


def of_one_gradient(outputs: Sequence[Output]) -> bool:
    """Whether all outputs are made of one gradient of the logits, which can take their place."""
    return len({o.inside for o in outputs}) == 1 and sum(o.how is How.ADD for o in outputs) <= 1


def _serves(region: Region, output: Output) -> bool:
    if output.how is How.TOTAL:
        return list(reduction_dims(output.node)[0]) == list(range(region.leads[output.inside])) \
            and "sum" in str(output.node.target)
    return output.how is How.PUT or output.how is How.ADD and not output.turned


@dataclass(frozen=True)
class Sweep:
    """How the gradients are computed: `size` columns of a block, after `before`; `parts` of the rows in which the sums
    over columns grow, each rounded before the next, so that they and the result never stand beside each other."""

    size: int
    before: tuple[fx.Node, ...] = ()
    parts: int = 1


def unroll_columns(
    region: Region, outputs: Sequence[Output], known: Mapping[fx.Node, fx.Node], sweep: Sweep, write: Writer,
    kept: Kept = Kept(),
) -> Loop:
    """Computes `outputs` at the graph's insertion point; `known` has the statistics, [M, *rest]."""
    loop = _Blocks(region, outputs, Operands(region, write, dict(known)), sweep, sweep.before)
    loop.prepare()
    start = 0
    for logits in kept.parts:
        loop.kept(start, start + logits.columns, logits.node, logits.inside)
        start += logits.columns
    while start < region.columns:
        stop = min(start + sweep.size, region.columns)
        loop.block(Block(loop.operands, start, stop, loop.done))
        start = stop
    return Loop({o.node: loop.finished(o) for o in outputs}, loop.done)


@dataclass
class _Blocks:
    region: Region
    outputs: Sequence[Output]
    operands: Operands
    sweep: Sweep
    done: tuple[fx.Node, ...]
    sums: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)  # by output and part of the rows
    pieces: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    @property
    def write(self) -> Writer:
        return self.operands.write

    def prepare(self) -> None:
        """Narrow values, computed once."""
        region, rows = self.region, self.operands.rows
        given, wanted = frozenset(rows), needed(region, self.outputs)
        whole: dict[fx.Node, fx.Node] = {}
        for node in (n for n in region.members if n in wanted):
            lead = region.leads[node]
            if node is not region.product and lead and not is_wide(region, node) and node not in given and any(
                    u in wanted and u not in given and u is not region.product for u in node.users):
                rows[node] = self.operands.whole(node, whole)
        rows.update({n: self.operands.call(AFTER, v, []) for n, v in rows.items()})

    def block(self, block: Block) -> None:
        """All outputs for columns whose logits are computed again."""
        done = []
        for output in self.outputs:
            inside = block.value(output.inside)
            if output.how is How.TOTAL:
                done.append(self._total(output, inside))
            elif output.how is How.PUT:
                done += self._add_columns(output, inside, block)
            else:
                across = self.write.call(aten.permute.default, inside, [1, 0], like=output.node)
                done.append(self._put(output, across, block.start))
        self.done = tuple(done)

    # ------------------------------------------------------------ logits that the forward has kept, [columns, M]

    def kept(self, start: int, stop: int, logits: fx.Node, in_room: bool) -> None:
        """All outputs for columns whose logits are in memory; `in_room`: at the end of that of an output."""
        block = Block(self.operands, start, stop, self.done)
        shape = [stop - start, self.region.rows]
        # behind a tangent, so that the cut saves all of it and not the end alone
        across = self._end(self.operands.call(AFTER, logits, list(self.done)), shape, []) if in_room else logits
        block.known[self.region.product] = self.operands.call(aten.permute.default, across, [1, 0])
        turned = self.operands.call(aten.permute.default, block.value(self.outputs[0].inside), [1, 0])
        gradient = self.operands.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
        back = self.operands.call(aten.permute.default, gradient, [1, 0])
        done = []
        for output in sorted(self.outputs, key=lambda o: o.how is How.ADD):  # which overwrites the gradient of logits
            if output.how is How.TOTAL:
                apart = self.operands.call(AFTER, back, [])  # what sums as well writes nothing in place
                done.append(self._total(output, apart))
            elif output.how is How.PUT:
                done += self._add_columns(output, back, block)
            elif in_room:
                done.append(self._give_way(output, gradient, done))
            else:
                done.append(self._put(output, gradient, start))
        self.done = tuple(done)

    def _end(self, whole: fx.Node, shape: Sequence[int], done: Sequence[fx.Node], first: int = 0) -> fx.Node:
        """Of the matrix of this shape at the end of a tensor the rows from `first` on, as a tensor of its own."""
        count = whole.meta["val"].numel()
        flat = self.operands.call(aten.view.default, whole, [count])
        begin = count - shape[0] * shape[1] + first * shape[1]
        part = self.operands.call(aten.slice.Tensor, flat, 0, begin, count)
        view = self.operands.call(aten.view.default, part, [shape[0] - first, shape[1]])
        return self.operands.call(AFTER, view, list(done))

    def _give_way(self, output: Output, gradient: fx.Node, done: Sequence[fx.Node]) -> fx.Node:
        """Rows of an output over what they are computed of: as many at a time as end before those that are still to be
        multiplied, so that each product is larger than the one before."""
        assert output.other is not None
        shape, done = list(output.node.meta["val"].shape), [*done]
        columns, rows = gradient.meta["val"].shape
        whole = self.write.call(WITH_ROOM, gradient, shape, like=output.node)
        for start, stop in overwritten_rows(columns, rows, shape):
            rest = self._end(whole, [columns, rows], done, start)
            left = self.operands.call(aten.slice.Tensor, rest, 0, 0, stop - start)
            whole = self.write.call(PUT_PRODUCT, whole, left, self.operands.flat(output.other), start, shape[0],
                                    output.node.meta["val"].dtype, like=output.node)
            done = [whole]
        self.sums[output.node, 0] = whole
        return whole

    # ------------------------------------------------------------ outputs

    def _put(self, output: Output, across: fx.Node, start: int) -> fx.Node:
        """Rows of a sum over all rows of the region, from `start` on."""
        assert output.other is not None
        found = self.write.call(PUT_PRODUCT, self.sums.get((output.node, 0)), across, self.operands.flat(output.other),
                                start, self.region.columns, output.node.meta["val"].dtype, like=output.node)
        self.sums[output.node, 0] = found
        return found

    def _add_columns(self, output: Output, inside: fx.Node, block: Block) -> list[fx.Node]:
        """What the block's columns add to a sum over columns, for each part of the rows."""
        assert output.other is not None
        dtype, other = output.node.meta["val"].dtype, block.part_of(output.other, 0)
        wide = torch.float32 if dtype in HALVES else dtype
        found = []
        for number, (start, stop) in enumerate(self._parts):
            left = inside if len(self._parts) == 1 else self.write.call(
                aten.slice.Tensor, inside, 0, start, stop, like=output.node)
            found.append(self.write.call(ADD_PRODUCT, self.sums.get((output.node, number)), left, other, wide,
                                         like=output.node))
            self.sums[output.node, number] = found[-1]
        return found

    @property
    def _parts(self) -> list[tuple[int, int]]:
        size = -(-self.region.rows // self.sweep.parts)
        return [(a, min(a + size, self.region.rows)) for a in range(0, self.region.rows, size)]

    def _total(self, output: Output, inside: fx.Node) -> fx.Node:
        dtype = output.node.meta["val"].dtype
        wide = torch.float32 if dtype in HALVES else dtype
        part = self.write.call(aten.sum.dim_IntList, inside, [0], dtype=wide, like=output.node)
        self.pieces.setdefault(output.node, []).append(part)
        return part

    def finished(self, output: Output) -> fx.Node:
        if output.how is How.PUT:
            return self._rounded(output)
        node, value = output.node, output.node.meta["val"]
        if output.how is How.TOTAL:
            found = self._joined(node, self.pieces[node])
            if list(found.meta["val"].shape) != list(value.shape):
                found = self.write.call(aten.view.default, found, list(value.shape), like=node)
        else:
            found = self.sums[node, 0]
        if found.meta["val"].dtype is not value.dtype:
            found = self.write.call(aten._to_copy.default, found, dtype=value.dtype, like=node)
        return found

    def _joined(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        """Tensors one after the other; each has been computed apart."""
        apart = [self.write.call(AFTER, p, [], like=node) for p in parts]
        return self.write.call(aten.cat.default, apart, 0, like=node)

    def _rounded(self, output: Output) -> fx.Node:
        """A sum over columns in its dtype, one part after the other."""
        node, dtype = output.node, output.node.meta["val"].dtype
        sums = [self.sums[node, number] for number in range(len(self._parts))]
        done, found = list(self.done), []
        for part in sums:
            if len(sums) > 1:
                part = self.write.call(AFTER, part, done, like=node)
            if part.meta["val"].dtype is not dtype:
                part = self.write.call(aten._to_copy.default, part, dtype=dtype, like=node)
            found.append(part)
            done = [part]
        return found[0] if len(found) == 1 else self._joined(node, found)
