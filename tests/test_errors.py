"""Messages name the op, the user's line, the segment, the dump and the next step, and nothing that is not known."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from torch import fx

from fxfuser import errors

TRACE = f'''  File "/home/ada/model.py", line 12, in forward
    return self.norm(x)
  File "{torch.__path__[0]}/nn/modules/normalization.py", line 229, in forward
    return F.layer_norm(x)
'''


def _node() -> fx.Node:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.sort.default, (graph.placeholder("x"),))
    node.meta["stack_trace"] = TRACE
    return node


@pytest.mark.parametrize(("trace", "location"), [
    (TRACE, "/home/ada/model.py:12"), ("", ""), (None, ""),
    (f'File "{torch.__path__[0]}/nn/functional.py", line 3, in f', f"{torch.__path__[0]}/nn/functional.py:3"),
])
def test_the_location_is_the_users_own_innermost_frame(trace: str | None, location: str) -> None:
    assert errors.user_location(trace) == location


def test_lowering_error_fills_every_field() -> None:
    error = errors.LoweringError("no row", errors.Site.of(_node(), "segment3", "out/segment3.py"), "cast to float32")
    assert str(error).splitlines() == [
        "cannot lower to a kernel: no row",
        "  op:      aten.sort.default (sort_default)",
        "  model:   /home/ada/model.py:12",
        "  segment: segment3",
        "  dump:    out/segment3.py",
        "  try:     cast to float32",
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert str(errors.LoweringError("no row")) == "cannot lower to a kernel: no row"


def test_an_outer_stage_adds_but_does_not_replace() -> None:
    inner = errors.LoweringError("no row", errors.Site(op="aten.sort", segment="segment3"))
    outer = inner.at(segment="segment9", dump="out")
    assert (outer.site.op, outer.site.segment, outer.site.dump) == ("aten.sort", "segment3", "out")


def test_verification_error_says_how_to_find_the_pass() -> None:
    text = str(errors.VerificationError("cse", "use before definition", errors.Site.of(_node())))
    assert text.startswith("cse broke an invariant: use before definition")
    assert "model:   /home/ada/model.py:12" in text
    assert "FXFUSER_FUEL" in text


def test_executor_error() -> None:
    error = errors.ExecutorError("triton", "the tensors are on cpu", "leave executor at auto")
    assert str(error) == "executor 'triton' cannot run here: the tensors are on cpu\n  try:     leave executor at auto"


def test_fallback_warning_carries_the_error() -> None:
    error = errors.LoweringError("no row")
    with pytest.warns(errors.FallbackWarning, match=r"(?s)no row.*runs as ATen ops; FXFUSER_STRICT=1") as caught:
        warnings.warn(errors.FallbackWarning(error), stacklevel=1)
    assert caught[0].message.error is error


@pytest.mark.parametrize("error", [
    errors.UnknownOption("mode", "x", ["a"]), errors.InvalidOption("fuel", -1, "a number"),
    errors.LoweringError("r", errors.Site("op"), "h"), errors.VerificationError("s", "r"),
    errors.ExecutorError("triton", "r"), errors.FallbackWarning(errors.LoweringError("r")),
], ids=lambda e: type(e).__name__)
def test_errors_cross_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
