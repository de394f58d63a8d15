"""Masks of attention, before PyTorch chooses the kernel that takes them.

    m = arange(S)[None, :] <= arange(S)[:, None]           is known:  attn_mask=None, is_causal=True
    m = (arange(S)[:, None] >= 0).expand(S, S)             is known to allow all:  attn_mask=None
    m = bias.permute(0, 3, 1, 2)                           lies as no kernel takes it:  attn_mask=dense_rows(m)

Models that are traced build masks that they would not build in eager mode, where they look whether they need one
(transformers' do).  A kernel that is told that attention is causal skips half of its work, and one without a mask reads
none.  CUDA's fused attention takes no mask whose last dimension is not contiguous; PyTorch then falls back, while it
traces as in eager mode, on products of float32 matrices and a softmax between.

The choice falls when AOTAutograd takes the call apart, so this looks at the graph that Dynamo hands over, where a mask
that follows from constants alone can be computed.  Left as they are: masks that depend on an input or are written to,
and sizes that vary.
"""

from __future__ import annotations

import operator
from typing import Any, Iterable

import torch
from torch import fx
from torch.nn.functional import scaled_dot_product_attention

from fxfuser.errors import user_location
from fxfuser.observe import MaskRecord

CAUSAL_ALONE, NOTHING, LAID_OUT = FATES = ("causal", "allows all", "laid out")
MASK, CAUSAL = 3, 5  # positions of `attn_mask` and `is_causal` among the arguments
MOST = 1 << 26  # elements of a tensor that is computed for what it says
FUSED = "cuda"  # whose fused attention wants contiguous rows

# Functions of torch and of `operator`, and methods of tensors: those whose result may be their operand's memory, and
# others that make masks; none has effects or asks for chance
_VIEWS = frozenset({
    "expand", "expand_as", "view", "view_as", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t", "flatten",
    "getitem", "narrow", "select", "contiguous", "detach", "to", "type_as", "bool", "int", "long", "float", "half",
    "bfloat16"})
_MAKERS = _VIEWS | {
    "arange", "full", "ones", "zeros", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full",
    "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or",
    "bitwise_not", "and_", "or_", "xor", "invert", "neg", "add", "sub", "mul", "floordiv", "mod", "abs", "minimum",
    "maximum", "where", "masked_fill", "tril", "triu", "diff", "cumsum", "cat", "clone"}
_IN_PLACE = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand",
                       "ior", "ixor", "ilshift", "irshift", "iconcat"})


def simplify_masks(module: fx.GraphModule, fused: str = FUSED) -> tuple[MaskRecord, ...]:
    """Rewrites the module and those that it calls; returns what became of the masks that it has changed."""
    records: list[MaskRecord] = []
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            known: dict[fx.Node, torch.Tensor | None] = {}
            dense: dict[fx.Node, fx.Node] = {}
            calls = part.graph.find_nodes(op="call_function", target=scaled_dot_product_attention)
            found = [(fate, call) for call in calls if (fate := _simplified(call, known, dense, fused))]
            if found:
                part.recompile()
            records += [MaskRecord(fate, user_location(call.stack_trace)) for fate, call in found]
    return tuple(records)


def dense_rows(mask: torch.Tensor) -> torch.Tensor:
    """The same values with a contiguous last dimension; dimensions before it that repeat one place still do."""
    once = mask
    for dim in range(mask.dim() - 1):
        if mask.stride(dim) == 0:
            once = once.narrow(dim, 0, 1)
    return once.contiguous().expand(mask.shape)


def _simplified(
    call: fx.Node, known: dict[fx.Node, torch.Tensor | None], dense: dict[fx.Node, fx.Node], fused: str
) -> str:
    """What has become of a call's mask; empty where that stays.  `known` and `dense` are of masks of earlier calls."""
    mask = call.args[MASK] if len(call.args) > MASK else call.kwargs.get("attn_mask")
    value = mask.meta.get("example_value") if isinstance(mask, fx.Node) else None
    if not isinstance(mask, fx.Node) or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return ""
    if not all(isinstance(n, int) and n for n in value.shape):
        return ""
    if mask not in known:
        known[mask] = _allowed(mask)
    allowed = None if _repeats(call, value) else known[mask]
    if allowed is not None and bool(allowed.all()):
        _set(call, MASK, "attn_mask", None)
        return NOTHING
    if allowed is not None and value.shape[-1] == value.shape[-2] and _is_causal(allowed):
        _set(call, MASK, "attn_mask", None)
        _set(call, CAUSAL, "is_causal", True)
        return CAUSAL_ALONE
    if value.device.type == fused and value.shape[-1] != 1 and value.stride(-1) != 1:
        if mask not in dense:
            with call.graph.inserting_before(call):
                dense[mask] = call.graph.call_function(dense_rows, (mask,))
            dense[mask].meta = {k: v for k, v in mask.meta.items() if k != "example_value"}  # whose strides differ
        call.replace_input_with(mask, dense[mask])
        return LAID_OUT
    return ""


