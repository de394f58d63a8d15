"""Elements that a label chooses in each row, found while the row is read anyway.

    p = aten.gather(f(l), 1, label)     ->      q = aten.sum(where(arange == label, l, 0), [1], True);  p = f(q)
    p = aten.gather(f(x @ w.T), 1, label)
                                        ->      q = aten.sum(x * w[label], [1], True);  p = f(q)     # few columns of x
    s = aten.sum(where((arange == label) & c, v, 0), [1])
                                        ->      s = where((0 <= label) & (label < N) & c, v, 0)     # v: [M, 1]; or cast

A gather of logits would read them at a place of its own, so that no kernel could write their gradient over them; and
the sum of a one-hot row is the number in it.  Where nothing keeps the logits and rows are long, an element is computed
apart, so that each tile leaves one number for each row, the logsumexp, and none of the element (12288 x 768 x 50304 on
an H200, torch 2.11, triton 3.6: 9.5 MB and 1.03 of the time of the product alone; 1.10 of it where the product is
rounded).  Eager refuses a label out of range: so does a gather of a constant, which `pick` adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fxfuser.domain.products import rounds_to_tf32
from fxfuser.ops import Kind, kind_of, named_argument, reduction_dims
from fxfuser.ops.products import AFTER, WIDE_PRODUCT
from fxfuser.passes.casts import is_plain_cast
from fxfuser.passes.funnel import Scope
from fxfuser.passes.rebuild import Make, replace_each
from fxfuser.passes.row_region import factors, is_product, transposes
from fxfuser.passes.row_values import RESHAPES, Writer
from fxfuser.passes.tangents import is_zero

aten = torch.ops.aten
HALVES = (torch.float16, torch.bfloat16)

# Columns for each of the inner elements from which on an element is computed apart.  By arithmetic for an H200 both
# take as long at 5.5: a comparison, a selection, an addition and the rounding there and back for each column, and two
# rows of half factors read; at 9 where the product is rounded for another reader.  Between the two it saves memory
APART = 7


class Picker:
    """Picks of one piece of C rows at `index`, [C, 1].  `kept`: something reads the logits besides.  `known`: all that
    reads them is in the graph."""

    def __init__(self, index: fx.Node, like: fx.Node, write: Writer, kept: bool = True, known: bool = False) -> None:
        self.index, self.like, self.write, self.kept, self.known = index, like, write, kept, known
        self.columns = 0
        self.found: dict[fx.Node, fx.Node] = {}

    def pick(self, wide: fx.Node) -> fx.Node:
        """The value of [C, N] `wide` at the index, [C, 1]."""
        self.columns = wide.meta["val"].shape[1]
        value = wide.meta["val"]
        checked = self._checked(value)
        return self._call(aten.add.Tensor, self._picked(wide), checked)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.write.call(target, *args, like=self.like, **kwargs)

    def _checked(self, value: torch.Tensor) -> fx.Node:
        """Zeros, gathered at the index: what refuses a label out of range."""
        zero = self._call(aten.full.default, [], 0, dtype=value.dtype, device=value.device, pin_memory=False)
        row = self._call(aten.expand.default, zero, list(value.shape))
        return self._call(aten.gather.default, row, 1, self.index)

    def _picked(self, node: fx.Node) -> fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[-1] != self.columns:
            return node  # a number for each row, or for all
        if node not in self.found:
            product = _unchanged(node)
            self.found[node] = self._through(node) if self._pointwise(node) else \
                self._apart(product) if not self.kept and _pays(product) else self._compared(node)
        return self.found[node]

    def _pointwise(self, node: fx.Node) -> bool:
        """Whether the pick of the node is the node of the picks: it has the picked shape then, too."""
        return kind_of(node) is Kind.POINTWISE and node.meta["val"].dim() == 2

    def _through(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._picked)
        return self._call(node.target, *args, **kwargs)

    def _apart(self, product: fx.Node) -> fx.Node:
        """The element of a product from a row of each factor, rounded as the product's then are everywhere, or not at
        all.

        A kernel may keep what it multiplies unrounded.  Of a row that its label dominates the loss is the difference of
        two nearly equal numbers, which then would be wrong by the rounding, and below 0.
        """
        bias, left, right = factors(product)
        rows = right.all_input_nodes[0] if transposes(right) else self._call(aten.permute.default, right, [1, 0])
        label = self._call(aten.squeeze.dims, self.index, [1])
        pair = left, self._call(aten.index_select.default, rows, 0, label)
        dtype = product.meta["val"].dtype
        terms = self._call(aten.mul.Tensor, *map(self._wide, pair))
        total = self._call(aten.sum.dim_IntList, terms, [1], True)
        if bias is not None:
            total = self._call(aten.add.Tensor, total, self._wide(self._compared(bias)))
        if dtype in HALVES and not self._widened(product):
            total = self._call(aten._to_copy.default, total, dtype=dtype)
            _round(product)
        return self._call(AFTER, total, [])  # a kernel of its own: sums over the inner dimension are no tile's

    def _widened(self, product: fx.Node) -> bool:
        """Whether all that reads a half product now reads it as float32, of which nothing has been rounded.

            l = aten._to_copy(aten.mm(x, w), dtype=float32)     ->      l = aten._to_copy(fxfuser.wide_product(x, w))
        """
        if not self.known or not reads_unrounded(product, self.write.scope):
            return False
        views = views_that_widen(product)
        with product.graph.inserting_before(product):
            whole = wide_product(self.write, product, *factors(product))
        for reader in list(product.users):
            reader.replace_input_with(product, whole)
        for view in views or ():
            with self.write.scope.fake():
                call: Any = view.target
                view.meta["val"] = call(view.all_input_nodes[0].meta["val"], *view.args[1:])
        return True

    def _wide(self, node: fx.Node) -> fx.Node:
        half = node.meta["val"].dtype in HALVES
        return self._call(aten._to_copy.default, node, dtype=torch.float32) if half else node

    def _compared(self, node: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if value.dim() < 2 or value.shape[0] != self.index.meta["val"].shape[0]:  # the same for all rows
            whole = self._call(aten.expand.default, node, [self.index.meta["val"].shape[0], self.columns])
            return self._call(aten.gather.default, whole, 1, self.index)
        number = self._call(aten.arange.start_step, 0, self.columns, 1, dtype=torch.int64, device=value.device,
                            pin_memory=False)
        chosen = self._call(aten.eq.Tensor, number, self.index)
        zero = self._call(aten.full.default, [], 0, dtype=value.dtype, device=value.device, pin_memory=False)
        alone = self._call(aten.where.self, chosen, node, zero)
        return self._call(aten.sum.dim_IntList, alone, [1], True)


def _unchanged(node: fx.Node) -> fx.Node:
    """What a node is a view of, in the same shape, or a rounding to the dtype that it has."""
    while node.target in RESHAPES or node.target is aten._to_copy.default:
        value, source = node.meta["val"], node.all_input_nodes[0].meta["val"]
        if (source.shape, source.dtype, source.device) != (value.shape, value.dtype, value.device):
            break
        node = node.all_input_nodes[0]
    return node


def _round(product: fx.Node) -> None:
    """All that reads the product, now or later, reads it rounded to its dtype.

        l = aten.mm(x, w)     ->      m = aten.mm(x, w);  l = aten._to_copy(m, dtype=bfloat16)
    """
    if all(user.target is aten._to_copy.default and _unchanged(user) is product for user in product.users):
        return
    with product.graph.inserting_before(product):
        whole = product.graph.node_copy(product, lambda n: n)
    product.target, product.args = aten._to_copy.default, (whole,)
    product.kwargs = {"dtype": product.meta["val"].dtype}


def reads_unrounded(product: fx.Node, scope: Scope) -> bool:
    """Whether a half product whose elements are computed apart is float32 from the start, as all read it so."""
    half = product.meta["val"].dtype in HALVES
    return half and scope.unrounded and _pays(product) and views_that_widen(product) is not None


def wide_product(write: Writer, like: fx.Node, bias: fx.Node | None, left: fx.Node, right: fx.Node) -> fx.Node:
    """left @ right + bias of halves in float32."""
    whole = write.call(WIDE_PRODUCT, left, right, like=like)
    if bias is None:
        return whole
    wide = write.call(aten._to_copy.default, bias, dtype=torch.float32, like=like)
    return write.call(aten.add.Tensor, whole, wide, like=like)


def views_that_widen(node: fx.Node) -> list[fx.Node] | None:
    """The views of a half tensor, operands first, where what reads it and them are casts to float32; None elsewhere."""
    views: list[fx.Node] = []
    for user in node.users:
        if is_plain_cast(user) and user.meta["val"].dtype is torch.float32:
            continue
        below = views_that_widen(user) if user.target in RESHAPES and not user.kwargs else None
        if below is None:
            return None
        views += [user, *below]
    return views


def _pays(node: fx.Node) -> bool:
    """Whether an element of the node is computed apart: of a product with many columns, whose factors hold the rows
    that it takes side by side, and whose factors are multiplied as they are."""
    if not is_product(node) and node.target is not WIDE_PRODUCT:
        return False
    _, left, right = factors(node)
    if left.meta["val"].dtype is torch.float32 and rounds_to_tf32():
        return False
    inner, columns = right.meta["val"].shape
    return bool(columns >= APART * inner and left.meta["val"].stride(1) == right.meta["val"].stride(0) == 1)


# ---------------------------------------------------------------- sums of one-hot rows


def one_hot_sums(graph: fx.Graph, scope: Scope) -> int:
    """The pass that replaces sums of rows of which all but the label's element are 0."""
    return replace_each(graph, scope, _one_hot, _number_in)


