"""Complex arithmetic becomes kernels over pairs of real tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser import observe
from fxfuser.passes import JOINT
from tests.passes.rewriting import assert_rewrites, assert_untouched

aten = torch.ops.aten
PAIRS = [p for p in JOINT if p.__name__ == "pair_complex"]
inf, nan = float("inf"), float("nan")


def z(*shape: int, seed: int = 0, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def special() -> Tensor:
    parts = torch.tensor([0.0, -0.0, 1.5, -2.0, inf, -inf, nan, 3e38, 1e-40])
    return torch.complex(parts[:, None].expand(9, 9).contiguous(), parts[None].expand(9, 9).contiguous())


def rope(q: Tensor, f: Tensor) -> Tensor:
    pairs = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * f[None, :, None]).flatten(3).type_as(q)


def run(fn: Callable[..., Tensor], args: list[Tensor], **options: object) -> tuple[Tensor, list[str], int]:
    """The result, the ops that ran as ATen calls and the number of kernels."""
    torch._dynamo.reset()
    settings = {"executor": "interpret", "strict": True}
    compiled = torch.compile(fn, backend="fxfuser", options=settings, fullgraph=True, **options)
    with observe.recording() as recording:
        got = compiled(*args)
        if isinstance(got, Tensor) and got.requires_grad:
            got.abs().sum().backward()
    externs = [e.op for trace in recording.graphs for e in trace.externs]
    return got, externs, sum(len(trace.kernels) for trace in recording.graphs)


def test_rope_is_one_kernel_each_way() -> None:
    f = torch.polar(torch.ones(6, 4), torch.randn(6, 4))
    q = torch.randn(2, 6, 3, 8)
    got, externs, kernels = run(rope, [q, f])
    assert (externs, kernels) == ([], 1)
    torch.testing.assert_close(got, rope(q, f))
    mine, theirs = q.clone().requires_grad_(), q.clone().requires_grad_()
    got, externs, kernels = run(rope, [mine, f])
    rope(theirs, f).abs().sum().backward()
    assert (externs, kernels) == ([], 2)
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_rope_with_symbolic_sizes_and_half_precision() -> None:
    f = torch.polar(torch.ones(6, 4), torch.randn(6, 4))
    for q in (torch.randn(2, 6, 3, 8).bfloat16(), torch.randn(2, 6, 3, 8)):
        got, externs, _ = run(rope, [q, f], dynamic=True)
        assert externs == []
        torch.testing.assert_close(got, rope(q, f))


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: torch.sub(a, b, alpha=2), "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "reciprocal": lambda a, b: a.reciprocal(), "conj": lambda a, b: (a * b.conj()).exp(),
    "abs": lambda a, b: (a * b).abs(), "angle": lambda a, b: (a + b).angle(), "exp": lambda a, b: a.exp(),
    "log": lambda a, b: a.log(), "sgn": lambda a, b: a.sgn() * b, "number": lambda a, b: a * 2.5 + (1 - 2j),
    "imaginary": lambda a, b: a * 1j, "real operand": lambda a, b: a * b.real + b.imag,
    "parts": lambda a, b: torch.complex(a.imag, b.real), "polar": lambda a, b: torch.polar(a.abs(), b.angle()),
    "views": lambda a, b: (a * b).t().reshape(-1)[2:].unsqueeze(0).expand(2, -1) + 1,
    "cat": lambda a, b: torch.cat([a * 2, b], 1).flip(0),
    "sum": lambda a, b: (a * b).sum(1), "mean": lambda a, b: a.mean(),
    "sum in another dtype": lambda a, b: a.sum(1, dtype=torch.complex128), "sum of reals":
        lambda a, b: a.real.sum(0, dtype=torch.complex64),
    "where": lambda a, b: torch.where(a.real > 0, a, b), "equal": lambda a, b: a == b, "real to complex":
        lambda a, b: a.real.to(torch.complex64) * b, "wider": lambda a, b: a.to(torch.complex128) / b,
    "transposed result": lambda a, b: (a.t() * b.t()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_eager_s(name: str) -> None:
    fn = FUNCTIONS[name]
    got, externs, kernels = run(fn, [z(5, 7), z(5, 7, seed=1)])
    want = fn(z(5, 7), z(5, 7, seed=1))
    assert externs == [] and kernels == 1
    torch.testing.assert_close(got, want)
    assert (got.stride(), got.dtype) == (want.stride(), want.dtype)


@pytest.mark.parametrize("name", ["mul", "div", "abs", "conj", "angle", "number", "imaginary", "parts", "equal"])
def test_infinities_and_nan(name: str) -> None:
    fn = {"conj": lambda a, b: a.conj() * b, "angle": lambda a, b: a.angle()}.get(name, FUNCTIONS[name])
    a, b = special(), special().t().contiguous().flip(0)
    got, want = run(fn, [a, b])[0], fn(a, b)
    parts = (torch.view_as_real(t) if t.is_complex() else t for t in (got.resolve_conj(), want.resolve_conj()))
    torch.testing.assert_close(*parts, equal_nan=True)


def test_an_atencall_between_reads_and_writes_complex() -> None:
    def fn(a: Tensor) -> Tensor:
        return torch.fft.fft(a * 2).conj() * 3
    got, externs, _ = run(fn, [z(4, 8)])
    assert externs and all("fft" in e for e in externs)
    torch.testing.assert_close(got, fn(z(4, 8)))


def test_a_conjugate_that_leaves_the_graph() -> None:
    got, _, _ = run(lambda a: (a * 2).conj(), [z(4, 8)])
    torch.testing.assert_close(got.resolve_conj(), (z(4, 8) * 2).conj().resolve_conj())


def test_gradients() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return (a * b / (b.abs() + 1)).abs()
    a, b = z(3, 4).requires_grad_(), z(3, 4, seed=1).requires_grad_()
    c, d = z(3, 4).requires_grad_(), z(3, 4, seed=1).requires_grad_()
    _, externs, _ = run(fn, [a, b])
    fn(c, d).abs().sum().backward()
    assert externs == []
    torch.testing.assert_close(a.grad, c.grad)
    torch.testing.assert_close(b.grad, d.grad)


def test_a_product_reads_its_parts() -> None:
    def before(x: Tensor) -> Tensor:
        return aten.view_as_real.default(aten.neg.default(aten.view_as_complex.default(x)))

    def expected(x: Tensor) -> Tensor:
        re, im = aten.select.int(x, -1, 0), aten.select.int(x, -1, 1)
        re, im = aten.neg.default(re), aten.neg.default(im)
        return aten.cat.default([aten.unsqueeze.default(re, -1), aten.unsqueeze.default(im, -1)], -1)

    assert_rewrites(before, expected, [torch.randn(5, 2)], PAIRS)


def test_real_graphs_and_ops_without_a_rule_stay() -> None:
    assert_untouched(lambda x: aten.mul.Tensor(x, x), [torch.randn(3)], PAIRS)
    assert_untouched(lambda x: aten.tan.default(x), [z(3)], PAIRS)


def test_results_that_share_memory_go_on_sharing_it() -> None:
    def views(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return y, y[1:].t(), y.conj(), torch.view_as_real(y), torch.view_as_complex(torch.view_as_real(y) + 1)

    x = z(4, 4)
    torch._dynamo.reset()
    got = torch.compile(views, backend="fxfuser", options={"executor": "interpret", "strict": True})(x)
    torch.testing.assert_close(got, views(x))
    own = got[0].untyped_storage().data_ptr()
    assert [t.untyped_storage().data_ptr() == own for t in got] == [True, True, True, True, False]
    assert got[2].is_conj()


def test_a_slice_of_an_input_is_returned_as_one_where_sizes_vary() -> None:
    """AOTAutograd replays on the input how the returned tensor was viewed."""
    def rotated(x: Tensor, f: Tensor, start: int) -> tuple[Tensor, Tensor]:
        part = f[start:start + x.shape[0]]
        return torch.view_as_real(torch.view_as_complex(x) * part), part

    f = z(16, 4)
    torch._dynamo.reset()
    options = {"executor": "interpret", "strict": True}
    compiled = torch.compile(rotated, backend="fxfuser", options=options, dynamic=True)
    for start in (2, 3):
        x = torch.randn(start + 2, 4, 2)
        got = compiled(x, f, start)
        torch.testing.assert_close(got, rotated(x, f, start))
        assert got[1].data_ptr() == f[start].data_ptr()
