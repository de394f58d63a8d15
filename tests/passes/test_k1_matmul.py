from __future__ import annotations

import pytest
import torch

from fxfuser.passes.k1_matmul import multiply_instead_of_k1_matmul
from tests.passes.rewriting import apply, assert_meta, assert_same, assert_untouched, targets, text, trace

PASS = (multiply_instead_of_k1_matmul,)
aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int64, torch.int32)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that every dtype holds products and sums exactly."""
    return torch.randint(-3, 4, shape).to(dtype)


def rewritten(function, inputs, dynamic: bool = False, exact: bool = True):
    """The module after the pass; its results and their meta strides are those of eager."""
    module = trace(function, inputs, dynamic)
    assert apply(module, PASS) == 1
    assert_meta(module)
    want = function(*inputs)
    assert_same(module(*inputs), want, exact)
    result = module.graph.output_node().args[0].meta["val"]
    if not dynamic:
        assert (result.dtype, result.stride()) == (want.dtype, want.stride())
    return module


def test_mm_becomes_mul() -> None:
    inputs = [values(5, 1), values(1, 7)]
    module = rewritten(aten.mm.default, inputs)
    assert text(module.graph) == text(trace(aten.mul.Tensor, inputs).graph)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("target", "shapes"), [
    (aten.mm.default, [(5, 1), (1, 7)]),
    (aten.mm.default, [(1, 1), (1, 1)]),
    (aten.mm.default, [(0, 1), (1, 4)]),
    (aten.bmm.default, [(3, 5, 1), (3, 1, 7)]),
    (aten.mv.default, [(5, 1), (1,)]),
    (aten.dot.default, [(1,), (1,)]),
    (aten.addmm.default, [(7,), (5, 1), (1, 7)]),
    (aten.addmm.default, [(5, 7), (5, 1), (1, 7)]),
    (aten.addmm.default, [(5, 1), (5, 1), (1, 7)]),
    (aten.baddbmm.default, [(3, 5, 7), (3, 5, 1), (3, 1, 7)]),
    (aten.baddbmm.default, [(7,), (3, 5, 1), (3, 1, 7)]),
])
def test_every_product_and_dtype(target, shapes, dtype: torch.dtype) -> None:
    module = rewritten(target, [values(*s, dtype=dtype) for s in shapes])
    assert not any("mm" in t or "dot" in t or "mv" in t for t in targets(module))


@pytest.mark.parametrize("scales", [{"alpha": 2}, {"beta": 3}, {"alpha": -1, "beta": 2}, {"beta": 0, "alpha": 2}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_scales(scales, dtype: torch.dtype) -> None:
    inputs = [values(7, dtype=dtype), values(5, 1, dtype=dtype), values(1, 7, dtype=dtype)]
    rewritten(lambda c, a, b: aten.addmm.default(c, a, b, **scales), inputs)


def test_beta_zero_reads_no_bias() -> None:
    bias = torch.full((7,), float("nan"))
    module = rewritten(lambda c, a, b: aten.addmm.default(c, a, b, beta=0), [bias, values(5, 1), values(1, 7)])
    assert targets(module) == ["mul.Tensor"]


def test_half_types_round_once() -> None:
    a, b, c = (torch.randn(s).bfloat16() for s in ((50, 1), (1, 60), (60,)))
    module = trace(aten.addmm.default, [c, a, b])
    apply(module, PASS)
    exact = c.double() + a.double() * b.double()
    assert_same(module(c, a, b), exact.float().bfloat16())


def test_strides_are_those_of_the_product() -> None:
    """mul would follow its operands' strides; mm's result is contiguous."""
    inputs = [values(1, 5).t(), values(7, 1).t()]
    rewritten(aten.mm.default, inputs)
    a, b = values(3, 1, 5).transpose(1, 2), values(7, 3, 1).permute(1, 2, 0)
    rewritten(aten.bmm.default, [a, b])


def test_symbolic_rows_and_columns() -> None:
    module = rewritten(aten.mm.default, [values(5, 1), values(1, 7)], dynamic=True)
    assert targets(module) == ["mul.Tensor"]


@pytest.mark.parametrize("function", [
    lambda a, b: torch.outer(a[:, 0], b[0]) + torch.nn.functional.linear(a, b.t()),
    lambda a, b: torch.einsum("ik,kj->ij", a, b),
    lambda a, b: torch.matmul(a.expand(2, 5, 1), b),
    lambda a, b: torch.matmul(a[:, None], b),
    lambda a, b: torch.nn.functional.linear(a, b.t(), b[0]),
])
def test_what_users_write(function) -> None:
    module = trace(function, [values(5, 1), values(1, 7)])
    apply(module, PASS)
    assert not any("mm" in t for t in targets(module))
    assert_same(module(values(5, 1), values(1, 7)).shape, function(values(5, 1), values(1, 7)).shape)


@pytest.mark.parametrize("shapes", [[(5, 2), (2, 7)], [(1, 2), (2, 7)], [(5, 3), (3, 1)], [(5, 0), (0, 7)]])
def test_other_k_is_left_alone(shapes) -> None:
    assert_untouched(aten.mm.default, [values(*s) for s in shapes], PASS)


def test_symbolic_k_is_left_alone() -> None:
    assert_untouched(aten.mm.default, [values(5, 3), values(3, 7)], PASS, dynamic=True)


def test_what_eager_refuses_stays_refused() -> None:
    a, b = torch.ones(5, 1, dtype=torch.bool), torch.ones(1, 7, dtype=torch.bool)
    with pytest.raises(RuntimeError):
        torch.mm(a, b)
    assert_untouched(aten.mm.default, [a, b], PASS)
    module = trace(aten.mm.default, [values(5, 1), values(1, 7)])
    left = next(iter(module.graph.nodes))
    left.meta["val"] = left.meta["val"].double()
    assert apply(module, PASS) == 0
