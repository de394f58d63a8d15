"""Whether a graph's plan may be captured in a CUDA graph, and what of its inputs a capture depends on.

Enters: an ATen graph and its `Boundary`, what AOTAutograd knows of its inputs and outputs.  Leaves: `Facts`, or the
reason why the plan has to run call by call.  A capture records kernels with their addresses, nothing of what the host
does, so every tensor must live on one device and no op may ask the host for a number.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Callable, Iterator

import torch
from torch import fx

from fxfuser.runtime import sizes

# they tell the host nothing unless an index is a mask
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)
_VALUES = (torch.Tensor, int, float, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))


@dataclass(frozen=True)
class Boundary:
    """`static`: positions of inputs that keep their address from call to call, such as parameters and buffers.

    `results`: how many leading outputs go to the user; those that follow are saved for the backward.  None: all.
    `retained`: of a backward graph, whether the backward that runs keeps what was saved (`retain_graph`).
    `needed`: of a backward graph, whether anything but the call that runs may read this input again: the graph, if it
    is retained, or whoever a hook on saved tensors has given it to.
    """

    static: frozenset[int] = frozenset()
    results: int | None = None
    retained: Callable[[], bool] | None = None
    needed: Callable[[torch.Tensor], bool] | None = None


@dataclass(frozen=True)
class Facts:
    """What captures of one plan need to know.

    `varying` are the positions of inputs whose numbers or sizes differ between calls, `mutated` those of inputs that
    the graph writes to, `unread` those that nothing reads; `random`: it draws from the device's generator.
    """

    device: torch.device
    boundary: Boundary
    varying: tuple[int, ...]
    mutated: frozenset[int]
    random: bool
    unread: frozenset[int] = frozenset()

    def key(self, args: list[Any]) -> tuple[Any, ...]:
        """Equal for calls that one capture can serve."""
        return tuple((a.shape, a.stride()) if isinstance(a, torch.Tensor) else a
                     for a in (args[i] for i in self.varying))


class NotCapturable(Exception):
    """The reason why a plan is not captured."""


def facts(module: fx.GraphModule, boundary: Boundary) -> Facts:
    """Raises NotCapturable."""
    nodes = list(module.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"]
    device = _device(module, nodes)
    for node in nodes:
        if node.op == "call_function" and (reason := _refusal(node)):
            raise NotCapturable(reason)
    for node in inputs:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.layout is not torch.strided or value.is_neg()
                                                or value.is_conj()):
            raise NotCapturable(f"{node.name} is no plain strided tensor")
        if not isinstance(value, _VALUES):
            raise NotCapturable(f"{node.name} is neither a tensor nor a number")
    mutated = frozenset(i for i, n in enumerate(inputs) if n in set(map(_base, _written(nodes))))
    varying = tuple(i for i, n in enumerate(inputs) if _varies(n.meta.get("val")))
    unread = frozenset(i for i, n in enumerate(inputs) if not n.users)
    return Facts(device, boundary, varying, mutated, any(map(_is_random, nodes)), unread)


def _device(module: fx.GraphModule, nodes: list[fx.Node]) -> torch.device:
    found: torch.device | None = None
    for node in nodes:
        value = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else node.meta.get("val")
        for tensor in _tensors(value):
            if tensor.device.type != "cuda":
                raise NotCapturable(f"{node.name} is on {tensor.device}")
            if found is not None and tensor.device != found:
                raise NotCapturable(f"{node.name} is on {tensor.device}, others are on {found}")
            found = tensor.device
    if found is None:
        raise NotCapturable("nothing of it is on a CUDA device")
    return found


def _refusal(node: fx.Node) -> str:
    """Why this call cannot be captured, or ""."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"{target} decides on the host what runs"
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    if target.namespace in ("_c10d_functional", "c10d_functional", "c10d"):
        return f"{target} is a collective"
    if torch.Tag.cudagraph_unsafe in target.tags:
        return f"{target} is marked as unsafe in CUDA graphs"
    shaped = torch.Tag.dynamic_output_shape in target.tags or target in _INDEXED
    masked = target not in _INDEXED or any(v.dtype in (torch.bool, torch.uint8) for v in _indices(node))
    if torch.Tag.data_dependent_output in target.tags or (shaped and masked):
        return f"{target} makes the host wait for a number"
    if any(s.startswith(("u", "zu")) for v in _tensors(node.meta.get("val")) for d in v.shape
           for s in sizes.symbols(d)):
        return f"{target} has a size that only the device knows"
    if node.kwargs.get("generator") is not None:
        return f"{target} draws from a generator of its own"
    return ""


def _indices(node: fx.Node) -> Iterator[torch.Tensor]:
    indices = node.args[1]
    assert isinstance(indices, (list, tuple))
    for index in indices:
        if isinstance(index, fx.Node):
            yield from _tensors(index.meta.get("val"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _varies(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(type(n) is not int for n in (*value.shape, *value.stride()))
    return value is not None  # a number is baked into the launches


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _written(nodes: list[fx.Node]) -> Iterator[fx.Node]:
    """What in-place ops write to."""
    for node in nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            for argument, value in zip(node.target._schema.arguments, node.args):
                if argument.is_write:
                    yield from (n for n in (value if isinstance(value, (list, tuple)) else [value])
                                if isinstance(n, fx.Node))


def _base(node: fx.Node) -> fx.Node:
    """What a node may be a view of; of a chain of calls the first tensor that it starts from."""
    while node.op == "call_function" and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
