"""What a row of the op table sees of its node while text is emitted: `ops.Operands` over a point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from fxfuser.domain.index import Axis
from fxfuser.domain.points import Point
from fxfuser.domain.size import Poly
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.guard import Guard
from fxfuser.lowering.scope import Value
from fxfuser.ops import Promotion, compute_dtype, kernel_dtype, literal, operand, promoted_dtype, reads_rounded, row


@dataclass
class NodeOperands:
    """`ops.Operands` for one op point."""

    emitter: Emission
    point: Point
    guard: Guard

    def __post_init__(self) -> None:
        node = self.point.node
        assert node is not None
        found = row(node.target)
        assert found is not None
        self.precise = self.emitter.precise
        self.reads_rounded = reads_rounded(node, found)
        self.dtype = compute_dtype(node, found)
        self.promoted = self.dtype if found.promote is Promotion.RESULT else promoted_dtype(node, found)
        self.result = self.point.dtype
        self.axes: frozenset[Axis] = frozenset()
        assert isinstance(node.target, OpOverload)
        self.schema = [a.name for a in node.target._schema.arguments]
        self.keywords = dict(self.point.kwargs)

    def _argument(self, i: int) -> Any:
        return self.point.args[i] if i < len(self.point.args) else self.keywords.get(self.schema[i])

    def _value(self, point: Point) -> Value:
        value = self.emitter.emit(point, self.guard)
        if self.reads_rounded:
            value = self.emitter.rounded(value, point.dtype)
        self.axes = self.axes | value.axes
        return value

    def text(self, i: int) -> str:
        argument = self._argument(i)
        if not isinstance(argument, Point):
            return self._number(argument, self.dtype)
        value = self._value(argument)
        text = operand(value.name, argument.dtype, self.promoted)
        if text == value.name:
            return text
        return self.emitter.bind("cast", text, kernel_dtype(self.dtype), value.axes).name

    def raw(self, i: int) -> str:
        argument = self._argument(i)
        if isinstance(argument, Point):
            return self._value(argument).name
        return self._number(argument, self._kind(argument))

    def source(self, i: int) -> torch.dtype:
        argument = self._argument(i)
        return argument.dtype if isinstance(argument, Point) else self._kind(argument)

    @staticmethod
    def _kind(number: Any) -> torch.dtype:
        if isinstance(number, bool):
            return torch.bool
        return torch.float64 if isinstance(number, float) else torch.int64

    def _number(self, number: Any, dtype: torch.dtype) -> str:
        if isinstance(number, Poly):
            text = f"{literal(0, torch.int64, typed=True)} + {self.emitter.sizes.text(number)}"
            size = self.emitter.bind("size", text, torch.int64, frozenset())
            return self.emitter.converted(size, torch.int64, dtype).name
        return literal(number, dtype)

    def argument(self, name: str, default: Any = None) -> Any:
        found = self.keywords.get(name)
        if found is None and name in self.schema and self.schema.index(name) < len(self.point.args):
            found = self.point.args[self.schema.index(name)]
        if isinstance(found, Poly):
            return self.emitter.sizes.text(found)
        return default if found is None else found

    def has(self, name: str) -> bool:
        return self.argument(name) is not None

    def let(self, text: str) -> str:
        return self.emitter.bind("t", text, kernel_dtype(self.dtype), self.axes).name

    def literal(self, value: bool | int | float) -> str:
        return literal(value, self.dtype)
