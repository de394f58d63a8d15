"""What the inputs of a fuzzed program hold: a `Base` is a seed and a recipe, and makes the same tensor each time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FAR_STEP = 1 << 30
FAR_SHAPE = (2 * FAR_STEP + 1,)
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0)


@dataclass(frozen=True)
class Base:
    """`kind`: plain; special (NaN and infinities among the values); wide (the whole range of an integer dtype);
    index (in [0, high)); far (a few elements, the last past the reach of a 32-bit offset, and nothing in between: that
    memory is never touched)."""

    seed: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = "plain"
    high: int = 0

    def tensor(self) -> Tensor:
        """A fresh tensor on the CPU, contiguous."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "index":
            return torch.randint(0, max(self.high, 1), self.shape, generator=generator).to(self.dtype)
        if self.kind == "far":
            values = torch.empty(self.shape, dtype=self.dtype)
            values[::FAR_STEP] = torch.randint(0, 9, (3,), generator=generator).to(self.dtype)
            return values
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.dtype.is_complex:
            return torch.randn(self.shape, generator=generator, dtype=self.dtype)
        if not self.dtype.is_floating_point:
            return self._integers(generator)
        # some on a grid, so that equal values, ties and exact zeros occur
        values = torch.randn(self.shape, generator=generator, dtype=torch.float64) * 1.5
        grid = (values * 2).round() / 2
        values = torch.where(torch.rand(self.shape, generator=generator) < 0.3, grid, values)
        if self.kind == "special":
            chosen = torch.randint(0, len(SPECIAL), self.shape, generator=generator)
            rare = torch.rand(self.shape, generator=generator) < 0.15
            values = torch.where(rare, torch.tensor(SPECIAL, dtype=torch.float64)[chosen], values)
        return values.to(self.dtype)

    def _integers(self, generator: torch.Generator) -> Tensor:
        info = torch.iinfo(self.dtype)
        low, high = max(info.min, -9), 10
        if self.kind == "wide":
            low, high = max(info.min, -(2**62)), min(info.max, 2**62)
        return torch.randint(low, high, self.shape, generator=generator).to(self.dtype)
