"""Checks of kernels whose outputs share program axes and walk inner axes of their own, for gpu_check.

Position embeddings of queries, keys and values are such: rows and columns of a head lie over programs, the heads of
each are a loop of its own, and what is common to all heads is computed or read once before the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.checks import BF16, F32, Inputs, add, draw, large, short
from benchmarks.kernel_loops import BESIDE, BORDER, NESTED, PIECES, REMAINDER, STAGED
from benchmarks.rope_modules import MODULES, Module, product_angles, repeat, rotate_half

Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]
Split = tuple[Tensor, Tensor, Tensor]
SMALL = 3  # the longest sequence that is interpreted


# ---------------------------------------------------------------- rotations: x, [B, H, S, R], and both tables


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables: [B, 1, S, R]."""
    return x * cos + rotate_half(x) * sin


def _pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring elements are a pair; tables: [B, 1, S, R / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def _complex(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same as a product of complex numbers, in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    rotated = torch.view_as_complex(wide.unflatten(-1, (-1, 2))) * torch.complex(cos.to(wide.dtype), sin.to(wide.dtype))
    return torch.view_as_real(rotated).flatten(-2).to(x.dtype)


ROTATIONS: Mapping[str, Rotation] = {"halves": _halves, "pairs": _pairs, "complex": _complex}


# ---------------------------------------------------------------- where q, k and v come from: each to [B, H, S, D]


def _rows(device: torch.device, b: int, h: int, s: int, d: int, dtype: torch.dtype) -> Tensor:
    """As a projection leaves them."""
    return draw(device, b, s, h, d, dtype=dtype).transpose(1, 2)


def _window(device: torch.device, b: int, h: int, s: int, d: int, dtype: torch.dtype) -> Tensor:
    """Part of a larger tensor, whose other elements are NaN."""
    base = torch.full((b, s + 3, h + 1, d + 8), float("nan"), dtype=dtype, device=device)
    base[:, 1:s + 1, 1:, 3:d + 3] = draw(device, b, s, h, d, dtype=dtype)
    return base[:, 1:s + 1, 1:, 3:d + 3].transpose(1, 2)


LAYOUTS: Mapping[str, Callable[..., Tensor]] = {
    "rows": _rows,
    "heads": lambda device, b, h, s, d, t: draw(device, b, h, s, d, dtype=t),
    "sequence_first": lambda device, b, h, s, d, t: draw(device, s, b, h, d, dtype=t).permute(1, 2, 0, 3),
    "transposed": lambda device, b, h, s, d, t: draw(device, b, h, d, s, dtype=t).transpose(2, 3),
    "head_last": lambda device, b, h, s, d, t: draw(device, b, s, d, h, dtype=t).permute(0, 3, 1, 2),
    "strided": lambda device, b, h, s, d, t: draw(device, b, s, h, 2 * d, dtype=t)[..., ::2].transpose(1, 2),
    "window": _window,
    "one_head": lambda device, b, h, s, d, t: draw(device, b, 1, s, d, dtype=t).expand(b, h, s, d),
    "one_batch": lambda device, b, h, s, d, t: draw(device, 1, s, h, d, dtype=t).expand(b, s, h, d).transpose(1, 2),
}


@dataclass(frozen=True)
class Rotary:
    """One module: `queries` and `keys` heads of `head` elements, of which the first `rotated` are rotated (0: all).

    angles: "positions" (cos and sin of position ids times frequencies), "tables" ([B, S, R] or half of it) or "cache"
    (tables that position ids index).  layout: one of LAYOUTS, or "packed" or "grouped", one tensor of all three as
    `rope_modules` has them.  repeated: keys and values are repeated for each query.
    """

    queries: int = 7
    keys: int = 3
    head: int = 64
    length: int = 1000
    batch: int = 1
    rotated: int = 0
    form: str = "halves"
    angles: str = "positions"
    layout: str = "rows"
    repeated: bool = False
    values: bool = True
    dtype: torch.dtype = BF16

    @property
    def leaves(self) -> int:
        """How many of the inputs, the first ones, have gradients."""
        return 1 if self.layout in PACKED else 3 if self.values else 2

    def function(self) -> Callable[..., tuple[Tensor, ...]]:
        rotation, angles, width = ROTATIONS[self.form], ANGLES[self.angles], self.rotated or self.head
        split = PACKED.get(self.layout)

        def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            if width == x.shape[-1]:
                return rotation(x, cos, sin)
            return torch.cat((rotation(x[..., :width], cos, sin), x[..., width:]), -1)

        def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
            q, k, *v = split(self, inputs[0]) if split else inputs[:self.leaves]
            cos, sin = angles(self, *inputs[self.leaves:], q.dtype)
            results = [rotate(q, cos, sin), rotate(k, cos, sin), *([x * 2 for x in v] if not self.repeated else v)]
            if self.repeated:
                results[1:] = [repeat(x, self.queries // self.keys) for x in results[1:]]
            return tuple(results)

        return forward

    def inputs(self, device: torch.device, length: int) -> tuple[Tensor, ...]:
        b, s, d = self.batch, length, self.head
        counts = (self.queries, self.keys, self.keys)
        leaves: tuple[Tensor, ...]
        if self.layout in PACKED:
            leaves = (draw(device, b, s, sum(counts) * d, dtype=self.dtype),)
        else:
            leaves = tuple(LAYOUTS[self.layout](device, b, h, s, d, self.dtype) for h in counts[:self.leaves])
        width = self.rotated or d
        frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=device).float() / width)
        positions = torch.randint(0, 2 * s, (b, s)).to(device)
        if self.angles == "positions":
            return *leaves, frequencies, positions
        angle = torch.arange(2 * s, device=device)[:, None].float() * frequencies
        if self.form == "halves":
            angle = angle.repeat(1, 2)
        tables = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        return (*leaves, *tables, positions) if self.angles == "cache" else (*leaves, *(t[positions] for t in tables))


def _computed(module: Rotary, frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if module.form == "halves":
        return product_angles(frequencies, positions, dtype)
    angle = positions[:, None, :, None].float() * frequencies.float()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _given(module: Rotary, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cos.unsqueeze(1), sin.unsqueeze(1)


def _cached(module: Rotary, cos: Tensor, sin: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)


ANGLES: Mapping[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "positions": _computed, "tables": _given, "cache": _cached}


def _packed(module: Rotary, qkv: Tensor) -> Split:
    q, k, v = (x.unflatten(-1, (-1, module.head)).transpose(1, 2)
               for x in qkv.split([n * module.head for n in (module.queries, module.keys, module.keys)], -1))
    return q, k, v


def _grouped(module: Rotary, qkv: Tensor) -> Split:
    b, s, _ = qkv.shape
    repeats = module.queries // module.keys
    x = qkv.view(b, s, module.keys, repeats + 2, module.head).permute(0, 2, 3, 1, 4)
    q, k, v = x.split((repeats, 1, 1), 2)
    return q.reshape(b, module.queries, s, module.head), k.squeeze(2), v.squeeze(2)


PACKED: Mapping[str, Callable[[Rotary, Tensor], Split]] = {"packed": _packed, "grouped": _grouped}


# ---------------------------------------------------------------- no rotations


def _table(*xs: Tensor) -> tuple[Tensor, ...]:
    """[S, heads, D] of any numbers of heads, then [S, D] for all of them."""
    *heads, table = xs
    return tuple(x * table[:, None] + 1 for x in heads)


def _angles(*xs: Tensor) -> tuple[Tensor, ...]:
    """The same with something to compute before the loops."""
    *heads, angle = xs
    return tuple(x * angle.cos()[:, None] for x in heads)


def _sums(x: Tensor, y: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Heads of x one by one, those of y added up in registers."""
    return x * table[:, None], y.unflatten(1, (-1, 3)).sum(2) * table[:, None]


def _rows_of_their_own(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """[S, A] and [S, B], of which nothing but the rows is common."""
    return x * 2 + 1, y.abs()


def _heads(device: torch.device, length: int, counts: tuple[int, ...], head: int, table: torch.dtype) -> Any:
    s = large(device, SMALL, length)
    return (*(draw(device, s, n, head, dtype=BF16) for n in counts), draw(device, s, head, dtype=table))


def _pair(rows: int, first: int, second: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = large(device, min(rows, SMALL), rows)
    return draw(device, rows, first), draw(device, rows, second)


def _plain() -> None:
    def plain(name: str, fn: Callable[..., Any], length: int, counts: tuple[int, ...], head: int = 64,
              table: torch.dtype = BF16, shows: Set[str] = frozenset()) -> None:
        _one_launch(f"plain/{name}", fn, lambda d: _heads(d, length, counts, head, table), leaves=len(counts),
                    shows=shows)

    plain("table", _table, 4097, (37, 11), shows={BESIDE, STAGED, REMAINDER})
    plain("three", _table, 1025, (37, 21, 11), 80, shows={BESIDE, STAGED, REMAINDER, BORDER})
    plain("one_of_many", _table, 129, (1, 67), 6, shows={STAGED, REMAINDER, BORDER})
    plain("angles", _angles, 4097, (13, 3, 5), 96, F32, {BESIDE, STAGED, BORDER})
    plain("equal", _angles, 4097, (13, 13), 96, F32)
    plain("sums", _sums, 1025, (37, 33))
    plain("sums_of_few", _sums, 127, (5, 9), 10)
    for name, sizes in {"long": (1000, 3000, 1001), "short": (4097, 48, 7), "one": (1, 5000, 129)}.items():
        _one_launch(f"plain/rows_{name}", _rows_of_their_own, partial(_pair, *sizes))


# ---------------------------------------------------------------- the checks

HEADS = ((1, 1), (3, 1), (5, 5), (7, 3), (1, 7), (37, 11))
REPEATS = ((3, 1), (9, 3), (10, 5), (14, 2))
LENGTHS = (1, 2, 127, 129, 1000, 4097)
SIZES = (64, 80, 96, 128, 256, 6, 10)
LONG = 4097
UNEVEN = {BESIDE, STAGED, REMAINDER}  # numbers of heads that no vector divides
BORDERED = {BESIDE, STAGED, BORDER}  # numbers of rows that no program's divides


def _of_sizes() -> None:
    for q, k in HEADS:
        _add(f"heads/{q}_{k}", Rotary(q, k, 64, LONG), BORDERED if min(q, k) > 1 and q != k else set())
        _add(f"heads/{q}_{k}/tables", Rotary(q, k, 80, 1025, angles="tables"), {STAGED} if q != k else set())
    for q, k in REPEATS:
        _add(f"repeated/{q}_{k}", Rotary(q, k, 64, 1025, repeated=True), {STAGED, PIECES})
        _add(f"repeated/{q}_{k}/tables", Rotary(q, k, 96, LONG, angles="tables", repeated=True), {STAGED, PIECES})
    for n in LENGTHS:
        _add(f"length/{n}", Rotary(7, 3, 64, n, 2), {BESIDE, STAGED})
        _add(f"length/{n}/tables", Rotary(11, 5, 80, n, angles="tables"), UNEVEN)
    for d in SIZES:
        _add(f"head/{d}", Rotary(5, 3, d, 1025), BORDERED | {PIECES})
        _add(f"head/{d}/tables", Rotary(21, 13, d, 1025, angles="tables", layout="packed"), UNEVEN | {PIECES})
    for b in (1, 2, 3):
        _add(f"batch/{b}", Rotary(11, 3, 96, 1025, b, angles="cache"), UNEVEN | BORDERED)
    for dtype in (F32, torch.float16):
        _add(f"dtype/{short(dtype)}", Rotary(13, 3, 80, 1025, dtype=dtype), BORDERED)
        _add(f"dtype/{short(dtype)}/pairs", Rotary(13, 3, 80, 1025, form="pairs", angles="tables", dtype=dtype))


def _of_forms() -> None:
    for form in ROTATIONS:
        for angles in ANGLES:
            _add(f"{form}/{angles}", Rotary(11, 5, 64, LONG, form=form, angles=angles),
                 {BESIDE, STAGED if form == "halves" else NESTED})
            _add(f"{form}/{angles}/packed", Rotary(9, 3, 80, 1025, form=form, angles=angles, layout="packed"), {BESIDE})
            _add(f"{form}/{angles}/grouped", Rotary(9, 3, 128, 129, 2, form=form, angles=angles, layout="grouped",
                                                    repeated=True))
            _add(f"{form}/{angles}/partial", Rotary(5, 1, 80, 1025, rotated=20, form=form, angles=angles))
        _add(f"{form}/equal", Rotary(7, 7, 96, LONG, form=form, values=False))
        _add(f"{form}/odd_half", Rotary(7, 3, 10, LONG, 3, rotated=6, form=form), {BESIDE, NESTED})
    for name in LAYOUTS:
        _add(f"layout/{name}", Rotary(7, 3, 64, 1025, 2, layout=name), BORDERED)
        _add(f"layout/{name}/tables", Rotary(11, 5, 80, LONG, layout=name, angles="tables"), {BESIDE})


def _calls() -> None:
    """The modules that are measured, and lengths that change from call to call."""
    for module in MODULES:
        _one_launch(f"module/{module.name}", module.function(), partial(_measured, module),
                    leaves=3 if module.layout == "separate" else 1)
    for form, angles in (("halves", "positions"), ("pairs", "tables"), ("complex", "cache")):
        rotary = Rotary(7, 3, form=form, angles=angles)
        makers = (partial(_inputs, rotary, *lengths) for lengths in ((5, 1000), (2, 129), (9, LONG)))
        _one_launch(f"dynamic/{form}", rotary.function(), *makers, dynamic=True, leaves=rotary.leaves, shows={BESIDE})


def _measured(module: Module, device: torch.device) -> tuple[Any, ...]:
    return module.inputs(large(device, SMALL, 1025), device, False)


def _inputs(module: Rotary, small: int, length: int, device: torch.device) -> tuple[Any, ...]:
    return module.inputs(device, large(device, small, length))


def _add(name: str, module: Rotary, shows: Set[str] = frozenset()) -> None:
    small = min(module.length, SMALL)
    _one_launch(name, module.function(), partial(_inputs, module, small, module.length), leaves=module.leaves,
                shows=shows)


def _one_launch(name: str, fn: Callable[..., Any], *makers: Inputs, shows: Set[str] = frozenset(),
                **settings: Any) -> None:
    """Forward and backward, each one kernel.  AOTAutograd takes tangents to lie as outputs do, or where their sizes are
    symbolic, to be contiguous, and gradients lie accordingly."""
    add(f"siblings/{name}", fn, *makers, grad=True, as_outputs=not settings.get("dynamic"), launches=1,
        shows=frozenset(shows), **settings)


def register() -> None:
    for section in (_plain, _of_sizes, _of_forms, _calls):
        section()
