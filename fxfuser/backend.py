"""The spine: Dynamo's graph in, a callable out."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

from torch import fx

from fxfuser.capture import capture, run_as_aten
from fxfuser.config import Config


def fxfuser(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Any]:
    """The torch.compile backend.  Raises UnknownOption or InvalidOption for a `mode` or an option it does not know."""
    return capture(gm, example_inputs, Config.resolve(mode, options), run_as_aten)
