"""A numerical reading of a Domain: every point as a tensor over the axes it depends on.

Independent of lowering: it follows the contract in fxfuser/domain/points.py and nothing else, and fails where
a domain breaks it (a read out of range, an element stored twice or never).
"""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torch import fx

from fxfuser.domain.index import Axis, Form, Lookup, Quotient, Remainder
from fxfuser.domain.points import Condition, Domain, Point, PointKind
from fxfuser.domain.products import matrix_product
from fxfuser.domain.size import Size, from_torch, hint, symbols
from fxfuser.ops import Kind, kind_of, row

MONOIDS = {
    "sum": (torch.sum, lambda a, b: a + b, 0),
    "prod": (torch.prod, lambda a, b: a * b, 1),
    "amax": (torch.amax, torch.maximum, float("-inf")),
    "amin": (torch.amin, torch.minimum, float("inf")),
    "any": (torch.any, torch.logical_or, False),
    "all": (torch.all, torch.logical_and, True),
}


class Evaluator:
    def __init__(self, domain: Domain, tensors: Mapping[fx.Node, torch.Tensor], sizes: Mapping[str, int]) -> None:
        self.domain, self.tensors, self.sizes = domain, tensors, sizes
        self.slots = {axis: i for i, axis in enumerate(domain.axes)}
        self.positions: dict[Lookup, torch.Tensor] = {}

    def size(self, size: Size) -> int:
        values = {s.text: eval(s.text, {}, dict(self.sizes)) for s in symbols(size)}  # noqa: S307
        return hint(size, values)

    def axis(self, axis: Axis) -> torch.Tensor:
        shape = [1] * len(self.slots)
        shape[self.slots[axis]] = -1
        return torch.arange(self.size(axis.size)).view(shape)

    def form(self, form: Form) -> torch.Tensor:
        total = torch.full([1] * len(self.slots), self.size(form.constant))
        for atom, k in form.terms:
            total = total + self.atom(atom) * self.size(k)
        return total

    def atom(self, atom: Any) -> torch.Tensor:
        if isinstance(atom, Quotient):
            return self.form(atom.form) // self.size(atom.divisor)
        if isinstance(atom, Remainder):
            return self.form(atom.form) % self.size(atom.divisor)
        if isinstance(atom, Lookup):
            return self.positions[atom]
        assert type(atom) is Axis
        return self.axis(atom)

    def condition(self, condition: Condition) -> torch.Tensor:
        holds = torch.ones([1] * len(self.slots), dtype=torch.bool)
        for bound in condition:
            value = self.form(bound.form)
            if bound.lower is not None:
                holds = holds & (value >= self.size(bound.lower))
            if bound.upper is not None:
                holds = holds & (value < self.size(bound.upper))
        return holds

    def value(self, point: Point, guard: torch.Tensor) -> torch.Tensor:
        for name, position in point.lookups:
            value = self.value(position, guard)
            self.positions[name] = torch.where(value < 0, value + self.size(name.size), value) if name.wraps else value
        if point.kind is PointKind.SELECT:
            return self.select(point, guard)
        if point.kind is PointKind.LOAD:
            return self.load(point, guard)
        operands = {id(p): self.value(p, guard) for p in point.operands}
        if point.kind is PointKind.OP:
            return self.op(point, operands)
        if point.kind is PointKind.REDUCE:
            return self.reduce(point, operands)
        if point.kind is PointKind.DOT:
            return self.dot(point, operands)
        if point.kind is PointKind.TIMES:
            left, right = (operands[id(p)] for p in point.operands)
            return left * right  # in double: the test's, not the kernel's, precision
        if point.kind is PointKind.PARTS:
            return self.sum_of(point.node).flatten()[self.form(point.index[0])]
        if point.kind is PointKind.SCALED:
            return self.scaled(point, [operands[id(p)] for p in point.operands])
        if point.kind is PointKind.IOTA:
            return self.form(point.index[0]).to(point.dtype)
        return torch.full([1] * len(self.slots), point.value, dtype=point.dtype)

    def load(self, point: Point, guard: torch.Tensor) -> torch.Tensor:
        tensor, index = self.tensors[point.node], []
        for form, size in zip(point.index, tensor.shape, strict=True):
            position = self.form(form)
            inside = (position >= 0) & (position < size)
            assert bool((inside | ~guard).all()) or tensor.numel() == 0, f"{point} out of range"
            index.append(torch.where(inside, position, 0))
        shape = torch.broadcast_shapes(*(i.shape for i in index), [1] * len(self.slots))
        if 0 in shape or tensor.numel() == 0:
            return tensor.new_empty(shape if 0 in shape else [1] * len(self.slots)).fill_(0)
        return tensor[tuple(i.expand(shape) for i in index)] if index else tensor.expand(shape)

    def select(self, point: Point, guard: torch.Tensor) -> torch.Tensor:
        assert len(point.conditions) == len(point.operands) - 1
        left, parts = guard, []
        for operand, condition in zip(point.operands, point.conditions):
            holds = self.condition(condition)
            parts.append((holds, self.value(operand, left & holds).to(point.dtype)))
            left = left & ~holds
        total = self.value(point.operands[-1], left).to(point.dtype)
        for holds, value in reversed(parts):
            total = torch.where(holds, value, total)
        return total

    def op(self, point: Point, operands: Mapping[int, torch.Tensor]) -> torch.Tensor:
        def given(argument: Any) -> Any:
            if isinstance(argument, Point):
                return operands[id(argument)]
            if isinstance(argument, tuple):
                return [given(a) for a in argument]
            return self.size(argument) if type(argument).__name__ == "Poly" else argument

        assert point.node is not None
        if kind_of(point.node) is Kind.FACTORY:  # a fractional arange
            index, start, step = map(given, point.args)
            return (start + step * index).to(point.dtype)
        result = point.node.target(*map(given, point.args), **{k: given(v) for k, v in point.kwargs})
        return result.to(point.dtype)

    def reduce(self, point: Point, operands: Mapping[int, torch.Tensor]) -> torch.Tensor:
        if kind_of(point.node) is Kind.GEMM:
            (operand,), (axes,) = point.operands, point.axes
            return operands[id(operand)].sum([self.slots[a] for a in axes], keepdim=True)
        name = row(point.node.target).monoid.name
        if name in ("argmax", "argmin"):
            return self.arg(point, operands, name)
        fold, combine, identity = MONOIDS["sum" if name == "mean" else name]
        total, count = None, 0
        for operand, axes in zip(point.operands, point.axes, strict=True):
            value = operands[id(operand)]
            shape = list(value.shape)
            for axis in axes:
                shape[self.slots[axis]] = self.size(axis.size)
            value = value.expand(shape)
            if name in ("sum", "prod", "mean"):
                value = value.to(point.dtype)
            count += torch.Size([self.size(a.size) for a in axes]).numel()
            for axis in axes:
                value = fold(value, self.slots[axis], keepdim=True)
            total = value if total is None else combine(total, value)
        if total is None:
            return torch.full([1] * len(self.slots), float("nan") if name == "mean" else identity, dtype=point.dtype)
        return (total / count if name == "mean" else total).to(point.dtype)

    def dot(self, point: Point, operands: Mapping[int, torch.Tensor]) -> torch.Tensor:
        left, right, *added = (operands[id(p)] for p in point.operands)
        factors = matrix_product(point.node)
        assert factors is not None and len(added) == (factors.added is not None)
        product = left * right
        for axis in point.axes[0]:
            assert product.shape[self.slots[axis]] == self.size(axis.size), f"{point} sums what it does not depend on"
            product = product.sum(self.slots[axis], keepdim=True)
        product = product if factors.alpha == 1 else product * factors.alpha
        return (product + factors.beta * added[0] if added else product).to(point.dtype)

    def sum_of(self, product: fx.Node) -> torch.Tensor:
        """The sums of a product as an earlier kernel leaves them: not scaled, nothing added."""
        factors = matrix_product(product)
        assert factors is not None
        return self.tensors[factors.left] @ self.tensors[factors.right]

    def scaled(self, point: Point, operands: list[torch.Tensor]) -> torch.Tensor:
        factors = matrix_product(point.node)
        assert factors is not None and len(operands) == 1 + (factors.added is not None)
        total = operands[0] * factors.alpha
        return (total + factors.beta * operands[1] if operands[1:] else total).to(point.dtype)

    def arg(self, point: Point, operands: Mapping[int, torch.Tensor], name: str) -> torch.Tensor:
        values = []
        for operand, axes in zip(point.operands, point.axes, strict=True):
            value, slots = operands[id(operand)], [self.slots[a] for a in axes]
            shape = list(value.shape)
            for axis, slot in zip(axes, slots):
                shape[slot] = self.size(axis.size)
            kept = [i for i in range(value.dim()) if i not in slots]
            moved = value.expand(shape).permute([*kept, *slots])
            values.append(moved.reshape([*(1 if i in slots else shape[i] for i in range(value.dim())), -1]))
        return getattr(torch, name)(torch.cat(values, -1), -1)

    def stores(self) -> dict[fx.Node, torch.Tensor]:
        """What is stored, by node; every element exactly once."""
        results: dict[fx.Node, torch.Tensor] = {}
        written: dict[fx.Node, torch.Tensor] = {}
        for store in self.domain.stores:
            shape, dtype = [self.size(s) for s in _shape(store.node)], store.node.meta["val"].dtype
            results.setdefault(store.node, torch.zeros(shape, dtype=dtype))
            written.setdefault(store.node, torch.zeros(shape, dtype=torch.int64))
            everywhere = [self.size(a.size) if a in store.axes else 1 for a in self.slots]
            value = self.value(store.value, torch.ones(everywhere, dtype=torch.bool))
            assert value.dtype == dtype, store
            index = [self.form(f) for f in store.index]
            full = torch.broadcast_shapes(value.shape, *(i.shape for i in index))
            if not shape:
                assert value.numel() == 1
                results[store.node], written[store.node] = value.reshape(()), written[store.node] + 1
                continue
            at = tuple(i.expand(full) for i in index)
            results[store.node][at] = value.expand(full)
            written[store.node].index_put_(at, torch.ones(full, dtype=torch.int64), accumulate=True)
        for node, times in written.items():
            assert bool((times == 1).all()), f"{node} is not written once everywhere"
        return results


def _shape(node: fx.Node) -> list[Size]:

    return [from_torch(s) for s in node.meta["val"].shape]
