"""Factors of products, in the interpreter against fp64: layouts, strides and bases, sizes, and what is computed on
the way into the product."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxfuser import observe
from fxfuser.lowering.kernel import Kernel
from fxfuser.runtime.build import DESCRIPTOR_ARCH, Variant, loads_by_descriptor

from .harness import POLICIES, Blocks, Made, check, made

Tensor = torch.Tensor
B = torch.bfloat16
M, N, K = 20, 24, 40


def rand(*shape: int, dtype: torch.dtype = B) -> Tensor:
    return torch.randn(shape).to(dtype)


def padded(rows: int, columns: int, pad: int = 8) -> Tensor:
    return rand(rows, columns + pad)[:, :columns]


def shifted(rows: int, columns: int, by: int) -> Tensor:
    """Contiguous, `by` elements after an aligned address."""
    memory = rand(rows * columns + 64)
    start = -memory.data_ptr() // 2 % 8 + by
    return memory[start:start + rows * columns].view(rows, columns)


def kernel(of: Made, policy: str = "persistent") -> Kernel:
    return of.programs[policy].launches[0].kernel


def descriptors(of: Made) -> int:
    return kernel(of).source.count("tl.make_tensor_descriptor")


# ---------------------------------------------------------------- layouts

LAYOUTS: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
    "nn": (lambda a, b: a @ b, (M, K), (K, N)),
    "nt": (lambda a, b: a @ b.t(), (M, K), (N, K)),
    "tn": (lambda a, b: a.t() @ b, (K, M), (K, N)),
    "tt": (lambda a, b: a.t() @ b.t(), (K, M), (N, K)),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [B, torch.float32], ids=lambda d: str(d)[6:])
def test_layouts(name: str, dtype: torch.dtype) -> None:
    """Rows of 20 bf16 are no multiple of 16 bytes, so `tn` and `tt` load one factor by pointers."""
    fn, left, right = LAYOUTS[name]
    found = check(fn, [rand(*left, dtype=dtype), rand(*right, dtype=dtype)])
    by_pointers = dtype is B and name in ("tn", "tt")
    assert descriptors(found) == (2 if by_pointers else 3)
    assert kernel(found).source.count("tl.trans(") == {"nn": 0, "nt": 1, "tn": 1, "tt": 2}[name] - by_pointers


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_symbolic_sizes(name: str) -> None:
    """One kernel for sizes that descriptors can move, and for others."""
    fn, _, _ = LAYOUTS[name]

    def sized(m: int, n: int, k: int) -> list[Tensor]:
        return [rand(*(k, m) if name[0] == "t" else (m, k)), rand(*(n, k) if name[1] == "t" else (k, n))]

    found = check(fn, sized(20, 24, 40), [{0, 1}, {0, 1}], [sized(32, 16, 48), sized(2, 33, 5)],
                  policies=[POLICIES[list(LAYOUTS).index(name) % 3]])
    assert kernel(found).sizes == 3 and kernel(found).divisible


# ---------------------------------------------------------------- strides and bases

STRIDED: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "padded": (lambda: padded(M, K), True),
    "padded by one": (lambda: padded(M, K, 1), False),
    "every other column": (lambda: rand(M, 2 * K)[:, ::2], False),
    "every other row": (lambda: rand(2 * M, K)[::2], True),
    "transposed and padded": (lambda: padded(K, M, 4).t(), True),
    "expanded rows": (lambda: rand(1, K).expand(M, K), False),
    "expanded columns": (lambda: rand(M, 1).expand(M, K), False),
    "a middle dimension": (lambda: rand(M, 3, K)[:, 1], True),
    "an aligned base": (lambda: shifted(M, K, 8), True),
    "a misaligned base": (lambda: shifted(M, K, 1), True),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides_and_bases(name: str) -> None:
    left, movable = STRIDED[name]
    found = check(lambda a, b: (a @ b.t()).relu(), [left(), rand(N, K)], policies=[POLICIES[len(name) % 3]])
    assert descriptors(found) == (3 if movable else 2)


@pytest.mark.parametrize("offset, moves", [(0, True), (8, True), (1, False), (4, False)])
def test_a_misaligned_base_is_loaded_by_pointers(offset: int, moves: bool) -> None:
    a, b, out = shifted(M, K, offset), shifted(N, K, 0), torch.empty(M, N, dtype=B)
    of = kernel(made(lambda a, b: a @ b.t(), [a, b]))
    variant = Variant.of([t.data_ptr() for t in (a, b, out)], [], 1)
    assert loads_by_descriptor(of, variant, DESCRIPTOR_ARCH) is moves
    assert not loads_by_descriptor(of, variant, 80)


def test_slices_inside_the_graph() -> None:
    """Bases that views move: by whole 16 bytes, and not."""
    x, w = rand(M + 3, K + 16), rand(N, K + 16)
    assert descriptors(check(lambda x, w: x[2:2 + M, 8:48] @ w[:, 16:].t(), [x, w])) == 3
    assert descriptors(check(lambda x, w: x[2:2 + M, 4:44] @ w[:, 16:].t(), [x, w], policies=["persistent"])) == 2


BATCHES: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "batched": (lambda a, b: torch.bmm(a, b), [(3, M, K), (3, K, N)]),
    "both transposed": (lambda a, b: torch.bmm(a.transpose(1, 2), b.transpose(1, 2)), [(3, K, M), (3, N, K)]),
    "one matrix for all": (lambda a, b: torch.matmul(a, b.expand(3, K, N)), [(3, M, K), (K, N)]),
    "two dimensions": (lambda a, b: torch.matmul(a, b).exp(), [(2, 3, 9, K), (2, 3, K, 10)]),
    "heads": (lambda a, b: torch.einsum("bshd,bthd->bhst", a, b) * 0.3, [(2, 9, 3, 8), (2, 10, 3, 8)]),
    "outer dimensions swapped": (lambda a, b: torch.bmm(a.transpose(0, 1), b).transpose(0, 1).contiguous(),
                                 [(M, 3, K), (3, K, N)]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str) -> None:
    fn, shapes = BATCHES[name]
    check(fn, [rand(*shape) for shape in shapes], policies=POLICIES if name == "batched" else ["persistent"])


def test_a_symbolic_batch() -> None:
    def given(batch: int, rows: int) -> list[Tensor]:
        return [rand(batch, rows, K), rand(batch, K, 9)]

    check(lambda a, b: ((h := torch.bmm(a, b)).relu(), h.sum(1)), given(3, 20), [{0, 1}, {0}],
          [given(2, 5), given(5, 17)], policies=["persistent", "last_arriver"])


@pytest.mark.parametrize("depth", [2, 8, 15, 16, 17, 33, 48])
def test_tails_of_the_sum(depth: int) -> None:
    """What lies past the end of a row, here its neighbours, is not summed."""
    left, right = padded(M, depth, 3), padded(N, depth, 3)
    check(lambda a, b: a @ b.t(), [left, right], policies=POLICIES if depth == 17 else [POLICIES[depth % 3]])


@pytest.mark.parametrize("rows, columns", [(2, 2), (16, 16), (2, 40), (40, 3), (15, 17)])
def test_matrices_of_few_rows_or_columns(rows: int, columns: int) -> None:
    check(lambda a, b: (a @ b.t()).sigmoid(), [rand(rows, K), rand(columns, K)], policies=["persistent"])


# ---------------------------------------------------------------- prologues

PROLOGUES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "a cast": (lambda x, w: x.bfloat16() @ w.t(), [rand(M, K, dtype=torch.float32), rand(N, K)]),
    "casts of both": (lambda x, w: x.bfloat16() @ w.bfloat16().t(), [rand(M, K).float() / 3, rand(N, K).float() / 3]),
    "a cast to float": (lambda x, w: x.float() @ w.float().t(), [rand(M, K), rand(N, K)]),
    "a cast to float16": (lambda x, w: x.half() @ w.t(), [rand(M, K).float(), rand(N, K).half()]),
    "one that is not zero at zero": (lambda x, w: x.exp() @ w.t(), [rand(M, 37), rand(N, 37)]),
    "on the right": (lambda x, w: x @ F.silu(w).t(), [rand(M, K), rand(N, K)]),
    "on both": (lambda x, w: x.cos() @ w.cos().t(), [rand(M, 37), rand(N, 37)]),
    "row statistics": (
        lambda x, mean, scale, g, w: ((x - mean) * scale * g).bfloat16() @ w.t(),
        [rand(M, K), rand(M, 1).float(), rand(M, 1).float().abs(), rand(K), rand(N, K)]),
    "a mask": (lambda x, m, w: torch.where(m, x, 0.0).bfloat16() @ w.t(), [rand(M, K), rand(M, K) > 0, rand(N, K)]),
    "a comparison": (lambda x, w: (x > 0).to(B) @ w.t(), [rand(M, 37), rand(N, 37)]),
    "integers": (lambda x, w: x.to(B) @ w.t(), [torch.randint(-9, 9, (M, K), dtype=torch.int8), rand(N, K)]),
    "a concatenation": (lambda x, y, w: torch.cat([x, y * 2], 1) @ w.t(), [rand(M, 17), rand(M, 23), rand(N, K)]),
    "a pad": (lambda x, w: F.pad(x, (1, 2), value=0.5) @ w.t(), [rand(M, 37), rand(N, K)]),
    "a flip": (lambda x, w: x.flip(1) @ w.t(), [rand(M, K), rand(N, K)]),
    "a lookup": (lambda t, i, w: t[i] @ w.t(), [rand(30, K), torch.randint(0, 30, (M,)), rand(N, K)]),
    "a scaled lookup": (
        lambda t, i, w: F.embedding(i, t) * 3 @ w.t(), [rand(30, 37), torch.randint(0, 30, (M,)), rand(N, 37)]),
    "indices": (lambda x, w: (x * torch.arange(37, dtype=B)) @ w.t(), [rand(M, 37), rand(N, 37)]),
    "a factor that is also stored": (
        lambda x, w: (x.bfloat16() @ w.t(), x[:, :N] * 2), [rand(M, K).float(), rand(N, K)]),
    "the same on both sides": (lambda x: x.relu() @ x.relu().t(), [rand(M, K)]),
    "two products of one factor": (
        lambda x, w, v: (y := x.tanh()) @ w.t() + y @ v.t(), [rand(M, 37), rand(N, 37), rand(N, 37)]),
}


@pytest.mark.parametrize("name", PROLOGUES)
def test_prologues(name: str) -> None:
    fn, args = PROLOGUES[name]
    full = name in ("one that is not zero at zero", "on both")
    check(fn, args, policies=POLICIES if full else [POLICIES[len(name) % 3]])


@pytest.mark.parametrize("precision, text", [("highest", '"ieee"'), ("high", '"tf32"'), ("medium", '"tf32"')])
def test_products_of_float32_round_as_pytorch_is_told(precision: str, text: str) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = made(lambda x, w: x @ w, [rand(M, K, dtype=torch.float32), rand(K, N, dtype=torch.float32)])
    finally:
        torch.set_float32_matmul_precision(before)
    assert f"input_precision={text}" in found.source()
    assert "input_precision" not in made(lambda x, w: x @ w, [rand(M, K), rand(K, N)]).source()


@pytest.mark.parametrize("value, text", [("tf32", '"tf32"'), ("ieee", '"ieee"')])
def test_the_newer_setting_counts_too(value: str, text: str) -> None:
    """Set alone, it makes `torch.get_float32_matmul_precision` raise an error."""
    before = torch.get_float32_matmul_precision()
    torch.backends.cuda.matmul.fp32_precision = value
    try:
        found = made(lambda x, w: x @ w, [rand(M, K, dtype=torch.float32), rand(K, N, dtype=torch.float32)])
    finally:
        torch.set_float32_matmul_precision(before)
    assert f"input_precision={text}" in found.source()


def test_a_change_of_the_setting_compiles_anew() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu()

    options = {"executor": "interpret", "strict": True, "gemm": "fused"}
    run, args = torch.compile(fn, backend="fxfuser", options=options), [torch.randn(M, K), torch.randn(K, N)]
    before = torch.get_float32_matmul_precision()
    found = []
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            with observe.recording() as recording:
                run(*args)
            found.append([re.findall(r'input_precision="(\w+)"', kernel.source)
                          for trace in recording.graphs for kernel in trace.of(observe.KernelRecord)])
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [[["ieee"]], [["tf32"]], []], "the third call finds what the first compiled"


@pytest.mark.parametrize("policy", POLICIES)
def test_poison_beside_the_operands_stays_out(policy: str) -> None:
    """What surrounds a factor in memory is nan: whole columns, rows and elements between."""
    def inside(rows: int, columns: int) -> Tensor:
        around = torch.full((rows + 9, columns + 16), float("nan"), dtype=B)
        around[3:3 + rows, 8:8 + columns] = rand(rows, columns)
        return around[3:3 + rows, 8:8 + columns]

    check(lambda x, w, b: F.linear(x, w) + b, [inside(M, 37), inside(N, 37), inside(M, N)], policies=[policy],
          blocks=Blocks(32, 16, 16))
