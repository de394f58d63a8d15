"""The nodes that hold a graph's symbolic sizes.

Enters: an ATen graph, whose leading inputs are the sizes that vary.  Leaves: arguments for an op that takes a shape:
integers, and the input nodes that stand for symbols.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import torch
from torch import fx

Sizes = Mapping[str, fx.Node]


def size_inputs(graph: fx.Graph) -> Sizes:
    """Each symbol's text -> the graph input that holds it."""
    return {str(n.meta["val"]): n for n in graph.nodes
            if n.op == "placeholder" and isinstance(n.meta.get("val"), torch.SymInt)}


def as_arguments(shape: Iterable[int | torch.SymInt], sizes: Sizes) -> list[Any] | None:
    """`shape` as call arguments; None where a dimension is an expression that no input holds."""
    found = [s if isinstance(s, int) else sizes.get(str(s)) for s in shape]
    return None if any(s is None for s in found) else found
