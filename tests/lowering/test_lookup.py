"""Indexed loads in kernels: values in the interpreter, positions out of range, one load per position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.domain.roles import PERSISTENT_ELEMENTS
from fxfuser.errors import OutOfRange
from tests.domain.test_lookup import CASES, at, x
from tests.lowering.harness import check, compiled, run

LOOPED = 2 * PERSISTENT_ELEMENTS + 5  # a row that is walked in a loop


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"softmax at labels"}))
def test_values(name: str) -> None:
    fn, args = CASES[name]
    check(fn, args)


def log_softmax_at(a: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    shifted = a - a.amax(1, keepdim=True)
    picked = shifted.gather(1, i[:, None]) - shifted.exp().sum(1, keepdim=True).log()
    return -picked.squeeze(1)


@pytest.mark.parametrize("columns", [17, LOOPED])
def test_softmax_at_labels(columns: int) -> None:
    _, lowered = check(log_softmax_at, [x(3, columns), at(columns, 3)])
    assert lowered.kernel.source.count("in1") == 2, "the label is loaded once a row"


def test_the_largest_of_a_looped_row() -> None:
    check(lambda a: a.gather(1, a.argmax(1, keepdim=True)) * 2, [x(3, LOOPED)])


def test_a_row_padded_and_read_at_its_largest() -> None:
    check(lambda a: F.pad(a - a.amax(1, keepdim=True), (2, 1)).gather(1, a.argmax(1, keepdim=True)), [x(3, LOOPED)])


def test_half_tables_and_symbolic_sizes() -> None:
    check(lambda a, i: F.embedding(i, a) * 3 + 1, [x(13, 8).bfloat16(), at(13, 3, 5)], [{0}, {0, 1}],
          [[x(30, 8).bfloat16(), at(30, 7, 2)]])


@pytest.mark.parametrize("bad", [8, -9, -1, 1 << 40, -(1 << 40)])
def test_nothing_is_read_out_of_range(bad: int) -> None:
    """The interpreter refuses an access past a tensor's end; embedding takes no negative position."""
    fn = lambda a, i: F.embedding(i, a) * 2  # noqa: E731
    table, positions = x(8, 4), torch.tensor([3, 5, 7])
    graph, segment, lowered = compiled(fn, [table, positions])
    broken = torch.tensor([3, bad, 7])
    with pytest.raises(OutOfRange, match="outside of its dimension"):
        run(graph, lowered, segment, [table, broken])
    got, = run(graph, lowered, segment, [table, broken], debug=False)  # as on a device
    torch.testing.assert_close(got[[0, 2]], table[[3, 7]] * 2)


def test_negative_positions_count_from_the_end_once() -> None:
    graph, segment, lowered = compiled(lambda a, i: a[i] * 2, [x(8, 4), at(8, 3)])
    got, = run(graph, lowered, segment, [x(8, 4), torch.tensor([-8, -9, -1])], debug=False)
    torch.testing.assert_close(got[[0, 2]], x(8, 4)[[0, 7]] * 2)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fn, raised", [
    (lambda a, i: a[i] * 2, IndexError), (lambda a, i: a.gather(0, i[:, None]) * 2, RuntimeError),
    (lambda a, i: F.pad(a[i].exp(), (1, 2)) + 1, IndexError)])
@pytest.mark.parametrize("rows, bad", [(8, [3, 8]), (0, [0, 0])])
@pytest.mark.filterwarnings("error")
def test_positions_out_of_range_are_refused(fn: Any, raised: type, rows: int, bad: list[int], strict: bool) -> None:
    """As eager does and with its own error, or under `strict` with the op and the user's line."""
    run = torch.compile(fn, backend="fxfuser", options={"executor": "interpret", "strict": strict})
    torch.testing.assert_close(run(x(8, 4), at(8, 2)), fn(x(8, 4), at(8, 2)))
    with pytest.raises(raised):
        fn(x(rows, 4), torch.tensor(bad))
    with pytest.raises(OutOfRange if strict else raised, match="test_lookup.py" if strict else None):
        run(x(rows, 4), torch.tensor(bad))
