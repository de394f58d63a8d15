"""The margin loss of several labels, which PyTorch takes apart into something else than eager computes.

PyTorch's decomposition also adds the margins of places behind the first -1 of a row of labels, as if they named the
first class.  It is a kernel for autograd, which runs before any table of decompositions is asked, so the call is
replaced in the graph that Dynamo hands over.  Left as they are: halves on the CPU, which eager refuses.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F


def correct_margin_losses(module: fx.GraphModule) -> int:
    """Rewrites the module and those that it calls; returns how many calls it has replaced."""
    changes = 0
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            calls = part.graph.find_nodes(op="call_function", target=F.multilabel_margin_loss)
            wanted = [call for call in calls if _is_known(call)]
            for call in wanted:
                call.target = multilabel_margin_loss
            if wanted:
                part.recompile()
            changes += len(wanted)
    return changes


def _is_known(call: fx.Node) -> bool:
    """Whether eager takes the call, in its form without the arguments that are out of use."""
    found = [n.meta.get("example_value") for n in call.all_input_nodes]
    values = [v for v in found if isinstance(v, torch.Tensor)]
    if not len(found) == len(values) == 2 or len(call.args) > 2:
        return False
    x, target = values
    wide = x.dtype in (torch.float32, torch.float64) or (x.is_cuda and x.is_floating_point())
    same = x.shape == target.shape and x.dim() in (1, 2) and target.dtype is torch.int64
    return wide and same and call.kwargs.keys() <= {"input", "target", "reduction"}


def multilabel_margin_loss(input: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Of (C,) or (N, C) scores and int64 labels, of which those before a row's first -1 count."""
    classes = input.shape[-1]
    scores, labels = input.reshape(-1, classes), target.reshape(-1, classes)
    scores = scores if scores.dtype is torch.float64 else scores.float()
    counted = (labels < 0).cumsum(-1) == 0
    named = (labels[:, :, None] == torch.arange(classes, device=labels.device)) & counted[:, :, None]
    others = counted[:, :, None] & ~named.any(1)[:, None, :]
    picked = scores.gather(-1, labels.clamp(min=0))
    margins = torch.relu(1 - picked[:, :, None] + scores[:, None, :])
    losses = (torch.where(others, margins, 0.0).sum((1, 2)) / classes).to(input.dtype)
    if reduction == "none":
        return losses if input.dim() == 2 else losses[0]
    return losses.sum() if reduction == "sum" else losses.mean()
