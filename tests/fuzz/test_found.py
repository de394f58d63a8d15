"""What the fuzzer found, shrunk: each was wrong once."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.compare import check
from tests.fuzz.data import Base
from tests.fuzz.program import Input, Program

F32 = torch.float32


def positions(name: str, high: int, *shape: int) -> Input:
    return Input(name, Base(3, shape, torch.int64, "index", high), "")


def plain(name: str, *shape: int, dtype: torch.dtype = F32, view: str = "") -> Input:
    return Input(name, Base(2, shape, dtype), view)


FOUND = {
    # a reduction in one piece of a cat: the condition on the piece is none on what the reduction reads
    "a guard on axes that a reduction does not know": ('''def program(a, b):
    v0 = torch.ops.prims.amin.default(b, [1])
    v1 = torch.ops.aten.vstack.default([v0, a])
    return (v1, )''', [plain("a", 33), plain("b", 33, 65)]),
    # lanes past the end of the row axis met the diagonal's condition and read past its source
    "a guard that relates two axes": ('''def program(a, b):
    v0 = torch.ops.aten.diagonal_scatter.default(a, b, 1, 0, 1)
    v1 = torch.ops.aten.unbind_copy.int(v0, 1)[1]
    v2 = torch.ops.aten.asin.default(v0)
    return (v1, v2, )''', [plain("a", 32, 31), plain("b", 30)]),
    # what no loop iterates over is invariant in it, and was read before it, through a null pointer
    "an empty tensor that is broadcast": ('''def program(a, b, c):
    v0 = torch.ops.aten.select_scatter.default(b, a, -1, 1)
    v1 = torch.ops.aten.neg.default(c)
    return (v0, v1, )''', [plain("a", 1, view=".expand([0])"), plain("b", 0, 3), plain("c")]),
    # of an empty diagonal the row is a constant, one past the last
    "an empty result beside one that is not": ('''def program(a):
    v0 = torch.ops.aten.clone.default(a, memory_format=torch.contiguous_format)
    v1 = torch.ops.aten._unsafe_view.default(v0, [1, -1, 16])
    v2 = torch.ops.aten.diagonal_copy.default(v1, -1, 0, 2)
    return (v2, v0, )''', [plain("a", 13, 8, 1, view=".expand([13, 8, 2])")]),
    "an empty tensor with an offset": ('''def program(a, b):
    v0 = torch.ops.aten.clamp.default(a, 0, 7)
    v1 = torch.ops.aten.threshold.default(b, 2, -1.5)
    return (v0, v1, )''', [plain("a", 3, dtype=torch.int8, view="[1:][:0]"), plain("b")]),
    # PyTorch's decompositions: of the first with other values, of the second with other strides
    "integers between fractions": ('''def program(a):
    v0 = torch.ops.aten.linspace.default(-1.5, 3.0, 17, dtype=torch.int16, device=DEVICE)
    v1 = torch.ops.aten.add.Tensor(v0, a)
    return (v0, v1, )''', [plain("a", 17, dtype=torch.int16)]),
    "a filled slice": ('''def program(a, b):
    v0 = torch.ops.aten.fill.Tensor(a, b)
    return (v0, )''', [plain("a", 33, 130, view="[:, ::2]"), plain("b")]),
    # a view of a constant became a constant whose elements share places, and was written there
    "a constant that repeats its elements": ('''def program(a):
    v0 = torch.ops.aten.zero_.default(a)
    v1 = torch.ops.aten._unsafe_view.default(v0, [-1, 1])
    v2 = torch.ops.aten.expand.default(v1, [2, 9, 3])
    v3 = torch.ops.aten.fliplr.default(v2)
    return (v2, v3, )''', [plain("a", 9, dtype=torch.int64)]),
    # a hundred factors of a continued fraction that were 1 but for their rounding added up
    "an incomplete gamma function": ('''def program(a):
    v0 = torch.ops.aten.igammac.default(a, a)
    return (v0, )''', [plain("a", 127, 17)]),
    # the table of positions of a gather is read where a position says that the kernel itself computes
    "positions of positions": ('''def program(ids, row, table):
    v0 = torch.ops.aten.embedding.default(table, ids)
    v1 = torch.ops.aten.remainder.Scalar(row, 9)
    v2 = torch.ops.aten._unsafe_index.Tensor(v0, [row, v1])
    return (v2, )''', [positions("ids", 5, 2, 9), positions("row", 2), plain("table", 5, 32)]),
    # a fill was cut to an integer before it was asked for its truth
    "a fraction as a bool": ('''def program(a):
    v0 = torch.ops.aten.constant_pad_nd.default(a, [0, 2, 1, 2], 0.5)
    v1 = torch.ops.aten.full_like.default(a, -0.25)
    v2 = torch.ops.aten.logical_xor.default(v1, a)
    return (v0, v2, )''', [plain("a", 8, 8, dtype=torch.bool)]),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("executor", ["reference", "interpret"])
def test_as_eager(name: str, executor: str) -> None:
    source, inputs = FOUND[name]
    program = Program.of(source, inputs)
    fault = check(program, executor)
    assert fault is None, f"{fault.kind}: {fault.text}"
