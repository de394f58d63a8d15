"""Helper functions that kernel text may call: name -> source of one `@triton.jit` function."""

from __future__ import annotations

PRELUDE: dict[str, str] = {}
