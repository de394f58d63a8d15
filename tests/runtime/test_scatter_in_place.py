"""Writes into a mutated tensor are stores of the kernel that computes them, and only where nobody can tell."""

from __future__ import annotations

import copy
import re
from typing import Any, Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fxfuser import observe
from fxfuser.config import Config
from fxfuser.lowering.lower import lower
from fxfuser.ops import SCATTER_INTO
from fxfuser.runtime.build import report
from fxfuser.segmenter.segment import SegmentKind

Function = Callable[..., Any]
Case = tuple[Function, tuple[Any, ...]]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def at(*positions: int) -> Tensor:
    return torch.tensor(positions)


def compiled(fn: Function, args: tuple[Any, ...], executor: str = "interpret", dynamic: bool = False, **options: Any,
             ) -> observe.Recording:
    """What was recorded of a call, which leaves its arguments and results as eager does."""
    torch.compiler.reset()
    ours, eager = copy.deepcopy(args), copy.deepcopy(args)  # tensors that share memory still do
    options = {"executor": executor, "strict": executor == "interpret", **options}
    with observe.recording() as recording, torch.no_grad():
        found = torch.compile(fn, backend="fxfuser", options=options, dynamic=dynamic)(*ours)
        expected = fn(*eager)
    close = 1e-2 if any(isinstance(a, Tensor) and a.dtype is torch.bfloat16 for a in args) else 2e-4
    torch.testing.assert_close((ours, found), (eager, expected), rtol=close, atol=close)
    return recording


def plan_of(recording: observe.Recording) -> str:
    return "\n".join(str(g.plan) for g in recording.graphs)


def in_place(recording: observe.Recording) -> bool:
    """Whether kernels did all writes: no ATen op scatters, and nothing is copied."""
    plan = plan_of(recording)
    return "scatter_into" in plan and re.search(r"(index_copy|index_put|\w*_scatter)_?\.\w+\(", plan) is None \
        and not re.search(r"copy_\.default\((?!\w+, add)", plan)


def reasons(recording: observe.Recording) -> str:
    return "\n".join(s.reason for g in recording.graphs for s in g.segmentation.segments)


