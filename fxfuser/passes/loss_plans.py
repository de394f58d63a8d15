"""Which plan a linear layer with its cross entropy gets, and what it holds in memory.

    whole       all logits at once, in the product's dtype; the backward turns them into their gradient
    chunks      the gradients of a few rows at a time, in the forward, which is possible where the backward only
                multiplies them by one number; without gradients the loss of many rows at a time, since a fused
                product then keeps no logits
    recompute   the loss of a few rows at a time, and in the backward again, with their gradients
    columns     the same, but in the backward for all rows and a few columns at a time: no float32 sum is as large as
                the weights

Enters: a `Head`, its sizes and what is possible.  Leaves: a `LossPlan`.  Times are those of matrix products: whole and
chunks make three, recompute four.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

LEAST = 64 << 20  # bytes of logits under which `auto` leaves them whole
# bytes of a piece's logits without gradients; a fused product keeps none, and wants pieces that fill the device
PIECES = {"auto": 512 << 20, "low_memory": 128 << 20}
SAVING = 0.6  # `auto` takes pieces that need at most this part of what whole logits need
FEWEST = 4  # pieces with gradients under `auto`
MANY = 16  # under `low_memory`
BLOCK = 72 << 20  # bytes of a block's logits at most: fewer blocks read and write the sums less often
# Columns of a block with which reading and writing the float32 sums takes about a twelfth of the products' time, by
# arithmetic; and the step in which blocks grow, so that products have whole tiles
ENOUGH, STEP = 3072, 1024
BLOCKS = 64  # at most, or so


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

    @property
    def logits(self) -> int:
        return self.rows * self.columns * self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an element of a sum over rows while it grows."""
        return max(self.dtype.itemsize, 4)

    def results(self, itemsize: int) -> int:
        """Bytes of the gradients."""
        return (self.rows + self.columns * self.weights) * self.inner * itemsize * self.gradient


@dataclass(frozen=True)
class LossPlan:
    """`kind` is whole, chunks, recompute or columns; `size` the rows of a piece, for the last the columns of a block;
    `buffers` what stands, with bytes."""

    kind: str
    size: int
    buffers: tuple[tuple[str, int], ...]
    reason: str = ""
    forward: int = 0  # rows of a piece in the forward, where that differs

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
    if option == "low_memory" and head.columns_apart and head.gradient:
        blocks = _blocks(head)
        pieces = blocks if blocks.bytes < pieces.bytes else pieces
    if option == "low_memory" or pieces.bytes <= SAVING * whole.bytes and pieces.kind == "chunks":
        return pieces
    why = "computing the logits twice would take a third longer" if pieces.kind == "recompute" else \
        "the float32 sums of pieces would need about as much"
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


def _blocks(head: Head) -> LossPlan:
    size = block_columns(head)
    sums = head.rows * head.inner * head.wide
    weights = head.columns * head.inner * head.dtype.itemsize * head.weights
    return LossPlan("columns", size, (("logits of a block", head.rows * size * head.dtype.itemsize),
                                      ("gradients and their sums", sums + weights)),
                    forward=piece_rows(replace(head, gradient=False), "low_memory"))


def block_columns(head: Head) -> int:
    """Steps of columns, or a power of two of fewer, so that blocks are alike and products have whole tiles."""
    most = max(min(BLOCK // (head.rows * head.dtype.itemsize), ENOUGH), head.columns // BLOCKS)
    whole = most // STEP * STEP or 1 << max(most, 1).bit_length() - 1
    return min(whole, head.columns)


def piece_rows(head: Head, option: str) -> int:
    """A power of two of rows, so that pieces are alike and products have whole tiles."""
    if head.gradient:
        most = head.rows // (FEWEST if option == "auto" else MANY)
    else:
        most = PIECES[option] // (head.columns * head.dtype.itemsize)
        if most >= head.rows:
            return head.rows
    return max(1 << max(most, 1).bit_length() - 1, min(head.rows, 16))
