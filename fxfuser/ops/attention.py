"""Attention over pieces of its keys: what is left of each, from which another kernel makes the whole.

    attend_pieces(q, k, v, mask, scale, piece)      # q [B, H, Q, D], k [B, H, S, D], v [B, H, S, E] of a half type
        -> [B, H, pieces, Q, E + 2] of float32:  o = exp(s - m) @ v;  l = exp(s - m).sum(-1);  m = s.amax(-1)

where s = q @ k.T * scale, to which a mask of floats is added: what asks PyTorch's kernels has made floats of bool ones.
A piece is `piece` keys, the last one what is left; there are two at least, even if the second has no keys.  Where all
scores of a piece are -inf, so is its m, and o and l are zeros.  Powers of e are rounded to the operands' dtype before
they are multiplied, as in PyTorch's fused kernels.
"""

from __future__ import annotations

import math
from typing import Sequence

import torch
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from fxfuser.ops.row import Kind, Row
from fxfuser.ops.table import add_row

LEAST = 2  # pieces: one would be a size that broadcasts, and whether it is that would be a guard where keys vary
STATES = 2  # numbers of a query beside its sums: the sum of its exponentials, then its maximum


def _pieces(keys: int, piece: int) -> int:
    count: int = torch.sym_max(LEAST, -(-keys // piece))  # type: ignore[no-untyped-call]
    return count


def _attend_pieces(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, piece: int
) -> torch.Tensor:
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask.float()
    keys, pieces = key.shape[2], _pieces(key.shape[2], piece)
    missing = pieces * piece - keys
    scores = functional.pad(scores, (0, missing), value=-math.inf)
    scores = scores.reshape(*scores.shape[:3], pieces, piece).transpose(2, 3)
    values = functional.pad(value, (0, 0, 0, missing))
    values = values.reshape(*values.shape[:2], pieces, piece, values.shape[3])
    maxima = scores.amax(-1, keepdim=True)
    powers = torch.exp(scores - maxima.masked_fill(maxima == -math.inf, 0.0))
    sums = powers.to(value.dtype).float() @ values.float()
    return torch.cat((sums, powers.sum(-1, keepdim=True), maxima), -1)


def _shape(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float, piece: int
) -> torch.Tensor:
    batch, heads, queries, _ = query.shape
    pieces = _pieces(key.shape[2], piece)
    return query.new_empty((batch, heads, pieces, queries, value.shape[3] + STATES), dtype=torch.float32)


torch.library.define("fxfuser::attend_pieces", "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, "
                     "int piece) -> Tensor")
torch.library.impl("fxfuser::attend_pieces", "CompositeExplicitAutograd", _attend_pieces)
torch.library.register_fake("fxfuser::attend_pieces", _shape)


@register_flop_formula(torch.ops.fxfuser.attend_pieces)
def _flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *others: object, **named: object) -> int:
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[3])


ATTEND_PIECES = torch.ops.fxfuser.attend_pieces.default
add_row(ATTEND_PIECES, Row(Kind.ATTENTION, reason="attention over pieces of the keys is a kernel of its own", cost=64))
