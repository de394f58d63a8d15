"""The one kernel of a segment that is no product, of whichever family."""

from __future__ import annotations

from typing import Mapping

from fxfuser.config import Config
from fxfuser.lowering.attention import lower_attention
from fxfuser.lowering.kernel import Lowered
from fxfuser.lowering.lower import lower
from fxfuser.segmenter.segment import Segment, SegmentKind


def lower_kernel(segment: Segment, config: Config, hints: Mapping[str, int]) -> Lowered:
    """The kernel of a segment; `hints` and errors are those of `lower`."""
    return lower_attention(segment, hints) if segment.kind is SegmentKind.ATTENTION else lower(segment, config, hints)
