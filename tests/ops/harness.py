"""One op as a kernel: the row's text in a one-dimensional kernel, interpreted or compiled.

Half tensors enter and leave as fp32, which is how kernels hold them; everything else as itself.
"""

from __future__ import annotations

import itertools
import linecache
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Callable

import numpy
import torch
import triton.language as tl
from torch import fx
from torch._ops import OpOverload
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from fxfuser import ops as table

_serial = itertools.count()
_UNSET = object()


def make_node(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node:
    """An FX call of `op` whose tensor arguments are placeholders."""
    graph = fx.Graph()

    def lift(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"arg{next(_serial)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(op, tuple(lift(a) for a in args), {k: lift(v) for k, v in kwargs.items()})
    node.meta["val"] = result
    return node


@dataclass
class NodeOperands:
    """`Operands` of a node; `names` maps its tensor arguments' positions to the loaded values."""

    node: fx.Node
    row: table.Row
    precise: bool = False
    prefix: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return table.compute_dtype(self.node, self.row)

    @property
    def result(self) -> torch.dtype:
        return self.node.meta["val"].dtype

    def _tensor(self, i: int) -> fx.Node | None:
        value = table.argument(self.node, i)
        return value if isinstance(value, fx.Node) else None

    def text(self, i: int) -> str:
        tensor = self._tensor(i)
        if tensor is None:
            return self.literal(table.argument(self.node, i))
        return table.convert(f"{self.prefix}x{i}", tensor.meta["val"].dtype, self.dtype)

    def raw(self, i: int) -> str:
        if self._tensor(i) is None:
            return table.literal(table.argument(self.node, i), self.source(i))
        return f"{self.prefix}x{i}"

    def source(self, i: int) -> torch.dtype:
        tensor, value = self._tensor(i), table.argument(self.node, i)
        if tensor is not None:
            return tensor.meta["val"].dtype
        return torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64

    def argument(self, name: str, default: Any = None) -> Any:
        return table.named_argument(self.node, name, default)

    def has(self, name: str) -> bool:
        return table.named_argument(self.node, name) is not None

    def let(self, text: str) -> str:
        name = f"{self.prefix}t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def literal(self, value: bool | int | float) -> str:
        return table.literal(value, self.dtype)


def body(operands: NodeOperands, target: str) -> list[str]:
    """The statements that compute the node and bind it, in its own in-kernel dtype, to `target`."""
    result = operands.let(table.render(operands.row, operands))
    boolean = operands.result == torch.bool and operands.row.promote is not table.Promotion.RESULT
    source = torch.bool if boolean else operands.dtype
    return [*operands.lines, f"{target} = {table.convert(result, source, operands.result)}"]


def kernel_source(operands: NodeOperands, positions: list[int]) -> str:
    lines = body(operands, "y")
    pointers = ", ".join(f"in{i}" for i in positions)
    loads = [f"x{i} = tl.load(in{i} + i)" for i in positions]
    statements = "\n    ".join(["i = tl.arange(0, N)", *loads, *lines, "tl.store(out + i, y)"])
    text = f"@triton.jit\ndef kernel({pointers}, out, N: tl.constexpr):\n    {statements}\n"
    return f"{table.prelude_for(text)}\n\n{text}"


def _held(tensor: torch.Tensor, shape: torch.Size, size: int) -> torch.Tensor:
    flat = tensor.expand(shape).reshape(-1)
    repeated = flat.repeat(-(-size // max(flat.numel(), 1)))[:size]
    return repeated.to(table.opmath(tensor.dtype)).contiguous()


def interpret(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], expected: torch.Tensor,
              precise: bool = False) -> torch.Tensor:
    """What the row's text computes in Triton's interpreter; shape and dtype of `expected`."""
    node = make_node(op, args, kwargs, expected)
    row = table.row(op)
    assert row is not None
    positions = [i for i in range(len(op._schema.arguments)) if isinstance(table.argument(node, i), fx.Node)]
    source = kernel_source(NodeOperands(node, row, precise), positions)
    size = 1 << max(expected.numel() - 1, 0).bit_length()
    inputs = [_held(table.argument(node, i).meta["val"], expected.shape, size) for i in positions]
    output = torch.empty(size, dtype=table.opmath(expected.dtype))
    with numpy.errstate(all="ignore"):
        load(source)["kernel"][(1,)](*inputs, output, N=size)
    return output[:expected.numel()].reshape(expected.shape).to(expected.dtype)


def load(source: str) -> dict[str, Any]:
    """Executes kernel text with the interpreter's wrapper in place of `triton.jit`."""
    filename = f"<kernel {next(_serial)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {
        "triton": SimpleNamespace(jit=InterpretedFunction), "tl": tl, "libdevice": _libdevice()}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def _libdevice() -> SimpleNamespace:
    def wrap(function: Callable[..., torch.Tensor]) -> Callable[..., tl.tensor]:
        def call(*arguments: Any) -> tl.tensor:
            dtype = next(a.dtype for a in arguments if isinstance(a, tl.tensor))
            like = next(a.handle.data for a in arguments if isinstance(a, tl.tensor))
            values = [torch.from_numpy(numpy.array(a.handle.data)) if isinstance(a, tl.tensor)
                      else torch.tensor(a, dtype=torch.from_numpy(like[:0].copy()).dtype) for a in arguments]
            result = function(*values).numpy()
            shaped = any(a.type.is_block() for a in arguments if isinstance(a, tl.tensor))
            kind = tl.block_type(dtype, list(result.shape)) if shaped else dtype
            return tl.tensor(TensorHandle(result, dtype), kind)
        return call
    return SimpleNamespace(**{name: wrap(function) for name, function in table.LIBDEVICE.items()})