@dataclass(frozen=True)
class OneHot:
    """A row of `columns` that holds `value` at `label`, where `condition` (if any) holds, and else zeros; then cast to
    one dtype after the other."""

    label: fx.Node
    condition: fx.Node | None
    value: fx.Node
    columns: int
    casts: tuple[torch.dtype, ...] = ()

    @property
    def narrow(self) -> bool:
        """Whether one number for each row is all that it takes."""
        parts = [n for n in (self.label, self.condition, self.value) if n is not None]
        return all(not n.meta["val"].dim() or n.meta["val"].shape[-1] == 1 for n in parts)


def _one_hot(node: fx.Node) -> OneHot | None:
    """What row a node sums, if it is the sum of one-hot rows."""
    if node.target is not aten.sum.dim_IntList or named_argument(node, "dtype") is not None:
        return None
    source, casts = node.all_input_nodes[0], list[torch.dtype]()
    while is_plain_cast(source):
        casts.insert(0, source.meta["val"].dtype)
        source = source.all_input_nodes[0]
    if source.target is not aten.where.self or not is_zero(source.args[2]):
        return None
    shape = source.meta["val"].shape
    dims, _ = reduction_dims(node)
    mask, value, _ = source.args
    if dims != (len(shape) - 1,) or not isinstance(value, fx.Node) or not isinstance(shape[-1], int):
        return None
    label, condition = _compared(mask, shape[-1])
    if label is None or node.meta["val"].dtype is not (casts or [value.meta["val"].dtype])[-1]:
        return None
    found = OneHot(label, condition, value, shape[-1], tuple(casts))
    return found if found.narrow else None