def turned(k: Tensor) -> Tensor:
    """A position embedding's exchange of halves."""
    return torch.cat((-k[..., k.shape[-1] // 2:], k[..., :k.shape[-1] // 2]), -1) * 0.7 + k


def attention(q: Tensor, cache: Tensor) -> Tensor:
    return torch.softmax(q @ cache.transpose(-1, -2), -1) @ cache


def step(cache: Tensor, k: Tensor, positions: Tensor, q: Tensor) -> Tensor:
    cache.index_copy_(2, positions, turned(k))
    return attention(q, cache)


def along(dim: int) -> Function:
    def write(cache: Tensor, k: Tensor, positions: Tensor) -> None:
        cache.index_copy_(dim, positions, k.sin())
    return write


def put(cache: Tensor, k: Tensor, positions: Tensor) -> None:
    cache[:, :, positions] = k * 2


def paged(cache: Tensor, k: Tensor, block: Tensor, offset: Tensor) -> None:
    cache[block, offset] = k.exp()


def paged_apart(cache: Tensor, k: Tensor, block: Tensor, offset: Tensor) -> None:
    cache[block, :, offset] = k.exp()


def product(cache: Tensor, h: Tensor, w: Tensor, positions: Tensor, q: Tensor) -> Tensor:
    cache.index_copy_(2, positions, turned((h @ w).view(2, 1, 3, 8).transpose(1, 2)))
    return attention(q, cache)


def keys_and_values(
    keys: Tensor, values: Tensor, h: Tensor, wk: Tensor, wv: Tensor, positions: Tensor, q: Tensor
) -> Tensor:
    k, v = ((h @ w).view(2, 1, 3, 8).transpose(1, 2) for w in (wk, wv))
    keys.index_copy_(2, positions, turned(k))
    values.index_copy_(2, positions, v)
    return torch.softmax(q @ keys.transpose(-1, -2), -1) @ values


def counted(cache: Tensor, k: Tensor, filled: Tensor) -> Tensor:
    positions = torch.arange(k.shape[0]) + filled
    filled.add_(k.shape[0])
    cache.index_copy_(0, positions, k * 2)
    return cache.sum()


def normalised(cache: Tensor, h: Tensor, positions: Tensor) -> Tensor:
    cache.index_copy_(0, positions, F.layer_norm(h, h.shape[-1:]))
    return cache.sum()


def also_read(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    new = k * 2
    cache.index_copy_(0, positions, new)
    return new + cache.sum()


def two_tensors(first: Tensor, second: Tensor, k: Tensor, positions: Tensor) -> None:
    first.index_copy_(0, positions, k * 2)
    second.index_copy_(0, positions, k * 2)


def two_writes(cache: Tensor, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> Tensor:
    cache.index_copy_(1, i, a * 2)
    cache.index_copy_(1, j, b + 1)
    return cache.sum(1)


def read_between(cache: Tensor, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = cache.sum(1)
    cache.index_copy_(1, i, a * 2)
    between = cache.sum(1)
    cache.index_copy_(1, j, b + 1)
    return before, between, cache.sum(1)


def of_old(cache: Tensor, a: Tensor, i: Tensor) -> Tensor:
    cache.index_copy_(1, i, a * cache.sum(1, keepdim=True))
    return cache.amax(1)


def moved(cache: Tensor, i: Tensor, j: Tensor) -> None:
    cache.index_copy_(1, i, cache[:, j] * 2)


def product_of_old(cache: Tensor, h: Tensor, i: Tensor) -> Tensor:
    y = h @ cache[:8].T
    cache.index_copy_(1, i, y.T.reshape(16, -1)[:, :2] * 2)
    return y


def part(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    cache[:, :, :10].index_copy_(2, positions, k * 2)
    return cache + 1


def part_of_part(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    cache[1][:, :10].index_copy_(1, positions, k * 2)
    return cache + 1


def transposed(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    cache.transpose(0, 1)[:8].index_copy_(1, positions, k * 2)
    return cache + 1


def unsqueezed(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    cache.unsqueeze(1).index_copy_(0, positions, k[:, None] * 2)
    return cache * 2


def twice_in_a_part(cache: Tensor, a: Tensor, b: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    rows = cache[2:9]
    rows.index_copy_(0, i, a * 2)
    rows[j] = b + 1
    return cache.sum(), rows * 3


def with_fills(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    cache.index_copy_(0, positions, k.abs())
    cache[0] = 1.0
    cache[1:3] = k[:2]
    return cache * 2


def rows_read(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    cache.index_copy_(0, positions, k * 2)
    return cache[:, :4] * cache.sum(1, keepdim=True)


def attended(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    keys.index_copy_(2, positions, k * 2)
    return F.scaled_dot_product_attention(q, keys, values)


def cast(cache: Tensor, k: Tensor, positions: Tensor) -> None:
    cache[positions] = k.to(cache.dtype)


CACHE, K, Q = x(2, 3, 16, 8), x(2, 3, 1, 8), x(2, 3, 4, 8)
IN_PLACE: dict[str, Case] = {
    "one position": (step, (CACHE, K, at(3), Q)),
    "several positions": (step, (CACHE, x(2, 3, 5, 8), at(3, 9, 1, 15, 0), Q)),
    "halves": (along(2), (CACHE.bfloat16(), x(2, 3, 5, 8, dtype=torch.bfloat16), at(3, 9, 1, 15, 0))),
    "integers": (lambda c, k, i: c.index_copy_(0, i, k + 1), (torch.arange(64).view(16, 4), torch.arange(8).view(2, 4),
                                                              at(7, 1))),
    "bools": (lambda c, k, i: c.index_copy_(0, i, ~k), (torch.zeros(16, 4) > 0, x(2, 4) > 0, at(7, 1))),
    "first dimension": (along(0), (x(16, 3, 8), x(2, 3, 8), at(3, 9))),
    "middle dimension": (along(1), (x(5, 16, 8), x(5, 3, 8), at(3, 9, 4))),
    "last dimension": (along(-1), (x(5, 16), x(5, 3), at(3, 9, 4))),
    "vector": (along(0), (x(16), x(3), at(3, 9, 4))),
    "position that is a number": (along(0), (x(16, 4), x(1, 4), torch.tensor(3))),
    "index put": (put, (CACHE, x(2, 3, 2, 8), at(3, -1))),
    "int32 positions": (put, (CACHE, x(2, 3, 2, 8), at(3, -1).int())),
    "one row at several": (put, (CACHE, x(8), at(3, -1))),
    "pages": (paged, (x(6, 4, 8), x(5, 8), at(0, 2, 5, 5, 1), at(0, 1, 2, 3, 3))),
    "pages of heads": (paged_apart, (x(6, 3, 4, 8), x(5, 3, 8), at(0, 2, 5, 5, 1), at(0, 1, 2, 3, 3))),
    "a block of pages": (paged, (x(6, 4, 8), x(3, 2, 8), at(0, 2, 5)[:, None], at(1, 3)[None])),
    "a number": (lambda c, i: c.__setitem__(i, 0.5), (x(16, 4), at(3, 5))),
    "behind a cast": (cast, (x(16, 4).bfloat16(), x(3, 4), at(7, 1, 4))),
    "behind a norm": (normalised, (x(16, 40), x(3, 40), at(7, 1, 4))),
    "behind a reduction": (lambda c, h, i: c.index_copy_(0, i, h.amax(-1)), (x(16), x(3, 40), at(7, 1, 4))),
    "behind a sum of columns": (lambda c, h, i: c.index_copy_(0, i, h.sum(0)), (
        x(160), x(300, 40), torch.arange(159, 0, -4))),
    "behind a product": (product, (CACHE, x(2, 512), x(512, 24) / 20, at(7), Q)),
    "keys and values": (keys_and_values, (CACHE, CACHE * 2, x(2, 1024), x(1024, 24) / 20, x(1024, 24) / 9, at(7), Q)),
    "computed positions": (counted, (x(16, 40), x(3, 40), torch.tensor(4))),
    "what else is read": (also_read, (x(16, 40), x(3, 40), at(7, 1, 4))),
    "two tensors": (two_tensors, (x(16, 40), x(16, 40), x(3, 40), at(7, 1, 4))),
    "two writes": (two_writes, (x(3, 16, 8), x(3, 2, 8), x(3, 2, 8), at(1, 2), at(2, 5))),
    "read before, between and after": (read_between, (x(3, 16, 8), x(3, 2, 8), x(3, 2, 8), at(1, 2), at(2, 5))),
    "new of old": (of_old, (x(3, 16, 8), x(3, 2, 8), at(1, 2))),
    "moved": (moved, (x(3, 16, 8), at(1, 2), at(2, 3))),
    "a product of the old": (product_of_old, (x(16, 40), x(4, 40), at(7, 1))),
    "returned": (lambda c, k, i: c.index_copy_(1, i, k * 2), (x(3, 16, 8), x(3, 2, 8), at(1, 2))),
    "part": (part, (CACHE, x(2, 3, 2, 8), at(3, 9))),
    "part of a part": (part_of_part, (CACHE, x(3, 2, 8), at(3, 9))),
    "transposed": (transposed, (x(16, 12), x(8, 3), at(7, 1, 4))),
    "unsqueezed": (unsqueezed, (x(16, 4), x(3, 4), at(7, 1, 4))),
    "twice in a part": (twice_in_a_part, (x(16, 12), x(3, 12), x(2, 12), at(4, 1, 6), at(1, 2))),
    "fills and slices too": (with_fills, (x(16, 4), x(3, 4), at(7, 1, 4))),
    "columns of a tensor": (rows_read, (x(12, 16).t(), x(3, 12), at(4, 1, 6))),
    "gaps in a tensor": (rows_read, (x(16, 30)[:, 3:15], x(3, 12), at(4, 1, 6))),
    "attention to part of a tensor": (attended, (x(2, 3, 40, 16)[:, :, 4:20], x(2, 3, 16, 16), x(2, 3, 1, 16),
                                                 x(2, 3, 1, 16), at(5))),
}


@pytest.mark.parametrize("executor", ["interpret", "reference"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_kernel_stores_where_the_value_belongs(name: str, executor: str) -> None:
    assert in_place(compiled(*IN_PLACE[name], executor))


@pytest.mark.parametrize("name", ["one position", "index put", "pages", "behind a norm", "keys and values", "part",
                                  "read before, between and after", "gaps in a tensor"])
def test_sizes_that_vary(name: str) -> None:
    assert in_place(compiled(*IN_PLACE[name], dynamic=True))


def rows_of(cache: Tensor, h: Tensor, w: Tensor, b: Tensor, positions: Tensor) -> None:
    cache.index_copy_(0, positions, torch.relu(h @ w + b))


def heads_of(cache: Tensor, h: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    cache.index_copy_(2, positions, (h @ w).view(2, 40, 3, 16).transpose(1, 2) * 2)
    return cache.sum()


def pages_of(cache: Tensor, h: Tensor, w: Tensor, block: Tensor, offset: Tensor) -> None:
    cache[block, offset] = (h @ w) * 2


def slice_of(cache: Tensor, h: Tensor, w: Tensor) -> None:
    cache[:, 64:128] = (h @ w).sin()


def columns_of(cache: Tensor, h: Tensor, w: Tensor, positions: Tensor) -> None:
    cache.index_copy_(1, positions, h @ w * 2)


def and_maxima_of(cache: Tensor, h: Tensor, w: Tensor, positions: Tensor) -> Tensor:
    y = h @ w * 2
    cache.index_copy_(0, positions, y)
    return y.amax(1)


H, W, SHUFFLED = x(80, 48), x(48, 64) / 7, (torch.arange(80) * 77 + 5) % 199
PRODUCTS: dict[str, Case] = {
    "rows": (rows_of, (x(200, 64), H, W, x(64), SHUFFLED)),
    "heads": (heads_of, (x(2, 3, 64, 16), x(80, 96), x(96, 48) / 9, (torch.arange(40) * 7 + 3) % 61)),
    "pages": (pages_of, (x(20, 8, 64), H, W, torch.arange(80) // 8, torch.arange(80) % 8)),
    "a slice": (slice_of, (torch.zeros(80, 1 << 14), H, W)),
    "columns": (columns_of, (x(80, 200), H, W, (torch.arange(64) * 77 + 5) % 199)),
    "maxima of the rows too": (and_maxima_of, (x(200, 64), H, W, SHUFFLED)),
    "long sums": (rows_of, (x(40, 32), x(16, 4096), x(4096, 32) / 60, x(32), torch.arange(39, 7, -2))),
    **{name: IN_PLACE[name] for name in ("behind a product", "keys and values")},
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_store_their_tiles_and_sums_in_place(name: str, dynamic: bool) -> None:
    recording = compiled(*PRODUCTS[name], dynamic=dynamic, gemm="fused")
    kinds = [s.kind for g in recording.graphs for s in g.segmentation.segments if any(
        n.target is SCATTER_INTO for n in s.nodes)]
    assert in_place(recording) and (dynamic or set(kinds) == {SegmentKind.GEMM})


def test_no_product_stores_into_its_own_factor() -> None:
    def fn(cache: Tensor, h: Tensor, positions: Tensor) -> None:
        cache.index_copy_(0, positions, h @ cache * 2)

    recording = compiled(fn, (x(64, 64), x(4, 64), at(1, 7, 60, 2)), gemm="fused")
    stores = [s for s in recording.graphs[0].segmentation.segments if any(n.target is SCATTER_INTO for n in s.nodes)]
    assert in_place(recording) and [s.kind for s in stores] == [SegmentKind.POINTWISE]


@pytest.mark.parametrize("rows", [4, 40])
def test_two_products_that_store_into_one_tensor_are_apart(rows: int) -> None:
    """Where both write a place, the second's value stays."""
    def fn(cache: Tensor, h: Tensor, v: Tensor, w: Tensor, positions: Tensor) -> None:
        first = h @ v
        cache.index_copy_(0, positions, first.relu())
        cache.index_copy_(0, positions, first + h @ w)

    recording = compiled(fn, (x(64, 24), x(rows, 32), x(32, 24), x(32, 24), torch.arange(rows).flip(0)), gemm="fused")
    stores = [sum(n.target is SCATTER_INTO for n in s.nodes) for s in recording.graphs[0].segmentation.segments]
    assert in_place(recording) and sorted(stores)[-2:] == [1, 1]


def test_no_buffer_has_the_size_of_the_tensor() -> None:
    plan = plan_of(compiled(*IN_PLACE["keys and values"]))
    assert "1 kernel launch" in plan  # softmax; the others are the two halves of the products, with both writes
    assert not re.search(r"empty\w*\(\(2, 3, 16, 8\)", plan)


def test_keys_and_values_are_one_launch_with_what_computes_them() -> None:
    def layer(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        keys.index_copy_(2, positions, turned(k))
        values.index_copy_(2, positions, v.view(2, 1, 3, 16).transpose(1, 2))
        return F.scaled_dot_product_attention(turned(q), keys, values)

    recording = compiled(layer, (x(2, 3, 16, 16), x(2, 3, 16, 16), x(2, 3, 1, 16), x(2, 3, 1, 16), x(2, 48), at(5)))
    assert in_place(recording) and "1 kernel launch, 1 ATen call" in plan_of(recording)


# ---------------------------------------------------------------- what stays as it was


def old_later(cache: Tensor, a: Tensor, i: Tensor) -> Tensor:
    new = cache.index_copy(1, i, a * 1)
    old = torch.sort(cache, 1)[0]
    torch.ops.aten.copy_.default(cache, new)
    return old * new.sum()


def view_returned(cache: Tensor, a: Tensor, i: Tensor) -> Tensor:
    cache.index_copy_(1, i, a * 2)
    return cache[:, :4]


def overlapping(cache: Tensor, other: Tensor, a: Tensor, i: Tensor) -> Tensor:
    cache.index_copy_(0, i, a * 2)
    return other + 1


BASE = x(16, 4)
LEFT: dict[str, tuple[Function, tuple[Any, ...], str]] = {
    "a view of it is returned": (view_returned, (x(3, 16, 8), x(3, 2, 8), at(1, 2)), "the caller gets the new value"),
    "a reader reshapes it": (step, (x(2, 16, 3, 8).transpose(1, 2), K, at(3), Q), "reshapes the new value"),
    "nothing is stored": (along(1), (x(5, 16, 8), x(5, 0, 8), at()[:0].long()), "nothing is stored"),
    "it moves its own elements": (lambda c, i: c.index_copy_(1, i, c[:, 5:7]), (x(3, 16, 8), at(1, 2)),
                                  "elements of the tensor itself"),
    "inputs that overlap": (overlapping, (BASE, BASE[2:5], x(3, 4), at(7, 1, 4)), "writes at positions"),
    "accumulation": (lambda c, a, i: c.index_put_((i,), a, accumulate=True), (x(16, 4), x(3, 4), at(7, 1, 1)), ""),
    "a mask": (lambda c, m: c.__setitem__(m, 0.0), (x(16, 4), torch.arange(16) % 2 == 0), ""),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_could_be_told_from_a_copy_is_left_alone(name: str) -> None:
    fn, args, reason = LEFT[name]
    recording = compiled(fn, args)
    assert "scatter_into" not in plan_of(recording) and reason in reasons(recording)


def test_small_tensors_and_slices_of_old_values_stay_pointwise() -> None:
    def shift(c: Tensor, a: Tensor) -> None:
        c[:, 3:5] = a * 2

    def grow(c: Tensor, a: Tensor) -> None:
        c[:, 3:5] += a

    assert "scatter_into" not in plan_of(compiled(shift, (x(8, 16, 4), x(8, 2, 4))))
    large = torch.zeros(8, 1 << 15, 4)
    assert in_place(compiled(shift, (large, x(8, 2, 4))))
    assert "scatter_into" not in plan_of(compiled(grow, (large, x(8, 2, 4)), executor="reference"))


def test_slices_of_sizes_that_vary() -> None:
    def two(c: Tensor, a: Tensor) -> None:
        c[:, 3:5] = a * 2
        c[:, 9] = 1.5

    assert in_place(compiled(two, (x(8, 40, 16), x(8, 2, 16)), dynamic=True))


@pytest.mark.parametrize("written", [
    lambda c, a: c.select(1, 7).copy_(a[:, 0] * 2), lambda c, a: c[:, 7:11:2].copy_(a * 2),
    lambda c, a: c[:, 7:9].fill_(2.5), lambda c, a: c[2:4, 7:9].copy_(a[:2].double() * 3)])
def test_slices_of_large_tensors(written: Function) -> None:
    def fn(c: Tensor, a: Tensor) -> None:
        written(c, a)

    assert in_place(compiled(fn, (torch.zeros(8, 1 << 15, 4), x(8, 2, 4))))


# ---------------------------------------------------------------- positions


def test_each_of_several_values_for_one_place_may_win() -> None:
    cache, k = torch.zeros(16, 8), x(5, 8)
    torch.compile(along(0), backend="fxfuser", options={"executor": "interpret"})(cache, k, at(3, 3, 9, 3, 9))
    assert cache[[0, 1, 2, *range(4, 9), *range(10, 16)]].eq(0).all()
    for place, candidates in ((3, [0, 1, 3]), (9, [2, 4])):
        torch.testing.assert_close((cache[place] - k[candidates].sin()).abs().amin(0), torch.zeros(8))


@pytest.mark.parametrize("position", [16, -1, -17, 1 << 40])
def test_positions_out_of_range_are_refused(position: int) -> None:
    compiled_write = torch.compile(along(0), backend="fxfuser", options={"executor": "interpret", "strict": True})
    cache = x(16, 4)
    with pytest.raises(Exception, match="outside of its dimension|out of bounds|out of range"):
        compiled_write(cache, x(2, 4), at(3, position))
    compiled_write(cache, x(2, 4), at(3, 4))  # and the next call is served


def test_a_position_before_the_first_is_refused_by_index_put() -> None:
    compiled_put = torch.compile(put, backend="fxfuser", options={"executor": "interpret", "strict": True})
    with pytest.raises(Exception, match="outside of its dimension|out of bounds|out of range"):
        compiled_put(CACHE.clone(), x(2, 3, 2, 8), at(3, -17))


# ---------------------------------------------------------------- around it


def test_a_kernel_that_cannot_run_leaves_its_writes_to_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ATen ops that stand for a kernel write to the tensor itself, too."""
    def broken(*args: Any) -> Any:
        raise RuntimeError("no kernel")

    monkeypatch.setattr("fxfuser.runtime.lower_segments.lower_kernel", broken)
    with pytest.warns(UserWarning):
        recording = compiled(*IN_PLACE["one position"], executor="interpret", strict=False)
    assert in_place(recording)


class Kept(torch.autograd.Function):
    """Its backward keeps the gradient in a row of a buffer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, kept: Tensor, row: Tensor) -> Tensor:
        ctx.kept, ctx.row = kept, row
        return h * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.index_copy_(0, ctx.row, gradients[0][None].sin())
        return gradients[0] * 2, None, None


@pytest.mark.parametrize("executor", ["interpret", "reference"])
def test_a_write_of_the_backward_is_told_to_autograd(executor: str) -> None:
    def run(function: Function) -> tuple[Tensor, ...]:
        h, kept = torch.arange(8.0).requires_grad_(), torch.zeros(4, 8)
        y = function(h, kept, at(2))
        before = kept._version
        y.sum().backward()
        assert kept._version > before and h.grad is not None
        return y.detach(), h.grad, kept

    def function(h: Tensor, kept: Tensor, row: Tensor) -> Tensor:
        y: Tensor = Kept.apply(h, kept, row)
        return y.cos()

    expected = run(function)
    torch.compiler.reset()
    found = run(torch.compile(function, backend="fxfuser", options={"executor": executor}))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["one position", "behind a norm", "pages of heads", "keys and values"])
def test_the_kernels_build_without_spills(name: str) -> None:
    recording = compiled(*IN_PLACE[name])
    built = 0
    for segment in recording.graphs[0].segmentation.segments:
        if segment.kind not in (SegmentKind.POINTWISE, SegmentKind.REDUCTION):
            continue
        found = report(lower(segment, Config(), {}).kernel)
        assert found.spills == 0
        built += 1
    assert built
