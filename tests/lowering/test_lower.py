"""Functions as single kernels against eager, in the interpreter: every kind of nest that the emitter makes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fxfuser.config import Config
from fxfuser.domain import roles
from fxfuser.lowering import tiles
from fxfuser.lowering.lower import module
from tests.lowering.harness import check, compiled, run

B = torch.bfloat16


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


POINTWISE = {
    "chain": (lambda x, y: (x * y + 1).exp(), [rand(5, 37), rand(5, 37)]),
    "row and column broadcast": (lambda x, b, c: x * b + c, [rand(6, 33), rand(33), rand(6, 1)]),
    "0-d operand": (lambda x, s: x * s, [rand(7), rand()]),
    "0-d result": (lambda x: x * 2 + 1, [rand()]),
    "empty": (lambda x: x * 2, [rand(0, 4)]),
    "transposed operand": (lambda x, y: x.t() + y, [rand(40, 33), rand(33, 40)]),
    "transposed result": (lambda x: (x + 1).t() * 2, [rand(9, 70)]),
    "permuted 4-d": (lambda x, y: x.permute(0, 2, 1, 3) * y, [rand(2, 3, 5, 8), rand(2, 5, 3, 8)]),
    "strided slice": (lambda x: x[1:, ::3] * 2, [rand(5, 20)]),
    "view splits and merges": (lambda x: (x.view(4, 6).exp().view(2, 2, 3, 2) + 1).view(24), [rand(24)]),
    "view that does not factor": (lambda x: (x.view(6, 4) * 2).view(3, 8) + 1, [rand(4, 6)]),
    "x + x.T": (lambda x: x + x.t(), [rand(17, 17)]),
    "cat": (lambda x, y: torch.cat([x * 2, y, x], 1) + 1, [rand(3, 5), rand(3, 7)]),
    "cat of one axis": (lambda x, y: torch.cat([x, y.exp()]), [rand(13), rand(30)]),
    "pad": (lambda x: F.pad(x, (2, 3, 1, 0), value=1.5) * 2, [rand(4, 5)]),
    "negative pad": (lambda x: F.pad(x, (-1, 2)) + 1, [rand(4, 5)]),
    "flip": (lambda x: x.flip(0, 1) + x, [rand(4, 5)]),
    "roll": (lambda x: x.roll(2, 1) * 2, [rand(3, 7)]),
    "repeat": (lambda x: x.repeat(2, 3) + 1, [rand(3, 4)]),
    "stack": (lambda x, y: torch.stack([x, y * 2], -1).flatten(1), [rand(3, 4), rand(3, 4)]),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 1, 7, 2) * 2, [rand(3, 8), rand(3, 3)]),
    "select_scatter": (lambda x, y: torch.select_scatter(x, y, 0, 1) + 1, [rand(3, 4), rand(4)]),
    "two outputs": (lambda x, y: (x + y, (x * y).exp()), [rand(6, 9), rand(6, 9)]),
    "output that is read on": (lambda x: (y := x * 3.1415, y + 1), [rand(50, dtype=B)]),
    "bf16": (lambda x, y: x * y + x / 3, [rand(64, dtype=B), rand(64, dtype=B)]),
    "fp64": (lambda x: x * 0.1 + 1e-9, [rand(33, dtype=torch.float64)]),
    "int64 mixed with float": (lambda x, i: x * i, [rand(11), torch.arange(11)]),
    "int8 wraps": (lambda x: x + x, [torch.arange(-128, 128, dtype=torch.int8)]),
    "comparison and where": (lambda x, y: torch.where(x > y, x, y * 2), [rand(40), rand(40)]),
    "bool result": (lambda x: (x > 0) & (x < 1), [rand(40)]),
    "cast to int": (lambda x: (x * 10).to(torch.int32), [rand(40)]),
    "arange": (lambda x: torch.arange(6) * x, [rand(6)]),
    "triangle": (lambda x: x.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), float("-inf")), [rand(9, 9)]),
    "expanded": (lambda x, y: x[:, None].expand(4, 3, 5) * y, [rand(4, 5), rand(4, 3, 5)]),
}


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise(name: str) -> None:
    fn, args = POINTWISE[name]
    check(fn, args)


ROWS = {
    "sum": (lambda x: x.sum(-1), [rand(5, 37)]),
    "sum of all": (lambda x: x.sum(), [rand(5, 37)]),
    "mean keepdim": (lambda x: x - x.mean(-1, keepdim=True), [rand(5, 37)]),
    "amax amin": (lambda x: (x.amax(1), x.amin(1)), [rand(4, 50)]),
    "column sum": (lambda x: (x * 2).sum(0), [rand(41, 35)]),
    "middle axis": (lambda x: x.sum(1), [rand(3, 20, 9)]),
    "two axes": (lambda x: x.mean((0, 2)), [rand(12, 5, 11)]),
    "sum and its input": (lambda x: ((y := x.exp()), y.sum(-1)), [rand(5, 37)]),
    "argmax": (lambda x: (x.argmax(-1), x.argmin(-1)), [torch.randint(0, 4, (6, 40)).float()]),
    "any all": (lambda x: ((x > 2).any(1), (x > -3).all(1)), [rand(6, 40)]),
    "prod": (lambda x: x.prod(1), [rand(4, 12)]),
    "int sum": (lambda x: x.sum(1), [torch.randint(-9, 9, (4, 40), dtype=torch.int32)]),
    "softmax by hand": (lambda x: (y := (x - x.amax(-1, keepdim=True)).exp()) / y.sum(-1, keepdim=True), [rand(5, 61)]),
    "layer norm by hand": (
        lambda x, w: ((c := x - x.mean(-1, keepdim=True)) * torch.rsqrt((c * c).mean(-1, keepdim=True) + 1e-5)) * w,
        [rand(6, 48), rand(48)]),
    "group norm by hand": (
        lambda x, w: ((v := x.view(2, 3, -1)) - v.mean(-1, keepdim=True)).view(2, 6, 4, 4) * w.view(6, 1, 1),
        [rand(2, 6, 4, 4), rand(6)]),
    "bf16 softmax": (lambda x: (y := (x.float() - x.float().amax(-1, keepdim=True)).exp()) /
                     y.sum(-1, keepdim=True), [rand(3, 40, dtype=B)]),
    "sum of a broadcast value": (lambda x: x.expand(5, 37).sum(-1), [rand(5, 1)]),
    "sum of a cat": (lambda x, y: torch.cat([x, y], 1).sum(1), [rand(4, 30), rand(4, 21)]),
    "empty rows": (lambda x: x.sum(1), [rand(4, 0)]),
    "no rows": (lambda x: x.sum(1), [rand(0, 4)]),
    "short axis": (lambda x: x.sum(0), [rand(4, 40)]),
    "nan": (lambda x: (x.amax(1), x.argmax(1), x.sum(1)), [rand(3, 20).index_fill(1, torch.tensor([7]), float("nan"))]),
}


@pytest.mark.parametrize("name", ROWS)
def test_persistent_rows(name: str) -> None:
    fn, args = ROWS[name]
    check(fn, args)


@pytest.mark.parametrize("name", ROWS)
def test_looped_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same functions when no row fits a tile."""
    monkeypatch.setattr(roles, "PERSISTENT_ELEMENTS", 8)
    monkeypatch.setattr(tiles, "LOOP_CHUNK", 8)
    monkeypatch.setattr(tiles, "LONE_CHUNK", 8)
    fn, args = ROWS[name]
    _, lowered = check(fn, args)
    if name == "softmax by hand":
        assert lowered.kernel.source.count("for r0_start in range(0, 61, R0BLOCK)") == 2


