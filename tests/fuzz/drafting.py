"""A program that is being written: what its values are so far, and how operands for the next line are found.

Each line is evaluated as it is added, on small inputs, so that what eager refuses is never part of a program and
magnitudes stay where a comparison means something.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from benchmarks.judge import significant_strides
from tests.fuzz.data import FAR_SHAPE, FAR_STEP, Base
from tests.fuzz.program import Eager, Input, Line, Program, Ref, bind, overload

SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
DTYPES = {torch.float32: 30, torch.bfloat16: 14, torch.float16: 10, torch.float64: 8, torch.int64: 10,
          torch.int32: 8, torch.int16: 4, torch.int8: 4, torch.uint8: 4, torch.bool: 6}
COMPLEX = (torch.complex64, torch.complex128)
LIMIT = {torch.float16: 2e3, torch.bfloat16: 1e5, torch.float32: 1e5, torch.float64: 1e6}
MOST_ELEMENTS, MOST_DIMS = 2304, 5
REFUSALS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError)
Where = Callable[[Tensor], bool]


class Refused(Exception):
    """No line could be made of this."""


class Draft:
    """Inputs, lines and the eager value of each name."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.inputs: list[Input] = []
        self.lines: list[Line] = []
        self.values: dict[str, Tensor] = {}
        self.special = rng.random() < 0.12
        self.shape = self.draw_shape()

    # -- drawing

    def draw_shape(self, rank: int | None = None, most: int = MOST_ELEMENTS) -> tuple[int, ...]:
        rng = self.rng
        rank = rng.choices((0, 1, 2, 3, 4), (4, 20, 42, 24, 10))[0] if rank is None else rank
        shape = []
        for _ in range(rank):
            fitting = [s for s in SIZES if s <= most]
            size = rng.choice(fitting)
            shape.append(size)
            most //= size
        if shape and rng.random() < 0.03:
            shape[rng.randrange(rank)] = 0
        rng.shuffle(shape)
        return tuple(shape)

    def draw_dtype(self, only: Sequence[torch.dtype] = tuple(DTYPES)) -> torch.dtype:
        return self.rng.choices(only, [DTYPES.get(d, 1) for d in only])[0]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # -- inputs

    def fresh(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, kind: str = "",
              high: int = 0) -> Ref:
        """A new input of this shape, with strides of any sort."""
        shape = self.draw_shape() if shape is None else shape
        dtype = dtype or self.draw_dtype()
        if not kind:
            wide = not dtype.is_floating_point and not dtype.is_complex and self.chance(0.1)
            kind = "special" if self.special and dtype.is_floating_point else "wide" if wide else "plain"
        base_shape, view = self._strided(shape)
        return self._add_input(Base(self.rng.randrange(1 << 16), base_shape, dtype, kind, high), view)

    def _add_input(self, base: Base, view: str) -> Ref:
        name = f"a{len(self.inputs)}"
        made = Input(name, base, view)
        shared = next((i for i in self.inputs if i.base == base), None)
        if shared is not None:
            root = self.values[shared.name]
            value = made.of(_base_of(root, base))
        else:
            value = made.of(base.tensor())
        self.inputs.append(made)
        self.values[name] = value
        return Ref(name)

    def _strided(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """A base shape and the view of it that has `shape`."""
        rng, rank = self.rng, len(shape)
        way = rng.choices(("plain", "permuted", "sliced", "stepped", "expanded", "offset"), (45, 17, 11, 9, 9, 9))[0]
        if way == "offset":
            count = 1
            for s in shape:
                count *= s
            return (count + 3,), f"[{rng.randint(1, 2)}:][:{count}].view({list(shape)})"
        if not rank or way == "plain":
            return shape, ""
        d = rng.randrange(rank)
        before = ":, " * d
        if way == "permuted":
            perm = list(range(rank))
            rng.shuffle(perm)
            base = [0] * rank
            for i, p in enumerate(perm):
                base[p] = shape[i]
            return tuple(base), f".permute({perm})"
        if way == "sliced":
            low, more = rng.randint(0, 2), rng.randint(0, 3)
            return (*shape[:d], shape[d] + low + more, *shape[d + 1:]), f"[{before}{low}:{low + shape[d]}]"
        if way == "stepped":
            return (*shape[:d], shape[d] * 2, *shape[d + 1:]), f"[{before}::2]"
        return (*shape[:d], 1, *shape[d + 1:]), f".expand({list(shape)})"

    def far(self) -> Ref:
        """An input whose last element needs a 64-bit offset."""
        return self._add_input(Base(self.rng.randrange(1 << 16), FAR_SHAPE, torch.int8, "far"), f"[::{FAR_STEP}]")

    def alias(self) -> Ref:
        """Another view of a base that an input views."""
        rng = self.rng
        usable = [i for i in self.inputs if len(i.base.shape) and 0 not in i.base.shape
                  and i.base.kind not in ("index", "far")]
        if not usable:
            return self.fresh(self.shape)
        base = rng.choice(usable).base
        views = ["", ".view(-1)", "[1:]", "[::2]", "[:1]", ".unsqueeze(0)"]
        if len(base.shape) > 1:
            views += [".transpose(0, 1)", "[:, 1:]", "[0]", ".diagonal()"]
        return self._add_input(base, rng.choice(views))

    # -- operands

    def pick(self, where: Where = lambda t: True) -> Ref | None:
        """A value there is, late ones more often."""
        names = [n for n, t in self.values.items() if where(t)]
        if not names:
            return None
        weights = [1 + i for i in range(len(names))]
        return Ref(self.rng.choices(names, weights)[0])

    def operand(self, where: Where = lambda t: not t.dtype.is_complex, dtypes: Sequence[torch.dtype] = tuple(DTYPES),
                rank: int | None = None, fresh: float = 0.12) -> Ref:
        """A value there is, or a new input that satisfies `where` and `rank`."""
        found = None if self.chance(fresh) else self.pick(
            lambda t: where(t) and t.dtype in dtypes and (rank is None or t.dim() == rank))
        if found is not None:
            return found
        shape = self.shape if rank is None or len(self.shape) == rank else self.draw_shape(rank)
        return self.fresh(shape, self.draw_dtype(dtypes))

    def partner(self, x: Ref, exactly: bool = False) -> Ref:
        """A second operand for `x`: broadcastable, or of its very shape and dtype."""
        t, rng = self.values[x.name], self.rng
        if self.chance(0.08):
            return x
        if exactly:
            found = self.pick(lambda v: v.shape == t.shape and v.dtype == t.dtype)
            return found if found is not None and self.chance(0.7) else self.fresh(tuple(t.shape), t.dtype)
        found = self.pick(lambda v: not v.dtype.is_complex and _broadcasts(v, t))
        if found is not None and self.chance(0.75):
            return found
        shape = [1 if rng.random() < 0.25 else s for s in t.shape]
        dtype = t.dtype if self.chance(0.6) else self.draw_dtype()
        return self.fresh(tuple(shape[rng.randint(0, len(shape)):] if self.chance(0.3) else shape), dtype)

    def value(self, x: Ref) -> Tensor:
        return self.values[x.name]

    # -- lines

    def add(self, op: str, *args: Any, index: int | None = None, **kwargs: Any) -> Ref:
        """A line, evaluated.  Raises Refused where eager refuses it or its result is no use."""
        line = Line(f"v{len(self.lines)}", op, args, tuple(kwargs.items()), index)
        call = overload(op)
        in_place = call._schema.is_mutable
        try:
            device = torch.device("cpu")
            bound = [bind(a, self.values, device) for a in args]
            named = {k: bind(v, self.values, device) for k, v in kwargs.items()}
            result = Eager().call(line, call, bound, named)
        except REFUSALS as error:
            if in_place:
                self._replay()
            raise Refused(str(error)) from error
        if not in_place and not _captured(line, call, bound, named, result):
            raise Refused("tracing gives another result than eager")
        operands = [self.values[n] for n in line.reads()]
        if not isinstance(result, Tensor) or not self._usable(result, operands):
            if in_place:
                self._replay()
            raise Refused("no use")
        self.lines.append(line)
        self.values[line.result] = result
        return Ref(line.result)

    def back_to(self, count: int) -> None:
        """Takes the lines after the first `count` back."""
        if len(self.lines) > count:
            mutating = any(overload(line.op)._schema.is_mutable for line in self.lines[count:])
            for line in self.lines[count:]:
                del self.values[line.result]
            del self.lines[count:]
            if mutating:
                self._replay()

    def _replay(self) -> None:
        program = Program(tuple(self.inputs), tuple(self.lines), ())
        self.values = program.run(Eager(), program.tensors(torch.device("cpu")))

    def _usable(self, t: Tensor, operands: Sequence[Tensor]) -> bool:
        if t.numel() > MOST_ELEMENTS or t.dim() > MOST_DIMS or t.dtype not in (*DTYPES, *COMPLEX):
            return False
        if t.is_conj() and not t.dtype.is_complex or t.layout is not torch.strided:
            return False
        if not t.dtype.is_floating_point and not t.dtype.is_complex:
            return True
        value = torch.view_as_real(t.resolve_conj()) if t.dtype.is_complex else t
        finite = value[value.isfinite()].abs()
        if finite.numel() and finite.max() > LIMIT.get(t.dtype, 1e5):
            return False
        if finite.numel() < value.numel():
            return self.special or any(_has_special(o) for o in operands) or self.chance(0.1)
        return True

    def program(self) -> Program:
        """The program: it returns what nothing reads, and some of what is read."""
        read = {n for line in self.lines for n in line.reads()}
        used = tuple(i for i in self.inputs if i.name in read)
        results = [line.result for line in self.lines if line.result not in read or self.chance(0.12)]
        return Program(used, tuple(self.lines), tuple(results))


def _captured(line: Line, op: OpOverload, args: list[Any], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether PyTorch's own meta function, which every traced graph relies on, agrees with the kernel."""
    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if isinstance(value, torch.device):
            return torch.device("meta")
        return [meta(v) for v in value] if isinstance(value, list) else value

    if any(v.dtype.is_complex for v in (*args, result) if isinstance(v, Tensor)):
        return True  # a lazy conjugate has no such copy
    try:
        shown = Eager().call(line, op, [meta(a) for a in args], {k: meta(v) for k, v in kwargs.items()})
    except REFUSALS:
        return False
    return isinstance(result, Tensor) and (shown.dtype, shown.shape, significant_strides(shown)) == (
        result.dtype, result.shape, significant_strides(result))


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    return all(m == n or m == 1 or n == 1 for m, n in zip(a.shape[::-1], b.shape[::-1]))


def _has_special(t: Tensor) -> bool:
    return t.dtype.is_floating_point and not bool(t.isfinite().all())


def _base_of(view: Tensor, base: Base) -> Tensor:
    strides, step = [], 1
    for size in reversed(base.shape):
        strides.append(step)
        step *= max(size, 1)
    return torch.as_strided(view, base.shape, strides[::-1], 0)
