"""Products that leave a graph as float32 are computed as such; others keep their type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxfuser.ops.products import ADD_PRODUCT
from fxfuser.passes.wide_products import products_in_float32
from tests.passes.rewriting import apply, assert_meta, assert_untouched, text, trace

aten = torch.ops.aten
PASSES = [products_in_float32]


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(24, 16).to(dtype), torch.randn(16, 40).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_of_a_parameter(dtype: torch.dtype) -> None:
    def before(a: Tensor, b: Tensor) -> Tensor:
        return aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float32)

    def expected(a: Tensor, b: Tensor) -> Tensor:
        return ADD_PRODUCT(None, a, b, torch.float32)

    module = trace(before, inputs(dtype))
    assert apply(module, PASSES) == 1
    assert text(module.graph) == text(trace(expected, inputs(dtype)).graph)
    assert_meta(module)


def test_nothing_is_rounded() -> None:
    def gradient(a: Tensor, b: Tensor) -> Tensor:
        return aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float32)

    a, b = inputs()
    module = trace(gradient, [a, b])
    rounded, exact = module(a, b), a.double() @ b.double()
    assert apply(module, PASSES) == 1
    assert (module(a, b) - exact).abs().max() < 0.01 * (rounded - exact).abs().max()


NEGATIVE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a kernel reads the cast": lambda a, b: aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float32) + 1,
    "the product leaves too": lambda a, b: (
        y := aten.mm.default(a, b), aten._to_copy.default(y, dtype=torch.float32)),
    "a wider type": lambda a, b: aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float64),
    "pieces of the cast leave": lambda a, b: aten.split.Tensor(
        aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float32), 20, 1),
    "a kernel reads pieces of the cast": lambda a, b: aten.unbind.int(
        aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float32))[0].exp(),
    "no cast": lambda a, b: aten.mm.default(a, b),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_other_products_keep_their_type(name: str) -> None:
    assert_untouched(NEGATIVE[name], inputs(), PASSES)


def test_wide_products_have_no_cast() -> None:
    assert_untouched(NEGATIVE["no cast"], inputs(torch.float32), PASSES)


def test_views_are_of_the_wide_result() -> None:
    def gradient(a: Tensor, b: Tensor) -> Tensor:
        turned = aten.permute.default(aten.permute.default(aten.mm.default(a, b), [1, 0]), [1, 0])
        wide = aten._to_copy.default(turned, dtype=torch.float32, layout=torch.strided, device=turned.device)
        return aten.view.default(wide, [-1])  # as AOTAutograd writes the gradient of a cast

    a, b = inputs()
    module = trace(gradient, [a, b])
    rounded, exact = module(a, b), (a.double() @ b.double()).view(-1)
    assert apply(module, PASSES) == 1
    assert [n.target for n in module.graph.nodes if n.op == "call_function"] == [
        ADD_PRODUCT, aten.permute.default, aten.permute.default, aten.view.default]
    assert (module(a, b) - exact).abs().max() < 0.01 * (rounded - exact).abs().max()
    assert_meta(module)


def test_other_bits_are_no_view_of_the_numbers() -> None:
    assert_untouched(lambda a, b: aten._to_copy.default(aten.view.dtype(aten.mm.default(a, b), torch.int16),
                                                        dtype=torch.float32), inputs(), PASSES)


def test_a_view_that_others_read_keeps_the_product() -> None:
    def two(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        turned = aten.permute.default(aten.mm.default(a, b), [1, 0])
        return aten._to_copy.default(turned, dtype=torch.float32), turned

    assert_untouched(two, inputs(), PASSES)


def accumulators() -> list[Tensor]:
    return [torch.randn(24, 40), *inputs()]


ACCUMULATED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "plain": lambda t, a, b: aten.add.Tensor(t, aten.mm.default(a, b)),
    "other order": lambda t, a, b: aten.add.Tensor(aten.mm.default(a, b), t),
    "cast and factor": lambda t, a, b: aten.add.Tensor(
        t, aten._to_copy.default(aten.mm.default(a, b), dtype=torch.float32), alpha=0.5),
    "a factor apart": lambda t, a, b: aten.add.Tensor(t, aten.mul.Tensor(aten.mm.default(a, b), 0.5)),
    "transposed": lambda t, a, b: aten.add.Tensor(
        t, aten.permute.default(aten.mm.default(b.t(), a.t()), [1, 0])),
}


@pytest.mark.parametrize("name", ACCUMULATED)
def test_a_gradient_that_is_accumulated(name: str) -> None:
    def update(t: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return aten.copy_.default(t, ACCUMULATED[name](t, a, b))

    total, a, b = accumulators()
    module = trace(update, [total, a, b])
    assert apply(module, PASSES) == 1
    assert [n.target for n in module.graph.nodes].count(ADD_PRODUCT) == 1
    exact = total.double() + (0.5 if "factor" in name else 1) * (a.double() @ b.double())
    found = module(total.clone(), a, b)
    assert (found - exact).abs().max() < 1e-5


OTHER_SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "not written back": lambda t, a, b: aten.add.Tensor(t, aten.mm.default(a, b)),
    "the total is read elsewhere": lambda t, a, b: (
        t.sum(), aten.copy_.default(t, aten.add.Tensor(t, aten.mm.default(a, b)))),
    "written back elsewhere": lambda t, a, b: aten.copy_.default(
        t, aten.add.Tensor(aten._to_copy.default(a[:, :1], dtype=torch.float32), aten.mm.default(a, b))),
    "the factor is the total's": lambda t, a, b: aten.copy_.default(
        t, aten.add.Tensor(aten.mm.default(a, b), t, alpha=2)),
    "the product has other readers": lambda t, a, b: (
        y := aten.mm.default(a, b), aten.copy_.default(t, aten.add.Tensor(t, y))),
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_sums_stay(name: str) -> None:
    assert_untouched(OTHER_SUMS[name], accumulators(), PASSES)
