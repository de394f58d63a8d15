"""What a matrix product multiplies and adds: one view of mm, addmm, bmm, baddbmm and our own wide_product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxfuser.ops.products import WIDE_PRODUCT

aten = torch.ops.aten

_PLAIN = (aten.mm.default, aten.bmm.default, WIDE_PRODUCT)
_ADDING = (aten.addmm.default, aten.baddbmm.default)


@dataclass(frozen=True)
class Factors:
    """alpha * left @ right + beta * added, with left [.., M, K], right [.., K, N], added broadcast to [.., M, N]."""

    left: fx.Node
    right: fx.Node
    added: fx.Node | None = None
    alpha: float = 1
    beta: float = 1


def rounds_to_tf32() -> bool:
    """Whether products of float32 may round their factors to tf32: PyTorch's setting, however it was made.

    The two older ways to ask raise an error where the newer one was used to set it.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def matrix_product(node: fx.Node) -> Factors | None:
    """The factors of a product whose operands are whole matrices; None for any other node.

    beta = 0 drops what would be added: PyTorch does not read it, whatever it holds.
    """
    if node.target in _PLAIN and len(node.args) == 2 and not node.kwargs:
        left, right = node.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        return Factors(left, right)
    if node.target not in _ADDING:
        return None
    added, left, right = node.args
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        return None  # a number that is computed at run time
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node) and isinstance(added, fx.Node)
    return Factors(left, right, None if beta == 0 else added, alpha, beta)
