"""Where the lines of a kernel go: nested scopes, one per serial loop, and the values defined in them.

A value lives in the shortest prefix of the loop nest that covers the loops it depends on, so what is
invariant is computed outside without a hoisting pass.  Within a scope (and below it) equal text is one value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fxfuser.domain.index import Axis
from fxfuser.lowering.schedule import Dim


@dataclass(frozen=True)
class Value:
    """A name in the kernel's text.

    `dtype` is the in-kernel dtype (fp32 for the half types), `axes` what the tile depends on, and `rounded`
    says that every element is representable in the node's own ATen dtype.
    """

    name: str
    dtype: torch.dtype
    axes: frozenset[Axis]
    rounded: bool = True


@dataclass
class Scope:
    """One loop's body (or the kernel's, for `dim` None)."""

    dim: Dim | None = None
    parent: Scope | None = None
    lines: list[str] = field(default_factory=list)
    by_text: dict[tuple[str, torch.dtype], Value] = field(default_factory=dict)
    by_point: dict[object, Value] = field(default_factory=dict)

    def chain(self) -> list[Scope]:
        """This scope and those around it, innermost first."""
        return [self] if self.parent is None else [self, *self.parent.chain()]

    def covering(self, loops: frozenset[Dim]) -> Scope:
        """The outermost scope around (or at) this one inside all of `loops`."""
        for scope in self.chain():
            if scope.dim is None or scope.dim in loops:
                return scope
        raise AssertionError("the outermost scope has no loop")
