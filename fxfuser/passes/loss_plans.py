"""Which plan a linear layer with its cross entropy gets, and what it holds in memory.

    whole       all logits at once, in the product's dtype; the backward turns them into their gradient
    chunks      the gradients of a few rows at a time, in the forward, which is possible where the backward only
                multiplies them by one number; without gradients the loss of many rows at a time, since a fused
                product then keeps no logits
    recompute   the loss of a few rows at a time, and in the backward again, with their gradients
    columns     the same, but in the backward for all rows and a few columns at a time: no float32 sum is as large as
                the weights
    mixed       columns of which as many logits are kept as there is memory for, and the others computed again; most
                lie in the memory of the weights' gradient until its rows are written, where they need none of their own

Enters: a `Head`, its sizes and what is possible.  Leaves: a `LossPlan`.  Times are those of matrix products: whole and
chunks make three, recompute and columns four, mixed three and the share that it computes again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import torch

from fxfuser.passes.kept_logits import overwritten_rows

LEAST = 64 << 20  # bytes of logits under which `auto` leaves them whole
# bytes of a piece's logits without gradients; a fused product keeps none, and wants pieces that fill the device
PIECES = {"auto": 512 << 20, "low_memory": 128 << 20}
SAVING = 0.55  # `auto` takes a plan that needs at most this part of what whole logits need
SPARING = 0.49  # `low_memory` makes blocks of columns smaller where this part of it is in reach
AGAIN = 0.4  # the most columns of all that `auto` computes twice: a seventh more products
FEWEST = 4  # pieces with gradients under `auto`
MANY = 16  # under `low_memory`
BLOCK = 72 << 20  # bytes of a block's logits at most: fewer blocks read and write the sums less often
# Columns of a block with which reading and writing the float32 sums takes about a twelfth of the products' time, by
# arithmetic; and the step in which blocks grow, so that products have whole tiles
ENOUGH, STEP = 3072, 1024
BLOCKS = 64  # at most, or so
WHOLE_TILES = 128  # columns of kept logits are a multiple of this
FIRST = 1024  # rows of the weights' gradient, at least, in front of kept logits: the first product that overwrites some
PRODUCTS = 12  # that overwrite kept logits with the weights' gradient, at most
WORTH = 8  # logits of fewer columns than this part of all are not kept under `low_memory`
PARTS = 4  # of the rows of sums over columns, where these cannot stand beside their rounded copy
SMALL = 2 << 20  # bytes of labels and numbers of rows and columns


@dataclass(frozen=True)
class Head:
    """A product [rows, inner] x [inner, columns] and what the graph wants of its loss."""

    rows: int
    inner: int
    columns: int
    dtype: torch.dtype
    gradient: bool  # whether the backward is in the graph
    weights: bool = True  # whether those of the weights, which are sums over rows, are wanted
    scalar: bool = True  # whether the backward only multiplies by one number
    columns_apart: bool = False  # whether blocks of columns can compute the gradients
    obstacle: str = "blocks of columns cannot compute the gradients"  # why logits of some columns cannot be kept

    @property
    def may_keep(self) -> bool:
        """Whether logits of some columns can be kept."""
        return not self.obstacle

    @property
    def logits(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum over rows while it grows."""
        return max(self.dtype.itemsize, 4)

    @property
    def sums(self) -> int:
        """Bytes of what stands while blocks of columns are computed: sums over columns and the weights' gradient."""
        return self.rows * self.inner * self.wide + self.columns * self.inner * self.dtype.itemsize * self.weights

    @property
    def rounded(self) -> int:
        """Bytes of sums over columns in their own dtype, where that is another."""
        return self.rows * self.inner * self.dtype.itemsize * (self.wide > self.dtype.itemsize)

    def results(self, itemsize: int) -> int:
        """Bytes of the gradients."""
        return (self.rows + self.columns * self.weights) * self.inner * itemsize * self.gradient


@dataclass(frozen=True)
class LossPlan:
    """`kind` is whole, chunks, recompute, columns or mixed; `size` the rows of a piece, for the last two the columns of
    a block that is computed again; `buffers` what stands in memory, in bytes; `reason` why `auto` is whole."""

    kind: str
    size: int
    buffers: tuple[tuple[str, int], ...]
    reason: str = ""
    forward: int = 0  # rows of a piece in the forward, where that differs; of mixed: columns that are not kept
    inside: int = 0  # columns whose logits lie in the memory of the weights' gradient
    beside: int = 0  # columns whose logits have memory of their own
    parts: int = 1  # of the rows, in which sums over columns grow

    @property
    def kept(self) -> int:
        """Columns whose logits are kept."""
        return self.inside + self.beside

    @property
    def rows(self) -> int:
        """Rows of a piece in the forward."""
        return self.forward or self.size

    @property
    def bytes(self) -> int:
        return sum(n for _, n in self.buffers)


