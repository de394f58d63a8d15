"""Where a tile of elements lies: the text of its pointers."""

from __future__ import annotations

import torch

from fxfuser.domain.index import Axis, Form
from fxfuser.lowering.emission import Emission


def pointers_to(emitter: Emission, name: str, offset: Form, axes: frozenset[Axis]) -> str:
    """A tile of pointers over `axes`, which cover the offset's; `name` is the parameter that points to the tensor.

    A constant is added to the pointer, not to the offset: it becomes part of the instruction that loads, so that
    the places of a window share one address.
    """
    indices, dims_of = emitter.indices, emitter.schedule.dims_of
    if not offset.axes:
        zero = emitter.full(0, torch.int64)
        text = zero if offset == Form() else f"({zero} + {indices.form(offset)})"
    else:
        text = indices.form(Form(offset.terms))
        text = f"({text})" if " " in text else text
        if offset.constant != 0:
            text = f"{text} + {emitter.sizes.text(offset.constant)}".replace("+ -", "- ")
    if dims_of(axes) <= dims_of(offset.axes):
        return f"{name} + {text}"
    return f"tl.broadcast_to({name} + {text}, {emitter.tile(axes)})"
