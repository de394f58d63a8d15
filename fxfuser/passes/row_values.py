"""Which ops compute each row of a tensor from the same row of their operands, and how they read for some of the rows.

A value has its M rows in its leading `lead` dimensions, whose sizes multiply to M: [M, N] and [B, T, N] with B * T = M
are the same rows.  `operand_leads` says for an op with rows in its result which operands have rows and which are the
same for all; `emit` makes the op again for a piece of C rows, where every value with rows has the shape
[C, *rest].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Hashable, Mapping, Sequence

import torch
from torch import fx

from fxfuser.ops import Kind, kind_of, reduction_dims, row
from fxfuser.passes.aliasing import aliased
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import inherited

aten = torch.ops.aten

RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dims,
                      aten.squeeze.dim, aten.reshape.default})
SAME = frozenset({aten.clone.default, aten.alias.default, aten.detach.default})
# ops along one dimension: the position of the argument that says which
ALONG: Mapping[Any, int] = {
    aten.slice.Tensor: 1, aten.select.int: 1, aten.cat.default: 1, aten.slice_scatter.default: 2}
FILLS = frozenset({aten.full.default, aten.scalar_tensor.default})

Leads = Mapping[fx.Node, int]  # 0: the value is the same for all rows


def value_of(node: fx.Node) -> torch.Tensor | None:
    """The fake tensor of a node with one dense result of known size."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value if all(isinstance(s, int) for s in value.shape) else None


def lead_in(shape: Sequence[Any], rows: int) -> int | None:
    """How many leading dimensions make up the rows; None where none do."""
    product = 1
    for count, size in enumerate(shape, 1):
        product *= size
        if product == rows:
            return count
        if product == 0 or product > rows:
            return None
    return None


def rest_of(node: fx.Node, lead: int) -> list[int]:
    """The shape of one row."""
    return list(node.meta["val"].shape[lead:])


def grown_lead(node: fx.Node, leads: Leads, rows: int) -> int | None:
    """The lead of a node of whose operands some have the rows in `leads`; None where it is not computed row by row."""
    value = value_of(node)
    if value is None or node.op != "call_function":
        return None
    given = [leads[n] for n in node.all_input_nodes if n in leads]
    lead = lead_in(value.shape, rows) if node.target in RESHAPES else given[0]
    found = None if lead is None else operand_leads(node, lead, rows)
    if found is None or any(found.get(n) != leads[n] for n in node.all_input_nodes if n in leads):
        return None
    return lead


def operand_leads(node: fx.Node, lead: int, rows: int) -> dict[fx.Node, int] | None:
    """The lead of each operand of a node whose result has its rows in `lead` dimensions, 0 for what is the same for
    all rows; None where the op does not work row by row."""
    value, target = value_of(node), node.target
    operands = node.all_input_nodes
    if value is None or any(value_of(n) is None for n in operands):
        return None
    if target in FILLS:
        return {}
    if target in RESHAPES:
        base = operands[0].meta["val"]
        found = lead_in(base.shape, rows)
        return None if found is None else {operands[0]: found}
    if target in SAME:
        return {operands[0]: lead}
    if kind_of(node) is Kind.POINTWISE or target is aten.expand.default:
        return _aligned(operands, value, lead)
    if target is aten.permute.default:
        kept = list(node.args[1])[:lead] == list(range(lead))  # type: ignore[arg-type]
        return {operands[0]: lead} if kept else None
    if target is aten.constant_pad_nd.default:
        return {operands[0]: lead} if len(node.args[1]) <= 2 * (value.dim() - lead) else None  # type: ignore[arg-type]
    if target in ALONG or target is aten.gather.default:
        return _along(node, lead)
    if kind_of(node) is Kind.REDUCTION:
        dims, _ = reduction_dims(node)
        return {operands[0]: lead} if dims and min(dims) >= lead else None
    return None


def _aligned(operands: Sequence[fx.Node], value: torch.Tensor, lead: int) -> dict[fx.Node, int] | None:
    found: dict[fx.Node, int] = {}
    for operand in operands:
        shape = operand.meta["val"].shape
        missing = value.dim() - len(shape)
        leading = list(shape[:max(lead - missing, 0)])
        if all(s == 1 for s in leading):
            found[operand] = 0
        elif missing == 0 and leading == list(value.shape[:lead]):
            found[operand] = lead
        else:
            return None
    return found


