"""Reductions as monoids: states, identity, lift, combine, finish.

One description serves every kernel kind: a persistent row, a loop over a row, one state per region, the two halves
of a split reduction, a scan, and the epilogues to come.  Lanes that pad a tile hold the identity.  NaN propagates,
which is why each combine is written out instead of taken from `tl.max`.  A monoid is known to nothing but its row in
the op table: a new one is a value of this type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Callable, Mapping

import torch

Number = bool | int | float


class Folds(Enum):
    """The dtype that elements have when they are folded; half types fold in fp32."""

    RESULT = "result"  # the result's: sum, prod
    OPERAND = "operand"  # the operand's: maxima and their places
    TRUTH = "truth"  # whether an element is true, as int32; the result is bool


@dataclass(frozen=True)
class Step:
    """One state of a held tile: `monoid` (a name in MONOIDS) folds `lift`, a text over {x}, {at} and the states before,
    and `settle` is the state as a text over the fold's result {0} and the state's {identity}.  Positions fold as int32
    where all are known to fit; {none} is then the largest of their type.

    Monoids that tell elements apart read them rounded.  {reaches} in a lift says that an element is the state before:
    `equals` for integers, and for floats `exceeds`, a text over {dtype} too, in which an element stands for its
    rounding to that dtype.  What `exceeds` compares with is made once a row, so that elements are not rounded one by
    one, and that NaN, of which only other NaNs are as large, takes no comparison of its own."""

    monoid: str
    lift: str
    settle: str = "{0}"
    equals: str = ""
    exceeds: str = ""


@dataclass(frozen=True)
class Packing:
    """All states of a monoid as one number, for results that do not tell states apart whose numbers are equal.

    `pack` is a text over the states {0}, {1}, ...; `unpack` has a text for each state over the number {0} and the
    state's {identity}; `nothing` is the identity's number."""

    pack: str
    unpack: tuple[str, ...]
    nothing: Number


@dataclass(frozen=True)
class Monoid:
    """`combine` is the name of a function in `source` that takes the states of two elements and returns one's.

    It must be associative, and commutative for a reduction over a loop or over several regions.
    `identity(dtype)` gives a Python number per state and `dtypes(dtype)` the dtype of each, where `dtype` is the
    accumulation dtype.  `lift` has a format string per state over {x} (the element) and {at} (its position in the
    reduced dimensions), or a number.  `finish` has a format string per result of the op over {0}, {1}, ... (states)
    and {count} (the number of reduced elements, in the accumulation dtype), see
    `result_dtype`.
    `splits` says that folding the results of parts gives the result of the whole; `idempotent` that an element may be
    folded twice; `adds` that states are sums of elements, in no particular order.
    `steps`, where given, is how a tile that is held as a whole folds faster than by `combine`: one `Step` per state.
    `settled`, where given, are the states as texts over what the steps have found, {0}, {1}, ...
    `absorbs` says that what the first step's fold holds for nothing lifts to what the others hold for nothing.
    `counts` are the states that combine without regard to the others: numbers that all lanes of a loop share where each
    has an element.
    `packing`, where given, halves what is stored of states between two kernels.
    """

    name: str
    combine: str
    source: str
    identity: Callable[[torch.dtype], tuple[Number, ...]]
    dtypes: Callable[[torch.dtype], tuple[torch.dtype, ...]] = lambda dtype: (dtype,)
    lift: tuple[str, ...] = ("{x}",)
    finish: tuple[str, ...] = ("{0}",)
    folds: Folds = Folds.RESULT
    splits: bool = False
    idempotent: bool = False
    adds: bool = False
    steps: tuple[Step, ...] = ()
    absorbs: bool = False
    settled: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    packing: Packing | None = None

    @property
    def states(self) -> int:
        return len(self.lift)

    def result_dtype(self, output: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype of result number `output`: a state's where it is one, else the last state's."""
        dtypes, finish = self.dtypes(dtype), self.finish[output]
        if self.folds is Folds.TRUTH:
            return torch.bool
        return next((d for i, d in enumerate(dtypes) if finish == f"{{{i}}}"), dtypes[-1])

    @property
    def indexed(self) -> bool:
        """Whether it tells elements apart by their position."""
        return any("{at}" in text for text in self.lift)


def lowest(dtype: torch.dtype) -> Number:
    """What no value of this dtype is below."""
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """What no value of this dtype is above."""
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def function(name: str, arguments: str, *lines: str) -> str:
    """The source of a combine."""
    return f"@triton.jit\ndef {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)


def _extremum(name: str, of: str, identity: Callable[[torch.dtype], Number]) -> Monoid:
    combine = f"combine_{name}"
    return Monoid(name, combine, function(combine, "a, b", f"return tl.{of}(a, b, tl.PropagateNan.ALL)"),
                  lambda dtype: (identity(dtype),), folds=Folds.OPERAND, splits=True, idempotent=True)


