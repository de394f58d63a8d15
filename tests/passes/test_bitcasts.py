"""Views as another dtype: values of the same bits, in one kernel with what computes them; and where they stay views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fxfuser import observe
from fxfuser.ops.bitcast import castable

Tensor = torch.Tensor
OPTIONS = {"executor": "interpret", "strict": True}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BITS = {BF16: torch.int16, F16: torch.int16, F32: torch.int32, F64: torch.int64, E4M3: torch.uint8, E5M2: torch.int8}


def ran(fn: Callable[..., Any], *args: Tensor, dynamic: bool = False) -> tuple[Any, str, int]:
    """What the compiled function returns, its plan, and how many bitcasts it has."""
    torch.compiler.reset()
    with torch.no_grad(), observe.recording() as recording:
        compiled = torch.compile(fn, backend="fxfuser", dynamic=dynamic, options=OPTIONS)
        result = compiled(*[a.clone() for a in args])
    (graph,) = recording.graphs
    plan = graph.plan
    return result, plan, next(p for p in graph.passes if p.name == "join_bitcasts").changes


def same(got: Tensor, want: Tensor) -> None:
    if want.dtype.itemsize == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def joined(fn: Callable[..., Any], *args: Tensor, bitcasts: int = 1) -> None:
    result, plan, found = ran(fn, *args)
    assert found == bitcasts and plan.startswith('"""Plan of') and "1 kernel launch." in plan.splitlines()[0]
    same(result, fn(*args))


def hard(dtype: torch.dtype) -> Tensor:
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.5, 3.14159, 1e-7, -6e-8, 65504.0, 1e30, float("inf"), -float("inf"),
                            float("nan")])
    return torch.cat([numbers, torch.randn(53)]).to(dtype)


@pytest.mark.parametrize("dtype", BITS, ids=lambda d: str(d)[6:])
def test_bits_of_numbers_and_back(dtype: torch.dtype) -> None:
    bits = BITS[dtype]
    even = 254 if bits is torch.uint8 else -2
    joined(lambda x: ((x.to(F32) * 0.5).to(dtype).view(bits) & even).view(dtype).to(F32) + 1, hard(dtype), bitcasts=2)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_halves_are_read_as_eager_stores_them(dtype: torch.dtype) -> None:
    """The sum is held as float32 in the kernel; what is stored of it has the bits."""
    joined(lambda x, y: (x + y).view(torch.int16) + 1, torch.randn(97).to(dtype), torch.randn(97).to(dtype))


def test_between_integers() -> None:
    joined(lambda x: (x * 2).view(torch.uint8).to(F32), torch.randint(-128, 127, (7, 9), dtype=torch.int8))


def test_nibbles_by_the_bits_of_a_bfloat16() -> None:
    """0x4300 is 128: of that, an integer below 128 is the mantissa."""
    joined(lambda w: (((w & 15) | 0x4300).to(torch.int16).view(BF16) - 136) * 0.5,
           torch.randint(0, 255, (6, 40), dtype=torch.int32))


def test_exponents_as_scales() -> None:
    def fn(x: Tensor, e: Tensor) -> Tensor:
        return (x.view(4, -1, 8) * (e.int() << 23).view(F32)[..., None]).view(4, -1)

    joined(fn, torch.randn(4, 40), torch.randint(100, 140, (4, 5), dtype=torch.uint8))


def test_symbolic_sizes() -> None:
    def fn(x: Tensor) -> Tensor:
        return (x * 2).view(torch.int32).abs()

    x = torch.randn(5, 7)
    result, plan, found = ran(fn, x, dynamic=True)
    assert found == 1 and "1 kernel launch." in plan.splitlines()[0]
    same(result, fn(x))


@pytest.mark.parametrize("fn", [
    lambda x: x.view(torch.int32) + 1,  # of an input, which the host views at no cost
    lambda x: (x * 2).view(torch.int32),  # the result itself
    lambda x: (x * 2).view(torch.int16) + 1,  # of another size
    lambda x: (x * 2).view(torch.int32).sort().values], ids=["input", "result", "size", "no kernel"])
def test_what_stays_a_view(fn: Callable[..., Any]) -> None:
    x = torch.randn(4, 8)
    result, _, found = ran(fn, x)
    assert found == 0
    torch.testing.assert_close(result, fn(x))


def test_a_value_that_is_written_to() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x * 2
        y.view(torch.int32).add_(1)
        return y + 1

    x = torch.randn(4, 8)
    result, _, _ = ran(fn, x)
    same(result, fn(x))


@pytest.mark.parametrize("source, target, known", [
    (F32, torch.int32, True), (BF16, F16, True), (E4M3, torch.int8, True), (F32, torch.int64, False),
    (torch.bool, torch.uint8, False), (torch.complex64, F64, False)])
def test_castable(source: torch.dtype, target: torch.dtype, known: bool) -> None:
    assert castable(source, target) == known
