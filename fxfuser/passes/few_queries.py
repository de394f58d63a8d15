"""Attention of few queries goes over pieces of the keys, each a program of its own.

    a = attention(q, k, v, mask)                # q [B, H, Q, D], k [B, H, S, D], v [B, H, S, E], Q at most 16
->
    p = fxfuser.attend_pieces(q, k, v, mask, scale, piece)              # [B, H, pieces, Q, E + 2]
    o = p[..., :E];  l = p[..., E];  m = p[..., E + 1]
    w = exp(m - m.amax(2, True));  a = (w[..., None] * o).sum(2) / (w * l).sum(2)[..., None]

A step of decoding reads each key and each value once, so that it takes as long as reading them.  PyTorch's kernels
give all keys of a head to one program, of which a few sequences have too few to read as fast as the memory allows;
where the heads of a group share keys (grouped_attention.py) they are fewer still.  What is left of the pieces is put
together by nodes like any others, which fuse with what follows (flash-decoding,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html).  A query whose keys are all hidden gives zeros, as in the
softmax of PyTorch's attention.

Numbers of sequences and of keys may vary: a piece has then as many keys as are good for those of the first call.  Left
alone: more queries, single ones of as many heads as fill the device, few keys, operands that PyTorch's kernels refuse,
attention whose logsumexp is read, as a backward does, that is causal or drops out, other dtypes than halves, and
eager's numerics, which are those of its kernel.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from fxfuser.domain.size import example
from fxfuser.ops.attention import ATTEND_PIECES
from fxfuser.passes.attention_calls import ATTENTION, QUERIES, arguments_of, only_result_is_read
from fxfuser.passes.funnel import Scope
from fxfuser.passes.layout import all_equal, known_equal
from fxfuser.passes.rebuild import Make, replace_each

aten = torch.ops.aten

WIDTH = 256  # of a head, at most
PROGRAMS = 264  # two on each of an H200's 132 multiprocessors
STEP = 64  # keys of a piece are a multiple of this
# Pieces.  (On an H200, pieces and what puts them together beside cuDNN's kernel, us: 8 sequences of 4 heads, 4 queries
# and 1024 keys of width 64: 5.2, 19; 1 of 8, 4, 4096 and 128: 8.3, 82; 8 of 8, 4, 2048 and 128: 20.5, 47; 32 of 8, 8,
# 2048 and 128: 65, 96; 16 of 16, 1, 1024 and 64: 20.5, 19.6.)
FEWEST = 2
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Attention:
    """A call's arguments, and the keys of a piece."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    scale: float
    piece: int


def split_few_queries(graph: fx.Graph, scope: Scope) -> int:
    if not scope.reassociates:
        return 0
    calls = dict.fromkeys(n.args[0] for n in graph.nodes if _found(n) is not None)
    changes = replace_each(graph, scope, _found, _rewritten)
    for call in (c for c in calls if isinstance(c, fx.Node) and not any(r.users for r in c.users)):
        for node in (*call.users, call):  # no other pass removes a call that could draw random numbers
            graph.erase_node(node)
    return changes


def _found(node: fx.Node) -> Attention | None:
    """The attention whose result this is, where pieces of its keys are to be programs."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    call = node.args[0]
    if not isinstance(call, fx.Node) or call.target not in ATTENTION or not only_result_is_read(call):
        return None
    given, name = arguments_of(call), ATTENTION[call.target]
    query, key, value, mask = given["query"], given["key"], given["value"], given[name] if name else None
    sizes = _sizes(*(n.meta["val"] for n in (query, key, value)))
    if given["is_causal"] or given["dropout_p"] != 0.0 or sizes is None or not _taken(mask, call, query, key):
        return None
    batch, heads, queries, width, keys, value_width = sizes
    piece = _piece(keys, batch * heads)
    # the library's kernels are as fast for single queries of as many heads as fill the device
    pays = queries > 1 or FEWEST * batch * heads <= PROGRAMS
    if not pays or queries > QUERIES or max(width, value_width) > WIDTH or keys <= piece:
        return None
    scale = given["scale"] if given["scale"] is not None else 1 / math.sqrt(width)
    return Attention(query, key, value, mask, scale, piece)


def _sizes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, ...] | None:
    """B, H, Q, D, S and E of operands of one half dtype that fit each other, examples of a B or an S that varies; None
    where another does, nothing is known of one, or one is zero."""
    if any(t.dim() != 4 or t.dtype is not query.dtype for t in (query, key, value)) or query.dtype not in HALVES:
        return None
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    found = [n if isinstance(n, int) else example(n) for n in (batch, heads, queries, width, keys, value_width)]
    fixed = all(isinstance(n, int) for n in (heads, queries, width, value_width))
    fit = fixed and all_equal((*key.shape, *value.shape), (batch, heads, keys, width, batch, heads, keys, value_width))
    return tuple(n for n in found if n) if fit and all(found) else None


def _taken(mask: fx.Node | None, call: fx.Node, query: fx.Node, key: fx.Node) -> bool:
    """Whether this is no mask, or one that the library's kernel takes: others are its to refuse."""
    if mask is None:
        return True
    value, dtype = mask.meta["val"], query.meta["val"].dtype
    on_cpu = call.target is aten._scaled_dot_product_flash_attention_for_cpu.default
    dtypes, ranks = ((dtype, torch.float32), (2, 4)) if on_cpu else ((dtype,), (4,))
    scores = (*query.meta["val"].shape[:3], key.meta["val"].shape[2])
    return value.dtype in dtypes and value.dim() in ranks and all(
        known_equal(n, 1) or known_equal(n, whole) for n, whole in zip(reversed(value.shape), reversed(scores)))


def _piece(keys: int, heads: int) -> int:
    """Keys of a piece: about as many pieces as give the device all its programs."""
    pieces = max(FEWEST, PROGRAMS // heads)
    return -(-keys // (pieces * STEP)) * STEP


def _rewritten(make: Make, node: fx.Node, found: Attention) -> fx.Node:
    value = node.meta["val"]
    width = value.shape[3]
    states = make(ATTEND_PIECES, found.query, found.key, found.value, found.mask, found.scale, found.piece)
    sums = make(aten.slice.Tensor, states, 4, 0, width)
    totals, maxima = (make(aten.select.int, states, 4, width + i) for i in range(2))

    def number(amount: float) -> fx.Node:
        return make(aten.full.default, [], amount, dtype=torch.float32, device=value.device, pin_memory=False)

    def over_pieces(operand: fx.Node) -> fx.Node:
        return make(aten.sum.dim_IntList, operand, [2])

    highest = make(aten.amax.default, maxima, [2], True)
    hidden = make(aten.eq.Scalar, highest, -math.inf)
    shift = make(aten.where.self, hidden, number(0.0), highest)
    weights = make(aten.exp.default, make(aten.sub.Tensor, maxima, shift))
    whole = over_pieces(make(aten.mul.Tensor, weights, totals))
    result = over_pieces(make(aten.mul.Tensor, make(aten.unsqueeze.default, weights, 4), sums))
    divisor = make(aten.where.self, make(aten.eq.Scalar, whole, 0.0), number(1.0), whole)
    quotient = make(aten.div.Tensor, result, make(aten.unsqueeze.default, divisor, 3))
    return make(aten._to_copy.default, quotient, dtype=value.dtype)
