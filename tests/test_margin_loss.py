"""The margin loss of several labels beside eager's, and that its calls are replaced where eager takes them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fxfuser.margin_loss import correct_margin_losses, multilabel_margin_loss

LABELS = [[3, 0, -1, 1], [1, -1, 0, 2], [-1, 3, 3, 3], [2, 2, 0, 1]]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [None, 1, 4])
def test_labels_behind_the_end_do_not_count(rows: int | None, reduction: str) -> None:
    target = torch.tensor(LABELS[0] if rows is None else LABELS[:rows])
    x = torch.randn(target.shape, requires_grad=True)

    def function(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.multilabel_margin_loss(x * 2, target, reduction=reduction)

    got = torch.compile(function, backend="fxfuser", options={"executor": "interpret"})(x, target)
    want = function(x, target)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))


def test_sizes_vary() -> None:
    function = torch.compile(torch.nn.MultiLabelMarginLoss(), backend="fxfuser", dynamic=True)
    for rows, classes in ((3, 5), (2, 7), (5, 2)):
        x, target = torch.randn(rows, classes), torch.randint(-1, classes, (rows, classes))
        torch.testing.assert_close(function(x, target), F.multilabel_margin_loss(x, target))


@pytest.mark.parametrize(("dtype", "label", "changes"), [
    (torch.float32, torch.int64, 1), (torch.bfloat16, torch.int64, 0), (torch.float32, torch.int32, 0)])
def test_what_eager_refuses_is_left_to_it(dtype: torch.dtype, label: torch.dtype, changes: int) -> None:
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(name) for name in ("x", "target")]
    for node, kind in zip(nodes, (dtype, label)):
        node.meta["example_value"] = torch.zeros(3, 4, dtype=kind)
    call = graph.call_function(F.multilabel_margin_loss, tuple(nodes))
    graph.output(call)
    assert correct_margin_losses(torch.fx.GraphModule({}, graph)) == changes
    assert (call.target is multilabel_margin_loss) is bool(changes)
