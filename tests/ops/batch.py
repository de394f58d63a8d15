"""Ops that admit a dtype as one kernel, each op with pointers of its own: one build instead of a hundred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload

from fxfuser import ops as table
from fxfuser.lowering.kernel import Kernel, Tile

from .harness import NodeOperands, body, flat, loads, make_node, module, positions
from .samples import SAMPLES, eager

LANES = 1024  # elements of each op


@dataclass(frozen=True)
class Batch:
    """`results[i]` is what eager computes for `ops[i]` on `device`; output i of the kernel must equal its elements."""

    kernel: Kernel
    inputs: tuple[torch.Tensor, ...]
    ops: tuple[OpOverload, ...]
    results: tuple[torch.Tensor, ...]


def distinct() -> list[OpOverload]:
    """One op of each text: prims share those of ATen."""
    return list({id(row.emit) if callable(row.emit) else row.emit: op
                 for op, row in reversed(table.TABLE.items()) if row.kind is table.Kind.POINTWISE}.values())


def batch(dtype: torch.dtype, precise: bool = False, device: str = "cpu", block: int = 32,
          among: Sequence[OpOverload] = ()) -> Batch:
    """The first sample of every op, `among` those where given, of a distinct text that eager and the table admit for
    `dtype`.

    `block` elements a program: few build fast, many interpret fast.
    """
    inputs: list[torch.Tensor] = []
    ops: list[OpOverload] = []
    results: list[torch.Tensor] = []
    statements: list[str] = []
    for op in among or distinct():
        args, kwargs = SAMPLES[op][0].make(dtype)
        args = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in args)
        expected = eager(op, args, kwargs)
        if expected is None or table.unsupported(node := make_node(op, args, kwargs, expected)) is not None:
            continue
        operands = NodeOperands(node, table.TABLE[op], precise, prefix=f"v{len(ops)}_")
        for i in positions(node):
            statements.append(f"{operands.prefix}p{i} = in{len(inputs)}")
            inputs.append(flat(table.argument(node, i).meta["val"], expected.shape, LANES))
        statements += [*loads(operands, f"{operands.prefix}p"), *body(operands, f"y{len(ops)}")]
        statements.append(f"tl.store(out{len(ops)} + i, y{len(ops)})")
        ops.append(op)
        results.append(expected)
    pointers = [f"in{i}" for i in range(len(inputs))] + [f"out{i}" for i in range(len(ops))]
    kernel = Kernel("kernel", module(", ".join(pointers), statements), tuple(x.dtype for x in inputs),
                    tuple(r.dtype for r in results), 0, str(LANES // block), str(LANES),
                    Tile((("N", block),), num_warps=1))
    return Batch(kernel, tuple(inputs), tuple(ops), tuple(results))
