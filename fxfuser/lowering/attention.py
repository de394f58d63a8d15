"""The kernel of attention over pieces of its keys: a program of each piece and head, for all queries.

    for keys a:b of the piece    s = q @ k[a:b].T * scale + mask;  m' = max(m, s.amax());  p = exp(s - m')
                                 l = l * exp(m - m') + p.sum();  o = o * exp(m - m') + p @ v[a:b];  m = m'

Enters: a segment of one `fxfuser::attend_pieces`.  Leaves: a `Lowered`.  The products are those of
tensor cores, whose tiles have 16 rows at least: queries past the last are zeros and are not stored.  Strides are part
of the text, so that operands may lie as they like, views of what others have made among them, of which no tensor is
made; loads are wide where rows of keys are dense and aligned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Mapping, Sequence

import torch
from torch import fx

from fxfuser.domain.roles import next_power_of_2
from fxfuser.domain.size import Size, from_torch
from fxfuser.domain.views import address
from fxfuser.errors import user_location
from fxfuser.lowering.expressions import Sizes
from fxfuser.lowering.kernel import Kernel, Lowered, Note, Tile
from fxfuser.lowering.lower import module, stem
from fxfuser.lowering.tiles import MULTIPROCESSORS, size_hint
from fxfuser.ops import MONOIDS, TRITON_NAMES, literal
from fxfuser.ops.attention import LEAST, STATES
from fxfuser.segmenter.segment import Segment

ROWS = 16  # of a tensor core's tile, at least
KEYS = "KEYS"  # the block of keys of one step
# (keys, warps, stages) of a step, the first the default
TILES = ((64, 4, 3), (32, 4, 4), (128, 4, 2), (64, 4, 2), (64, 8, 3), (128, 8, 2))
# Programs from which on more of them beside each other on a multiprocessor are worth more than a third stage (256 heads
# of 8 queries and 2048 keys of width 128 on an H200, in pieces of 1024: 65 us with two stages, 75 with three; 64 heads
# in pieces of 512: 22.7 and 20.5)
MANY = 2 * MULTIPROCESSORS
CROWDED = (64, 4, 2)
SHARED = 100_000  # bytes of keys and values under way, at most: two programs are on a multiprocessor then

TEXT = """\
program = tl.program_id(0).to(INDEX)
pieces = {pieces}
piece = program % pieces
head = program // pieces % {heads}
batch = program // pieces // {heads}
q = tl.arange(0, {rows}).to(INDEX)[:, None]
d = tl.arange(0, {width}).to(INDEX)
e = tl.arange(0, {value_width}).to(INDEX)[None, :]
query = {query}
maxima = tl.full([{rows}, 1], float("-inf"), tl.float32)
totals = tl.full([{rows}, 1], 0.0, tl.float32)
sums = tl.full([{rows}, {value_width}], 0.0, tl.float32)
for start in range(0, {piece}, KEYS):
    k = piece * {piece} + start + tl.arange(0, KEYS).to(INDEX)
    key = {key}
    scores = tl.dot(query, key) * {scale}{hidden}
    highest = combine_amax(maxima, tl.reduce(scores, 1, combine_amax, keep_dims=True))
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    powers = tl.exp2((scores - shift) * {log2_e})
    fading = tl.exp2((maxima - shift) * {log2_e})
    totals = totals * fading + tl.reduce(powers, 1, combine_sum, keep_dims=True)
    value = {value}
    sums = tl.dot(powers.to({dtype}), value, sums * fading)
    maxima = highest
