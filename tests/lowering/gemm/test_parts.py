"""Parts that another kernel adds up, and loops for a matrix and a vector: values on every route, kernels' shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser.lowering.kernel import Place
from fxfuser.ops.products import WIDE_PRODUCT

from .harness import Blocks, Made, check, made

Tensor = torch.Tensor
B = torch.bfloat16
M, K, N = 5, 528, 48
Shapes = tuple[tuple[int, ...], ...]


def tensors(shapes: Shapes, dtype: torch.dtype = B) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def rms(h: Tensor, g: Tensor) -> Tensor:
    f = h.float()
    return (f * torch.rsqrt((f * f).mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * g


def layer(h: Tensor, g: Tensor) -> Tensor:
    d = h.float() - h.float().mean(-1, keepdim=True)
    return (d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * g + g


def softmax(h: Tensor) -> Tensor:
    e = torch.exp((f := h.float() / 20) - f.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def decode(x: Tensor, w: Tensor, residual: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    h = residual + x @ w.t()
    return h, rms(h, g)


CASES: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "residual and rms_norm": (decode, ((M, K), (N, K), (M, N), (N,))),
    "layer_norm": (lambda x, w, g: layer(F.linear(x, w, g), g), ((M, K), (N, K), (N,))),
    "softmax": (lambda x, w: softmax(x @ w), ((M, K), (K, N))),
    "bias and activation": (
        lambda x, w, b: F.gelu(torch.addmm(b, x, w, alpha=0.25, beta=2.0)), ((M, K), (K, N), (N,))),
    "a computed bias": (lambda x, w, b: softmax(torch.addmm(b * 0.5, x, w)), ((M, K), (K, N), (N,))),
    "a computed bias, turned": (lambda x, w, b: softmax(torch.addmm((b + 1).t(), x, w)), ((M, K), (K, N), (N, M))),
    "gates": (lambda x, w: F.silu((h := x @ w)[:, ::2]) * h[:, 1::2], ((M, K), (K, 2 * N))),
    "two products": (lambda x, w, v: rms(F.silu(x @ w) * (x @ v), v[0]), ((M, K), (K, N), (K, N))),
    "a batch": (lambda a, b: softmax(torch.bmm(a, b)), ((3, M, K), (3, K, N))),
    "a computed factor": (lambda x, w: softmax((x * 0.5) @ w), ((M, K), (K, N))),
    "a wide product": (lambda x, w: softmax(WIDE_PRODUCT(x, w)), ((M, K), (K, N))),
    "a padded row": (lambda x, w: softmax(F.pad(x @ w, (2, 3))), ((M, K), (K, N))),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_add_up(name: str) -> None:
    fn, shapes = CASES[name]
    found = check(fn, tensors(shapes), policies=("parts", "one_grid"))
    first, second = found.programs["parts"].launches
    assert "tl.dot" in first.kernel.source and "atomic" not in first.kernel.source
    assert "tl.dot" not in second.kernel.source and "for first in range" in second.kernel.source


@pytest.mark.parametrize("splits", [1, 2, 4, 5, 9])
def test_any_number_of_parts(splits: int) -> None:
    """Fewer and more than are loaded at once, and more than there are steps of k for some."""
    check(decode, tensors(CASES["residual and rms_norm"][1]), policies=("parts", "one_grid"),
          blocks=Blocks(splits=splits, depth=64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    check(decode, tensors(CASES["residual and rms_norm"][1], dtype), policies=("parts", "one_grid"))


def test_symbolic_rows() -> None:
    shapes = CASES["residual and rms_norm"][1]
    others = [tensors(((m, K), (N, K), (m, N), (N,))) for m in (2, 17)]
    check(decode, tensors(shapes), [{0}, set(), {0}], others, policies=("parts", "one_grid"))


def test_parts_need_no_memory_that_is_cleared() -> None:
    (first, second), scratch = programs(decode, CASES["residual and rms_norm"][1])
    assert [s.kept for s in scratch] == [False] and scratch[0].size == f"SPLITS * {M * N}"
    assert first.pointers[-1] == (Place.SCRATCH, 0) and (Place.SCRATCH, 0) in second.pointers
    assert second.sizes == ("SPLITS",)


def programs(fn: Callable[..., Any], shapes: Shapes) -> tuple[Any, Any]:
    program = made(fn, tensors(shapes)).programs["parts"]
    return program.launches, program.scratch


VECTORS: dict[str, tuple[Callable[..., Any], Shapes]] = {
    "one row": (lambda x, w: (x @ w.t()).relu(), ((1, K), (260, K))),
    "one column": (lambda w, x: torch.tanh(w @ x), ((260, K), (K, 1))),
    "a batch of rows": (lambda x, w: torch.bmm(x, w.transpose(1, 2)).relu(), ((4, 1, K), (4, 70, K))),
    "bias": (lambda x, w, b: F.gelu(torch.addmm(b, x, w.t(), alpha=2, beta=0.5)), ((1, K), (260, K), (260,))),
    "gates": (lambda x, w: F.silu((h := x @ w.t())[:, ::2]) * h[:, 1::2], ((1, K), (520, K))),
    "a wide product": (lambda x, w: WIDE_PRODUCT(x, w.t()).relu(), ((1, K), (260, K))),
}


WIDE = {False: Blocks(16, 64, 256, splits=2), True: Blocks(64, 16, 256, splits=2)}  # few programs to interpret


@pytest.mark.parametrize("name, dtype", [*((n, B) for n in VECTORS), ("one row", torch.float32)])
def test_a_matrix_and_a_vector(name: str, dtype: torch.dtype) -> None:
    """By rows, and by tiles of which the vector is the only row or column."""
    fn, shapes = VECTORS[name]
    found = check(fn, tensors(shapes, dtype), policies=("rowwise", "persistent", "last_arriver", "turnstile"),
                  blocks=WIDE[name == "one column"])
    (launch,) = found.programs["rowwise"].launches
    assert "tl.dot" not in launch.kernel.source and not found.programs["rowwise"].scratch


@pytest.mark.parametrize("columns", [False, True])
def test_a_vector_with_a_norm(columns: bool) -> None:
    """A kernel leaves the sums, by rows of the matrix or by tiles; the other has the whole row."""
    def fn(x: Tensor, w: Tensor, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return decode(x, w.t() if columns else w, r, g)

    shapes = ((1, K), (K, 260) if columns else (260, K), (1, 260), (260,))
    found = check(fn, tensors(shapes), policies=("parts", "one_grid"), blocks=WIDE[False])
    first, _ = found.programs["parts"].launches
    assert ("tl.dot" in first.kernel.source) == columns


def test_the_same_bits_whoever_is_last() -> None:
    """Bundles change the order of addition by their size alone."""
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).float()

    for join in (1, 2, 3, 7):
        check(fn, tensors(((M, K), (K, N))), policies=("last_arriver",), blocks=Blocks(splits=7, join=join))


def bodies(of: Made) -> list[str]:
    return [launch.kernel.source for launch in of.programs["parts"].launches]


def test_names_do_not_matter() -> None:
    """Equal layers share their kernels."""
    def other(query: Tensor, matrix: Tensor, stream: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return decode(query, matrix, stream, scale)

    shapes = CASES["residual and rms_norm"][1]
    assert bodies(made(decode, tensors(shapes))) == bodies(made(other, tensors(shapes)))