def _along(node: fx.Node, lead: int) -> dict[fx.Node, int] | None:
    """Ops along one dimension, all of whose operands have the rows of the result."""
    operands = node.all_input_nodes
    rank = operands[0].meta["val"].dim()
    if dimension(node) % max(rank, 1) < lead:
        return None
    shape = list(node.meta["val"].shape[:lead])
    if any(list(n.meta["val"].shape[:lead]) != shape for n in operands):
        return None
    return dict.fromkeys(operands, lead)


def dimension(node: fx.Node) -> int:
    """The dimension along which an op of ALONG, or a gather, works."""
    place = ALONG.get(node.target, 1)
    dim = node.args[place] if place < len(node.args) else node.kwargs.get("dim", 0)
    assert isinstance(dim, int)
    return dim


# ---------------------------------------------------------------- again, for a piece


@dataclass(frozen=True)
class Writer:
    """Makes nodes at the graph's insertion point; `tag` says on which side of the cut they are.

    Pieces are alike: `known` keeps the value of a call, which only depends on what its operands look like.
    """

    graph: fx.Graph
    scope: Scope
    tag: Any = None
    known: dict[Hashable, Any] = field(default_factory=dict)

    def call(self, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in inherited(like).items() if k != "recompute"}
        if self.tag is not None:
            node.meta["partitioner_tag"] = self.tag
        key = None if aliased(node) else _key(node)
        if key is None or key not in self.known:
            values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            with self.scope.fake():
                value = target(*values[0], **values[1])
            if key is None:
                node.meta["val"] = value
                return node
            self.known[key] = value
        node.meta["val"] = self.known[key]
        return node


def _key(node: fx.Node) -> Hashable:
    """What the value of a call depends on, where that is known; a view's depends on its base as well."""
    described = []
    for operand in node.all_input_nodes:
        value = operand.meta["val"]
        if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in (*value.shape, *value.stride())):
            return None
        described.append((value.dtype, value.device, tuple(value.shape), value.stride()))
    place = {n: i for i, n in enumerate(node.all_input_nodes)}
    return node.target, repr(fx.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}")), tuple(described)


def emit(
    node: fx.Node, lead: int, count: int, known: Mapping[fx.Node, fx.Node], write: Writer,
    columns: tuple[int, int] | None = None,
) -> fx.Node:
    """`node` for `count` rows; `known` holds its operands for those rows.

    `columns`: dimensions of the first size have the second, in a block of columns.
    """
    target, shift = node.target, lead - 1
    rest = [columns[1] if columns and n == columns[0] else n for n in rest_of(node, lead)]
    shape = [count, *rest]

    def again(*args: Any) -> fx.Node:
        return write.call(target, *fx.map_arg(args, known.__getitem__), like=node, **_kwargs(node, known))

    if target is aten.full.default:
        return again(shape, *node.args[1:])
    if target in RESHAPES:
        source = known[node.all_input_nodes[0]]
        same = list(source.meta["val"].shape) == shape
        return source if same else write.call(aten.view.default, source, shape, like=node)
    if target is aten.expand.default:
        return write.call(target, _short(node.all_input_nodes[0], len(shape), known, write), shape, like=node)
    if target is aten.permute.default:
        order = [0, *(d - shift for d in node.args[1][lead:])]  # type: ignore[index,operator,union-attr]
        return again(node.args[0], order)
    if target in ALONG or target is aten.gather.default:
        place = ALONG.get(target, 1)
        rank = node.all_input_nodes[0].meta["val"].dim()
        args = list(node.args) + [0] * (place + 1 - len(node.args))
        args[place] = dimension(node) % rank - shift
        return again(*args)
    if kind_of(node) is Kind.REDUCTION:
        dims, _ = reduction_dims(node)
        moved = [d - shift for d in dims]
        return again(node.args[0], moved[0] if isinstance(node.args[1], int) else moved, *node.args[2:])
    if kind_of(node) is Kind.POINTWISE and row(target) is not None:
        short = {n: _short(n, len(shape), known, write) for n in node.all_input_nodes}
        return write.call(target, *fx.map_arg(node.args, short.__getitem__), like=node, **_kwargs(node, short))
    return again(*node.args)


def _kwargs(node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> dict[str, Any]:
    found: dict[str, Any] = fx.map_arg(dict(node.kwargs), known.__getitem__)
    return found


def _short(operand: fx.Node, rank: int, known: Mapping[fx.Node, fx.Node], write: Writer) -> fx.Node:
    """An operand that is the same for all rows, without leading dimensions of size 1 that a piece does not have."""
    node = known[operand]
    shape = list(node.meta["val"].shape)
    extra = len(shape) - rank
    if extra <= 0:
        return node
    assert math.prod(shape[:extra]) == 1, (operand, shape)
    return write.call(aten.view.default, node, shape[extra:], like=operand)