def _place(name: str, sign: str, extremum: str, identity: Callable[[torch.dtype], Number]) -> Monoid:
    combine = f"combine_{name}"
    exceeds = "~({x} <= just_below({0}, {dtype}))" if sign == ">" else "~({x} >= -just_below(-{0}, {dtype}))"
    source = function(
        combine, "a, a_at, b, b_at",
        "a_nan = a != a",
        "b_nan = b != b",
        "tie = (a == b) | (a_nan & b_nan)",
        f"first = (a {sign} b) | (a_nan & (b == b)) | (tie & (a_at < b_at))",
        "return tl.where(first, a, b), tl.where(first, a_at, b_at)")
    return Monoid(name, combine, source, lambda dtype: (identity(dtype), torch.iinfo(torch.int64).max),
                  lambda dtype: (dtype, torch.int64), ("{x}", "{at}"), ("{1}",), Folds.OPERAND, idempotent=True,
                  steps=(Step(extremum, "{x}"),
                         Step("amin", "tl.where({reaches}, {at}, {none})", "{0}.to(tl.int64)", "{x} == {0}",
                              exceeds)))


def _truth(name: str, sign: str, identity: int) -> Monoid:
    combine = f"combine_{name}"
    return Monoid(name, combine, function(combine, "a, b", f"return a {sign} b"), lambda dtype: (identity,),
                  lambda dtype: (torch.int32,), finish=("{0} != 0",), folds=Folds.TRUTH, splits=True,
                  idempotent=True)


# exp of the distance scales the sum of the smaller maximum.  Maxima start at the lowest finite number, as infinities
# have no distance: a sum that is still 0 tells that nothing was above -inf.  Powers of 2 take three instructions less
# than tl.exp: denormal ones are flushed, which no sum of at least 1 shows
_LOG2_E = math.log2(math.e)
_SOFTMAX = function(
    "combine_softmax", "a, a_sum, b, b_sum",
    "distance = b - a",
    f"scale = tl.exp2(tl.abs(distance) * {-_LOG2_E!r})",
    "total = tl.where(distance > 0, a_sum * scale + b_sum, a_sum + b_sum * scale)",
    "return tl.maximum(a, b, tl.PropagateNan.ALL), total")

# The logsumexp, a maximum whose sum is 1.  It is no less than the maximum, rounded too, and exact where that dominates:
# a loss that subtracts an element from it is no less than 0.  Its error is half a unit of its last place
_LOGSUMEXP = Packing("tl.where({0} == float('inf'), {0}, {0} + tl.log({1}))", (
    "tl.maximum({0}, {identity}, tl.PropagateNan.ALL)", "tl.where({0} == float('-inf'), 0.0, 1.0)"), float("-inf"))

# a maximum and the sum of exponentials that it shifts; the sum is nan where the maximum is infinite or nan
SOFTMAX = Monoid("softmax", "combine_softmax", _SOFTMAX, lambda dtype: (torch.finfo(dtype).min, 0),
                 lambda dtype: (dtype, dtype), ("{x}", "1"),
                 ("tl.where({1} != 0, {0}, float('-inf'))",
                  "tl.where(({1} != 0) & ({0} < float('inf')), {1}, float('nan'))"),
                 steps=(Step("amax", "{x}", "tl.maximum({0}, {identity}, tl.PropagateNan.ALL)"),
                        Step("sum", f"tl.exp2(({{x}} - {{0}}) * {_LOG2_E!r})")), absorbs=True, packing=_LOGSUMEXP)

# the same where the shift is 0 for an infinite maximum: sums of exponentials that are all 0, or one of which is inf
SHIFTED_SOFTMAX = replace(SOFTMAX, name="shifted_softmax", finish=(
    SOFTMAX.finish[0], "tl.where({0} == float('inf'), float('inf'), {1})"))

# Means without a distance (infinities, nan) add as sums do; an empty side has no weight
_MOMENTS = function(
    "combine_moments", "a, a_count, a_sum, b, b_count, b_sum",
    "count = a_count + b_count",
    "weight = tl.where(count > 0, b_count / count, 0.0)",
    "distance = b - a",
    "mean = tl.where(tl.abs(distance) < float('inf'), a + distance * weight, a + b)",
    "return mean, count, a_sum + b_sum + distance * distance * (a_count * weight)")

# the mean and the sum of squared distances from it (Chan, Golub and LeVeque, 1979)
MOMENTS = Monoid("moments", "combine_moments", _MOMENTS, lambda dtype: (0, 0, 0), lambda dtype: (dtype,) * 3,
                 ("{x}", "1", "0"), ("tl.where({1} > 0, {0}, float('nan'))",
                                         "tl.where(tl.abs({0}) < float('inf'), {2}, float('nan'))"),
                 steps=(Step("sum", "{x}"), Step("sum", "tl.where({x} == {x}, 1.0, 1.0)"),
                        Step("sum", "({x} - {0} / {1}) * ({x} - {0} / {1})")),
                 settled=("tl.where({1} > 0, {0} / {1}, 0.0)", "{1}", "{2}"), counts=(1,))

_SUM = function("combine_sum", "a, b", "return a + b")

MONOIDS: Mapping[str, Monoid] = MappingProxyType({m.name: m for m in (
    Monoid("sum", "combine_sum", _SUM, lambda dtype: (0,), adds=True),
    Monoid("mean", "combine_sum", _SUM, lambda dtype: (0,), finish=("{0} / {count}",), adds=True),
    Monoid("prod", "combine_prod", function("combine_prod", "a, b", "return a * b"), lambda dtype: (1,)),
    _extremum("amax", "maximum", lowest),
    _extremum("amin", "minimum", highest),
    _place("argmax", ">", "amax", lowest),
    _place("argmin", "<", "amin", highest),
    _truth("any", "|", 0),
    _truth("all", "&", 1),
)})
