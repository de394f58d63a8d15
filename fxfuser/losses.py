"""What became of linear layers with their cross entropy, in words.

Enters: a `GraphTrace`.  Leaves: lines for `fxfuser dump` and `fxfuser explain`: the plan of each layer, what stands in
memory with its bytes, why no other plan, and what logits that the program returns cost.
"""

from __future__ import annotations

from fxfuser.observe import GraphTrace, LossRecord
from fxfuser.words import bytes_text, short_path

PLANS = {
    "whole": "all logits at once",
    "chunks": "{size} of {rows} rows at a time",
    "recompute": "{size} of {rows} rows at a time, again in the backward",
    "columns": "rows in pieces, and in the backward {size} of {rows} columns at a time",
    "mixed": "the logits of {size} of {rows} columns are kept, those of the others computed again in the backward",
}


def text(trace: GraphTrace) -> str:
    """A paragraph for each layer; empty where the graph has none."""
    return "\n\n".join(map(paragraph, trace.losses))


def paragraph(loss: LossRecord) -> str:
    where = f" at {short_path(loss.location)}" if loss.location else ""
    plan = PLANS[loss.plan].format(size=loss.size, rows=loss.rows)
    lines = [f"linear + cross entropy{where} ({loss.product}): {plan}"]
    if loss.reason:
        lines.append(f"  because {_shortened(loss.reason)}")
    lines += [f"  {name}: {bytes_text(count)}" for name, count in loss.buffers]
    if loss.returned:
        lines.append(
            f"  logits that are returned: {bytes_text(loss.returned)}, and as much again for their tangent, which is "
            "all zeros where only the loss has a gradient; a function that returns the loss alone needs neither")
    return "\n".join(lines)


def _shortened(reason: str) -> str:
    head, _, place = reason.rpartition(" (")
    return f"{head} ({short_path(place[:-1])})" if head and place.endswith(")") else reason
