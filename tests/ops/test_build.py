"""Every row's text compiles for a GPU: one kernel per dtype holds all ops, built for sm_90 on any machine."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload
from triton.backends.compiler import GPUTarget

from fxfuser import ops as table
from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime.build import Variant, build

from .harness import NodeOperands, body, loads, make_node, module, positions
from .samples import SAMPLES
from .test_pointwise import _eager

LANES = 32


def _distinct() -> list[OpOverload]:
    """One op of each text: prims share those of ATen."""
    return list({id(row.emit) if callable(row.emit) else row.emit: op
                 for op, row in reversed(table.TABLE.items()) if row.kind is table.Kind.POINTWISE}.values())


def _kernel(dtype: torch.dtype, precise: bool) -> Kernel:
    """One kernel that computes every op which admits `dtype`, each from pointers of its own."""
    inputs: list[torch.dtype] = []
    outputs: list[torch.dtype] = []
    statements: list[str] = []
    for number, op in enumerate(_distinct()):
        args, kwargs = SAMPLES[op][0].make(dtype)
        expected = _eager(op, args, kwargs)
        if expected is None:
            continue
        node = make_node(op, args, kwargs, expected)
        if table.unsupported(node) is not None:
            continue
        row = table.TABLE[op]
        operands = NodeOperands(node, row, precise, prefix=f"v{number}_")
        for i in positions(node):
            operands.lines += [f"{operands.prefix}p{i} = in{len(inputs)}"]
            inputs.append(table.argument(node, i).meta["val"].dtype)
        statements += [*operands.lines, *loads(operands, f"{operands.prefix}p")]
        operands.lines = []
        statements += [*body(operands, f"y{number}"), f"tl.store(out{len(outputs)} + i, y{number})"]
        outputs.append(expected.dtype)
    pointers = [f"in{i}" for i in range(len(inputs))] + [f"out{i}" for i in range(len(outputs))]
    return Kernel("kernel", module(", ".join(pointers), statements), tuple(inputs), tuple(outputs), 0, "1", str(LANES),
                  Tile((("N", LANES),), num_warps=1))


@pytest.mark.parametrize("dtype, precise", [
    (torch.float64, False), (torch.float32, False), (torch.float32, True), (torch.bfloat16, False),
    (torch.int64, False), (torch.uint8, False), (torch.bool, False)])
def test_rows_compile(dtype: torch.dtype, precise: bool) -> None:
    kernel = _kernel(dtype, precise)
    assert len(kernel.outputs) > 20
    assert build(kernel, Variant.usual(kernel), GPUTarget("cuda", 90, 32)).asm["cubin"]
