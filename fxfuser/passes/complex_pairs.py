"""Complex numbers as pairs of real tensors.

    z = aten.view_as_complex(x)              re, im = x[..., 0], x[..., 1]
    w = aten.mul(z, f)                ->     f = aten.view_as_real(f);  c, d = f[..., 0], f[..., 1]
    y = aten.view_as_real(w)                 y = aten.cat([re * c - im * d, re * d + im * c], -1)

Kernels have no complex arithmetic, but whole subgraphs of it can live as pairs.  A complex tensor from outside (an
input, what an ATen call returns) is read through view_as_real, which moves nothing; where an ATen call or the graph's
output needs one, the pair is written interleaved and viewed as complex, with the strides that it had.  So every op
with a rule is rewritten, whatever its neighbours are.  Products and quotients follow PyTorch's formulas, a real operand
being a pair with a zero: infinities and nan come out as eager's.  Sums add parts; eager multiplies the second operand
by 1 + 0j first, which turns its infinities into nan.

Left alone: complex32, tensors with the conjugate or negative bit that come from outside, ops without a rule, and views
by which results of the graph share memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping

import torch
from torch import fx

from fxfuser.passes.aliasing import shared_by_results
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import call, forward, replace

aten = torch.ops.aten
PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
REAL = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class Pair:
    """The real and imaginary parts, real tensors of the complex one's shape."""

    re: fx.Node
    im: fx.Node


class Unpaired(Exception):
    """An operand has no pair: the node stays as it is."""


class Converter:
    """Rewrites of one graph; new nodes go before `node`."""

    def __init__(self, graph: fx.Graph, scope: Scope) -> None:
        self.graph, self.scope = graph, scope
        self.pairs: dict[fx.Node, Pair] = {}
        self.converted: list[fx.Node] = []
        self.node = next(iter(graph.nodes))

    def make(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self.graph, self.scope, target, *args, like=self.node, **kwargs)

    def part(self) -> torch.dtype:
        """The dtype of the parts of the node's result, or of its operand where it is real."""
        values = [self.node.meta["val"], *(n.meta["val"] for n in self.node.all_input_nodes)]
        return next(PARTS[v.dtype] for v in values if isinstance(v, torch.Tensor) and v.dtype in PARTS)

    def pair(self, operand: Any) -> Pair:
        """An operand as a pair in the node's dtype.  Errors: Unpaired."""
        part = self.part()
        if not isinstance(operand, fx.Node):
            number = complex(operand)
            return Pair(self.number(number.real, part), self.number(number.imag, part))
        value = operand.meta["val"]
        if not isinstance(value, torch.Tensor):
            raise Unpaired
        if value.dtype in REAL:
            return Pair(self.cast(operand, part), self.number(0.0, part))
        known = self.pairs.get(operand) or self._from_outside(operand)
        return Pair(self.cast(known.re, part), self.cast(known.im, part))

    def _from_outside(self, operand: fx.Node) -> Pair:
        value = operand.meta["val"]
        if value.dtype not in PARTS or value.is_conj() or value.is_neg():
            raise Unpaired
        both = self.make(aten.view_as_real.default, operand)
        pair = Pair(self.make(aten.select.int, both, -1, 0), self.make(aten.select.int, both, -1, 1))
        self.pairs[operand] = pair
        return pair

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype is dtype else self.make(aten._to_copy.default, x, dtype=dtype)

    def number(self, value: float, dtype: torch.dtype) -> fx.Node:
        device = self.node.meta["val"].device
        return self.make(aten.full.default, [], value, dtype=dtype, device=device, pin_memory=False)

    def interleaved(self, pair: Pair) -> fx.Node:
        """Both parts side by side in a last dimension."""
        parts = [self.make(aten.unsqueeze.default, x, -1) for x in (pair.re, pair.im)]
        return self.make(aten.cat.default, parts, -1)

    def visit(self, node: fx.Node) -> bool:
        """Whether the node had a rule that applied."""
        self.node = node
        try:
            with self.graph.inserting_before(node):
                result = RULES[node.target](self, node)
        except Unpaired:
            return False
        if isinstance(result, Pair):
            self.pairs[node] = result
            self.converted.append(node)
        else:
            replace(node, result, self.graph, self.scope)
        return True

    def finish(self) -> None:
        """Erases what was converted; what someone still reads as complex is made of its pair."""
        for node in reversed(self.converted):
            if not node.users:
                self.graph.erase_node(node)
            elif not node.meta["val"].is_conj():  # a conjugate view is read from its base
                self.node = node
                with self.graph.inserting_before(node):
                    forward(node, self._materialised(node), self.graph)

    def _materialised(self, node: fx.Node) -> fx.Node:
        value, pair = node.meta["val"], self.pairs[node]
        shape = list(value.shape)
        parts = [x if list(x.meta["val"].shape) == shape else self.make(aten.expand.default, x, shape)
                 for x in (pair.re, pair.im)]
        both = self.interleaved(Pair(*parts))
        with self.scope.fake():
            both.meta["val"] = torch.view_as_real(value)
        result = self.make(aten.view_as_complex.default, both)
        result.meta["val"] = value
        return result


