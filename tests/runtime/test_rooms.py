"""Results in the storage of something else: where that is done, that it changes no number, and where it must not be.

Memory that is not yet written holds NaN, so that what is read too early, or overwritten too early, shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fxfuser
from fxfuser import observe
from fxfuser.ops.products import end_of

ops = torch.ops.fxfuser
ROWS, INNER, COLUMNS, KEPT = 32, 16, 40, 18  # KEPT * ROWS of COLUMNS * INNER elements; 4 rows of INNER are in front
FLOAT = torch.float32


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def ran(fn: Callable[..., object], *inputs: Tensor, executor: str = "interpret") -> tuple[object, str]:
    """What the compiled function returns, and its plan."""
    torch.compiler.reset()
    with torch.no_grad(), observe.recording() as recording:
        result = torch.compile(fn, backend="fxfuser", dynamic=False, options={"executor": executor})(*inputs)
    plan = recording.graphs[0].plan
    return result, plan[plan.index("def call"):]


def end(whole: Tensor, first: int = 0) -> Tensor:
    """The kept rows from `first` on, as a tensor of its own."""
    flat = whole.view(-1)[COLUMNS * INNER - (KEPT - first) * ROWS:].view(KEPT - first, ROWS)
    return fxfuser.boundary(flat)


def put(whole: Tensor, left: Tensor, right: Tensor, start: int) -> Tensor:
    return ops.put_product(whole, left, right, start, COLUMNS, FLOAT)  # type: ignore[no-any-return]


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(KEPT, ROWS, generator=generator), torch.randn(ROWS, INNER, generator=generator)


@pytest.mark.parametrize("executor", ["interpret", "reference"])
def test_a_piece_is_made_inside_its_room(executor: str) -> None:
    g, _ = given()
    whole, plan = ran(lambda g: ops.with_room(2 * g + 1, [COLUMNS, INNER]), g, executor=executor)
    assert isinstance(whole, Tensor) and torch.equal(end_of(whole, g.shape), 2 * g + 1)
    assert ("end_of(" in plan and "with_room.default" not in plan) is (executor == "interpret")


def overwritten(g: Tensor, x: Tensor) -> Tensor:
    """Rows of the product, at first as many as there is room for, then as many as have been multiplied."""
    whole = ops.with_room(g.sin(), [COLUMNS, INNER])
    start = 0
    for stop in (4, 12, KEPT):
        whole = put(whole, end(whole, start)[:stop - start], x, start)
        start = stop
    return whole[:KEPT] + 0


@pytest.mark.parametrize("executor", ["interpret", "reference"])
def test_products_overwrite_what_has_been_multiplied(executor: str) -> None:
    g, x = given()
    result, plan = ran(overwritten, g, x, executor=executor)
    torch.testing.assert_close(result, g.sin() @ x)
    if executor == "interpret":
        assert plan.count("put_product_(") == 3 and "put_product.default" not in plan


def read_too_late(g: Tensor, x: Tensor) -> Tensor:
    """The first product writes a row more than there is room for: what is still to be read begins there."""
    whole = ops.with_room(g.sin(), [COLUMNS, INNER])
    whole = put(whole, end(whole)[:5], x, 0)
    return whole[:5] + 0


def read_by_another(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The second product reads what there was before the first, whose result is read after the second."""
    whole = ops.with_room(g.sin(), [COLUMNS, INNER])
    first = put(whole, end(whole)[:4], x, 0)
    return first[:4] + 0, put(first, end(whole)[4:6], x, 4)[4:6] + 0


def returned(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    whole = ops.with_room(g.sin(), [COLUMNS, INNER])
    return whole, put(whole, end(whole)[:4], x, 0)[:4] + 0


@pytest.mark.parametrize("fn, copies", [(read_too_late, 1), (read_by_another, 2), (returned, 1)])
def test_what_is_still_to_be_read_is_not_overwritten(fn: Callable[..., object], copies: int) -> None:
    g, x = given()
    results, plan = ran(fn, g, x)
    assert plan.count("put_product.default(") == copies
    product = g.sin() @ x
    if fn is read_too_late:
        # functional: the product reads `whole` before anything is written
        torch.testing.assert_close(results, product[:5])
    elif fn is read_by_another:
        torch.testing.assert_close(results, (product[:4], product[4:6]))
    else:
        assert isinstance(results, tuple)
        torch.testing.assert_close((end_of(results[0], g.shape), results[1]), (g.sin(), product[:4]))


def test_a_kernel_takes_the_room_that_it_reads() -> None:
    def fn(g: Tensor, x: Tensor) -> Tensor:
        logits = ops.with_room(g.sin(), [COLUMNS, INNER])
        whole = ops.with_room(end(logits) * 3, [COLUMNS, INNER])
        return put(whole, end(whole)[:4], x, 0)[:4] + 0

    g, x = given()
    result, plan = ran(fn, g, x)
    torch.testing.assert_close(result, (3 * g.sin() @ x)[:4])
    assert plan.count("empty_strided((40, 16)") == 1 and plan.count("end_of(") == 2


def test_a_room_that_is_read_again_is_not_taken() -> None:
    def fn(g: Tensor) -> tuple[Tensor, Tensor]:
        logits = ops.with_room(g.sin(), [COLUMNS, INNER])
        whole = ops.with_room(end(logits) * 3, [COLUMNS, INNER])
        return end(whole) + 0, end(logits) + end(whole).sum()

    g, _ = given()
    results, plan = ran(fn, g)
    torch.testing.assert_close(results, (3 * g.sin(), g.sin() + 3 * g.sin().sum()))
    assert plan.count("empty_strided((40, 16)") == 2


def test_a_kernel_that_reads_elsewhere_takes_no_room() -> None:
    """Each row is read where another is written."""
    def fn(g: Tensor) -> Tensor:
        logits = ops.with_room(g.sin(), [COLUMNS, INNER])
        return end(ops.with_room(end(logits).flip(0) * 3, [COLUMNS, INNER])) + 0

    g, _ = given()
    result, plan = ran(fn, g)
    torch.testing.assert_close(result, 3 * g.sin().flip(0))
    assert plan.count("empty_strided((40, 16)") == 2
