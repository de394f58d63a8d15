"""The interpreter runs a kernel's text as the device would."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton.language as tl

from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime import interpret
from fxfuser.runtime.build import report
from fxfuser.runtime.interpret import interpreted

from .graphs import pointwise

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


def test_storage_offsets_and_aliases() -> None:
    storage = torch.randn(100)
    x, y, out = storage[3:43], storage[20:60], torch.empty(40)
    interpreted(pointwise()).run([x, y, out, 40])
    torch.testing.assert_close(out, 2 * (x + y))


def test_the_language_is_as_before() -> None:
    before = {name: vars(tl)[name] for name in ("load", "reduce", "associative_scan", "arange", "range")}
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
