"""Tensors as matrices whose tiles the copy engine moves: which can, and the text that does.

A tensor descriptor needs a contiguous dimension, other strides and a base that are multiples of 16 bytes, and indices
that walk each dimension at one stride.  What is known of sizes is checked here; what pointers and dynamic sizes are is
known at the call alone, and the text asks the constexpr DESCRIPTORS.  A program writes its descriptors to memory first
and waits until the copy engine sees them: what a program of many tiles does not notice, one of a part of a sum does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Sequence

from fxfuser.domain.index import Axis, Form
from fxfuser.domain.size import Poly, Size, Symbol
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.schedule import Dim, product

ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Side:
    """One dimension of a matrix: what walks it, elements of a block, and the index of a block's first, as source."""

    axes: tuple[Axis, ...]
    block: str
    start: str
    slot: int


@dataclass(frozen=True)
class Matrix:
    """`pointer` as [batch], outer, contiguous; `sides` and `strides` in that order, `offset` in elements.  Where the
    outer one is a block at each of several places, these are a side before it."""

    pointer: str
    sides: tuple[Side, ...]
    strides: tuple[Size, ...]
    offset: int

    @property
    def transposed(self) -> bool:
        """Whether the contiguous side is the first of the kernel's tile."""
        return self.sides[-1].slot < self.sides[-2].slot

    def starts(self) -> str:
        return ", ".join(side.start for side in self.sides)


def sides_of(dim: Dim) -> tuple[Side, ...]:
    """What a dim walks: one side, or its places and what it walks at each."""
    if dim.places == 1:
        return (Side(dim.axes, dim.block, start(dim), dim.slot),)
    within = dim.block.removeprefix(f"{dim.places} * ")
    return (Side(dim.axes[:1], str(dim.places), "0", dim.slot),
            Side(dim.axes[1:], within, start(dim).removeprefix(f"{dim.places} * "), dim.slot))


def start(dim: Dim) -> str:
    """What the kernel calls the first index of a program's block, or of the main loop's step."""
    return f"{dim.named or dim.name}_start"


@dataclass
class Descriptors:
    """The descriptors of one kernel: each matrix and the name of its descriptor; none where they are not `wanted`."""

    sizes: Sizes
    wanted: bool = True
    names: dict[Matrix, str] = field(default_factory=dict)
    divisible: set[Symbol] = field(default_factory=set)

    def load(self, pointer: str, offset: Form, dims: Sequence[Dim], itemsize: int) -> str | None:
        """The tile of `dims` (batch, first, second) at their starts; None where no descriptor can load it."""
        matrix = self._matrix(pointer, offset, dims, itemsize)
        if matrix is None:
            return None
        text = f"{self.names[matrix]}.load([{matrix.starts()}])"
        if len(matrix.sides) > 2:
            first, second = (d.block for d in (dims[:0:-1] if matrix.transposed else dims[1:]))
            text += f".reshape([{first}, {second}])"
        return f"tl.trans({text})" if matrix.transposed else text

    def store(self, pointer: str, offset: Form, dims: Sequence[Dim], itemsize: int, value: str) -> str | None:
        """The line that stores a tile; None where no descriptor can."""
        matrix = self._matrix(pointer, offset, dims, itemsize)
        if matrix is None:
            return None
        text = f"tl.trans({value})" if matrix.transposed else value
        if len(matrix.sides) == 3:
            text = f"({text}).reshape([1, {matrix.sides[1].block}, {matrix.sides[2].block}])"
        return f"{self.names[matrix]}.store([{matrix.starts()}], {text})"

    def lines(self) -> list[str]:
        """What makes the descriptors."""
        made = []
        for matrix, name in self.names.items():
            base = f"{matrix.pointer} + {matrix.offset}" if matrix.offset else matrix.pointer
            sizes = ", ".join(self.sizes.text(product(a.size for a in s.axes)) for s in matrix.sides)
            strides = ", ".join(self.sizes.text(s) for s in matrix.strides)
            blocks = ", ".join(s.block for s in matrix.sides)
            made.append(f"{name} = tl.make_tensor_descriptor({base}, [{sizes}], [{strides}], [{blocks}])")
        return made

    def pointers(self) -> frozenset[str]:
        """The parameters that must be aligned."""
        return frozenset(m.pointer for m in self.names)

    def _matrix(self, pointer: str, offset: Form, dims: Sequence[Dim], itemsize: int) -> Matrix | None:
        if not self.wanted:
            return None
        batch, *tile = map(sides_of, dims)
        found = [[(side, stride_along(offset, side.axes)) for side in sides] for sides in (batch, *tile)]
        covered = {a for d in dims for a in d.axes}
        if any(s is None for sides in found for _, s in sides) or any(a not in covered for a, _ in offset.terms):
            return None
        if not isinstance(offset.constant, int) or offset.constant < 0 or offset.constant * itemsize % ALIGNMENT:
            return None
        last = next((i for i in (2, 1) if found[i][-1][1] == 1), None)
        if last is None or len(found[last]) > 1 or any(s == 0 for sides in found[1:] for _, s in sides):
            return None
        kept = [*(found[0] if found[0][0][1] != 0 else []), *found[3 - last], *found[last]]
        known = [(side, stride) for side, stride in kept if stride is not None]
        needed = [multiples(stride, ALIGNMENT // itemsize) for _, stride in known[:-1]]
        if None in needed:
            return None
        self.divisible.update(*(symbols for symbols in needed if symbols))
        matrix = Matrix(pointer, tuple(side for side, _ in known), tuple(s for _, s in known), offset.constant)
        if matrix not in self.names:
            others = sum(m.pointer == pointer for m in self.names)
            self.names[matrix] = f"{pointer}_matrix" + (f"_{others + 1}" if others else "")
        return matrix


def stride_along(offset: Form, axes: Sequence[Axis]) -> Size | None:
    """The stride at which an offset walks axes that are flattened into one counter; None where it has several."""
    if not axes:
        return 0
    stride = offset.coefficient(axes[-1])
    for i, axis in enumerate(axes):
        if offset.coefficient(axis) != stride * product(a.size for a in axes[i + 1:]):
            return None
    return stride


def multiples(size: Size, number: int) -> set[Symbol] | None:
    """The symbols that must be multiples of 16 for `size` to be one of `number`, which divides 16; None: it is not."""
    if not isinstance(size, Poly):
        return set() if size % number == 0 else None
    needed: set[Symbol] = set()
    for monomial, coefficient in size.terms:
        if coefficient % number:
            if not monomial:
                return None
            needed.add(monomial[0])
    return needed
