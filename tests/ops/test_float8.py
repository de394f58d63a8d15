"""Float8 in kernels: casts are eager's to the bit, all else moves bytes, and what eager refuses is refused."""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget

from fxfuser import observe
from fxfuser.coverage import Coverage, coverage
from fxfuser.runtime.build import Variant, build
from tests.lowering.gemm.harness import made
from tests.lowering.harness import compiled as lowered

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8,
          torch.uint8, torch.bool, *FLOAT8)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def bits(value: Any) -> Any:
    """Float8 as integers, which can be compared."""
    if isinstance(value, (tuple, list)):
        return tuple(map(bits, value))
    return value.view(torch.uint8) if isinstance(value, Tensor) and value.dtype in FLOAT8 else value


def compiled(fn: Callable[..., Any], *args: Any, exact: bool = True, **options: Any) -> observe.Recording:
    """What was recorded of a call, which leaves its arguments and results as eager does."""
    torch.compiler.reset()
    ours, eager = copy.deepcopy(args), copy.deepcopy(args)
    with observe.recording() as recording, torch.no_grad():
        found = torch.compile(fn, backend="fxfuser",
                              options={"executor": "interpret", "strict": True, **options})(*ours)
        expected = fn(*eager)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(bits((found, ours)), bits((expected, eager)), equal_nan=True, **close)
    return recording


def assert_kernels(recording: observe.Recording, count: int) -> None:
    """That many kernels hold all that is computed."""
    (graph,) = recording.graphs
    found: Coverage = coverage(graph)
    assert found.lowered == found.compute and len(graph.kernels) == count, graph.plan


def hard_numbers() -> Tensor:
    """Every float that has only its upper 16 bits, between which all roundings of float8 lie, and its neighbours."""
    high = torch.arange(1 << 15, dtype=torch.int32) << 16
    return torch.cat((high, high + 1, high - 1, high | -(1 << 31))).view(torch.float32)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_numbers_are_rounded_to_eager_s_bytes(dtype: torch.dtype) -> None:
    assert_kernels(compiled(lambda x: x.to(dtype), hard_numbers()), 1)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_casts_of_all_bytes_and_to_bytes(dtype: torch.dtype, other: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    integral = not other.is_floating_point
    held = every[every.float().isfinite() & (every.float().abs() < 128)] if integral else every
    if other is torch.uint8:
        held = held[held.float() >= 0]
    compiled(lambda x: x.to(other), held)
    compiled(lambda x: x.to(dtype), (x(999) * 99).to(other))


def quantised(h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = h.abs().amax(-1, keepdim=True).float() / torch.finfo(dtype).max
    return (h.float() / scale).to(dtype), scale


@pytest.mark.parametrize("dtype", FLOAT8)
def test_rows_and_their_scales_are_one_kernel(dtype: torch.dtype) -> None:
    assert_kernels(compiled(lambda h: quantised(h, dtype), x(5, 24, dtype=torch.bfloat16), numerics="eager"), 1)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_weights_are_read_as_bytes_by_the_product(dtype: torch.dtype) -> None:
    def linear(h: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return F.linear(h, w.to(h.dtype) * scale[:, None])

    arguments = x(5, 64, dtype=torch.bfloat16), x(32, 64).to(dtype), x(32, dtype=torch.bfloat16)
    (graph,) = compiled(linear, *arguments, exact=False, gemm="fused").graphs
    assert [s.kind.value for s in graph.segmentation.segments] == ["gemm"]


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_cache_is_written_where_it_is(dtype: torch.dtype) -> None:
    def paged(cache: Tensor, k: Tensor, block: Tensor, offset: Tensor) -> None:
        cache[block, offset] = (k * 2).to(dtype)

    arguments = x(5, 4, 8).to(dtype), x(3, 8), torch.tensor([0, 4, 1]), torch.tensor([1, 1, 3])
    recording = compiled(paged, *arguments)
    assert_kernels(recording, 1)
    assert "scatter_into" in str(recording.graphs[0].plan)


@pytest.mark.parametrize("put", ["index_copy", "index_put", "slice"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_cache_is_written_as_bytes_where_it_is(dtype: torch.dtype, put: str) -> None:
    def write(cache: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        seen, new = cache.view(torch.uint8), (k * 2).to(dtype).view(torch.uint8)
        if put == "index_copy":
            seen.index_copy_(1, positions, new)
        elif put == "index_put":
            seen[:, positions] = new
        else:
            seen[:, 3:5] = new
        return cache.float().sum()

    (graph,) = compiled(write, x(2, 9, 8).to(dtype), x(2, 2, 8), torch.tensor([3, 5]), exact=False).graphs
    plan = str(graph.plan)
    assert "index_put.default(" not in plan and "index_copy.default(" not in plan
    if put != "slice":  # which is small: a kernel may write all of it
        assert "copy_.default" not in plan and "scatter_into" in plan


def test_bytes_move_as_they_are() -> None:
    def moved(a: Tensor, b: Tensor, i: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat((a, b), 1), a[i], a.roll(1, 1), a.index_select(1, i), F.embedding(i, a),
                a[:1].expand(4, -1).contiguous(), torch.where(mask, a, a.roll(2, 0)), F.pad(a, (1, 0), value=1.7),
                torch.full_like(a, -3.3), torch.zeros_like(a))

    for dtype in FLOAT8:
        every = torch.arange(256, dtype=torch.uint8).view(dtype).view(8, 32)  # NaN with their bits
        mask = torch.rand(8, 32, generator=torch.Generator().manual_seed(0)) > 0.5
        assert_kernels(compiled(moved, every, every[:, 3:7], torch.tensor([2, 0]), mask), 1)


@pytest.mark.parametrize("refused", [
    lambda a, i: a + a, lambda a, i: a * 2.0, lambda a, i: a.sum(), lambda a, i: a.gather(0, i[:, None]),
    lambda a, i: a.index_copy_(0, i, a[:2].clone()), lambda a, i: a.flip(1)])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_what_eager_refuses_is_refused(dtype: torch.dtype, refused: Callable[..., Any]) -> None:
    a, i = x(3, 4).to(dtype), torch.tensor([0, 2])
    with pytest.raises(NotImplementedError):
        refused(a.clone(), i)
    torch.compiler.reset()
    with pytest.raises(NotImplementedError):
        torch.compile(refused, backend="fxfuser", options={"executor": "interpret"})(a, i)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_kernels_build(dtype: torch.dtype, arch: int) -> None:
    """On devices without instructions for float8 as well."""
    def product(h: Tensor, w: Tensor) -> Tensor:
        return (h @ w.to(h.dtype)).to(dtype)

    h, w = x(64, 64, dtype=torch.bfloat16), x(64, 64).to(dtype)
    kernels = [launch.kernel for p in made(product, [h, w], blocks=None).programs.values() for launch in p.launches]
    kernels += [lowered(lambda h: quantised(h, dtype), [h])[2].kernel]
    for kernel in kernels:
        assert build(kernel, Variant.usual(kernel), GPUTarget("cuda", arch, 32)).asm["cubin"]
