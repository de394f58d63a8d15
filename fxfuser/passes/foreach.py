"""Ops on lists of tensors, which optimizers call, as the same op on each tensor.

    a, b = aten._foreach_add.Scalar([x, y], 1)    ->    a = aten.add(x, 1);  b = aten.add(y, 1)

What follows from one tensor of the list then shares kernels, where the lists would each be read and written whole by
every op.  Bodies take their op's arguments and return its list; capture traces them.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

# Ops whose name after `_foreach_` is that of an op that takes one element of each list
_SAME = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone cos cosh div erf erfc exp expm1 floor "
    "frac lerp lgamma log log10 log1p log2 max maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin "
    "sinh sqrt sub tan tanh trunc").split()
_LISTS = ("List[Tensor]", "List[number]")
_BY_NUMBER = {"maximum": aten.clamp_min, "minimum": aten.clamp_max}  # which take no number themselves


def _body(op: OpOverload, each: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """`each` on the elements of the lists that the schema names; what is no list goes to all."""
    arguments = op._schema.arguments
    zipped = frozenset(a.name for a in arguments if str(a.type) in _LISTS)
    by_name = frozenset({"alpha", "value"})  # keywords of the ops themselves

    def body(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        given = {a.name: v for a, v in zip(arguments, args)} | kwargs
        found = []
        for i in range(max(len(given[name]) for name in zipped)):
            one = {name: v[i] if name in zipped else v for name, v in given.items()}
            plain = [v for name, v in one.items() if name not in by_name and name != "scalars"]
            words = {name: v for name, v in one.items() if name in by_name}
            if "scalars" in one:  # of addcmul and addcdiv the factor, of others the second operand
                plain, words = (plain, {"value": one["scalars"]}) if "tensor1" in one else \
                    ([*plain, one["scalars"]], words)
            found.append(each(*plain, **words))
        return found

    return body


def _norm(x: torch.Tensor, ord: Any = 2, dtype: torch.dtype | None = None) -> torch.Tensor:
    found: torch.Tensor = aten.linalg_vector_norm.default(x, ord, dtype=dtype)
    return found


def bodies() -> Mapping[OpOverload, Callable[..., list[torch.Tensor]]]:
    """Every op on lists that this version of PyTorch has and that is taken apart.

    Left whole: factors that come in one tensor (`addcmul.Tensor`), which would have to be read on the host.
    """
    found: dict[OpOverload, Callable[..., list[torch.Tensor]]] = {}
    for name in _SAME:
        packet = getattr(aten, f"_foreach_{name}", None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            returns_list = [str(r.type) for r in op._schema.returns] == ["List[Tensor]"]
            if returns_list and not op._schema.is_mutable and not (overload == "Tensor" and name.startswith("addc")):
                number = overload in ("Scalar", "ScalarList")
                found[op] = _body(op, _BY_NUMBER.get(name, getattr(aten, name)) if number else getattr(aten, name))
    norm = aten._foreach_norm.Scalar
    found[norm] = _body(norm, _norm)
    return found