def _compared(mask: Any, columns: int) -> tuple[fx.Node | None, fx.Node | None]:
    """(label, condition) of a mask that holds where the column's number is the label's."""
    condition = None
    if isinstance(mask, fx.Node) and mask.target is aten.bitwise_and.Tensor:
        mask, condition = mask.all_input_nodes[0], mask.all_input_nodes[-1]
    if not isinstance(mask, fx.Node) or mask.target is not aten.eq.Tensor:
        return None, None
    number, label = mask.all_input_nodes[0], mask.all_input_nodes[-1]
    counts = number.target is aten.arange.start_step and number.args in ((0, columns), (0, columns, 1))
    integers = number.meta["val"].dtype is label.meta["val"].dtype is torch.int64
    return (label, condition) if counts and integers else (None, None)


def _number_in(make: Make, node: fx.Node, row: OneHot) -> fx.Node:
    value = row.value.meta["val"]
    shape = [*node.all_input_nodes[0].meta["val"].shape[:-1], 1]
    inside = make(
        aten.bitwise_and.Tensor, make(aten.ge.Scalar, row.label, 0), make(aten.lt.Scalar, row.label, row.columns))
    if row.condition is not None:
        inside = make(aten.bitwise_and.Tensor, inside, row.condition)
    zero = make(aten.full.default, [], 0, dtype=value.dtype, device=value.device, pin_memory=False)
    found = make(aten.where.self, inside, row.value, zero)
    for dtype in row.casts:
        found = make(aten._to_copy.default, found, dtype=dtype)
    if list(found.meta["val"].shape) != shape:
        found = make(aten.expand.default, found, shape)
    kept = bool(named_argument(node, "keepdim", False))
    return found if kept else make(aten.squeeze.dims, found, [len(shape) - 1])
