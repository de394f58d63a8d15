"""Which names a statement reads and binds, found without a parser where that is as good, and when they die."""

from __future__ import annotations

import pytest

from fxfuser.runtime.buffers import Names, _parsed, last_uses, names, without_unread

STATEMENTS = [
    "add = aten.add.Tensor(x, y, alpha=2)",
    "a, b = segment0_aten(x, s0)",
    "a, = segment0_aten(x, s0 + 1)",
    "mul = x.new_empty_strided((4, 8), (8, 1))",
    "buf = empty_strided((s0, 8), (8, 1), dtype=torch.float32, device=cuda0)",
    "segment3(x, y, mul, s0 * 8) or fill((mul,), segment3_aten(x, y))",
    "x = primals.new_empty_strided((4,), (1,)) if retained() else primals",
    "n = -1 * s0 // 2 - (s1 << 1)",
    "y = aten.mul.Tensor(x, 1e-05) + 0x1F + 1_000 + 1.5e3",
    "y = aten.full.default([], float('-inf'), pin_memory=False)",
    "y = aten.einsum.default('ab, bc', [x, z])",
    "y = x[0]",
    "y = x[1:2]",
    "if not segment1_2(x, y): return False",
    "return (x, None, y)",
    "del x, y",
    "ok = x == y",
    "ok = x<=y",
    "y = {z: 1}",
    "y = f(**{'a': z})",
    "y = [i for i in x if i is not None]",
    "y = f(key=lambda v: v + z)",
    "x.y = z",
    "x[0] = z",
    "y = z = x",
    "y += x",
    "assert x, y",
    "x",
    "é = ü.default(ß=ñ)",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_names_are_those_of_the_compiler(statement: str) -> None:
    """Also where `names` does not ask it."""
    assert names.__wrapped__(statement) == _parsed(statement)


def test_names_of_attributes_keywords_and_text_are_none() -> None:
    assert names("y, z = a.b.c(d, e=f, g='h')") == Names(frozenset("adf"), ("y", "z"))


def test_a_name_dies_after_its_last_use() -> None:
    unread, frees = last_uses(["a = f(x)", "b = g(a, y)", "c = h(a)", "return (b,)"], ("x", "y", "z"))
    assert unread == ("z",) and frees == [("x",), ("y",), ("a", "c"), ()]


def test_what_nothing_reads_can_be_left_out() -> None:
    assert without_unread(["a = f(x)", "b = g(a)", "c = f(x)", "return c"], [True, True, True, False]) == [2, 3]
