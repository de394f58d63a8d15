"""What a program tells the compiler about its own kernels: `boundary(x)` and `fuse()`.

Enters: calls inside compiled code.  Leaves: marks on ATen nodes, in the part of their meta that Dynamo, AOTAutograd
and the passes carry along, into the backward too.  Neither breaks the graph, and outside of compiled code both do
nothing.

A boundary is a view: of the same storage, with the same strides, so that a write through either side is seen by the
other, as in eager.  AOTAutograd sees aten.alias; `passes/mark_boundaries.py` makes it `fxfuser::boundary` again, which
no kernel sees through, and the plan passes the tensor on.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.traceback import annotate

from fxfuser.ops.row import Kind, Row
from fxfuser.ops.table import add_row

BOUNDARY_MARK = "fxfuser.boundary"
FUSE_MARK = "fxfuser.fuse."  # and the number of the block
_blocks = itertools.count()


def boundary(x: torch.Tensor) -> torch.Tensor:
    """`x` itself; what reads the result is in another kernel than what computed `x`.

    The gradient passes unhindered.  Where `x` is an input of the compiled region there is nothing to keep apart.
    """
    if not torch.compiler.is_compiling():
        return x
    result: torch.Tensor = BOUNDARY(x)
    return result


def fuse() -> AbstractContextManager[object]:
    """Asks that all ops inside, and their gradients, become one kernel each way, even where the cost model is against
    it.  What is not possible stays apart: `fxfuser.explain` says what and why.

    Each entry of the context is a request of its own; an op inside of several takes part in all of them.
    """
    if not torch.compiler.is_compiling():
        return nullcontext()
    block: AbstractContextManager[object] = annotate({f"{FUSE_MARK}{_next_block()}": True})
    return block


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _next_block() -> int:
    """Called once for each entry of a context that Dynamo traces."""
    return next(_blocks)


def is_marked_boundary(node: fx.Node) -> bool:
    """Whether a node is the alias that a call of `boundary` left behind."""
    return node.target is torch.ops.aten.alias.default and BOUNDARY_MARK in (node.meta.get("custom") or ())


def blocks_of(node: fx.Node) -> tuple[str, ...]:
    """The contexts of `fuse()` that a node was traced in."""
    return tuple(key for key in node.meta.get("custom") or () if isinstance(key, str) and key.startswith(FUSE_MARK))


def _alias(x: torch.Tensor) -> torch.Tensor:
    with annotate({BOUNDARY_MARK: True}):
        result: torch.Tensor = torch.ops.aten.alias.default(x)
    return result


def _define() -> OpOverload:
    # composite: fake tensors, functionalisation and autograd all see the alias, which they know
    torch.library.define("fxfuser::boundary", "(Tensor(a) x) -> Tensor(a)")
    torch.library.impl("fxfuser::boundary", "CompositeImplicitAutograd", _alias)
    op: OpOverload = torch.ops.fxfuser.boundary.default
    add_row(op, Row(Kind.VIEW))
    return op


BOUNDARY = _define()
