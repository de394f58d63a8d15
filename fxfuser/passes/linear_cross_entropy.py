"""A linear layer and the cross entropy that reads it, without all of its logits in memory at once.

    l = aten.mm(x, w.T)                             for a few rows at a time
    loss = -log_softmax(l).gather(label).mean()         l, loss[a:b], g = dloss/dl
    backward, for the tangent t:                        dx[a:b] = g @ w;  dw += g.T @ x[a:b]
    g = (softmax(l) - onehot) * t / M           ->  loss = loss[:].mean()
    dx = g @ w;  dw = g.T @ x                       backward: dx * t, dw * t

It runs on the joint graph after `expand`, where cross entropy has become pointwise ops, reductions and a gather, so
that biases, upcasts, weights, label smoothing, z-losses, softcaps and ignored labels are recognised by what they are:
work on single rows (row_region.py).  Which plan a layer gets, loss_plans.py says; `observe.LossRecord` tells the user.

Gradients are computed before the tangent is known where the backward is linear in one number (tangents.py), as it is
for mean and sum; float16 gradients then are scaled by a power of two, so that small ones do not underflow.  Nothing
computed in the forward is computed again: the loss is handed out after the gradients (`fxfuser::after`).  Between
forward and backward gradients of half types are kept as float32, so that they are rounded once, behind the tangent.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fxfuser import observe
from fxfuser.errors import user_location
from fxfuser.ops.products import AFTER
from fxfuser.passes.column_blocks import Sweep, of_one_gradient, statistics, unroll_columns
from fxfuser.passes.funnel import Scope
from fxfuser.passes.kept_logits import Cut, Kept, Numbers, numbers_for, unroll_parts
from fxfuser.passes.layout import bytes_of
from fxfuser.passes.loss_plans import Head, LossPlan, choose
from fxfuser.passes.picks import Picker
from fxfuser.passes.rebuild import call
from fxfuser.passes.row_chunks import Order, needed, unroll
from fxfuser.passes.row_region import How, Output, Refusal, Region, before_summed_exponentials, factors, region_of
from fxfuser.passes.row_values import Writer
from fxfuser.passes.seeds import Seed, seeded
from fxfuser.passes.tangents import dependents, is_linear, one_number

aten = torch.ops.aten


def chunk_linear_cross_entropy(graph: fx.Graph, scope: Scope) -> int:
    option = scope.linear_cross_entropy
    if option == "off":
        return 0
    changes = 0
    before: tuple[fx.Node, ...] = ()
    for product in before_summed_exponentials(graph):
        order = {n: i for i, n in enumerate(graph.nodes)}
        region = region_of(product, order)
        if region is None:
            continue
        if isinstance(region, Refusal):
            rows, count = product.meta["val"].shape[0], bytes_of(product.meta["val"])
            observe.record(observe.LossRecord(
                product.name, user_location(product.stack_trace), "whole", str(region), rows, rows,
                (("logits", count),), count if region.returned else 0))
            continue
        layer = _Layer(graph, scope, region, dependents(graph))
        plan = layer.plan(option)
        if plan.kind != "whole":
            if not scope.fuel.take():
                break
            before = layer.rewrite(plan, before)
            changes += 1
        else:
            changes += layer.pick_labels()
        observe.record(observe.LossRecord(
            product.name, user_location(product.stack_trace), plan.kind, plan.reason,
            plan.kept or plan.size, region.columns if plan.kind in ("columns", "mixed") else region.rows,
            plan.buffers))
    return changes


class _Layer:
    """One linear layer with its loss."""

    def __init__(self, graph: fx.Graph, scope: Scope, region: Region, depends: frozenset[fx.Node]) -> None:
        self.graph, self.scope, self.region, self.depends = graph, scope, region, depends
        self.early = [o for o in region.outputs if o.node not in depends]
        self.late = [o for o in region.outputs if o.node in depends]

    @functools.cached_property
    def number(self) -> fx.Node | None:
        """The number by which the backward multiplies the gradients; None where it does more than that."""
        region = self.region
        if region.late:
            return None
        if not all(is_linear(n, self.depends) for n in region.members if n in self.depends):
            return None
        if any(n in self.depends for n in self._products()):
            return None
        entries = [n for n in region.leaves if n in self.depends]
        return one_number(entries, self.depends, self.graph) if entries else None

    @functools.cached_property
    def statistics(self) -> list[fx.Node] | None:
        """What blocks of columns have to know of each row; None where they cannot compute the gradients."""
        return statistics(self.region, self.late, self.depends) if self.late else None

    @functools.cached_property
    def numbers(self) -> Numbers | None:
        """What parts of the columns tell of all rows; None where they do not tell all that is wanted."""
        if self.statistics is None or any(o.how is not How.ROWS for o in self.early):
            return None
        return numbers_for(self.region, [*(o.inside for o in self.early), *self.statistics])

    def _products(self) -> list[fx.Node]:
        """What products read besides the region."""
        others = [o.other for o in self.region.outputs if o.other is not None]
        return others + [n for n in factors(self.region.product) if n is not None]

    def plan(self, option: str) -> LossPlan:
        product = self.region.product
        inner = factors(product)[1].meta["val"].shape[1]
        weights = any(o.how is How.ADD for o in self.late)
        head = Head(self.region.rows, inner, self.region.columns, product.meta["val"].dtype, bool(self.late), weights,
                    self.number is not None, self.statistics is not None, self._obstacle())
        if self._tangled():
            return LossPlan("whole", self.region.rows, (("logits", head.logits),),
                            "what the forward wants depends on a sum over all rows")
        return choose(head, option)

    def _obstacle(self) -> str:
        """Why logits of some columns cannot be kept; empty where they can."""
        if self.statistics is None:
            return "blocks of columns cannot compute the gradients"
        if self.numbers is None:
            return "its numbers of rows are more than maxima, sums of exponentials and labels' elements of some columns"
        if not self.scope.unrounded:
            return "the library's products write all logits first"
        dtype = self.region.product.meta["val"].dtype
        alike = all(o.node.meta["val"].dtype is dtype for o in self.late if o.how is How.ADD)
        return "" if alike and of_one_gradient(self.late) else "no gradient of its dtype takes the logits' place"

    def _tangled(self) -> bool:
        """Whether a late leaf is needed for what the forward computes."""
        return bool(self.region.late & needed(self.region, self.early))

    def pick_labels(self) -> int:
        """Whole logits are read once: a fused product then can pick a label's logit where it sums exponentials, or need
        not where no gradient needs them."""
        changes = 0
        for output in self.early:
            node = output.node
            if node.target is not aten.gather.default or not self.scope.fuel.take():
                continue
            source, index = node.all_input_nodes
            if source.meta["val"].dim() == 2 and list(index.meta["val"].shape[1:]) == [1]:
                with self.graph.inserting_before(node):
                    write = Writer(self.graph, self.scope, node.meta.get("partitioner_tag"))
                    picker = Picker(index, node, write, kept=bool(self.late), known=True)
                    node.replace_all_uses_with(picker.pick(source))
                changes += 1
        return changes

    def rewrite(self, plan: LossPlan, before: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """Makes the plan's nodes; returns those after which the next layer's may begin."""
        again = plan.kind in ("recompute", "columns", "mixed")
        self._hoist(self.early if again else [*self.early, *self.late])
        product = self.region.product
        write = Writer(self.graph, self.scope, product.meta.get("partitioner_tag"))
        order = Order(plan.rows, before)
        if plan.kind == "mixed":
            return self._keep(plan, write, before)
        if again:
            known = (self.statistics or []) if plan.kind == "columns" else []
            wanted = {o.node: o for o in (*self.early, *(Output(n, How.ROWS, n) for n in known))}
            with self.graph.inserting_before(product):
                loop = unroll(self.region, list(wanted.values()), {}, order, write)
            for output in self.early:
                self._hand_out(output, loop.values[output.node])
            self._again(plan, {n: loop.values[n] for n in known}, Kept())
            return loop.done
        with self.graph.inserting_before(product):
            seed = self._seed(write)
            order = replace(order, wide=seed is not None)  # the backward multiplies before it rounds
            loop = unroll(self.region, self.region.outputs, seed.leaves if seed else {}, order, write)
            gradients = tuple(loop.values[o.node] for o in self.late)
            early = [self._after(loop.values[o.node], gradients, write) for o in self.early]
        for output, value in zip(self.early, early):
            self._hand_out(output, value)
        for output, value in zip(self.late, gradients):
            assert seed is not None
            value.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            self._multiply(output, value, seed)
        return loop.done

    def _keep(self, plan: LossPlan, write: Writer, before: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
        """The loss from parts of the columns, of which the backward finds the logits of some."""
        assert self.numbers is not None and self.statistics is not None
        room = next((tuple(o.node.meta["val"].shape) for o in self.late if o.how is How.ADD), ())
        wanted = list(dict.fromkeys((*(o.inside for o in self.early), *self.statistics)))
        with self.graph.inserting_before(self.region.product):
            cut = Cut(plan.inside, plan.beside, plan.forward, room)
            values, kept, done = unroll_parts(self.region, wanted, self.numbers, cut, write, before)
            logits = [part.node for part in kept.parts]
            early = [self._after(values[output.inside], logits, write) for output in self.early]
        for node in logits:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for output, value in zip(self.early, early):
            self._hand_out(output, value)
        self._again(plan, {n: values[n] for n in self.statistics}, kept)
        return done

    def _seed(self, write: Writer) -> Seed | None:
        if self.number is None:
            return None
        half = self.region.product.meta["val"].dtype is torch.float16
        return seeded(self._entries(), self.depends, self.number, half, write)

    def _entries(self) -> list[fx.Node]:
        return [n for n in self.region.leaves if n in self.depends]

    def _after(self, value: fx.Node, gradients: Sequence[fx.Node], write: Writer) -> fx.Node:
        """Keeps gradients, or logits, on the forward's side of the cut: its results wait for them."""
        return write.call(AFTER, value, list(gradients), like=self.region.product) if gradients else value

    def _again(self, plan: LossPlan, known: Mapping[fx.Node, fx.Node], kept: Kept) -> None:
        """The gradients' loop, which depends on a tangent from its first product on."""
        first = min(self.late, key=lambda o: self._place()[o.node]).node
        self._hoist(self.late, first)
        write = Writer(self.graph, self.scope, first.meta.get("partitioner_tag"))
        with self.graph.inserting_before(first):
            if plan.kind in ("columns", "mixed"):
                sweep = Sweep(plan.size, tuple(self._entries()), plan.parts)
                loop = unroll_columns(self.region, self.late, known, sweep, write, kept)
            else:
                loop = unroll(self.region, self.late, {}, Order(plan.size, tuple(self._entries())), write)
        for output in self.late:
            self._hand_out(output, loop.values[output.node])

    def _place(self) -> Mapping[fx.Node, int]:
        return {n: i for i, n in enumerate(self.graph.nodes)}

    def _hand_out(self, output: Output, value: fx.Node) -> None:
        """The output's readers read `value`, which has its rows in one dimension."""
        node = output.node
        shape = list(node.meta["val"].shape)
        with self.graph.inserting_before(node):
            if list(value.meta["val"].shape) != shape:
                value = call(self.graph, self.scope, aten.view.default, value, shape, like=node)
        node.replace_all_uses_with(value)

    def _multiply(self, output: Output, value: fx.Node, seed: Seed) -> None:
        node = output.node
        with self.graph.inserting_before(node):
            factor = seed.factor(self.graph, self.scope, node)
            scaled = call(self.graph, self.scope, aten.mul.Tensor, value, factor, like=node)
            dtype = node.meta["val"].dtype
            if scaled.meta["val"].dtype is not dtype:
                scaled = call(self.graph, self.scope, aten._to_copy.default, scaled, dtype=dtype, like=node)
        assert scaled.meta["val"].dtype is node.meta["val"].dtype, node
        self._hand_out(output, scaled)

    def _hoist(self, outputs: Iterable[Output], place: fx.Node | None = None) -> None:
        """Moves what these outputs need in front of `place`, by default the product; none of it depends on that."""
        place = place or self.region.product
        order = self._place()
        stack = [n for n in needed(self.region, list(outputs)) if n not in self.region.members]
        wanted: set[fx.Node] = set()
        held = self.depends if place is self.region.product else frozenset()
        while stack:
            node = stack.pop()
            if node in wanted:
                continue
            if order[node] > order[place] or node in held:
                wanted.add(node)
                stack.extend(node.all_input_nodes)
        for node in sorted(wanted - set(held), key=order.__getitem__):
            if order[node] > order[place]:
                place.prepend(node)
