"""What a graph computes of a matrix product row by row, up to where the rows meet again.

    l = x @ w.T                [M, N]                   rows    [M, ..]     written row by row: losses, logsumexps
    e = exp(l - max(l)); ...   region, wide or narrow   put     g @ w       [M, K], row by row: the gradient of x
    g = ...                                             add     g.T @ x     [N, K], a sum over rows: that of w
                                                        total   g.sum(0)    [N] or a number: that of a bias

Enters: a product node.  Leaves: its `Region`, or a `Refusal`.  A node is wide where one row of it has about N
elements; the region holds all that is wide and depends on the product, what narrow values lead from wide to wide, and
the wide values from outside that those read (a comparison of labels with columns), which are computed where they are
read.  Invariant: besides its outputs nothing outside reads the region, and `leaves` are all that it reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Mapping

import torch
from torch import fx

from fxfuser.errors import user_location
from fxfuser.ops import Kind, kind_of, reduction_dims
from fxfuser.passes.row_values import grown_lead, operand_leads, rest_of, value_of

aten = torch.ops.aten
SUMS = frozenset({aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default})


class How(Enum):
    """How the rows of the region become one of its outputs."""

    ROWS = "rows"
    PUT = "put"
    ADD = "add"
    TOTAL = "total"


@dataclass(frozen=True)
class Output:
    """`node` is what the graph reads; `inside` the operand in the region; `other` the other factor of a product, for
    ADD with its rows first; `turned`: the product is other.T @ inside."""

    node: fx.Node
    how: How
    inside: fx.Node
    other: fx.Node | None = None
    turned: bool = False


@dataclass(frozen=True)
class Region:
    """See the module's text.  `leads` gives the leading dimensions that hold the rows, of members and of leaves, 0 for
    leaves that are the same for all rows; `members` are in graph order, the product first.  `late` leaves follow from
    outputs, such as a sum over all rows."""

    product: fx.Node
    rows: int
    columns: int
    members: tuple[fx.Node, ...]
    outputs: tuple[Output, ...]
    leads: Mapping[fx.Node, int]
    leaves: tuple[fx.Node, ...]
    late: frozenset[fx.Node] = frozenset()


@dataclass(frozen=True)
class Refusal:
    """Why a linear layer and its loss stay as they are."""

    reason: str
    node: fx.Node | None = None
    returned: bool = False  # the graph's outputs hold the logits

    def __str__(self) -> str:
        where = user_location(self.node.stack_trace) if self.node is not None else ""
        return self.reason + (f" ({where})" if where else "")


def descendants(node: fx.Node) -> set[fx.Node]:
    """All that depends on the node."""
    found: set[fx.Node] = set()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user not in found:
            found.add(user)
            stack.extend(user.users)
    return found


def transposes(node: fx.Node) -> bool:
    """Whether the node is a matrix, transposed."""
    return node.target is aten.permute.default and node.args[1] == [1, 0]


def is_product(node: fx.Node) -> bool:
    """mm or addmm of two matrices; a bias is added as it is."""
    if node.target is aten.mm.default:
        return value_of(node) is not None
    plain = node.target is aten.addmm.default and not node.kwargs and value_of(node) is not None
    return plain and node.args[0].meta["val"].dim() == 1  # type: ignore[union-attr]


def before_summed_exponentials(graph: fx.Graph) -> list[fx.Node]:
    """The products, in graph order, that a cross entropy may read: no other lies between them and exponentials that
    are summed.  To follow the readers of every product of a model instead takes longer than all other passes."""
    found: set[fx.Node] = set()
    stack = [n for n in graph.nodes if n.target is aten.exp.default and any(u.target in SUMS for u in n.users)]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node not in found:
                found.add(node)
                if not is_product(node):
                    stack.append(node)
    return [n for n in graph.nodes if n in found and is_product(n)]


def factors(product: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node]:
    """The bias, the factor that has the rows and the other one."""
    bias = product.args[0] if product.target is aten.addmm.default else None
    left, right = product.args[-2:]
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    return bias if isinstance(bias, fx.Node) else None, left, right


def region_of(product: fx.Node, order: Mapping[fx.Node, int]) -> Region | Refusal | None:
    """None where no cross entropy reads the product; `order` numbers the nodes of the graph."""
    rows, columns = product.meta["val"].shape
    if rows < 2 or columns < 2:
        return None
    search = _Search(product, rows, columns, order)
    search.grow()
    if not search.is_cross_entropy():
        return None
    if not search.refusals:
        return search.region()
    # a softmax that is returned, or multiplied, is nobody's loss
    return max(search.refusals, key=lambda r: r.returned) if search.picks() else None


@dataclass
class _Search:
    product: fx.Node
    rows: int
    columns: int
    order: Mapping[fx.Node, int]
    leads: dict[fx.Node, int] = field(default_factory=dict)
    turned: dict[fx.Node, fx.Node] = field(default_factory=dict)  # transposed -> what it transposes
    outputs: list[Output] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def wide(self, node: fx.Node) -> bool:
        return 2 * math.prod(rest_of(node, self.leads[node])) >= self.columns

    def grow(self) -> None:
        """Follows the product's readers, in graph order."""
        self.leads[self.product] = 1
        pending = dict.fromkeys(self.product.users)
        seen: set[fx.Node] = set()
        while pending:
            node = min(pending, key=self.order.__getitem__)
            del pending[node]
            if node in seen:
                continue
            seen.add(node)
            if self._enter(node):
                pending.update(dict.fromkeys(node.users))

    def _enter(self, node: fx.Node) -> bool:
        """Whether the node's readers are of interest too."""
        operands = [n for n in node.all_input_nodes if n in self.leads]
        across = [n for n in node.all_input_nodes if n in self.turned]
        if not across:
            lead = grown_lead(node, self.leads, self.rows)
            if lead is not None:
                self.leads[node] = lead
                return True
            if not any(self.wide(n) for n in operands):
                return False  # what narrow values become outside is none of the region's concern
        if not across and self._turns(node):
            self.turned[node] = operands[0]
            return True
        output = self._output(node)
        if output is None:
            what = "the logits or their gradient are returned" if node.op == "output" else \
                f"{node.target} reads the logits or their gradient as a whole"
            self.refusals.append(Refusal(
                what, node if node.op != "output" else self.product, node.op == "output"))
        else:
            self.outputs.append(output)
        return False

    def _turns(self, node: fx.Node) -> bool:
        return transposes(node) and self.leads.get(node.all_input_nodes[0]) == 1

    def _output(self, node: fx.Node) -> Output | None:
        if node.target is aten.mm.default and value_of(node) is not None:
            left, right = node.args
            assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
            inside = [n in self.leads or n in self.turned for n in (left, right)]
            if all(inside):
                return None
            if self.leads.get(left) == 1:
                return Output(node, How.PUT, left, right)
            if left in self.turned:
                return Output(node, How.ADD, self.turned[left], right)
            if self.leads.get(right) == 1 and transposes(left):
                return Output(node, How.ADD, right, left.all_input_nodes[0], turned=True)
            return None
        if node.target in SUMS and node.all_input_nodes[0] in self.leads:
            inside_node = node.all_input_nodes[0]
            dims, _ = reduction_dims(node)
            if set(range(self.leads[inside_node])) <= set(dims):
                return Output(node, How.TOTAL, inside_node)
        return None

    def is_cross_entropy(self) -> bool:
        """Exponentials of a row are summed."""
        exps = [n for n in self.leads if n.target is aten.exp.default and self.wide(n)]
        return any(u.target is aten.sum.dim_IntList and u in self.leads and not self.wide(u)
                   for n in exps for u in n.users)

    def picks(self) -> bool:
        """Whether an element of each wide row is gathered."""
        return any(n.target is aten.gather.default and n.args[0] in self.leads for n in self.leads)

    # ------------------------------------------------------------ the region

    def region(self) -> Region | Refusal | None:
        wide = [n for n in self.leads if self.wide(n)]
        inside = self._between(wide)
        self._row_outputs(inside)
        members, leaves = self._absorb(inside)
        if not _picks_label(members, self.leads):
            logs = any(n.target is aten.log.default for n in members)
            return Refusal("no label picks a column: the targets are probabilities", self.product) if logs else None
        below = descendants(self.product)
        ordered = tuple(sorted(members, key=self.order.__getitem__))
        return Region(self.product, self.rows, self.columns, ordered, tuple(self.outputs), self.leads, tuple(leaves),
                      frozenset(n for n in leaves if n in below))

    def _between(self, wide: list[fx.Node]) -> set[fx.Node]:
        """What is wide, and what leads from wide to wide."""
        found = set(wide)
        for node in sorted(self.leads, key=self.order.__getitem__, reverse=True):
            if any(u in found for u in node.users):
                found.add(node)
        return found

    def _row_outputs(self, inside: set[fx.Node]) -> None:
        """Narrow values that are made of something wide, and what of the region itself is read outside."""
        wide = {n for n in inside if self.wide(n)}
        made = {u for n in wide for u in n.users if u in self.leads and u not in inside}
        known = inside | made | {o.node for o in self.outputs} | set(self.turned)
        read = {n for n in inside - wide if any(u not in known for u in n.users)}
        for node in sorted(made | read, key=self.order.__getitem__):
            self.outputs.append(Output(node, How.ROWS, node))

    def _absorb(self, inside: set[fx.Node]) -> tuple[set[fx.Node], list[fx.Node]]:
        """Members, with wide values from outside, and leaves."""
        members = inside | {o.node for o in self.outputs if o.how is How.ROWS}
        leaves: dict[fx.Node, None] = {}
        stack = sorted(members - {self.product}, key=self.order.__getitem__)
        while stack:
            node = stack.pop()
            if not self.leads[node]:
                continue  # a factory: nothing is read
            found = operand_leads(node, self.leads[node], self.rows)
            assert found is not None, node
            for operand, lead in found.items():
                if operand in members:
                    continue
                if operand not in self.leads:
                    self.leads[operand] = lead
                if self._made_here(operand, lead):
                    members.add(operand)
                    stack.append(operand)
                else:
                    leaves[operand] = None
        return members, list(leaves)

    def _made_here(self, node: fx.Node, lead: int) -> bool:
        """Whether a value from outside is computed where it is read: it is wide, a sum of something wide, follows
        from labels, or is a constant."""
        if not lead:
            return kind_of(node) is Kind.FACTORY and not node.all_input_nodes
        if node.op != "call_function" or operand_leads(node, lead, self.rows) is None:
            return False
        elements = math.prod(rest_of(node, lead))
        if 2 * elements >= self.columns:
            return True
        if elements == 1 and not node.meta["val"].dtype.is_floating_point:
            return True  # what follows from a label
        if kind_of(node) is not Kind.REDUCTION:
            return False
        source = node.all_input_nodes[0]
        return source.op == "call_function" and self._made_here(source, lead)


def _picks_label(members: set[fx.Node], leads: Mapping[fx.Node, int]) -> bool:
    """Whether an integer of each row chooses a column: by a gather, or compared with the columns' numbers."""
    for node in members:
        if node.target is aten.gather.default and node.args[0] in members:
            return True
        if node.target is aten.eq.Tensor and leads.get(node) and not any(
                n.meta["val"].dtype.is_floating_point for n in node.all_input_nodes):
            return True
    return False