DYNAMIC = {
    "rows vary": (lambda x: x.exp() + 1, [rand(5, 8)], [{0}], [[rand(9, 8)], [rand(64, 8)]]),
    "both vary": (lambda x, b: x * b, [rand(5, 8), rand(8)], [{0, 1}, {0}], [[rand(3, 11), rand(11)]]),
    "flattened": (lambda x: x.view(-1) * 2, [rand(5, 8)], [{0}], [[rand(7, 8)]]),
    "cat": (lambda x, y: torch.cat([x, y], 0) + 1, [rand(5, 4), rand(6, 4)], [{0}, {0}], [[rand(2, 4), rand(9, 4)]]),
    "sum over the dynamic axis": (lambda x: x.sum(0), [rand(5, 8)], [{0}], [[rand(70, 8)]]),
    "row sums, both vary": (
        lambda x: x.exp() / x.exp().sum(1, keepdim=True), [rand(5, 8)], [{0, 1}], [[rand(70, 300)]]),
    "mean over a dynamic axis": (lambda x: x.mean(1), [rand(5, 8)], [{1}], [[rand(5, 33)]]),
    "size as a value": (lambda x: x * x.shape[0], [rand(5, 8)], [{0}], [[rand(7, 8)]]),
    "split heads": (
        lambda x: x.view(2, x.shape[1], 4, 8).transpose(1, 2) + 1, [rand(2, 5, 32)], [{1}], [[rand(2, 9, 32)]]),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_sizes(name: str) -> None:
    fn, args, dynamic, more = DYNAMIC[name]
    check(fn, args, dynamic, more)


def test_zeros_keep_their_sign() -> None:
    """Triton's constant -0.0 is 0.0; a comparison of zeros would not tell."""
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = torch.where(x > 0, x, -0.0)
        return 1 / chosen, 1 / torch.full_like(x, -0.0), 1 / F.pad(x * 0 + 1, (1, 1), value=-0.0), 1 / (0.0 + chosen)

    for dtype in (torch.float32, torch.float64):
        check(fn, [rand(3, 5, dtype=dtype)])


def test_equal_functions_of_other_names_have_equal_text() -> None:
    first = compiled(lambda x, y: (x + y) * 2, [rand(5, 7), rand(5, 7)])[2]
    second = compiled(lambda left, right: 2 * (left + right), [rand(5, 7), rand(5, 7)])[2]
    assert first.kernel.source == second.kernel.source


def test_invariant_work_stays_outside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "PERSISTENT_ELEMENTS", 8)
    _, _, lowered = compiled(lambda x, s: x * s.exp() / x.sum(-1, keepdim=True), [rand(5, 61), rand(5, 1)])
    before, _, loop = lowered.kernel.source.rpartition("for r0_start")
    assert "tl.exp" in before and "tl.exp" not in loop


