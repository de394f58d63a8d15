"""Elements that one thread computes beside each other, because they read the same.

    y[r, c] = max of x[2r - 1 .. 2r + 1, 2c - 1 .. 2c + 1]      ->      y[r, 4c'], y[r, 4c' + 1], ..: 27 loads, not 36
    dx[2r + a, 2c + b] = what windows r, r + 1, c, c + 1 hand   ->      four elements that read the same four windows

Enters: a pointwise domain.  Leaves: the same with an axis of each store in two, an outer one over which programs are
laid out and `times` places of an inner one, each of which has stores of its own.  What the copies share is emitted
once, since equal text is one value; what they load and store side by side becomes vectors (see neighbours.py).  The
arithmetic of indices is shared as well.

Done where every load jumps along the fastest axis, so that Triton gives neighbours to neighbouring threads anyway, and
windows overlap; and along short axes on which nothing depends that is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Mapping

from fxfuser.domain.coalesce import Rewriter
from fxfuser.domain.index import Axis, Form, bounds, linear
from fxfuser.domain.points import Bound, Condition, Domain, Point, PointKind, Store, needed_by
from fxfuser.domain.roles import FILLED
from fxfuser.domain.size import hint, nonneg
from fxfuser.lowering.schedule import schedule, strides_of

MOST = 4  # elements of one thread that become stores of their own
POINTS = 512  # of a kernel, all copies together: more would not fit the registers
SHARED = 0.85  # of the loads of all copies, those that are left where it pays
_KINDS = (PointKind.LOAD, PointKind.OP, PointKind.REDUCE, PointKind.SELECT, PointKind.IOTA, PointKind.CONSTANT)


def unrolled(domain: Domain, hints: Mapping[str, int]) -> Domain:
    """The domain with neighbours that read the same side by side; itself where there are none."""
    if not _pointwise(domain):
        return domain
    before = domain
    for axis in domain.program:
        if isinstance(axis.size, int) and _repeated(axis, domain) and _room(axis.size, before, domain, hints):
            domain = unroll(domain, axis, axis.size)
    fast = schedule(domain).program[0].axes[-1:] if len(schedule(domain).program) == 1 else ()
    for axis, times in product(fast, (MOST, MOST // 2)):
        if _overlaps(axis, times, domain) and _room(times, before, domain, hints):
            return unroll(domain, axis, times)
    return domain


def unroll(domain: Domain, axis: Axis, times: int) -> Domain:
    """The domain with `times` copies of each store that walks `axis`, whose size is a known multiple."""
    assert isinstance(axis.size, int)
    outer = Axis(f"{axis.name}_{times}", axis.size // times, axis.reduced) if axis.size != times else None
    copies = [_Copy(axis, outer, times, place) for place in range(times)]
    stores = tuple(copy.store(store) for store in domain.stores
                   for copy in (copies if axis in store.axes else copies[:1]))
    return replace(domain, stores=stores, program=copies[0].axes(domain.program), axes=copies[0].axes(domain.axes))


class _Copy(Rewriter):
    """What a domain is at one place of the inner axis."""

    def __init__(self, axis: Axis, outer: Axis | None, times: int, place: int) -> None:
        whole = Form.axis(outer).scale(times) if outer is not None else Form()
        super().__init__({axis: whole + place}, {axis: outer})
        self._axis = axis

    def store(self, store: Store) -> Store:
        for point in needed_by(store.value):
            if id(point) not in self.points:
                self.points[id(point)] = self.point(point)
        return Store(store.node, self.index(store.index), self.points[id(store.value)])

    def point(self, point: Point) -> Point:
        if self._axis not in point.deps:
            return point
        moved = super().point(point)
        return _settled(moved) if moved.kind is PointKind.SELECT else moved


def _settled(point: Point) -> Point:
    """A select without the conditions of which it is known whether they hold."""
    conditions, operands = list[Condition](), list[Point]()
    for operand, condition in zip(point.operands, (*point.conditions, ())):
        left = _left(condition)
        if left is None:
            continue
        operands.append(operand)
        if not left:
            break
        conditions.append(left)
    if len(operands) == 1 and operands[0].dtype is point.dtype:
        return operands[0]
    return replace(point, operands=tuple(operands), conditions=tuple(conditions[:len(operands) - 1]))


def _left(condition: Condition) -> Condition | None:
    """The bounds that are not known to hold; None where one is known not to."""
    left: list[Bound] = []
    for bound in condition:
        above = bound.lower is None or _known(bound.form - bound.lower)
        below = bound.upper is None or _known(bound.form.scale(-1) + bound.upper - 1)
        if above is False or below is False:
            return None
        if not above or not below:
            left.append(Bound(bound.form, None if above else bound.lower, None if below else bound.upper))
    return tuple(left)


def _known(form: Form) -> bool | None:
    """True: a form is nowhere below 0; False: it is everywhere; None: it may be here and there."""
    limits = bounds(form)
    if limits is None:
        return None
    return True if nonneg(limits[0]) else False if nonneg(-1 - limits[1]) else None


def _pointwise(domain: Domain) -> bool:
    """Whether all axes are program axes and all points of kinds that a copy can have."""
    return len(domain.axes) == len(domain.program) > 0 and all(
        p.kind in _KINDS and not any(p.axes) for p in domain.points())


def _room(times: int, before: Domain, domain: Domain, hints: Mapping[str, int]) -> bool:
    """Whether so many copies leave enough programs, and are few enough."""
    copies = times * len(domain.stores) // len(before.stores)
    elements = 1
    for axis in before.program:
        elements *= axis.size if isinstance(axis.size, int) else hint(axis.size, hints)
    return copies <= MOST and elements >= copies * FILLED and copies * len(before.points()) <= POINTS


def _repeated(axis: Axis, domain: Domain) -> bool:
    """Whether all that is loaded is the same along a short axis."""
    loads = [p for p in domain.points() if p.kind is PointKind.LOAD]
    return isinstance(axis.size, int) and 1 < axis.size <= MOST and bool(loads) \
        and not any(axis in p.deps for p in loads) and all(axis in s.axes for s in domain.stores)


def _overlaps(fast: Axis, times: int, domain: Domain) -> bool:
    """Whether copies along the fastest axis share loads that jump along it, and are stored side by side."""
    if not isinstance(fast.size, int) or fast.size % times or fast.size == times:
        return False
    loads = [p for p in domain.points() if p.kind is PointKind.LOAD and fast in p.deps]
    if not loads or any(p.lookups for p in loads):
        return False
    offsets = {(p.node, linear(p.index, strides_of(p.node))) for p in loads if p.node is not None}
    steps = {form: form.coefficient(fast) for _, form in offsets}
    if any(s.offset.coefficient(fast) != 1 for s in domain.stores):
        return False
    if not all(form.affine and isinstance(step, int) and abs(step) > 1 for form, step in steps.items()):
        return False
    moved = {(node, form.terms, form.constant + steps[form] * place)
             for node, form in offsets for place in range(times)}
    return len(moved) <= SHARED * times * len(offsets)
