"""Lines for VIEW, LAYOUT, FACTORY, REDUCTION and GATHER rows: one small function per form of arguments.

`RECIPES` names the rows; `NOT_DRAWN` those that no tensor program can call, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.data import Base
from tests.fuzz.drafting import COMPLEX, DTYPES, Draft, Refused
from tests.fuzz.program import Device, Ref, overload
from tests.fuzz.yardstick import rounds

Recipe = Callable[[Draft, str], Ref]
SAME_SIZE = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16,
             torch.float64: torch.int64, torch.int32: torch.int32, torch.uint8: torch.int8, torch.int8: torch.uint8}
TORCHSCRIPT = "an overload of TorchScript on lists and texts"
NOT_DRAWN: Mapping[str, str] = {
    **dict.fromkeys((
        "aten.slice.t", "aten.slice.str", "aten.select.t", "aten.split.str", "aten.numpy_T.a", "aten.mT.a",
        "aten.mH.a", "aten.matrix_H.a", "aten.index.str", "aten.index.list_int", "aten.index.list_float",
        "aten.index.list_bool", "aten.index.list_Tensor", "aten.index.list_str", "aten.split.default",
        "aten.index.Tensor_hacked_twin", "aten._unsafe_index.Tensor_hacked_twin"), TORCHSCRIPT),
    **dict.fromkeys(("aten.narrow.Tensor", "aten.tensor_split.tensor_indices_or_sections"),
                    "its view depends on data, which no graph of one piece can hold"),
    **dict.fromkeys(("aten.linspace.Tensor_Tensor", "aten.linspace.Tensor_Scalar", "aten.linspace.Scalar_Tensor"),
                    "reads its bounds on the host"),
    **dict.fromkeys((
        "prims.broadcast_in_dim.default", "prims.collapse_view.default", "prims.conj.default",
        "prims.split_dim.default", "prims.squeeze.default", "prims.transpose.default", "prims.view_of.default",
        "prims.view_of_dtype.default"), "functionalisation refuses a prim that returns a view"),
    "aten._neg_view.default": "autograd's own: its results carry a lazy negation",
}


def _x(draft: Draft, least: int = 0, where: Callable[[Tensor], bool] = lambda t: True) -> Ref:
    found = None if draft.chance(0.1) else draft.pick(
        lambda t: t.dim() >= least and not t.dtype.is_complex and where(t))
    if found is not None:
        return found
    rank = max(least, len(draft.shape))
    x = draft.fresh(draft.shape if rank == len(draft.shape) else draft.draw_shape(rank))
    if not where(draft.value(x)):
        raise Refused("no operand")
    return x


def _dim(draft: Draft, x: Ref) -> int:
    rank = draft.value(x).dim()
    return draft.rng.randrange(-rank, rank) if rank else draft.rng.choice((0, -1))


def _some_dims(draft: Draft, x: Ref, least: int = 0) -> list[int]:
    rank = draft.value(x).dim()
    return draft.rng.sample(range(rank), draft.rng.randint(min(least, rank), rank))


def _permutation(draft: Draft, x: Ref) -> list[int]:
    return draft.rng.sample(range(draft.value(x).dim()), draft.value(x).dim())


def _other_shape(draft: Draft, t: Tensor) -> list[int]:
    """Another shape with as many elements: dimensions joined, split, dropped."""
    rng, shape = draft.rng, list(t.shape)
    for _ in range(rng.randint(1, 3)):
        if len(shape) > 1 and rng.random() < 0.5:
            d = rng.randrange(len(shape) - 1)
            shape[d:d + 2] = [shape[d] * shape[d + 1]]
        elif shape and len(shape) < 5:
            d = rng.randrange(len(shape))
            factors = [f for f in range(1, shape[d] + 1) if shape[d] % f == 0] or [1]
            f = rng.choice(factors)
            shape[d:d + 1] = [f, shape[d] // f]
        elif not shape:
            shape = [1]
    if rng.random() < 0.2 and shape and t.numel():
        shape[rng.randrange(len(shape))] = -1
    return shape


def _span(draft: Draft, size: int) -> tuple[int, int]:
    start = draft.rng.randint(0, max(size - 1, 0))
    return start, draft.rng.randint(start, size)


# -- views and copies of views


def reshaped(draft: Draft, op: str) -> Ref:
    x = _x(draft)
    if op == "aten._unsafe_view.default":
        x = draft.add("aten.clone.default", x, memory_format=torch.contiguous_format)
    shape = _other_shape(draft, draft.value(x))
    if op.startswith("prims") and -1 in shape:
        raise Refused("prims take no -1")
    return draft.add(op, x, shape)


def reinterpreted(draft: Draft, op: str) -> Ref:
    x = _x(draft, where=lambda t: t.dtype in SAME_SIZE)
    if _is_rounded(draft, x) or bool(draft.value(x).isnan().any()):
        raise Refused("of a rounding and its neighbour, or of two NaNs, the bits are unlike")
    return draft.add(op, x, SAME_SIZE[draft.value(x).dtype])


def _is_rounded(draft: Draft, x: Ref) -> bool:
    """Whether a line behind a value rounds; what is done to its bits then says nothing about a compiler."""
    behind = {x.name}
    for line in reversed(draft.lines):
        if line.result in behind or overload(line.op)._schema.is_mutable:
            behind.update(line.reads())
            if rounds(overload(line.op)) and draft.value(Ref(line.result)).dtype.is_floating_point:
                return True
    return False


def restrided(draft: Draft, op: str) -> Ref:
    x = _x(draft, where=lambda t: t.is_contiguous() and t.numel() > 0)
    t = draft.value(x)
    if op == "aten._reshape_alias.default":
        shape = [s for s in t.shape if s != 1]
        return draft.add(op, x, shape, list(torch.empty(shape, device="meta").stride()))
    shape = [draft.rng.choice((1, 2, 3, 5)) for _ in range(draft.rng.randint(1, 3))]
    strides = [draft.rng.choice((0, 1, 2, 3, 7)) for _ in shape]
    if sum((s - 1) * d for s, d in zip(shape, strides)) >= t.numel():
        raise Refused("outside")
    return draft.add(op, x, shape, strides)


def permuted(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    return draft.add(op, x, _permutation(draft, x))


def transposed(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    return draft.add(op, x, _dim(draft, x), _dim(draft, x))


def moved(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    source = _some_dims(draft, x, 1)
    return draft.add(op, x, source, draft.rng.sample(range(draft.value(x).dim()), len(source)))


def plain(draft: Draft, op: str) -> Ref:
    return draft.add(op, _x(draft))


def at_most_2d(draft: Draft, op: str) -> Ref:
    found = draft.pick(lambda t: t.dim() <= 2 and not t.dtype.is_complex)
    return draft.add(op, found or draft.fresh(draft.draw_shape(2)))


def matrix(draft: Draft, op: str) -> Ref:
    complexes = draft.pick(lambda t: t.dtype in COMPLEX and t.dim() >= 2)
    exact = op == "aten.matrix_H.default"
    x = complexes if complexes is not None and not exact and draft.chance(0.5) else None
    if x is None:
        x = _matrix_of(draft) if exact else _x(draft, 2)
    return draft.add(op, x)


def _matrix_of(draft: Draft) -> Ref:
    return draft.pick(lambda t: t.dim() == 2) or draft.fresh(draft.draw_shape(2))


def expanded(draft: Draft, op: str) -> Ref:
    x = draft.pick(lambda t: 1 in t.shape and not t.dtype.is_complex)
    x = x if x is not None and draft.chance(0.7) else _x(draft)
    shape = list(draft.value(x).shape)
    grown = [draft.rng.choice((1, 2, 3, 5, 17)) if s == 1 else s for s in shape]
    lead = [draft.rng.choice((1, 2, 3))] if draft.chance(0.4) else []
    return draft.add(op, x, lead + grown)


def like_another(draft: Draft, op: str) -> Ref:
    x = _x(draft)
    t = draft.value(x)
    if op == "aten.expand_as.default":
        y = draft.pick(lambda v: v.dim() >= t.dim() and not v.dtype.is_complex and all(
            m in (1, n) for m, n in zip(t.shape[::-1], v.shape[::-1])))
    else:
        y = draft.pick(lambda v: v.numel() == t.numel() and not v.dtype.is_complex)
        if y is None or draft.chance(0.5):
            y = draft.fresh(tuple(torch.empty(t.shape).view(_other_shape(draft, t)).shape))
    return draft.add(op, x, y or x)


def sliced(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    d = _dim(draft, x)
    size = draft.value(x).shape[d]
    start, stop = _span(draft, size)
    start = start - size if draft.chance(0.2) and start else start
    return draft.add(op, x, d, start, stop if draft.chance(0.7) else 2**63 - 1, draft.rng.choice((1, 1, 2, 3)))


def selected(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    d = _dim(draft, x)
    size = draft.value(x).shape[d]
    return draft.add(op, x, d, draft.rng.randrange(-size, size) if size else 0)


def narrowed(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    d = _dim(draft, x)
    start, stop = _span(draft, draft.value(x).shape[d])
    return draft.add(op, x, d, start, stop - start)


def with_ones(draft: Draft) -> Ref:
    found = draft.pick(lambda t: 1 in t.shape and not t.dtype.is_complex)
    if found is not None:
        return found
    x = _x(draft)
    return draft.add("aten.unsqueeze.default", x, draft.rng.randint(0, draft.value(x).dim()))


def squeezed(draft: Draft, op: str) -> Ref:
    x = with_ones(draft)
    t = draft.value(x)
    ones = [d for d, s in enumerate(t.shape) if s == 1]
    if op.endswith("default") and not op.startswith("prims"):
        return draft.add(op, x)
    if op.endswith(".dim"):
        return draft.add(op, x, draft.rng.choice(ones) if draft.chance(0.8) else _dim(draft, x))
    return draft.add(op, x, draft.rng.sample(ones, draft.rng.randint(1, len(ones))))


def unsqueezed(draft: Draft, op: str) -> Ref:
    x = _x(draft)
    rank = draft.value(x).dim()
    return draft.add(op, x, draft.rng.randint(-rank - 1, rank))


def _cuts(draft: Draft, size: int) -> list[int]:
    count = draft.rng.randint(1, 3)
    marks = sorted(draft.rng.randint(0, size) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, size])]


def split(draft: Draft, op: str) -> Ref:
    """Every op that returns pieces; one of them is taken."""
    name = op.split(".")[1]
    least = {"vsplit": 2, "dsplit": 3}.get(name, 1)
    x = _x(draft, least)
    t = draft.value(x)
    d = {"vsplit": 0, "dsplit": 2, "hsplit": 0 if t.dim() == 1 else 1}.get(name, _dim(draft, x))
    size, rng = t.shape[d], draft.rng
    if name in ("hsplit", "vsplit", "dsplit"):
        if op.endswith("array"):
            return draft.add(op, x, sorted(rng.randint(0, size) for _ in range(2)), index=rng.randint(0, 2))
        parts = rng.choice([p for p in range(1, 6) if size % p == 0])
        return draft.add(op, x, parts, index=rng.randrange(parts))
    if name in ("unbind", "unbind_copy"):
        return draft.add(op, x, d, index=rng.randrange(size) if size else 0)
    if "with_sizes" in name or op.endswith("sizes"):
        sizes = _cuts(draft, size)
        return draft.add(op, x, sizes, d, index=rng.randrange(len(sizes)))
    if op.endswith("indices"):
        return draft.add(op, x, sorted(rng.randint(0, size) for _ in range(2)), d, index=rng.randint(0, 2))
    return draft.add(op, x, rng.randint(1, max(size, 1)) if name != "chunk" else rng.randint(1, 4), d, index=0)


def diagonal(draft: Draft, op: str) -> Ref:
    x = _x(draft, 2)
    d1, d2 = draft.rng.sample(range(draft.value(x).dim()), 2)
    offset = draft.rng.choice((0, 0, 1, -1))
    if op == "aten.linalg_diagonal.default":
        return draft.add(op, x, offset=offset, dim1=d1, dim2=d2)
    return draft.add(op, x, offset, d1, d2)


def unfolded(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    d = _dim(draft, x)
    size = draft.value(x).shape[d]
    return draft.add(op, x, d, draft.rng.randint(1, max(min(size, 5), 1)), draft.rng.randint(1, 3))


def _complex(draft: Draft) -> Ref:
    found = draft.pick(lambda t: t.dtype in COMPLEX)
    if found is not None and draft.chance(0.8):
        return found
    return as_complex(draft, "aten.view_as_complex.default")


def of_complex(draft: Draft, op: str) -> Ref:
    if op == "aten.real.default" and draft.chance(0.3):
        return draft.add(op, _x(draft))
    x = _complex(draft)
    if op == "aten.view_as_real.default" and draft.value(x).is_conj():
        x = draft.add("aten.resolve_conj.default", x)
    return draft.add(op, x)


def as_complex(draft: Draft, op: str) -> Ref:
    found = draft.pick(lambda t: t.dim() > 0 and t.shape[-1] == 2 and t.stride(-1) == 1
                       and t.dtype in (torch.float32, torch.float64))
    if found is None or draft.chance(0.4):
        shape = (*draft.draw_shape(most=512)[:3], 2)
        return draft.add(op, draft._add_input(_base(draft, shape, torch.float32), ""))
    return draft.add(op, found)


def _base(draft: Draft, shape: tuple[int, ...], dtype: torch.dtype) -> Base:
    return Base(draft.rng.randrange(1 << 16), shape, dtype)


def flattened(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    low, high = sorted(draft.rng.randrange(draft.value(x).dim()) for _ in range(2))
    return draft.add(op, x, low, high)


def unflattened(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    d = _dim(draft, x)
    size = draft.value(x).shape[d]
    f = draft.rng.choice([f for f in range(1, size + 1) if size % f == 0] or [1])
    return draft.add(op, x, d, [f, size // f])


# -- layout


def cloned(draft: Draft, op: str) -> Ref:
    if draft.chance(0.5):
        dense = op == "aten.contiguous.default" or draft.chance(0.6)
        kept = torch.contiguous_format if dense else torch.preserve_format
        return draft.add(op, _x(draft), memory_format=kept)
    return draft.add(op, _x(draft))


def flipped(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    return draft.add(op, x, _some_dims(draft, x))


def joined(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    t = draft.value(x)
    d = _dim(draft, x)
    if "stack" in op:
        parts = [x] + [draft.partner(x, exactly=True) for _ in range(draft.rng.randint(0, 2))]
    else:
        parts = [x]
        for _ in range(draft.rng.randint(1, 3)):
            def fits(v: Tensor) -> bool:
                return v.dim() == t.dim() and not v.dtype.is_complex and all(
                    m == n for i, (m, n) in enumerate(zip(v.shape, t.shape)) if i != d % t.dim())
            found = draft.pick(fits)
            shape = list(t.shape)
            shape[d] = draft.rng.choice((1, 2, 5))
            parts.append(found if found is not None and draft.chance(0.7) else draft.fresh(tuple(shape), t.dtype))
        draft.rng.shuffle(parts)
    if op in ("aten.cat.default", "aten.stack.default", "prims.cat.default"):
        return draft.add(op, parts, d % t.dim() if op.startswith("prims") else d)
    return draft.add(op, parts)


def padded(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    count = draft.rng.randint(1, min(draft.value(x).dim(), 3))
    pad = [draft.rng.choice((0, 1, 2, 3, -1)) for _ in range(2 * count)]
    return draft.add(op, x, pad, draft.rng.choice((0, 1, 0.5, -1)))


def scattered(draft: Draft, op: str) -> Ref:
    x = _x(draft, 2 if "diagonal" in op else 1)
    t, rng = draft.value(x), draft.rng
    d = _dim(draft, x)
    if "diagonal" in op:
        d1, d2 = rng.sample(range(t.dim()), 2)
        where: tuple[Any, ...] = (rng.choice((0, 1, -1)), d1, d2)
        shape = torch.diagonal(t, *where).shape
    elif "select" in op:
        where = (d, rng.randrange(t.shape[d]) if t.shape[d] else 0)
        shape = t.select(*where).shape if t.shape[d] else t.shape
    else:
        start, stop = _span(draft, t.shape[d])
        where = (d, start, stop, rng.choice((1, 1, 2, 3)))
        shape = torch.ops.aten.slice.Tensor(t, *where).shape
    found = draft.pick(lambda v: v.shape == shape and v.dtype == t.dtype)
    source = found if found is not None and draft.chance(0.7) else draft.fresh(tuple(shape), t.dtype)
    return draft.add(op, x, source, *where)


def repeated(draft: Draft, op: str) -> Ref:
    x = _x(draft)
    times = [draft.rng.choice((1, 1, 2, 3)) for _ in range(draft.value(x).dim() + draft.rng.randint(0, 1))]
    return draft.add(op, x, times)


def rolled(draft: Draft, op: str) -> Ref:
    x = _x(draft, 1)
    dims = _some_dims(draft, x, 1)
    shifts = [draft.rng.randint(-4, 4) for _ in dims]
    return draft.add(op, x, shifts[:1]) if draft.chance(0.2) else draft.add(op, x, shifts, dims)


def rotated(draft: Draft, op: str) -> Ref:
    x = _x(draft, 2)
    return draft.add(op, x, draft.rng.randint(-1, 3), draft.rng.sample(range(draft.value(x).dim()), 2))


def triangle(draft: Draft, op: str) -> Ref:
    return draft.add(op, _x(draft, 2), draft.rng.randint(-3, 3))


def at_least_2d(draft: Draft, op: str) -> Ref:
    return draft.add(op, _x(draft, 2))


# -- factories


def _fill(draft: Draft, dtype: torch.dtype | None) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return draft.rng.choice((0, 1, 3, True))
    return draft.rng.choice((0.5, 1.0, -2.0, 3, 0.1))


def factory(draft: Draft, op: str) -> Ref:
    """Every FACTORY row; its result has the shape of some value or one of its own."""
    rng, name = draft.rng, op.split(".")[1]
    dtype = draft.draw_dtype() if draft.chance(0.8) or op.startswith("prims") else None
    kwargs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    place: dict[str, Any] = {"device": Device()}
    if op.startswith("prims") and name != "scalar_tensor":
        place["requires_grad"] = False
    shape = list(draft.shape if draft.chance(0.7) else draft.draw_shape())
    if op == "aten.fill.Scalar":
        x = _x(draft)
        return draft.add(op, x, _fill(draft, draft.value(x).dtype))
    if name.endswith("_like"):
        x = _x(draft)
        filled = [_fill(draft, dtype or draft.value(x).dtype)] if name.startswith("full") else []
        return draft.add(op, x, *filled, **kwargs, **(place if op.startswith("prims") else {}))
    if name.startswith("new_"):
        x = _x(draft)
        filled = [_fill(draft, dtype or draft.value(x).dtype)] if name == "new_full" else []
        return draft.add(op, x, shape, *filled, **kwargs)
    if name in ("full", "zeros", "ones"):
        filled = [_fill(draft, dtype)] if name == "full" else []
        return draft.add(op, shape, *filled, **kwargs, **place)
    return _counting(draft, op, name, kwargs, place, rng.choice((1, 2, 5, 17, 32, 33)))


def _counting(draft: Draft, op: str, name: str, kwargs: dict[str, Any], place: dict[str, Any], n: int) -> Ref:
    rng = draft.rng
    if name == "scalar_tensor":
        return draft.add(op, _fill(draft, kwargs.get("dtype")), **kwargs, **place)
    if name == "eye":
        return draft.add(op, n, *([rng.choice((1, 3, 8))] if op.endswith("m") else []), **kwargs, **place)
    if name in ("tril_indices", "triu_indices"):
        kwargs = {"dtype": rng.choice((torch.int64, torch.int32))}
        return draft.add(op, n, rng.choice((2, 5, 9)), rng.randint(-2, 2), **kwargs, **place)
    if name == "linspace":
        return draft.add(op, rng.choice((0, -1.5, 2)), rng.choice((1, 3.0, 10)), n, **kwargs, **place)
    if name == "iota":
        kwargs = {"dtype": rng.choice((torch.int64, torch.int32))}
        return draft.add(op, n, start=rng.randint(-3, 5), step=rng.choice((1, 2, 3)), **kwargs, **place)
    bounds = {"default": (n,), "start": (2, 2 + n), "start_step": rng.choice(((0, n, 2), (1, 1 + n, 0.5), (n, 0, -1)))}
    return draft.add(op, *bounds[op.split(".")[2]], **kwargs, **place)


# -- reductions and gathers


def reduction(draft: Draft, op: str) -> Ref:
    name, overload = op.split(".")[1:]
    least = 0 if overload == "default" and name not in ("argmax", "argmin") else 1
    floats = name == "mean"
    x = _x(draft, least, lambda t: t.dtype.is_floating_point or not floats)
    if name == "prod" and draft.value(x).dtype.is_floating_point:
        x = draft.add("aten.clamp.default", x, -1.25, 1.25)
    rng = draft.rng
    keep = draft.chance(0.4)
    dtype: dict[str, Any] = {}
    if name in ("sum", "mean", "prod") and draft.chance(0.25):
        key = "output_dtype" if op.startswith("prims") else "dtype"
        kinds = (torch.float32, torch.float64) if floats or draft.chance(0.7) else (torch.int64, torch.int32)
        dtype = {key: rng.choice(kinds)}
    if op.startswith("prims"):
        return draft.add(op, x, _some_dims(draft, x, 1), **dtype)
    if name in ("argmax", "argmin"):
        return draft.add(op, x) if draft.chance(0.3) else draft.add(op, x, _dim(draft, x), keep)
    if overload == "default" and name not in ("amax", "amin"):
        return draft.add(op, x, **dtype)
    if overload in ("dim_int", "dim"):
        one = overload == "dim_int" or name in ("any", "all")
        return draft.add(op, x, _dim(draft, x) if one else _some_dims(draft, x, 1), keep, **dtype)
    return draft.add(op, x, _some_dims(draft, x, 1), keep, **dtype)


def _positions(draft: Draft, shape: tuple[int, ...], size: int, negative: bool = True) -> Ref:
    """An index tensor with values in [0, size), new or computed."""
    if not size:
        raise Refused("nothing to index")
    found = draft.pick(lambda t: t.dtype in (torch.int64, torch.int32) and tuple(t.shape) == shape)
    if found is not None and draft.chance(0.5):
        return draft.add("aten.remainder.Scalar", found, size)
    made = draft.fresh(shape, torch.int64, "index", size)
    return draft.add("aten.sub.Scalar", made, size) if negative and draft.chance(0.1) else made


def gathered(draft: Draft, op: str) -> Ref:
    rng, name = draft.rng, op.split(".")[1]
    x = _x(draft, 2 if name == "embedding" else 1, lambda t: t.dim() == 2 or name != "embedding")
    t = draft.value(x)
    d = _dim(draft, x)
    size = t.shape[d]
    few = draft.draw_shape(rng.randint(0, 2), 64)
    if name == "embedding":
        return draft.add(op, x, _positions(draft, few, t.shape[0], False))
    if name == "take":
        return draft.add(op, x, _positions(draft, few, t.numel()))
    if name == "index_select":
        return draft.add(op, x, d, _positions(draft, (rng.choice((1, 2, 7, 33)),), size, False))
    if name == "gather":
        shape = [rng.randint(1, max(s, 1)) if draft.chance(0.4) else s for s in t.shape]
        shape[d] = rng.choice((1, 2, max(size, 1)))
        return draft.add(op, x, d, _positions(draft, tuple(shape), size, False))
    first = rng.randrange(t.dim())
    count = rng.randint(1, min(t.dim() - first, 2))
    indices: list[Any] = [None] * first + [_positions(draft, few, t.shape[first + i]) for i in range(count)]
    return draft.add(op, x, indices)


def _recipes() -> Mapping[str, Recipe]:
    forms: dict[Recipe, str] = {
        reshaped: "view _unsafe_view reshape view_copy prims.reshape",
        reinterpreted: "view.dtype view_copy.dtype", restrided: "_reshape_alias as_strided",
        permuted: "permute permute_copy",
        transposed: "transpose.int transpose_copy.int swapaxes swapdims movedim.int moveaxis.int",
        moved: "movedim.intlist moveaxis.intlist",
        plain: "alias detach lift_fresh ravel resolve_conj resolve_neg alias_copy detach_copy lift_fresh_copy "
               "conj prims.clone",
        at_most_2d: "t t_copy numpy_T", matrix: "mT mH adjoint matrix_H",
        expanded: "expand expand_copy broadcast_to", like_another: "expand_as view_as reshape_as",
        sliced: "slice.Tensor slice_copy.Tensor", selected: "select.int select_copy.int", narrowed: "narrow",
        squeezed: "squeeze squeeze.dim squeeze.dims squeeze_copy squeeze_copy.dim squeeze_copy.dims",
        unsqueezed: "unsqueeze unsqueeze_copy",
        split: "split.Tensor split.sizes unsafe_split.Tensor split_with_sizes unsafe_split_with_sizes unbind.int "
               "chunk tensor_split.sections tensor_split.indices hsplit.int hsplit.array vsplit.int vsplit.array "
               "dsplit.int dsplit.array split_with_sizes_copy unbind_copy.int",
        diagonal: "diagonal linalg_diagonal diagonal_copy", unfolded: "unfold unfold_copy",
        of_complex: "view_as_real real imag _conj", as_complex: "view_as_complex",
        flattened: "flatten.using_ints prims.collapse",
        unflattened: "unflatten.int",
        cloned: "clone contiguous", flipped: "flip prims.rev",
        joined: "cat stack hstack vstack dstack prims.cat", padded: "constant_pad_nd",
        scattered: "slice_scatter select_scatter diagonal_scatter", repeated: "repeat tile", rolled: "roll",
        rotated: "rot90", triangle: "tril triu", at_least_2d: "fliplr flipud",
        factory: "full full_like new_full zeros zeros_like new_zeros ones ones_like new_ones arange arange.start "
                 "arange.start_step scalar_tensor eye eye.m tril_indices triu_indices linspace prims.full "
                 "prims.full_like prims.iota prims.scalar_tensor fill.Scalar",
        reduction: "max min sum sum.dim_IntList prims.sum mean mean.dim prod prod.dim_int prims.prod amax prims.amax "
                   "amin prims.amin argmax argmin any any.dim any.dims all all.dim all.dims",
        gathered: "index.Tensor _unsafe_index.Tensor index_select gather embedding take",
    }
    return {_full_name(word): recipe for recipe, words in forms.items() for word in words.split()}


def _full_name(word: str) -> str:
    name = word if word.startswith("prims.") else f"aten.{word}"
    return name if name.count(".") == 2 else f"{name}.default"


RECIPES: Mapping[str, Recipe] = _recipes()
assert set(DTYPES) >= set(SAME_SIZE)
