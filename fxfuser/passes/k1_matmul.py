"""A matrix product that contracts one element is a broadcast multiplication.

    c = aten.mm(a, b)     # a: [M, 1], b: [1, N]        ->    c = aten.mul(a, b)

    d = aten.addmm(v, a, b, beta=0.5, alpha=2)          ->    c = aten.mul(a, b);  c2 = aten.mul(c, 2)
                                                              w = aten.mul(v, 0.5);  d = aten.add(w, c2)

also mm, bmm, mv, dot and baddbmm; linear, einsum, outer and matmul of any rank arrive here as one of them.  Left in
place it would run as a GEMM, and the cut between forward and backward would count it as compute-heavy and save its
result.  beta = 0 reads no bias, which may hold nan.  addmm of half types adds in float32 and rounds once, as a GEMM's
epilogue does.  Left alone: what eager refuses (bool, mixed dtypes, integers on CUDA), K > 1 with M or N of 1, and
a symbolic K.  Results keep the product's strides.  nvFuser has the same rewrite
(translate_no_reduction_matmul_to_mul_squeeze.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import torch
from torch import fx

from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import known_equal
from fxfuser.passes.rebuild import Make, replace_each

aten = torch.ops.aten

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Product:
    """Where an op has its operands: the position of the left one, and of the bias that is added, if any."""

    left: int
    bias: int | None = None


PRODUCTS: Mapping[Any, Product] = {
    aten.mm.default: Product(0),
    aten.bmm.default: Product(0),
    aten.mv.default: Product(0),
    aten.dot.default: Product(0),
    aten.addmm.default: Product(1, bias=0),
    aten.baddbmm.default: Product(1, bias=0),
}


def multiply_instead_of_k1_matmul(graph: fx.Graph, scope: Scope) -> int:
    return replace_each(graph, scope, _product, _rewritten)


def _product(node: fx.Node) -> Product | None:
    product = PRODUCTS.get(node.target)
    return product if product is not None and _applies(node, product) else None


def _applies(node: fx.Node, product: Product) -> bool:
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    if len(operands) != (2 if product.bias is None else 3) or len(operands) != len(node.args):
        return False
    values = [n.meta["val"] for n in operands]
    result = node.meta["val"]
    if any(v.dtype is not result.dtype or v.layout is not torch.strided for v in values):
        return False
    if any(v.device != result.device for v in values):
        return False
    admitted = FLOATS if result.device.type == "cuda" else FLOATS | INTEGERS
    scales = [node.kwargs.get(name, 1) for name in ("alpha", "beta")]
    kinds = (int,) if result.dtype in INTEGERS else (int, float)
    if result.dtype not in admitted or any(isinstance(s, bool) or not isinstance(s, kinds) for s in scales):
        return False
    return known_equal(values[product.left].shape[-1], 1)


def _rewritten(make: Make, node: fx.Node, product: Product) -> fx.Node:
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    left, right = operands[product.left], operands[product.left + 1]
    if node.target is aten.mv.default:
        left = make(aten.squeeze.dims, left, [1])
    if node.target is aten.dot.default:
        left, right = make(aten.squeeze.dims, left, [0]), make(aten.squeeze.dims, right, [0])
    if product.bias is None:
        return make(aten.mul.Tensor, left, right)
    return _add_bias(make, node, operands[product.bias], left, right)


def _add_bias(make: Make, node: fx.Node, bias: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node:
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    dtype = node.meta["val"].dtype
    if beta == 0 and alpha == 1:
        return make(aten.mul.Tensor, left, right)
    if dtype in HALVES:
        left, right = (make(aten._to_copy.default, n, dtype=torch.float32) for n in (left, right))
    total = make(aten.mul.Tensor, left, right)
    if alpha != 1:
        total = make(aten.mul.Tensor, total, alpha)
    if beta != 0:
        if dtype in HALVES:
            bias = make(aten._to_copy.default, bias, dtype=torch.float32)
        if beta != 1:
            bias = make(aten.mul.Tensor, bias, beta)
        total = make(aten.add.Tensor, bias, total)
    return make(aten._to_copy.default, total, dtype=dtype) if dtype in HALVES else total
