"""One op as a kernel: the row's text in a one-dimensional kernel, interpreted or built."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fxfuser import ops as table
from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime.interpret import interpreted

_serial = itertools.count()


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
        promoted = table.promoted_dtype(self.node, self.row)
        if self.row.promote is table.Promotion.RESULT:  # a cast is no promotion: the harness rounds where it stores
            return table.convert(f"{self.prefix}x{i}", tensor.meta["val"].dtype, self.dtype)
        return table.operand(f"{self.prefix}x{i}", tensor.meta["val"].dtype, promoted)

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


def positions(node: fx.Node) -> list[int]:
    """The schema positions that hold tensors."""
    return [i for i in range(len(node.target._schema.arguments)) if isinstance(table.argument(node, i), fx.Node)]


def loads(operands: NodeOperands, pointer: str) -> list[str]:
    """Statements that load the node's tensors from pointers called `pointer` and their positions."""
    lines = []
    for i in positions(operands.node):
        name = f"{operands.prefix}x{i}"
        lines.append(f"{name} = tl.load({pointer}{i} + i)")
        if table.argument(operands.node, i).meta["val"].dtype in (torch.bfloat16, torch.float16):
            lines.append(f"{name} = {name}.to(tl.float32)")
        if table.argument(operands.node, i).meta["val"].dtype == torch.bool:
            lines.append(f"{name} = {name} != 0")
    return lines


def module(parameters: str, statements: list[str]) -> str:
    """A kernel's module."""
    lines = "\n    ".join(["i = tl.program_id(0) * N + tl.arange(0, N)", *statements])
    text = f"@triton.jit\ndef kernel({parameters}, INDEX: tl.constexpr, N: tl.constexpr):\n    {lines}\n"
    head = "import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n"
    return f"{head}\n\n{table.prelude_for(text)}\n\n{text}"


def interpret(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], expected: torch.Tensor,
              precise: bool = False) -> torch.Tensor:
    """What the row's text computes in Triton's interpreter; shape and dtype of `expected`."""
    node = make_node(op, args, kwargs, expected)
    row = table.row(op)
    assert row is not None
    operands = NodeOperands(node, row, precise)
    where = positions(node)
    pointers = ", ".join([*(f"in{i}" for i in where), "out"])
    source = module(pointers, [*loads(operands, "in"), *body(operands, "y"), "tl.store(out + i, y)"])
    size = 1 << max(expected.numel() - 1, 0).bit_length()
    inputs = [flat(table.argument(node, i).meta["val"], expected.shape, size) for i in where]
    output = torch.empty(size, dtype=expected.dtype)
    kernel = Kernel("kernel", source, tuple(x.dtype for x in inputs), (output.dtype,), 0, "1", str(size),
                    Tile((("N", size),)))
    interpreted(kernel).run([*inputs, output])
    return output[:expected.numel()].reshape(expected.shape)


def flat(tensor: torch.Tensor, shape: torch.Size, size: int) -> torch.Tensor:
    """The tensor broadcast to `shape` as `size` elements, cut or repeated."""
    flat = tensor.expand(shape).reshape(-1)
    return flat.repeat(-(-size // max(flat.numel(), 1)))[:size].contiguous()
