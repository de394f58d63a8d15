"""Which of PyTorch's decompositions a graph is traced with, and ours in place of some.

Enters: PyTorch's own, for which it has no public names: `capture` hands them in.  Leaves: what each overload is traced
as.  Invariant: what is one pointwise row of the op table stays whole, as it rounds once there, and eager rounds once.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Mapping, Sequence

import torch
from torch._ops import OpOverload

from fxfuser.ops import Kind, row
from fxfuser.passes import fake_quantize, foreach

aten = torch.ops.aten

Table = Mapping[Any, Callable[..., Any]]

# Overload packets of core ATen's decompositions that are not used, and why
KEPT_WHOLE: tuple[Any, ...] = (
    # one GEMM with its epilogue, rounded once; the K=1 pass knows them
    aten.baddbmm, aten.dot, aten.mv,
    # the expand pass has a body that keeps every dimension
    aten.linalg_vector_norm,
    # the expand pass has a body without a scatter
    aten.nll_loss_backward, aten.nll_loss2d_backward,
    # without it what a scan's body returns and what it saves are one value, which the op refuses; a pass drops it
    aten.detach,
    # changes of indices; taken apart the first would read at positions that a tensor holds, the second ask for the
    # position's value, and the third have other strides than eager
    aten.roll, aten.take, aten.select_scatter,
    # one library kernel
    aten._scaled_dot_product_flash_attention_for_cpu,
    # the expand pass traces its body once for equal layers, PyTorch once for each
    aten.native_layer_norm_backward,
    # the random pass has a body that follows from a seed
    aten.bernoulli,
    # float16 overflows between its steps in eager, and would not inside a kernel
    aten.soft_margin_loss, aten.soft_margin_loss_backward,
    # scatters, which run as their ATen call: one call is better than one with its operands prepared
    aten.embedding_dense_backward, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_,
    aten.index_fill, aten.index_fill_,
)

# Overload packets that core ATen has no decomposition for and PyTorch has: copies of views, a norm, and triangles
ALSO_TAKEN_APART: tuple[Any, ...] = (
    aten.narrow_copy, aten.unbind_copy, aten.as_strided_copy, aten.dist, aten.triu_indices, aten.tril_indices)

# Overloads that PyTorch takes for composites of others and that devices have kernels for.  Of composites that have no
# kernel none need be named: tracing takes them apart by itself, and to collect them all takes a tenth of a second.
COMPOSITES: tuple[OpOverload, ...] = (
    aten.upsample_nearest1d.default, aten.upsample_nearest2d.default, aten.upsample_nearest3d.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default)

# Pointwise ops that are taken apart although the op table could render them: the cut would not recompute them whole
NOT_RECOMPUTED: tuple[Any, ...] = (aten.floor_divide, aten.hardswish, aten.fill, aten.fix)
# and overloads of theirs whose decomposition has other strides than eager
OTHER_STRIDES: tuple[OpOverload, ...] = (aten.fill.Tensor,)

# What eager has for floating dtypes alone, and whose bodies would compute something with integers
OF_FLOATS: tuple[Any, ...] = (
    aten.hardswish, aten.log_sigmoid_forward, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy,
    aten.logaddexp, aten.logaddexp2, aten.frac, aten._softmax, aten._log_softmax, aten.nll_loss_forward,
    aten.nll_loss2d_forward)


def chosen(core: Table, others: Callable[[Sequence[Any]], Table]) -> Mapping[OpOverload, Callable[..., Any]]:
    """Core ATen and `others`, by overloads or their packets, without KEPT_WHOLE and without what one row renders."""
    table: Table = {
        **core, **others([*ALSO_TAKEN_APART, *COMPOSITES]), **foreach.bodies(), **fake_quantize.bodies(),
        aten.linspace.default: partial(_linspace, core[aten.linspace.default]),
        aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward, aten.logit_backward.default: _logit_backward,
        aten.transpose.int: _transpose, aten.t.default: lambda x: _transpose(x, 0, x.dim() - 1),
        aten.native_channel_shuffle.default: core[aten.channel_shuffle.default]}
    return refusing({op: f for op, f in table.items() if isinstance(op, OpOverload) and not is_kept(op)})


def refusing(bodies: Mapping[OpOverload, Callable[..., Any]]) -> Mapping[OpOverload, Callable[..., Any]]:
    """The bodies, of which those OF_FLOATS leave calls on integers as they are, for ATen to refuse."""
    return {op: _of_floats(f) if op.overloadpacket in OF_FLOATS else f for op, f in bodies.items()}


def _of_floats(body: Callable[..., Any]) -> Callable[..., Any]:
    def taken_apart(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return body(x, *args, **kwargs) if x.is_floating_point() or x.is_complex() else NotImplemented
    return taken_apart


def is_kept(op: OpOverload) -> bool:
    """Whether an op stays whole."""
    op = _functional(op)
    found = row(op)
    pointwise = found is not None and found.kind is Kind.POINTWISE
    taken = op.overloadpacket in NOT_RECOMPUTED and op not in OTHER_STRIDES
    return op.overloadpacket in KEPT_WHOLE or (pointwise and not taken)


def _functional(op: OpOverload) -> OpOverload:
    """The op without mutation that tracing makes of one with it, where PyTorch has that."""
    name = op.overloadpacket.__name__.removesuffix("_")
    found = getattr(getattr(aten, name, None), op._overloadname, op) if op.namespace == "aten" else op
    assert isinstance(found, OpOverload)
    return found


def _linspace(theirs: Callable[..., Any], start: Any, end: Any, steps: Any, *, dtype: torch.dtype | None = None,
              **kwargs: Any) -> torch.Tensor:
    """Eager cuts the ends to integers before it divides what lies between; PyTorch's decomposition after."""
    if dtype is not None and not dtype.is_floating_point and not dtype.is_complex:
        start, end = (int(x) if isinstance(x, float) else x for x in (start, end))
    made: torch.Tensor = theirs(start, end, steps, dtype=dtype, **kwargs)
    return made


def _smooth_l1_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """PyTorch's own asks what is near, and takes NaN for far: its sign is 0, and so would be the gradient."""
    apart = x - target
    scaled = gradient / x.numel() if reduction == 1 else gradient
    return torch.where(apart.abs() >= beta, scaled * apart.sign(), scaled * apart / beta)


def _logit_backward(gradient: torch.Tensor, x: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """PyTorch's own asks what is within, and takes NaN for beyond; of the pole at -0.0 it has another sign."""
    within = gradient / (x * (1.0 - x))
    if eps is not None:
        return torch.where((x < eps) | (x > 1.0 - eps), 0.0, within)
    inside = torch.where((x == 0.0) | (x == 1.0), gradient * math.inf, within)
    return torch.where((x < 0.0) | (x > 1.0), math.nan, inside)


def _transpose(x: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """PyTorch's own asks for torch.permute, and that of `t` for torch.transpose: tracing sees each twice or thrice."""
    order = list(range(x.dim()))
    if len(order) < 2 or first == second:
        same: torch.Tensor = aten.alias.default(x)
        return same
    order[first], order[second] = order[second], order[first]
    permuted: torch.Tensor = aten.permute.default(x, order)
    return permuted
