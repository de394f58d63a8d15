"""How much of the logits stands at once: live bytes while the plans of a linear layer with cross entropy run.

Kernels run in the interpreter, so that buffers are those that a GPU would hold.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fxfuser.lowering.kernel import LoweredPrograms, Program
from fxfuser.passes import loss_plans, picks
from fxfuser.runtime import in_place, lower_segments
from fxfuser.runtime.plan import BoxedCallable, Plan
from fxfuser.runtime.programs import _Shapes
from tests.lowering.gemm.harness import Blocks

ROWS, INNER, COLUMNS = 256, 16, 600
LOGITS, DW, DX = 4 * ROWS * COLUMNS, 4 * COLUMNS * INNER, 4 * ROWS * INNER
SLACK = 16 * ROWS  # losses, labels and what follows from them


class Live(TorchDispatchMode):
    """Counts the bytes of storages that were made inside and still have a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[int, list[weakref.ref[Tensor]]]] = {}
        self.outside: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(results):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key in given and key not in self.storages:
                continue  # a view of an input
            size, tensors = self.storages.get(key, (0, []))
            tensors = [r for r in tensors if r() is not None] if size == storage.nbytes() else []
            self.storages[key] = (storage.nbytes(), [*tensors, weakref.ref(tensor)])
        self.peak = max(self.peak, self.now())
        return results

    def now(self) -> int:
        self.storages = {k: v for k, v in self.storages.items() if any(r() is not None for r in v[1])}
        return sum(size for size, _ in self.storages.values())


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The peak of each plan that has run, by its name's last part."""
    found: dict[str, int] = {}
    compiled = Plan.compile

    def counting(plan: Plan) -> BoxedCallable:
        call = compiled(plan)

        def run(args: list[Any]) -> Any:
            with Live() as live:
                results = call(args)
            found[plan.name.rpartition(".")[2]] = live.peak
            return results

        return run

    monkeypatch.setattr(Plan, "compile", counting)
    monkeypatch.setattr(in_place, "LEAST", 1)
    return found


def run(option: str, grad: bool = True, gemm: str = "auto") -> None:
    torch.manual_seed(0)
    x, w = (torch.randn(n, INNER, requires_grad=grad) for n in (ROWS, COLUMNS))
    y = torch.randint(COLUMNS, (ROWS,))
    fn = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w), y), backend="fxfuser", dynamic=False,
                       options={"linear_cross_entropy": option, "executor": "interpret", "gemm": gemm})
    loss = fn(x, w, y)
    if grad:
        torch.autograd.grad(loss, (x, w))


def test_one_piece_of_logits_stands_at_a_time(peaks: dict[str, int]) -> None:
    run("low_memory")
    assert LOGITS // 16 + DW + DX <= peaks["forward"] <= LOGITS // 16 + DW + DX + SLACK
    assert peaks["backward"] <= SLACK  # gradients are multiplied where they are


def test_rows_that_are_walked_in_two_parts_become_their_gradient(
    peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row kernel of whole steps and a rest (see lowering/peeling.py) writes over the piece that it reads."""
    rows, columns, pieces = 64, 17389, 4
    for name, size in {"ROWS": rows, "COLUMNS": columns}.items():
        monkeypatch.setitem(globals(), name, size)
    for name in ("LEAST", "SMALL"):
        monkeypatch.setattr(loss_plans, name, 0)
    run("auto", gemm="library")
    piece, gradients = 4 * rows * columns // pieces, 4 * INNER * (rows + columns)
    assert piece + gradients <= peaks["forward"] <= piece + gradients + 16 * rows + 8 * columns


def test_one_block_of_columns_stands_at_a_time(peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_plans, "BLOCK", 1)
    monkeypatch.setattr(loss_plans, "BLOCKS", 32)
    monkeypatch.setitem(loss_plans.PIECES, "low_memory", LOGITS // 4)
    run("low_memory")
    assert peaks["forward"] <= LOGITS // 4 + SLACK
    block, numbers = 4 * ROWS * 16, 8 * COLUMNS + 8 * ROWS  # numbers of columns, and labels without the ignored ones
    assert DW + DX <= peaks["backward"] <= DW + DX + block + numbers + SLACK


def test_kept_logits_lie_in_the_memory_of_the_gradient(
    peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a quarter of the columns; of others they have their own, where those of the rest then are computed again."""
    rows, inner, columns, beside = 256, 64, 600, 96
    dw, dx, row = 4 * columns * inner, 4 * rows * inner, 4 * rows
    for name, value in {"FIRST": 8, "WHOLE_TILES": 8, "LEAST": 0, "SMALL": 0, "AGAIN": 1, "FEWEST": 1,
                        "SAVING": (dw + dx + row * beside) / (dw + dx + row * columns)}.items():
        monkeypatch.setattr(loss_plans, name, value)
    for name, size in {"ROWS": rows, "INNER": inner, "COLUMNS": columns}.items():
        monkeypatch.setitem(globals(), name, size)
    with Blocks(rows=64, columns=64, strips=1).chosen():
        run("auto", gemm="fused")
    partial = 3 * row * -(-beside // 64)  # of a fused product: maxima, sums and labels' elements
    slack = 16 * rows + 8 * columns + 24 * row  # three numbers of each row from each of some parts
    assert dw + row * beside <= peaks["forward"] <= dw + row * beside + partial + slack
    assert dx <= peaks["backward"] <= dx + row * beside + slack < dx + dw  # what is saved, such as dw, is not counted


def test_whole_logits_become_their_gradient(peaks: dict[str, int]) -> None:
    run("fast")
    assert LOGITS <= peaks["forward"] <= 1.25 * LOGITS  # and a fused product's partial results, of small tiles here
    assert peaks["backward"] <= DW + DX + SLACK


def test_without_gradients_a_number_of_each_row_and_tile_is_all_that_stands(
    peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picks, "APART", 3)
    with Blocks(rows=32, columns=128, strips=1).chosen():
        run("fast", grad=False, gemm="fused")
    assert 4 * ROWS * 5 <= peaks["inference"] <= 4 * ROWS * 5 + SLACK


@pytest.mark.parametrize("rows, inner, columns", [(12288, 768, 50304), (8192, 4096, 32000), (8192, 4096, 128256)])
@pytest.mark.parametrize("plan", ["fast", "auto"])
def test_tiles_of_a_loss_leave_little_without_gradients(
    rows: int, inner: int, columns: int, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of the tiles, of bf16 logits read as float32: four bytes of a row for each 256 columns."""
    found: list[Program] = []
    original = lower_segments.lower_gemm

    def lowered(*args: Any, **kwargs: Any) -> LoweredPrograms:
        made = original(*args, **kwargs)
        found.append(made.programs[0])
        return made

    monkeypatch.setattr(lower_segments, "lower_gemm", lowered)
    torch.compiler.reset()
    with FakeTensorMode(), torch.no_grad():
        x, w = (torch.empty(n, inner, dtype=torch.bfloat16) for n in (rows, columns))
        call = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y), backend="fxfuser",
                             options={"linear_cross_entropy": plan})
        call(x, w, torch.empty(rows, dtype=torch.int64))
    for program in found:
        sizes = _Shapes(program, lambda: 132).of(()).scratch
        held = sum(n * s.dtype.itemsize for n, s in zip(sizes, program.scratch))
        assert 0 < held <= 4 * rows * -(-columns // 256)
    assert found


def test_without_gradients_pieces_are_all_that_stands(
    peaks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_plans.PIECES, "low_memory", LOGITS // 2)
    run("low_memory", grad=False)
    assert peaks["inference"] <= LOGITS // 2 + SLACK
