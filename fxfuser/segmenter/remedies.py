"""What removes a boundary at a node with which nothing is fused, or that lies between two kernels.

Enters: the node and the reason why it is one.  Leaves: a sentence for the user, in terms of the program.
"""

from __future__ import annotations

from torch import fx

from fxfuser import ops
from fxfuser.errors import user_location
from fxfuser.ops import Kind

_BY_REASON = (
    ("operands on several devices", "put the operands of {name} on one device"),
    ("dtype ", "cast the operands of {name} to a dtype that kernels have, such as float32"),
    ("layout ", "make the operands of {name} dense"),
    ("the size of its result depends on data", "keep the size: torch.where(mask, x, 0) in place of x[mask]"),
    ("draws", "draw the random numbers outside, and pass them in"),
    ("reads a value on the host", "keep the number in a tensor"),
    ("attention runs", "keep {name}: as a softmax between two products it would leave its scores in memory"),
    ("a convolution runs", "keep {name}: no kernel of ours computes convolutions"),
)


def without_call(node: fx.Node, reason: str) -> str:
    """What makes an ATen call go away; nothing for what has a kernel of its own."""
    name = f"{node.target}{_at(node)}"
    if ops.kind_of(node) is Kind.ATTENTION:
        return ""
    if ops.kind_of(node) is Kind.GEMM:
        return f"keep {name} if it is large; a small one can be (a[..., :, None] * b).sum(-2), which kernels hold"
    for start, remedy in _BY_REASON:
        if reason.startswith(start):
            return remedy.format(name=name)
    if ops.row(node.target) is None:
        return f"give {node.target} a row (fxfuser.ops.add_row), or write {name} as ops that have one"
    return f"write {name} as pointwise ops, reductions and changes of layout"


def around(node: fx.Node) -> str:
    """What takes a node off the path that joins two kernels."""
    return f"compute {node.name}{_at(node)} from what the first does not make, or use it behind the second"


def _at(node: fx.Node) -> str:
    where = user_location(node.stack_trace)
    return f" at {where}" if where else ""
