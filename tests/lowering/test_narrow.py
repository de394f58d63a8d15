"""Labels compared with positions as int32, which must not change what is equal."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.harness import check

LABELS = torch.tensor([0, 4, -1, -(2**31), 2**31, 2**32 + 4, 2**32 - 1, 3])


@pytest.mark.parametrize("negated", [False, True])
def test_labels_that_int32_does_not_hold_equal_no_position(negated: bool) -> None:
    def hot(labels: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(5)[None, :]
        return positions != labels[:, None] if negated else positions == labels[:, None]

    _, lowered = check(hot, [LABELS])
    assert "narrow_0" in lowered.kernel.source


def test_positions_that_start_below_zero_stay_wide() -> None:
    _, lowered = check(lambda labels: torch.arange(-2, 3)[None, :] == labels[:, None], [LABELS])
    assert "narrow_0" not in lowered.kernel.source


def test_lanes_of_a_loop_are_compared_with_what_is_left_of_the_label() -> None:
    size, rows = 20001, torch.tensor([0, 20000, 20001, 20480, -1, 8191, 8192])

    def picked(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.arange(size)[None, :] == labels[:, None]
        return torch.where(chosen, x, 0.0).sum(1), (x * 0.5 - chosen.float())

    _, lowered = check(picked, [torch.randn(len(rows), size), rows])
    assert "lane_0 == narrow_0 - r0_start" in lowered.kernel.source
    assert "padded" not in lowered.kernel.source  # a label is no lane's past the end, so nothing is added there


def test_a_position_on_two_axes_is_padded() -> None:
    def picked(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = torch.arange(15).reshape(3, 5)[None] == labels[:, None, None]
        return torch.where(chosen, x, 0.0).sum(2)

    check(picked, [torch.randn(4, 3, 5), torch.tensor([0, 4, 5, 14])])


def test_what_stands_beside_a_label_s_element_is_padded() -> None:
    """The count of a variance is 1 in each lane, those past the end included, where the element itself is 0."""
    size, labels = 20001, torch.tensor([0, 20000, -1])

    def spread(x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.where(torch.arange(size)[None, :] == labels[:, None], x, 0.0)
        mean = chosen.mean(1, keepdim=True)
        distance = chosen - mean
        return mean, (distance * distance).sum(1)

    _, lowered = check(spread, [torch.randn(len(labels), size) * 100, labels], tolerance=1e-5)
    assert "combine_moments" in lowered.kernel.source