Rule = Callable[[Converter, fx.Node], "Pair | fx.Node"]


def pair_complex(graph: fx.Graph, scope: Scope) -> int:
    converter, shared = Converter(graph, scope), shared_by_results(graph)
    changes = 0
    for node in list(graph.nodes):
        if node.target not in RULES or node in shared or not _concerned(node):
            continue
        if scope.fuel.left == 0:
            break
        if converter.visit(node):
            scope.fuel.take()
            changes += 1
    converter.finish()
    return changes


def _concerned(node: fx.Node) -> bool:
    """Whether the node makes or reads one complex tensor, all on one device."""
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if not isinstance(values[0], torch.Tensor) or len({t.device for t in tensors}) != 1:
        return False
    known = all(t.layout is torch.strided and (t.dtype in PARTS or t.dtype in REAL) for t in tensors)
    return known and any(t.dtype in PARTS for t in tensors)


def _view_as_complex(to: Converter, node: fx.Node) -> Pair:
    x = node.args[0]
    return Pair(to.make(aten.select.int, x, -1, 0), to.make(aten.select.int, x, -1, 1))


def _view_as_real(to: Converter, node: fx.Node) -> fx.Node:
    if node.args[0] not in to.pairs or node.args[0] not in to.converted:
        raise Unpaired
    return to.interleaved(to.pair(node.args[0]))


def _complex(to: Converter, node: fx.Node) -> Pair:
    return Pair(*(to.cast(x, to.part()) for x in node.args))  # type: ignore[arg-type]


def _polar(to: Converter, node: fx.Node) -> Pair:
    size, angle = node.args
    return Pair(to.make(aten.mul.Tensor, size, to.make(aten.cos.default, angle)),
                to.make(aten.mul.Tensor, size, to.make(aten.sin.default, angle)))


def _sum_of(target: Any) -> Rule:
    def rule(to: Converter, node: fx.Node) -> Pair:
        a, b = map(to.pair, node.args[:2])
        alpha = node.kwargs.get("alpha", 1)
        if isinstance(alpha, complex):
            b = _product(to, b, to.pair(alpha))
        elif alpha != 1:
            b = Pair(to.make(aten.mul.Tensor, b.re, alpha), to.make(aten.mul.Tensor, b.im, alpha))
        return Pair(to.make(target, a.re, b.re), to.make(target, a.im, b.im))
    return rule


def _product(to: Converter, a: Pair, b: Pair) -> Pair:
    def times(x: fx.Node, y: fx.Node) -> fx.Node:
        return to.make(aten.mul.Tensor, x, y)
    return Pair(to.make(aten.sub.Tensor, times(a.re, b.re), times(a.im, b.im)),
                to.make(aten.add.Tensor, times(a.re, b.im), times(a.im, b.re)))


def _mul(to: Converter, node: fx.Node) -> Pair:
    return _product(to, to.pair(node.args[0]), to.pair(node.args[1]))


def _quotient(to: Converter, a: Pair, b: Pair) -> Pair:
    """Smith's method: the smaller part of the divisor over the larger one cannot overflow."""
    make = to.make
    size_re, size_im = make(aten.abs.default, b.re), make(aten.abs.default, b.im)
    first = make(aten.ge.Tensor, size_re, size_im)
    zero = make(aten.logical_and.default, make(aten.eq.Scalar, size_re, 0), make(aten.eq.Scalar, size_im, 0))

    def pick(yes: fx.Node, no: fx.Node) -> fx.Node:
        return make(aten.where.self, first, yes, no)

    large, small = pick(b.re, b.im), pick(b.im, b.re)
    ratio = make(aten.div.Tensor, small, large)
    scale = make(aten.reciprocal.default, make(aten.add.Tensor, large, make(aten.mul.Tensor, small, ratio)))
    scaled_re, scaled_im = make(aten.mul.Tensor, a.re, ratio), make(aten.mul.Tensor, a.im, ratio)
    re = pick(make(aten.add.Tensor, a.re, scaled_im), make(aten.add.Tensor, scaled_re, a.im))
    im = pick(make(aten.sub.Tensor, a.im, scaled_re), make(aten.sub.Tensor, scaled_im, a.re))
    return Pair(*(make(aten.where.self, zero, make(aten.div.Tensor, part, size_re), make(aten.mul.Tensor, x, scale))
                  for part, x in ((a.re, re), (a.im, im))))


def _div(to: Converter, node: fx.Node) -> Pair:
    if node.kwargs.get("rounding_mode") is not None:
        raise Unpaired
    return _quotient(to, to.pair(node.args[0]), to.pair(node.args[1]))


