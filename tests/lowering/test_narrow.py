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
