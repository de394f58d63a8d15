"""Whether a compiled result is as good as eager's.

Shapes, dtypes, strides and devices must be equal; integers, bools and the places of NaN and infinity too; other
values may be as far from the float64 reference as a few units in the last place or a small multiple of eager's own
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the result's dtype.  In the wide dtypes rounding inside the function shows, more so where terms cancel; in the
# narrow ones the inside is computed in float32 and the last rounding is all.
UNITS = {torch.float64: 32.0, torch.float32: 32.0, torch.bfloat16: 2.0, torch.float16: 4.0}

PIECE = 1 << 28  # elements that are compared at once


@dataclass(frozen=True)
class Verdict:
    """`fault` is None for a good result; `ratio` is our error over eager's (over half a unit, where eager has less)."""

    fault: str | None
    ratio: float = 0.0


def judge(ours: Sequence[object], eager: Sequence[object], reference: Sequence[object]) -> Verdict:
    """The worst of the results, which are compared one by one; `reference` may be eager's own."""
    if len(ours) != len(eager):
        return Verdict(f"{len(ours)} results, eager has {len(eager)}")
    worst = Verdict(None)
    for i, (a, b, c) in enumerate(zip(ours, eager, reference)):
        if not isinstance(b, Tensor):
            verdict = Verdict(None if a == b else f"{a!r}, eager {b!r}")
        elif not isinstance(a, Tensor):
            verdict = Verdict(f"{type(a).__name__}, eager has a tensor")
        else:
            assert isinstance(c, Tensor)
            verdict = compare(a, b, c)
        if verdict.fault:
            return Verdict(f"result {i}: {verdict.fault}", verdict.ratio)
        worst = max(worst, verdict, key=lambda v: v.ratio)
    return worst


def significant_strides(t: Tensor) -> tuple[int, ...]:
    """Strides that address something: those of dimensions of size 1 or of empty tensors do not."""
    return tuple(s for n, s in zip(t.shape, t.stride()) if n > 1) if t.numel() else ()


def compare(ours: Tensor, eager: Tensor, reference: Tensor) -> Verdict:
    for what, a, b in (("shape", tuple(ours.shape), tuple(eager.shape)), ("dtype", ours.dtype, eager.dtype),
                       ("device", ours.device, eager.device),
                       ("strides", significant_strides(ours), significant_strides(eager))):
        if a != b:
            return Verdict(f"{what} {a}, eager {b}")
    if not eager.is_floating_point():
        return exact(ours, eager)
    if eager.numel() == 0:
        return Verdict(None)
    a, b, c = (t.detach().double() for t in (ours, eager, reference))
    special = ~b.isfinite()
    same = (a == b) | (a.isnan() & b.isnan())
    wrong = (special | ~a.isfinite()) & ~same
    if wrong.any():
        return Verdict(_first("NaN or infinity", wrong, a, b))
    usable = ~special & c.isfinite()
    if not usable.any():
        return Verdict(None)
    zero = torch.zeros((), dtype=a.dtype, device=a.device)
    c = torch.where(usable, c, zero)
    scale = c.abs() + c.square().mean().sqrt()
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    error = torch.where(usable, (a - c).abs() / scale, zero)
    theirs = torch.where(usable, (b - c).abs() / scale, zero).max().item()
    unit = torch.finfo(eager.dtype).eps
    # sums that nearly cancel leave a few times eager's error to luck; in a narrow dtype they do not show
    times = 4 if unit < 1e-5 else 2
    allowed = max(times * theirs, UNITS[eager.dtype] * unit)
    ratio = error.max().item() / max(theirs, unit / 2)
    if error.max().item() > allowed:
        return Verdict(_first(f"error {error.max().item():.2e}, eager's {theirs:.2e}", error > allowed, a, b), ratio)
    return Verdict(None, ratio)


def exact(ours: Tensor, expected: Tensor) -> Verdict:
    """Bitwise equality, NaN equal to NaN; in pieces, so that it fits beside tensors of gigabytes."""
    if ours.numel() <= PIECE or ours.dim() == 0:
        return _exact_piece(ours, expected)
    rows = max(PIECE * ours.shape[0] // ours.numel(), 1)
    for a, b in zip(ours.split(rows), expected.split(rows)):
        verdict = _exact_piece(a, b)
        if verdict.fault:
            return verdict
    return Verdict(None)


def _exact_piece(ours: Tensor, expected: Tensor) -> Verdict:
    different = ours != expected
    if expected.is_floating_point():
        different &= ~(ours.isnan() & expected.isnan())
    return Verdict(_first("differs", different, ours, expected) if different.any() else None)


def _first(what: str, where: Tensor, ours: Tensor, eager: Tensor) -> str:
    index = tuple(int(i) for i in where.nonzero()[0])
    return (f"{what} at {int(where.sum())} of {where.numel()} places, first {list(index)}: "
            f"{ours[index].item()!r}, eager {eager[index].item()!r}")
