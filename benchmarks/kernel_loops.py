"""What a kernel's text says of its loops, so that checks can insist on being about what they were written for.

Enters: a `KernelRecord`.  Leaves: its `Loop`s and the features that they show, read off the canonical text:

    for r0_start in tl.range(0, 37, R0BLOCK, num_stages=3 if XBLOCK * R0BLOCK <= 4096 else 1):
        r0_mask = r0 < 37
        load_0 = tl.load(in2 + (r0 * 160 + x_0 * 1120), x_mask & r0_mask)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fxfuser.observe import KernelRecord

BESIDE = "beside"  # several loops follow each other in one program
STAGED = "staged"  # a loop of several iterations, some of whose loads are under way before theirs
REMAINDER = "remainder"  # a staged loop whose last iteration has lanes past its end
BORDER = "border"  # a staged loop whose loads are masked at the end of the program axes
PIECES = "pieces"  # a loop that stores several pieces of one tensor, made of the same loads
NESTED = "nested"  # a loop within a loop
FEATURES = frozenset({BESIDE, STAGED, REMAINDER, BORDER, PIECES, NESTED})

_HEAD = re.compile(r"( *)for (\w+)_(?:start|done) in (?:tl\.)?range\(0, (\w+), (\w+)(?:, num_stages=(.*))?\):")
_STORED = re.compile(r"tl\.store\((out\d+) ")


@dataclass(frozen=True)
class Loop:
    """One serial loop.  `length` and `step` are elements (a length that the run tells counts as endless)."""

    dim: str
    indent: int
    length: float
    step: int
    stages: int
    body: str

    @property
    def staged(self) -> bool:
        return self.stages > 1 and self.length > self.step

    def loads_masked_by(self, dim: str) -> bool:
        return any(f"{dim}_mask" in line for line in self.body.splitlines() if "tl.load(" in line)


def loops(kernel: KernelRecord) -> tuple[Loop, ...]:
    """The loops of a kernel in the order of its text, with the blocks of the tile that runs unmeasured."""
    return tuple(_loops(kernel.source.splitlines(), dict(kernel.blocks)))


def _loops(lines: Sequence[str], blocks: dict[str, int]) -> Iterator[Loop]:
    for i, line in enumerate(lines):
        head = _HEAD.fullmatch(line)
        if head is None:
            continue
        indent, dim, length, step, stages = head.groups()
        end = next((j for j in range(i + 1, len(lines)) if not lines[j].startswith(indent + " ")), len(lines))
        yield Loop(dim, len(indent), int(length) if length.isdigit() else float("inf"), blocks.get(step, 1),
                   eval(stages, {}, blocks) if stages else 1, "\n".join(lines[i + 1:end]))


def features(kernel: KernelRecord) -> frozenset[str]:
    """Which of FEATURES the kernel shows."""
    found = loops(kernel)
    outermost = min((loop.indent for loop in found), default=0)
    shown = {
        BESIDE: sum(loop.indent == outermost for loop in found) > 1,
        NESTED: any(loop.indent > outermost for loop in found),
        STAGED: any(loop.staged for loop in found),
        REMAINDER: any(loop.staged and loop.loads_masked_by(loop.dim) for loop in found),
        BORDER: any(loop.staged and loop.loads_masked_by("x") for loop in found),
        PIECES: any(len(set(stored)) < len(stored) for stored in (_STORED.findall(loop.body) for loop in found)),
    }
    return frozenset(name for name, holds in shown.items() if holds)