def choose(head: Head, option: str) -> LossPlan:
    """The plan that `option`, one of auto, fast and low_memory, asks for."""
    whole = _whole(head)
    if option == "fast" or option == "auto" and head.logits < LEAST:
        small = f"the logits are smaller than {LEAST >> 20} MiB" if option == "auto" else ""
        return LossPlan(whole.kind, whole.size, whole.buffers, small)
    pieces = _pieces(head, option)
    if option == "low_memory":
        blocks = _sparing(head) if head.columns_apart and head.gradient else pieces
        return blocks if blocks.bytes < pieces.bytes else pieces
    if pieces.bytes <= SAVING * whole.bytes and pieces.kind == "chunks":
        return pieces
    if head.gradient and head.may_keep:
        mixed = _mixed(head, int(SAVING * whole.bytes))
        if mixed is not None and head.columns - mixed.kept <= AGAIN * head.columns:
            return mixed
    why = "computing the logits twice would take a third longer" if pieces.kind == "recompute" else \
        "the float32 sums of pieces would need about as much"
    why += f"; {head.obstacle}" if head.gradient and head.obstacle else ""
    return LossPlan(whole.kind, whole.size, whole.buffers, why)


def _whole(head: Head) -> LossPlan:
    gradients = (("gradients", head.results(head.dtype.itemsize)),) if head.gradient else ()
    return LossPlan("whole", head.rows, (("logits", head.logits), *gradients))


def _pieces(head: Head, option: str) -> LossPlan:
    size = piece_rows(head, option)
    piece = size * head.columns * head.dtype.itemsize
    if not head.gradient:
        return LossPlan("chunks", size, (("logits of a piece", piece),))
    sums = head.results(head.wide if size < head.rows else head.dtype.itemsize)
    kind = "chunks" if head.scalar else "recompute"
    copy = head.columns * head.inner * head.dtype.itemsize if head.wide > head.dtype.itemsize and head.weights else 0
    return LossPlan(kind, size, (("logits of a piece", max(piece, copy)), ("gradients and their sums", sums)))


def _sparing(head: Head) -> LossPlan:
    """Blocks of columns; logits are kept where that takes no memory, of enough columns to be worth the trouble."""
    size, column = block_columns(head), head.rows * head.dtype.itemsize
    spare = int(SPARING * _whole(head).bytes) - head.sums - SMALL
    fits = _stepped(spare // column) if spare >= column else size
    if fits < size and fits * BLOCKS >= head.columns:
        size = fits
    parts = PARTS if head.rounded > max(spare, size * column) else 1
    buffers = (("logits of a block, then what is rounded", max(size * column, head.rounded // parts)),
               ("gradients and their sums", head.sums))
    inside = _inside(head)
    if inside * WORTH < head.columns:
        return LossPlan("columns", size, buffers, forward=piece_rows(replace(head, gradient=False), "low_memory"),
                        parts=parts)
    return LossPlan("mixed", size, buffers, forward=_unkept(head, head.columns - inside), inside=inside, parts=parts)


def _mixed(head: Head, budget: int) -> LossPlan | None:
    """As many logits as `budget`, in bytes, allows; None where it does not allow what has to stand anyway."""
    column, inside = head.rows * head.dtype.itemsize, _inside(head)
    spare = (budget - SMALL - head.sums) // column // WHOLE_TILES * WHOLE_TILES
    beside = min(spare, head.columns - inside)
    if beside <= 0 or head.rounded > budget - head.sums:
        return None
    rest = head.columns - inside - beside
    size = -(-rest // -(-rest // beside)) if rest else beside  # of equal blocks, which take the place of what is beside
    size = min(-(-size // WHOLE_TILES) * WHOLE_TILES, beside)
    buffers = (("logits in memory of their own", beside * column), ("gradients and their sums", head.sums))
    return LossPlan("mixed", size, buffers, forward=_unkept(head, rest), inside=inside, beside=beside)


def _inside(head: Head) -> int:
    """Columns whose logits fit in the memory of the weights' gradient behind its first rows, and in front of its last
    where these are longer, so that a few products overwrite them."""
    if not head.weights or not head.may_keep:
        return 0
    first = FIRST
    while first < head.columns:
        left = head.columns - first
        found = min(left * head.inner // head.rows, left) // WHOLE_TILES * WHOLE_TILES
        products = list(islice(overwritten_rows(found, head.rows, (head.columns, head.inner)), PRODUCTS))
        if found and products and products[-1][1] == found:
            return found
        first *= 2
    return 0


def _unkept(head: Head, columns: int) -> int:
    """Columns at a time in the forward, whose logits, if a library's product writes them, need no more than the sums
    that stand in the backward."""
    most = head.inner * head.wide // head.dtype.itemsize // WHOLE_TILES * WHOLE_TILES
    return max(min(most, columns), WHOLE_TILES)


def block_columns(head: Head) -> int:
    """Steps of columns, or a power of two of fewer, so that blocks are alike and products have whole tiles."""
    most = max(min(BLOCK // (head.rows * head.dtype.itemsize), ENOUGH), head.columns // BLOCKS)
    return min(_stepped(most), head.columns)


def _stepped(most: int) -> int:
    return most // STEP * STEP or 1 << max(most, 1).bit_length() - 1


def piece_rows(head: Head, option: str) -> int:
    """A power of two of rows, so that pieces are alike and products have whole tiles."""
    if head.gradient:
        most = head.rows // (FEWEST if option == "auto" else MANY)
    else:
        most = PIECES[option] // (head.columns * head.dtype.itemsize)
        if most >= head.rows:
            return head.rows
    return max(1 << max(most, 1).bit_length() - 1, min(head.rows, 16))
