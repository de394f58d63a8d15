"""Symbolic sizes as Python source over the graph's size symbols.

Enters: ints, `torch.SymInt` and sympy expressions.  Leaves: source text that evaluates to an int in a namespace
that holds the symbols and `FUNCTIONS`.  Invariant: no text divides with `/` where the value is an integer.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence, Union

import sympy
import torch

Dim = Union[int, torch.SymInt, sympy.Expr]


def _floor_div(a: int, b: int) -> int:
    return a // b


def _mod(a: int, b: int) -> int:
    return a % b


def _modular_indexing(a: int, b: int, c: int) -> int:
    return (a // b) % c


def _where(condition: bool, a: int, b: int) -> int:
    return a if condition else b


# torch's sympy functions under the names that str(expr) prints
FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "FloorDiv": _floor_div, "CleanDiv": _floor_div, "Mod": _mod, "PythonMod": _mod,
    "ModularIndexing": _modular_indexing, "Where": _where, "Max": max, "Min": min,
    "CeilToInt": lambda a: -int(-a // 1), "FloorToInt": lambda a: int(a // 1), "TruncToInt": int,
    "ToFloat": float, "TruncToFloat": lambda a: float(int(a)), "Identity": lambda a: a, "Abs": abs,
    "IntTrueDiv": lambda a, b: a / b, "FloatTrueDiv": lambda a, b: a / b, "FloatPow": pow, "PowByNatural": pow,
    "LShift": lambda a, b: a << b, "RShift": lambda a, b: a >> b, "RoundToInt": round,
    "ceiling": lambda a: -int(-a // 1), "floor": lambda a: int(a // 1),
    "BitwiseFn_bitwise_and": lambda a, b: a & b,
    "BitwiseFn_bitwise_or": lambda a, b: a | b,
}

_INFIX = {
    "FloorDiv": "//", "CleanDiv": "//", "Mod": "%", "PythonMod": "%", "Equality": "==", "Unequality": "!=",
    "StrictLessThan": "<", "LessThan": "<=", "StrictGreaterThan": ">", "GreaterThan": ">=",
}


def expression(value: Dim) -> sympy.Expr:
    """The sympy expression of a dimension, with what the shape environment has learnt put in."""
    if isinstance(value, torch.SymInt):
        return sympy.sympify(value.node.expr)
    return sympy.sympify(value)


def symbols(value: Dim) -> frozenset[str]:
    """The names of the symbols in `value`."""
    if type(value) is int:
        return frozenset()
    return frozenset(str(s) for s in expression(value).free_symbols)


def source(value: Dim) -> str:
    """Python source of `value`; raises ValueError for an expression that has none."""
    if type(value) is int:
        return repr(value)
    return _text(expression(value))


def evaluate(texts: Sequence[str], values: Mapping[str, int]) -> tuple[int, ...] | None:
    """The numbers that these sources have where the symbols have `values`; None if one is missing."""
    try:
        return tuple(int(eval(text, {**FUNCTIONS, **values})) for text in texts)
    except (NameError, ZeroDivisionError):
        return None


def solve(value: Dim, text: str) -> tuple[str, str] | None:
    """(symbol, source of its value), where `value`, known at run time as `text`, is a*s + b in one symbol s."""
    expr = expression(value)
    if expr.is_Symbol:
        return str(expr), text
    if len(expr.free_symbols) != 1:
        return None
    (s,) = expr.free_symbols
    factor, rest = expr.coeff(s, 1), expr.coeff(s, 0)
    if not (factor.is_Integer and rest.is_Integer) or factor == 0 or sympy.expand(factor * s + rest - expr) != 0:
        return None
    shifted = text if rest == 0 else f"({text} - {int(rest)})"
    return str(s), shifted if factor == 1 else f"{shifted} // {int(factor)}"


def _text(expr: sympy.Basic) -> str:
    if expr.is_Integer:
        return str(int(expr))
    if expr.is_Symbol:
        return str(expr)
    if expr.is_Float or expr.is_Rational:
        return repr(float(expr))
    if expr in (sympy.true, sympy.false):
        return str(bool(expr))
    if isinstance(expr, (sympy.Add, sympy.Mul)):
        numerator, denominator = expr.as_numer_denom()
        if denominator != 1:
            return f"{_atom(numerator)} // {_atom(denominator)}"
        if isinstance(expr, sympy.Add):
            return " + ".join(map(_atom, expr.as_ordered_terms())).replace("+ -", "- ")
        return "*".join(map(_atom, expr.as_ordered_factors()))
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return f"{_atom(expr.base)}**{int(expr.exp)}"
    if isinstance(expr, (sympy.And, sympy.Or)):
        return (" and " if isinstance(expr, sympy.And) else " or ").join(map(_atom, expr.args))
    if isinstance(expr, sympy.Not):
        return f"not {_atom(expr.args[0])}"
    return _call(expr)


def _call(expr: sympy.Basic) -> str:
    name = type(expr).__name__
    if name in _INFIX and len(expr.args) == 2:
        return f" {_INFIX[name]} ".join(map(_atom, expr.args))
    if name == "ModularIndexing":
        base, divisor, modulus = map(_atom, expr.args)
        return f"{base} // {divisor} % {modulus}"
    if name in ("Max", "Min"):
        return f"{name.lower()}({', '.join(map(_text, expr.args))})"
    if name in FUNCTIONS:
        return f"{name}({', '.join(map(_text, expr.args))})"
    raise ValueError(f"no Python source for the size {expr}")


def _atom(expr: sympy.Basic) -> str:
    text = _text(expr)
    simple = expr.is_Symbol or (expr.is_Integer and expr >= 0) or text.isidentifier() or isinstance(expr, sympy.Pow)
    product = isinstance(expr, sympy.Mul) and "//" not in text and "-" not in text
    return text if simple or product else f"({text})"
