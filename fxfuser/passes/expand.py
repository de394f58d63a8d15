"""Replaces ops that capture kept whole by the ATen ops they consist of.

    c = aten._softmax(a, -1, False)    ->    m = aten.amax(a, [-1], True);  s = aten.sub(a, m);  e = aten.exp(s)
                                             t = aten.sum(e, [-1], True);   c = aten.div(e, t)

They stay whole until here so that earlier passes can recognise them, and are taken apart before the cut between
forward and backward, which then can save a row's maximum and recompute the rest.  The body comes from a trace of
the op's decomposition on the graph's own fake tensors, symbolic sizes included; sizes that the trace asks of its
inputs become the graph's own size inputs.  A node whose body would change a dtype or a shape stays whole.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Hashable, Mapping, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser.ops.exponent import FREXP_EXPONENT, FREXP_MANTISSA
from fxfuser.ops.hashing import BITS64, EXCLUSIVE_OR
from fxfuser.ops.scans import CUMMAX, CUMMAX_PLACE, CUMMIN, CUMMIN_PLACE
from fxfuser.passes import binary_search, distances, fractional_pooling, grid_sampling, pooling, resampling
from fxfuser.passes.funnel import Scope
from fxfuser.passes.inline import splice, trace_body
from fxfuser.passes.sizes import size_inputs

aten = torch.ops.aten
sym_max: Callable[[Any, Any], Any] = torch.sym_max
OPMATH = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def _moments(
    x: torch.Tensor, dim: Sequence[int] | None, correction: Any, keepdim: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance and mean in two passes over the data, in float32 for half types."""
    dims = [d % x.dim() for d in dim] if dim and x.dim() else list(range(x.dim()))
    count: Any = 1
    for d in dims:
        count = count * x.shape[d]
    wide = x.to(OPMATH.get(x.dtype, x.dtype))
    mean = aten.mean.dim(wide, dims, True)
    centred = wide - mean
    total = aten.sum.dim_IntList(centred * centred, dims, keepdim)
    freedom = count - (1 if correction is None else correction)
    if isinstance(freedom, (int, float)):
        freedom = max(freedom, 0)
    else:
        freedom = sym_max(freedom, 0)
    variance = total / freedom
    if not keepdim:
        mean = aten.squeeze.dims(mean, dims) if dims else mean
    return variance.to(x.dtype), mean.to(x.dtype)


