"""What became of linear layers with their cross entropy, and of masks of attention, in words.

Enters: a `GraphTrace`.  Leaves: lines for `fxfuser dump` and `fxfuser explain`: the plan of each layer, what stands in
memory with its bytes, why no other plan, and what logits that the program returns cost; what a mask said.
"""

from __future__ import annotations

from collections import Counter
from typing import Iterable

from fxfuser.attention_masks import CAUSAL_ALONE, LAID_OUT, NOTHING
from fxfuser.observe import GraphTrace, LossRecord, MaskRecord
from fxfuser.words import bytes_text, short_path

PLANS = {
    "whole": "all logits at once",
    "chunks": "{size} of {rows} rows at a time",
    "recompute": "{size} of {rows} rows at a time, again in the backward",
    "columns": "rows in pieces, and in the backward {size} of {rows} columns at a time",
    "mixed": "the logits of {size} of {rows} columns are kept, those of the others computed again in the backward",
}


MASKS = {
    CAUSAL_ALONE: "its mask is causal, as the kernel is told instead of reading it",
    NOTHING: "its mask allows all, so that there is none",
    LAID_OUT: "its mask is laid out by rows, as fused attention takes no other",
}


def text(trace: GraphTrace) -> str:
    """A paragraph for each layer and one for all masks; empty where the graph has none."""
    return "\n\n".join(filter(None, (*map(layer, trace.losses), masks(trace.masks))))


def masks(records: Iterable[MaskRecord]) -> str:
    """A line for each place in the program; equal layers share theirs."""
    return "\n".join(
        f"attention{f' at {short_path(record.location)}' if record.location else ''}: {MASKS[record.fate]}"
        + (f" ({count} times)" if count > 1 else "") for record, count in Counter(records).items())


def layer(loss: LossRecord) -> str:
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