def _reciprocal(to: Converter, node: fx.Node) -> Pair:
    return _quotient(to, to.pair(1.0), to.pair(node.args[0]))


def _conj(to: Converter, node: fx.Node) -> Pair:
    z = to.pair(node.args[0])
    return Pair(z.re, to.make(aten.neg.default, z.im))


def _abs(to: Converter, node: fx.Node) -> fx.Node:
    z = to.pair(node.args[0])
    return to.make(aten.hypot.default, z.re, z.im)


def _angle(to: Converter, node: fx.Node) -> fx.Node:
    z = to.pair(node.args[0])
    return to.make(aten.atan2.default, z.im, z.re)


def _exp(to: Converter, node: fx.Node) -> Pair:
    z = to.pair(node.args[0])
    size = to.make(aten.exp.default, z.re)
    im = to.make(aten.mul.Tensor, size, to.make(aten.sin.default, z.im))
    on_axis = to.make(aten.eq.Scalar, z.im, 0)  # an infinite size has no imaginary part there
    return Pair(to.make(aten.mul.Tensor, size, to.make(aten.cos.default, z.im)),
                to.make(aten.where.self, on_axis, z.im, im))


def _log(to: Converter, node: fx.Node) -> Pair:
    z = to.pair(node.args[0])
    return Pair(to.make(aten.log.default, to.make(aten.hypot.default, z.re, z.im)),
                to.make(aten.atan2.default, z.im, z.re))


def _sgn(to: Converter, node: fx.Node) -> Pair:
    z = to.pair(node.args[0])
    size = to.make(aten.hypot.default, z.re, z.im)
    zero, nothing = to.make(aten.eq.Scalar, size, 0), to.number(0.0, to.part())
    return Pair(*(to.make(aten.where.self, zero, nothing, to.make(aten.div.Tensor, x, size)) for x in (z.re, z.im)))


def _to_copy(to: Converter, node: fx.Node) -> Pair | fx.Node:
    if node.meta["val"].dtype not in PARTS or set(node.kwargs) - {"dtype"}:
        raise Unpaired
    z = to.pair(node.args[0])
    if isinstance(z.im, fx.Node) and z.im.meta["val"].shape != z.re.meta["val"].shape:
        z = Pair(z.re, to.make(aten.zeros_like.default, z.re, pin_memory=False))
    return z


def _where(to: Converter, node: fx.Node) -> Pair:
    a, b = map(to.pair, node.args[1:])
    return Pair(*(to.make(aten.where.self, node.args[0], x, y) for x, y in ((a.re, b.re), (a.im, b.im))))


def _equal(to: Converter, node: fx.Node) -> fx.Node:
    a, b = map(to.pair, node.args)
    return to.make(aten.logical_and.default, to.make(aten.eq.Tensor, a.re, b.re), to.make(aten.eq.Tensor, a.im, b.im))


def _cat(to: Converter, node: fx.Node) -> Pair:
    tensors, *rest = node.args
    pairs = [to.pair(x) for x in tensors]  # type: ignore[union-attr]
    if any(x not in to.pairs for x in tensors):  # type: ignore[union-attr]
        raise Unpaired
    return Pair(to.make(node.target, [p.re for p in pairs], *rest), to.make(node.target, [p.im for p in pairs], *rest))


def _each(to: Converter, node: fx.Node) -> Pair:
    """Ops that do the same to both parts."""
    z = to.pair(node.args[0])
    target = aten.reshape.default if node.target in (aten.view.default, aten._unsafe_view.default) else node.target
    kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}  # the parts have it already
    return Pair(*(to.make(target, x, *node.args[1:], **kwargs) for x in (z.re, z.im)))


_EACH = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims,
    aten.squeeze.default, aten.unsqueeze.default, aten.alias.default, aten.clone.default, aten.flip.default,
    aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.diagonal.default,
    aten.roll.default, aten.repeat.default)

RULES: Mapping[Any, Rule] = {
    aten.view_as_complex.default: _view_as_complex, aten.view_as_real.default: _view_as_real,
    aten.complex.default: _complex, aten.polar.default: _polar,
    aten.add.Tensor: _sum_of(aten.add.Tensor), aten.sub.Tensor: _sum_of(aten.sub.Tensor),
    aten.mul.Tensor: _mul, aten.mul.Scalar: _mul, aten.div.Tensor: _div, aten.div.Scalar: _div,
    aten.reciprocal.default: _reciprocal, aten._conj.default: _conj, aten._conj_physical.default: _conj,
    aten.abs.default: _abs, aten.angle.default: _angle, aten.exp.default: _exp, aten.log.default: _log,
    aten.sgn.default: _sgn, aten._to_copy.default: _to_copy, aten.where.self: _where, aten.eq.Tensor: _equal,
    aten.cat.default: _cat, **dict.fromkeys(_EACH, _each),
}
