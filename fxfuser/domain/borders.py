"""Borders of regions: what is decided without looking, what fewer axes can tell, and where an axis could be cut."""

from __future__ import annotations

from fxfuser.domain.index import Axis, Form, divide, within
from fxfuser.domain.points import Bound
from fxfuser.domain.size import Size, exact_div, nonneg, positive


def decided(bound: Bound, limits: tuple[Size, Size] | None) -> bool | None:
    """Whether a bound holds everywhere (True) or nowhere (False), given its form's least and greatest value."""
    if limits is None:
        return None
    low, high = limits
    above = bound.lower is None or nonneg(low - bound.lower)
    below = bound.upper is None or positive(bound.upper - high)
    if above and below:
        return True
    if bound.lower is not None and positive(bound.lower - high):
        return False
    if bound.upper is not None and nonneg(low - bound.upper):
        return False
    return None


def simplified(bound: Bound) -> Bound:
    """The same bound on fewer terms: 16*h + j < 128 is h < 8, as j is in [0, 16)."""
    form = bound.form
    if len(form.terms) < 2:
        return bound
    for _, k in form.terms:
        if k == 1 or not positive(k):
            continue
        lower = None if bound.lower is None else exact_div(bound.lower, k)
        upper = None if bound.upper is None else exact_div(bound.upper, k)
        if (lower is None) != (bound.lower is None) or (upper is None) != (bound.upper is None):
            continue
        above, below = divide(form, k)
        if above.affine and within(below, k):
            return Bound(above, lower, upper)
    return bound


def borders(bound: Bound) -> tuple[Axis, list[Size]] | None:
    """The axis that alone decides the bound, and the positions inside it where the answer changes."""
    if len(bound.form.terms) != 1:
        return None
    axis, k = bound.form.terms[0]
    if type(axis) is not Axis:
        return None
    found: list[Size] = []
    for value in (bound.lower, bound.upper):
        if value is None:
            continue
        border = _border(bound.form, k, value)
        if border is None:
            return None
        if positive(border) and positive(axis.size - border):
            found.append(border)
    return axis, found


def _border(form: Form, k: Size, value: Size) -> Size | None:
    """The first position from which `form < value` has its other answer."""
    distance = value - form.constant
    if isinstance(k, int) and isinstance(distance, int):
        return -(-distance // k) if k > 0 else distance // k + 1  # the first with k*a >= d, or with k*a < d
    exact = exact_div(distance, k)
    if exact is None:
        return None
    return exact if nonneg(k) else exact + 1