def _var(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> torch.Tensor:
    return _moments(x, dim, correction, keepdim)[0]


def _var_mean(
    x: torch.Tensor, dim: Sequence[int] | None = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _moments(x, dim, correction, keepdim)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Sequence[int] | None = None, keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The norm of magnitudes along `dim`, in float32 for half types; 2.11's decomposition loses a dimension of 1."""
    result = x.dtype if dtype is None else dtype
    dims = list(range(x.dim())) if not dim else [d % max(x.dim(), 1) for d in dim]
    size = x.to(OPMATH.get(result, result)).abs()
    if ord == float("inf"):
        norm = aten.amax.default(size, dims, keepdim)
    elif ord == float("-inf"):
        norm = aten.amin.default(size, dims, keepdim)
    elif ord == 0:
        norm = aten.sum.dim_IntList((size != 0).to(size.dtype), dims, keepdim)
    elif ord == 1:
        norm = aten.sum.dim_IntList(size, dims, keepdim)
    elif ord == 2:
        norm = aten.sum.dim_IntList(size * size, dims, keepdim).sqrt()
    else:
        norm = aten.sum.dim_IntList(size.pow(ord), dims, keepdim).pow(1.0 / ord)
    total: torch.Tensor = norm.to(result)
    return total


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """What arg-reductions can compare: they know no bool."""
    return x.to(torch.uint8) if x.dtype is torch.bool else x


def _max_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The first of several maxima, as both argmax and max say; nan is the largest."""
    return aten.amax.default(x, [dim], keepdim), aten.argmax.default(_ordered(x), dim, keepdim)


def _min_dim(x: torch.Tensor, dim: int, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return aten.amin.default(x, [dim], keepdim), aten.argmin.default(_ordered(x), dim, keepdim)


def _cummax(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return CUMMAX(_ordered(x), dim).to(x.dtype), CUMMAX_PLACE(_ordered(x), dim)


def _cummin(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return CUMMIN(_ordered(x), dim).to(x.dtype), CUMMIN_PLACE(_ordered(x), dim)


def _hash(x: torch.Tensor, dim: Sequence[int] = (), *, keepdim: bool = False, mode: int = 0) -> torch.Tensor:
    """The exclusive or of 64 bits of each element: of its double, or of its integer."""
    wide = BITS64(x.to(torch.float64)) if x.dtype.is_floating_point else x.to(torch.int64)
    dims = sorted({d % max(x.dim(), 1) for d in dim}) if dim and x.dim() else list(range(x.dim()))
    hashed: torch.Tensor = EXCLUSIVE_OR(wide, dims, keepdim).view(torch.uint64)
    return hashed


def _frexp(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return FREXP_MANTISSA(x), FREXP_EXPONENT(x)


def _nll_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignore_index: int, total_weight: torch.Tensor,
) -> torch.Tensor:
    """One value per row, at the label's column.  PyTorch's own scatters it; a comparison with the column index is
    pointwise and joins what reads it.  The forward has refused labels out of range."""
    classes = 0 if x.dim() < 2 else 1
    if reduction == 1:
        grad = grad / total_weight
    label = target.unsqueeze(classes)
    if x.dim() > 1 and grad.dim() > 0:
        grad = grad.unsqueeze(classes)
    column = torch.arange(x.shape[classes], dtype=target.dtype, device=x.device)
    rest = x.dim() - classes - 1
    column = column.reshape([-1] + [1] * rest)
    row = -grad
    if weight is not None:
        row = row * weight.reshape([-1] + [1] * rest)
    named = torch.where(label != ignore_index, label, -1)  # no column's number, rather than a condition on each element
    return torch.where(column == named, row, 0).to(x.dtype)


# None: PyTorch's own decomposition is the body
EXPANSIONS: Mapping[OpOverload, Callable[..., Any] | None] = {
    aten._softmax.default: None,
    aten._log_softmax.default: None,
    aten.native_layer_norm.default: None,
    aten.native_layer_norm_backward.default: None,
    aten.native_group_norm.default: None,
    aten._native_batch_norm_legit_functional.default: None,
    aten._native_batch_norm_legit.no_stats: None,
    aten._native_batch_norm_legit.default: None,  # not training: functionalization makes another op of one that is
    aten._native_batch_norm_legit_no_training.default: None,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.max.dim: _max_dim,
    aten.min.dim: _min_dim,
    aten.cummax.default: _cummax,
    aten.cummin.default: _cummin,
    aten.frexp.Tensor: _frexp,
    aten.hash_tensor.default: _hash,
    aten.nll_loss_forward.default: None,
    aten.nll_loss2d_forward.default: None,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.grid_sampler_2d.default: None,
    aten.upsample_bilinear2d.default: None,
    **pooling.BODIES,
    **fractional_pooling.BODIES,
    **resampling.BODIES,
    **grid_sampling.BODIES,
    **distances.BODIES,
    **binary_search.BODIES,
}


def expand(graph: fx.Graph, scope: Scope) -> int:
    sizes = size_inputs(graph)
    traced: dict[Hashable, fx.Graph | None] = {}
    changes = 0
    for node in list(graph.nodes):
        if node.target not in EXPANSIONS or not _eligible(node):
            continue
        if scope.fuel.left == 0:
            break
        body = _body(node, scope, traced)
        if body is None:
            continue
        scope.fuel.take()
        splice(graph, node, node.all_input_nodes, body, scope, sizes)
        changes += 1
    return changes


def _eligible(node: fx.Node) -> bool:
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)]
    plain = all(t.layout is torch.strided and not t.dtype.is_complex for t in tensors)
    single = isinstance(node.meta["val"], torch.Tensor)
    return plain and bool(tensors) and (single or all(map(_reads_tensor, node.users)))


def _reads_tensor(user: fx.Node) -> bool:
    """Whether a node is one of several results; a gradient that nobody asked for is None and read by nobody."""
    return user.target is operator.getitem and (isinstance(user.meta.get("val"), torch.Tensor) or not user.users)


def _body(node: fx.Node, scope: Scope, traced: dict[Hashable, fx.Graph | None]) -> fx.Graph | None:
    """The body, traced once for equal calls: layers are alike, and tracing takes longer than all other passes."""
    key = _call_of(node)
    if key is None:
        return _trace(node, scope)
    if key not in traced:
        traced[key] = _trace(node, scope)
    return traced[key]


def _call_of(node: fx.Node) -> Hashable | None:
    """All that a trace of the call depends on; None where a size is symbolic, for which there may be guards to add."""
    place = {n: i for i, n in enumerate(node.all_input_nodes)}
    values = [n.meta["val"] for n in (*place, node)]
    if not all(_static(v) for v in values):
        return None
    described = repr(fx.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}"))
    return node.target, described, tuple(_described(v) for v in values)


def _static(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_static, value))
    return value is None or isinstance(value, torch.Tensor) and value.layout is torch.strided \
        and all(isinstance(s, int) for s in (*value.shape, *value.stride()))


def _described(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if value is None:
        return None
    return value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad


def _trace(node: fx.Node, scope: Scope) -> fx.Graph | None:
    """The body's graph, one placeholder per input node; None where it stays whole."""
    inputs = node.all_input_nodes
    target: Any = node.target

    def body(*values: Any) -> Any:
        given = dict(zip(inputs, values))
        args, kwargs = fx.map_arg((node.args, node.kwargs), given.__getitem__)
        return target(*args, **kwargs)

    graph = trace_body(body, [n.meta["val"] for n in inputs], node.meta["val"], scope)
    return None if graph is None or any(n.target is target for n in graph.nodes) else graph