def test_equal_loads_are_one_load() -> None:
    _, _, lowered = compiled(lambda x: (x * 2) + x.view(-1).view(6, 7).exp(), [rand(6, 7)])
    assert lowered.kernel.source.count("tl.load(") == 1


def test_a_stored_half_value_is_read_as_stored() -> None:
    _, _, stored = compiled(lambda x: (y := x * 3, y + 1), [rand(50, dtype=B)])
    _, _, passing = compiled(lambda x: x * 3 + 1, [rand(50, dtype=B)])
    assert "through_bfloat16(mul_0)" in stored.kernel.source
    assert "through_bfloat16" not in passing.kernel.source


def test_eager_numerics_round_after_every_op() -> None:
    args = [rand(400, dtype=B), rand(400, dtype=B)]

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y + y

    graph, segment, lowered = compiled(fn, args, config=Config(numerics="eager"))
    torch.testing.assert_close(run(graph, lowered, segment, args)[0], fn(*args), rtol=0, atol=0)


def test_integers_round_to_a_half_before_it_computes() -> None:
    check(lambda x, i: x * i, [rand(6, dtype=torch.float16), torch.tensor([65535, 2049, -3, 0, 4097, 70000])])


def test_a_half_constant_is_what_its_dtype_makes_of_it() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * torch.full([], 0.1, dtype=B).to(torch.float32)

    check(fn, [rand(16)])


def test_a_chain_as_long_as_a_kernel_may_be_is_no_deep_recursion() -> None:
    def chain(x: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(256):
            y = torch.sin(y) if i % 2 else y + x
        return y

    x = torch.randn(8)
    kernel = torch.compile(chain, backend="fxfuser", options={"executor": "interpret"}, fullgraph=True)
    torch.testing.assert_close(kernel(x), chain(x))


def test_offsets_along_a_held_dim_have_all_bits() -> None:
    far = torch.empty((1 << 31) + 1, dtype=torch.int8)[::1 << 30]  # pages that nobody touches take no memory
    far.copy_(torch.tensor([1, 0, 3], dtype=torch.int8))
    check(lambda a: (a.relu(), a.any(0)), [far])


def test_parameters_and_their_annotations_stay_on_one_line() -> None:
    names = [f"BLOCK{i}: tl.constexpr" for i in range(20)]
    source, _ = module("pointwise", ["pass"], {}, names)
    assert all(name in source for name in names) and max(map(len, source.splitlines())) <= 120