state = out0 + (program * {queries} + q) * {states}
tl.store(state + e, sums, {written})
tl.store(state + {value_size}, totals, {row})
tl.store(state + {maximum}, maxima, {row})
"""
STEP = "\n    "  # the start of a line in the loop
ACROSS, DOWN = "k[None, :]", "k[:, None]"


@dataclass(frozen=True)
class _Sizes:
    """Of one call.  `names` are the kernel's names of symbols in those of the batch and of the keys, and in strides."""

    batch: Size
    heads: int
    queries: int
    size: int  # of a query
    keys: Size
    value_size: int
    piece: int
    names: Sizes = field(default_factory=Sizes)

    def text(self, size: int | torch.SymInt) -> str:
        return self.names.text(from_torch(size))

    @property
    def places(self) -> int | None:
        """Of keys in all pieces; None where it varies."""
        return max(LEAST, -(-self.keys // self.piece)) * self.piece if isinstance(self.keys, int) else None

    def pieces(self, maximum: str) -> str:
        """How many, where the function of this name is the larger of two numbers."""
        if self.places is not None:
            return str(self.places // self.piece)
        return f"{maximum}(({self.names.text(self.keys)} + {self.piece - 1}) // {self.piece}, {LEAST})"

    @property
    def rows(self) -> int:
        return max(ROWS, next_power_of_2(self.queries))

    @property
    def width(self) -> int:
        return max(ROWS, next_power_of_2(self.size))

    @property
    def value_width(self) -> int:
        return max(ROWS, next_power_of_2(self.value_size))


def lower_attention(segment: Segment, hints: Mapping[str, int]) -> Lowered:
    """The kernel of a segment's one `fxfuser::attend_pieces`, with its operands' sizes and strides in the text, those
    that vary as arguments; `hints` are example values of the graph's size symbols."""
    (node,) = segment.nodes
    operands = [n for n in node.args[:4] if isinstance(n, fx.Node)]  # a mask is not always there
    values = [n.meta["val"] for n in operands]
    scale, piece = node.args[4:]
    assert isinstance(scale, float) and isinstance(piece, int), node
    query, key, value = values[:3]
    sizes = _sizes(query, key, value, piece)
    bases, first = zip(*map(address, operands))
    lines = _text(sizes, values, first, scale).splitlines()
    output = node.meta["val"]
    grid = f"{sizes.names.text(sizes.batch)} * {sizes.heads} * {sizes.pieces('max')}"
    written = f"{grid} * {sizes.queries * (sizes.value_size + STATES)}"
    reaches = [_reach(v, sizes, n) for v, n in zip(values, first)]
    extent = f"2 * max({', '.join(dict.fromkeys([*reaches, written]))}, 0)"
    tiles = _tiles(sizes, query.dtype, hints)
    combines = {m.combine: m.source for m in (MONOIDS["amax"], MONOIDS["sum"])}
    source, name = module(stem(segment), lines, combines, [
        *(f"in{i}" for i in range(len(operands))), "out0", *sizes.names.names.values(), "INDEX: tl.constexpr",
        f"{KEYS}: tl.constexpr"])
    kernel = Kernel(
        name=name, source=source, inputs=tuple(v.dtype for v in values), outputs=(output.dtype,),
        sizes=len(sizes.names.names), grid=grid, extent=extent, tile=tiles[0], candidates=tiles[1:],
        notes=(Note("state", node.name, str(node.target), user_location(node.stack_trace)),))
    return Lowered(kernel, tuple(segment.inputs.index(n) for n in bases), (0,),
                   tuple(s.text for s in sizes.names.names))


def _sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, piece: int) -> _Sizes:
    batch, heads, queries, size = query.shape
    return _Sizes(from_torch(batch), int(heads), int(queries), int(size), from_torch(key.shape[2]),
                  int(value.shape[3]), piece)


def _text(sizes: _Sizes, values: Sequence[torch.Tensor], first: Sequence[int], scale: float) -> str:
    """`first` are the elements before each operand's in what its pointer points to."""
    query, key, value, *masks = values
    pointers = [f"in{i} + {n}" if n else f"in{i}" for i, n in enumerate(first)]
    row = f"q < {sizes.queries}"
    # what lies past the last key belongs to nobody, or to the next sequence
    end, places = sizes.names.text(sizes.keys), sizes.places
    across, down = (_before(k, end, places is None or sizes.keys != places) for k in (ACROSS, DOWN))
    d_across, d_down = (_before(d, str(sizes.size), sizes.size < sizes.width) for d in ("d[None, :]", "d[:, None]"))
    e_across = _before("e", str(sizes.value_size), sizes.value_size < sizes.value_width)
    hidden = [_hides(pointer, mask, sizes, query, key, (row, across)) for pointer, mask in zip(pointers[3:], masks)]
    if across:
        hidden.append(f'scores = tl.where({across}, scores, float("-inf"))')

    def load(pointer: str, tensor: torch.Tensor, inner: tuple[str, str], *conditions: str) -> str:
        return _load(pointer, [sizes.text(n) for n in tensor.stride()], inner, conditions, along=inner)

    return TEXT.format(
        pieces=sizes.pieces("tl.maximum"), heads=sizes.heads, rows=sizes.rows,
        width=sizes.width, value_width=sizes.value_width, piece=sizes.piece, queries=sizes.queries,
        value_size=sizes.value_size, maximum=sizes.value_size + 1, states=sizes.value_size + STATES,
        scale=literal(scale, torch.float32), log2_e=1 / math.log(2), dtype=TRITON_NAMES[query.dtype],
        query=load(pointers[0], query, ("q", "d[None, :]"), row, d_across),
        key=load(pointers[1], key, (ACROSS, "d[:, None]"), across, d_down),
        value=load(pointers[2], value, (DOWN, "e"), down, e_across),
        hidden="".join(STEP + line for line in hidden), row=row, written=_both(row, e_across))


def _before(place: str, end: str, needed: bool) -> str:
    """The condition that a place lies before the end; nothing where all do."""
    return f"{place} < {end}" if needed else ""


def _load(pointer: str, strides: Sequence[str], inner: tuple[str, str], conditions: Sequence[str],
          along: Sequence[str] = ()) -> str:
    """A load of a head's elements where all conditions hold, of zeros elsewhere; a tile along these axes, even where
    its elements are one."""
    terms = [axis if stride == "1" else f"{axis} * {stride}"
             for axis, stride in zip(("batch", "head", *inner), strides) if stride != "0" or axis in along]
    place, mask = " + ".join(terms) or "0", _both(*conditions)
    return f"tl.load({pointer} + ({place}), {mask}, 0.0)" if mask else f"tl.load({pointer} + ({place}))"


def _both(*conditions: str) -> str:
    """That all conditions hold; those that always do are empty."""
    held = [c for c in conditions if c]
    return held[0] if len(held) == 1 else " & ".join(f"({c})" for c in held)


def _hides(pointer: str, mask: torch.Tensor, sizes: _Sizes, query: torch.Tensor, key: torch.Tensor,
           inside: tuple[str, str]) -> str:
    """What becomes of scores under a mask, of which each element is loaded once; `inside` are the conditions of a query
    and of a key that there is."""
    strides = [sizes.text(n) for n in mask.expand(*query.shape[:3], key.shape[2]).stride()]
    needed = [condition if stride != "0" else "" for condition, stride in zip(inside, strides[2:])]
    loaded = _load(pointer, strides, ("q", ACROSS), needed)
    return f"scores += {loaded}.to(tl.float32)"


def _tiles(sizes: _Sizes, dtype: torch.dtype, hints: Mapping[str, int]) -> tuple[Tile, ...]:
    """Steps that divide a piece and whose keys and values fit."""
    def fits(keys: int, stages: int) -> bool:
        return keys * (sizes.width + sizes.value_width) * dtype.itemsize * stages <= SHARED

    batch, keys = size_hint(sizes.batch, hints), size_hint(sizes.keys, hints)
    many = batch * sizes.heads * max(LEAST, -(-keys // sizes.piece)) > MANY
    ordered = dict.fromkeys((CROWDED, *TILES) if many else TILES)
    found = [Tile(((KEYS, step),), warps, stages) for step, warps, stages in ordered
             if sizes.piece % step == 0 and fits(step, stages)]
    return tuple(found) or (Tile(((KEYS, ROWS),), 4, 2),)


def _reach(tensor: torch.Tensor, sizes: _Sizes, first: int) -> str:
    """The largest offset of a tensor's elements, behind those before its first, that is computed: lanes past an end
    compute one as well."""
    padded = max(sizes.piece, sizes.rows, sizes.width)
    offset: Size = first
    for size, stride in zip(tensor.shape, tensor.stride()):
        offset = offset + (from_torch(size) + padded) * from_torch(stride)
    return sizes.names.text(offset)
