"""The interpreter runs a kernel's text as the device would."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import triton.language as tl

from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime import interpret
from fxfuser.runtime.build import report
from fxfuser.runtime.interpret import interpreted

from .graphs import pointwise
from .products import gemm

HEAD = "import triton\nimport triton.language as tl\n"


def unary(body: str, source: torch.dtype, target: torch.dtype, head: str = "") -> Kernel:
    """out0[i] = `body` of x, where x = in0[i]."""
    text = HEAD + head + f'''
@triton.jit
def unary(in0, out0, n0, INDEX: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(INDEX) * BLOCK + tl.arange(0, BLOCK).to(INDEX)
    x = tl.load(in0 + i, mask=i < n0)
    tl.store(out0 + i, {body}, mask=i < n0)
'''
    return Kernel("unary", text, (source,), (target,), 1, "cdiv(n0, BLOCK)", "n0", Tile((("BLOCK", 64),)))


def run(kernel: Kernel, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    interpreted(kernel).run([x, out, x.numel()])
    return out


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.int64, torch.int8, torch.bool])
def test_casts_to_bf16_round_to_nearest_even(source: torch.dtype) -> None:
    x = (torch.randn(1000, dtype=torch.float64) * 300).to(source)
    actual = run(unary("x.to(tl.bfloat16)", source, torch.bfloat16), x, torch.bfloat16)
    assert torch.equal(actual, x.to(torch.bfloat16))


def test_bf16_edges() -> None:
    x = torch.tensor([float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 3.4e38, float("nan"), 1.00390625, 1.01171875])
    actual = run(unary("x.to(tl.bfloat16)", torch.float32, torch.bfloat16), x, torch.bfloat16)
    torch.testing.assert_close(actual, x.to(torch.bfloat16), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("target", [torch.float32, torch.float64, torch.int32])
def test_casts_from_bf16(target: torch.dtype) -> None:
    x = torch.randn(100).mul(50).to(torch.bfloat16)
    name = {torch.float32: "float32", torch.float64: "float64", torch.int32: "int32"}[target]
    assert torch.equal(run(unary(f"x.to(tl.{name})", torch.bfloat16, target), x, target), x.to(target))


def test_bool_pointers() -> None:
    x = torch.randn(70) > 0
    assert torch.equal(run(unary("x == 0", torch.bool, torch.bool), x, torch.bool), ~x)


def test_integers_wrap() -> None:
    x = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
    assert torch.equal(run(unary("x * x + x", torch.int32, torch.int32), x, torch.int32), x * x + x)


@pytest.mark.parametrize("body, expected", [
    ("tl.math.erf(x)", torch.erf), ("tl.where(x > 0, x, -x)", torch.abs),
    ("tl.maximum(x, 0.5, propagate_nan=tl.PropagateNan.NONE)", lambda x: x.fmax(torch.tensor(0.5))),
    ("tl.maximum(x, 0.5, propagate_nan=tl.PropagateNan.ALL)", lambda x: x.maximum(torch.tensor(0.5))),
])
def test_math(body: str, expected: object) -> None:
    x = torch.cat([torch.randn(100), torch.tensor([float("nan")])])
    torch.testing.assert_close(run(unary(body, torch.float32, torch.float32), x, torch.float32),
                               expected(x), equal_nan=True)  # type: ignore[operator]


def test_libdevice_runs_the_torch_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpret, "LIBDEVICE", {"asinh": torch.asinh})
    kernel = unary("libdevice.asinh(x)", torch.float32, torch.float32, "from triton.language.extra import libdevice\n")
    x = torch.randn(100)
    torch.testing.assert_close(run(kernel, x, torch.float32), x.asinh())


ROWS = HEAD + '''
@triton.jit
def welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    delta = mean_b - mean_a
    n = n_a + n_b
    return mean_a + delta * n_b / n, m2_a + m2_b + delta * delta * n_a * n_b / n, n


@triton.jit
def variance(in0, out0, n0, INDEX: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(INDEX)
    x = tl.load(in0 + row * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    ones = tl.full([1, COLUMNS], 1.0, tl.float32)
    mean, m2, n = tl.reduce((x, x * 0.0, ones), 1, welford, keep_dims=True)
    tl.store(out0 + row + tl.arange(0, 1)[None, :], m2 / n)
'''


def test_reductions_combine_states() -> None:
    kernel = Kernel("variance", ROWS, (torch.float32,), (torch.float32,), 1, "n0", "n0 * COLUMNS",
                    Tile((("COLUMNS", 32),)))
    x, out = torch.randn(5, 32), torch.empty(5)
    interpreted(kernel).run([x, out, 5])
    torch.testing.assert_close(out, x.var(1, correction=0))


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows, columns, depth", [(96, 64, 80), (65, 48, 64), (70, 33, 45), (3, 1, 1), (0, 16, 16)])
def test_products(dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    a, b = torch.randn(rows, depth, dtype=dtype), torch.randn(columns, depth, dtype=dtype)
    out = torch.full((rows, columns), float("nan"), dtype=dtype)
    interpreted(gemm(dtype)).run([a, b, out, rows, columns, depth])
    exact = a.double() @ b.double().T
    # one rounding to the output's dtype, and sums of `depth` products in fp32
    bound = exact.abs() * torch.finfo(dtype).eps + depth * 2e-7 * (a.double().abs() @ b.double().abs().T)
    assert ((out.double() - exact).abs() <= bound).all()


def test_descriptors_load_and_store_within_the_tensors() -> None:
    a, b = torch.randn(32, 32, dtype=torch.float16), torch.randn(16, 32, dtype=torch.float16)
    with pytest.raises(IndexError, match="loads"):
        interpreted(gemm(torch.float16)).run([a, b, torch.empty(64, 16, dtype=torch.float16), 64, 16, 32])
    with pytest.raises(IndexError, match="stores"):
        interpreted(gemm(torch.float16)).run([a, b, torch.empty(16, 16, dtype=torch.float16), 32, 16, 32])


def program(body: str, dtypes: tuple[torch.dtype, ...], outputs: tuple[torch.dtype, ...], grid: int = 1) -> Kernel:
    """A kernel of this body for tensors of these dtypes; no sizes."""
    names = [*(f"in{i}" for i in range(len(dtypes))), *(f"out{i}" for i in range(len(outputs)))]
    lines = "".join(f"    {line}\n" for line in body.strip().split("\n"))
    text = HEAD + f"\n@triton.jit\ndef body({', '.join(names)}, INDEX: tl.constexpr):\n{lines}"
    return Kernel("body", text, dtypes, outputs, 0, str(grid), "0", Tile((), 1))


def check(kernel: Kernel, inputs: list[torch.Tensor], expected: torch.Tensor) -> None:
    """The kernel writes `expected`, and is one that builds."""
    out = torch.full_like(expected, 7)
    interpreted(kernel).run([*inputs, out])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert report(kernel).registers > 0


SQUARE = "i = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]\nx = tl.load(in0 + i)\n"


@pytest.mark.parametrize("body, expected", [
    ("tl.store(out0 + i, x.T)", lambda x: x.T),
    ("tl.store(out0 + i, tl.trans(x))", lambda x: x.T),
    ("tl.store(out0 + i, tl.reshape(tl.trans(tl.reshape(x, [4, 4, 16]), (1, 0, 2)), [16, 16]))",
     lambda x: x.view(4, 4, 16).transpose(0, 1)),
    ("low, high = tl.split(tl.reshape(x, [16, 8, 2]))\ntl.store(out0 + i, tl.reshape(tl.join(high, low), [16, 16]))",
     lambda x: x.view(16, 8, 2).flip(2)),
], ids=["T", "trans", "reshape", "split, join"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes(body: str, expected: object, dtype: torch.dtype) -> None:
    x = torch.randn(16, 16).to(dtype)
    check(program(SQUARE + body, (dtype,), (dtype,)), [x],
          expected(x).reshape(16, 16).contiguous())  # type: ignore[operator]


@pytest.mark.parametrize("dtype, precision", [(torch.float32, "ieee"), (torch.float32, "tf32x3"),
                                              (torch.bfloat16, "tf32"), (torch.int8, "ieee")])
def test_dot_takes_a_precision(dtype: torch.dtype, precision: str) -> None:
    total = torch.int32 if dtype == torch.int8 else torch.float32
    body = ("i = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]\n"
            f"tl.store(out0 + i, tl.dot(tl.load(in0 + i), tl.load(in1 + i), input_precision='{precision}'))")
    a, b = (torch.randint(-9, 9, (32, 32)).to(dtype) for _ in range(2))  # sums of integers are exact
    check(program(body, (dtype, dtype), (total,)), [a, b], (a.double() @ b.double()).to(total))


@pytest.mark.parametrize("lanes", [1, 4])
def test_masked_lanes_hold_the_number_that_is_given(lanes: int) -> None:
    body = (f"lanes = tl.arange(0, {lanes})\n"
            "tl.store(out0 + lanes, tl.load(in0 + lanes, lanes > 7, 0.0))")
    check(program(body, (torch.float32,), (torch.float32,)), [torch.ones(lanes)], torch.zeros(lanes))


def test_loops_count_in_tensors() -> None:
    body = ("total = tl.full([], 0, tl.int64)\n"
            "for i in tl.range(3, 12, 4, num_stages=2, flatten=True):\n    total += i.to(tl.int64) * 10\n"
            "tl.store(out0, total + tl.num_programs(0))")
    check(program(body, (), (torch.int64,), grid=3), [], torch.tensor([(3 + 7 + 11) * 10 + 3]))


def test_scalars_are_integers() -> None:
    """Triton's are arrays of one dimension, of which numpy makes no integer from 2.5 on, and before with a warning."""
    body = "for i in range(tl.load(in0), tl.load(in0 + 1)):\n    tl.store(out0 + i, i * tl.num_programs(0))"
    bounds, out = torch.tensor([1, 3], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        interpreted(program(body, (torch.int32,), (torch.int32,))).run([bounds, out])
    assert out.tolist() == [0, 1, 2]


COUNTED = '''arrived = tl.atomic_add(in0, 1, sem="acq_rel")
tl.debug_barrier()
if arrived == tl.num_programs(0) - 1:
    tl.store(out0, tl.atomic_xchg(in0, 0, sem="relaxed") * 100 + tl.atomic_cas(in0, 0, 5))
    tl.atomic_xchg(in0, 0)
'''


def test_atomics_and_barriers() -> None:
    counter = torch.zeros(1, dtype=torch.int32)
    check(program(COUNTED, (torch.int32,), (torch.int32,), grid=6), [counter], torch.tensor([600], dtype=torch.int32))
    assert counter.item() == 0


@pytest.mark.parametrize("update", ["tl.atomic_add(out0 + 1, 1)", "tl.atomic_xchg(out0 + 1, 1)",
                                    "tl.atomic_cas(out0 + 1, 1, 2)"])
def test_atomics_stay_within_the_tensors(update: str) -> None:
    with pytest.raises(IndexError, match="updates 1 elements outside"):
        interpreted(program(update, (), (torch.int32,))).run([torch.zeros(1, dtype=torch.int32)])


def test_storage_offsets_and_aliases() -> None:
    storage = torch.randn(100)
    x, y, out = storage[3:43], storage[20:60], torch.empty(40)
    interpreted(pointwise()).run([x, y, out, 40])
    torch.testing.assert_close(out, 2 * (x + y))


def test_the_language_is_as_before() -> None:
    before = {name: vars(tl)[name] for name in ("load", "reduce", "associative_scan", "arange", "range", "dot")}
    members = dict(vars(tl.tensor))
    builder = dict(vars(interpret.interpreter.interpreter_builder))
    x = torch.randn(40)
    interpreted(pointwise()).run([x, x, torch.empty(40), 40])
    assert {name: vars(tl)[name] for name in before} == before
    assert dict(vars(tl.tensor)) == members
    after = dict(vars(interpret.interpreter.interpreter_builder))
    assert {k: v for k, v in after.items() if not k.startswith("grid")} == {
        k: v for k, v in builder.items() if not k.startswith("grid")}
    assert report(pointwise()).registers > 0
    np.testing.assert_allclose(x, x)


def test_a_failing_kernel_leaves_no_patch() -> None:
    kernel = unary("x + nowhere", torch.float32, torch.float32)
    load = tl.load
    with pytest.raises(NameError):
        run(kernel, torch.randn(3), torch.float32)
    assert tl.load is load
