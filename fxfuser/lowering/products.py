"""The text of matrix products in kernels of any family: factors multiplied, parts added up, what a node makes of a sum.

Enters: points (see domain/sums.py).  Leaves: their values, in fp32 until they are rounded.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Sequence

import torch

from fxfuser.domain.points import Domain, Point, PointKind
from fxfuser.domain.products import matrix_product
from fxfuser.domain.sums import buffer_of
from fxfuser.lowering.emission import Emission
from fxfuser.lowering.expressions import HALF
from fxfuser.lowering.guard import Guard, crossing, guard_axes
from fxfuser.lowering.kernel import Tile
from fxfuser.lowering.pointers import pointers_to
from fxfuser.lowering.scope import Value
from fxfuser.ops import literal

TOGETHER = "TOGETHER"  # the block of a kernel that adds up parts: so many are under way at once
MOST_TOGETHER = 16
WAITING = 64  # registers of a thread for parts that are under way
WARP = 32

BYPASS = 'cache_modifier=".cg"'  # L1: other programs of the same grid may have left the parts
# Parts are added in their order, whatever their number.  Those past the last are not read
ADD = """\
{name} = tl.full({tile}, 0.0, tl.float32)
for first in range(0, {count}, TOGETHER):
    for other in tl.static_range(TOGETHER):
        {name} += tl.load({pointer} + (first + other) * {width}, {mask}, 0.0, """ + f"{BYPASS})"


def adds_parts(domain: Domain) -> bool:
    """Whether a kernel of this domain adds up parts, of which there may be several."""
    return any(p.kind is PointKind.PARTS and p.args[1] != 1 for p in domain.points())


def with_together(tile: Tile, count: int = MOST_TOGETHER) -> Tile:
    """The tile of a kernel that adds up parts, `count` of each element as far as is known, with how many are under way.

    No more than fit the registers beside what else the kernel has, and of those as few as need no further round.
    """
    blocks = dict(tile.blocks) | {TOGETHER: 1}
    most = min(MOST_TOGETHER, max(1, WAITING * WARP * tile.num_warps // math.prod(blocks.values())))
    rounds = -(-count // most)
    return replace(tile, blocks=tuple((blocks | {TOGETHER: -(-count // rounds)}).items()))


def add_parts(emitter: Emission, point: Point, guard: Guard) -> Value:
    """The sum of an element of all parts that an earlier kernel has left; of one part, that part."""
    (place,), (width, count) = point.index, point.args
    axes = place.axes | guard_axes(guard)
    masks = emitter.mask(place.axes | crossing(guard, place.axes), guard)
    pointer = emitter.bind("place", pointers_to(emitter, emitter.buffers[buffer_of(point).name], place, axes),
                           torch.int64, axes).name
    if count == 1:
        filled = [" & ".join(masks), "0.0"] if masks else []
        text = f"tl.load({', '.join([pointer, *filled, BYPASS])})"
        return emitter.bind("part", text, torch.float32, axes)
    number = emitter.sizes.text(count)
    name = emitter.fresh("parts", 1)[0]
    scope = emitter.scope.covering(emitter.loops(axes))
    scope.lines += ADD.format(name=name, tile=emitter.tile(axes), count=number, pointer=pointer,
                               width=emitter.sizes.text(width),
                               mask=" & ".join([*masks, f"(first + other < {number})"])).splitlines()
    return Value(name, torch.float32, axes)


def times(emitter: Emission, point: Point, guard: Guard) -> Value:
    """The product of two factors, each as it is stored."""
    factors = [emitter.rounded(emitter.emit(p, guard), p.dtype) for p in point.operands]
    text = " * ".join(f.name for f in factors)
    return emitter.bind("times", text, torch.float32, frozenset().union(*(f.axes for f in factors)))


def scaled(emitter: Emission, point: Point, total: Value, added: Sequence[Value]) -> Value:
    """The node's element of which `total` is the sum: times alpha, with what the node adds times beta."""
    assert point.node is not None
    factors = matrix_product(point.node)
    assert factors is not None, point.node
    text = total.name if factors.alpha == 1 else f"{total.name} * {literal(factors.alpha, torch.float32)}"
    for value in added:
        text += f" + {value.name}" if factors.beta == 1 else f" + {value.name} * {literal(factors.beta, torch.float32)}"
    axes, exact = total.axes.union(*(v.axes for v in added)), point.dtype not in HALF
    value = Value(text, torch.float32, axes, exact) if text == total.name else \
        emitter.bind("product", text, torch.float32, axes, exact)
    emitter.note(value, point)
    if not exact and id(point) in emitter.read and (emitter.precise or point.node in emitter.targets):
        return emitter.rounded(value, point.dtype)
    return value