def _repeats(call: fx.Node, mask: torch.Tensor) -> bool:
    """Whether a mask has more batches or heads than its queries, which eager refuses: it would go unnoticed."""
    query = call.args[0] if call.args else call.kwargs.get("query")
    value = query.meta.get("example_value") if isinstance(query, fx.Node) else None
    if not isinstance(value, torch.Tensor) or mask.dim() > value.dim():
        return True
    pairs = zip(reversed(mask.shape[:-2]), reversed(value.shape[:-2]))
    return any(n != 1 and n != m for n, m in pairs)


def _set(call: fx.Node, position: int, name: str, value: object) -> None:
    if len(call.args) > position:
        call.update_arg(position, value)  # type: ignore[arg-type]
    else:
        call.update_kwarg(name, value)  # type: ignore[arg-type]


def _is_causal(allowed: torch.Tensor) -> bool:
    return torch.equal(allowed, torch.ones(allowed.shape[-2:], dtype=torch.bool).tril().expand(allowed.shape))


def _allowed(mask: fx.Node) -> torch.Tensor | None:
    """Where a mask lets attention look, if it follows from constants and says nothing else; None otherwise."""
    value = _computed(mask)
    if value is None or value.dtype is torch.bool:
        return value
    if not value.dtype.is_floating_point:
        return None
    # a score that is added to the least number of a wide range vanishes beside any other
    least = -float("inf") if value.dtype is torch.float16 else torch.finfo(value.dtype).min
    allowed = value == 0
    return allowed if bool((allowed | (value <= least)).all()) else None


def _computed(node: fx.Node) -> torch.Tensor | None:
    """The value of a node on the CPU, where no input takes part in it."""
    needed, stack = {node}, [node]
    while stack:
        one = stack.pop()
        if not _makes(one):
            return None
        stack += [n for n in one.all_input_nodes if n not in needed]
        needed.update(one.all_input_nodes)
    if _written(needed):
        return None
    values: dict[fx.Node, Any] = {}
    try:
        with torch.no_grad(), torch.device("cpu"):
            for one in node.graph.nodes:
                if one in needed:
                    values[one] = _call(one, values)
    except Exception:  # what cannot be computed here is not known
        return None
    found = values[node]
    return found if type(found) is torch.Tensor and found.device.type == "cpu" else None


def _makes(node: fx.Node) -> bool:
    """Whether a node can be computed alone, and is not too large for that."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        if not all(isinstance(n, int) for n in value.shape) or value.numel() > MOST and _name(node) not in _VIEWS:
            return False
    known = node.op == "call_method" or node.op == "call_function" and any(
        getattr(home, _name(node), None) is node.target for home in (torch, operator))
    return known and _name(node) in _MAKERS


def _name(node: fx.Node) -> str:
    """The name of a function or method, of a special method that of its operator."""
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
    if not name.startswith("__"):
        return name
    plain = name.strip("_")
    return f"{plain}_" if plain in ("and", "or") else plain


def _written(nodes: Iterable[fx.Node]) -> bool:
    """Whether something writes to the memory of one of these nodes."""
    alike, stack = set(nodes), [*nodes]
    while stack:
        node = stack.pop()
        for user in node.users:
            if _writes(user, node):
                return True
            if user not in alike and (_name(user) in _VIEWS or user.op != "call_method" and not _is_torch_s(user)):
                alike.add(user)
                stack.append(user)
    return False


def _writes(user: fx.Node, node: fx.Node) -> bool:
    name, first = _name(user), bool(user.args) and user.args[0] is node
    in_place = name in _IN_PLACE or name.endswith("_") and not hasattr(operator, name)
    return first and (in_place or bool(user.kwargs.get("inplace"))) or user.kwargs.get("out") is node


def _is_torch_s(node: fx.Node) -> bool:
    """Whether a function is torch's own or an operator, whose result is new memory unless its name says otherwise."""
    return node.op == "call_function" and str(getattr(node.target, "__module__", "")).split(".")[0] in (
        "torch", "_operator", "math")


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def given(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return values[argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), given)
    if isinstance(kwargs.get("device"), str):
        kwargs = {**kwargs, "device": "cpu"}
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)
