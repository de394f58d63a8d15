"""A graph's text: equal where nothing differs that segments and kernels depend on, and only there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser.config import Config
from fxfuser.ops import UPDATE_MARK
from fxfuser.ops.hints import FUSE_MARK
from fxfuser.runtime.graph_text import READ, Untold, graph_text
from fxfuser.runtime.lower_segments import lower_segments
from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import trace

aten = torch.ops.aten
DERIVED = ("fxfuser_geometry", "stack_trace")  # made of meta["val"]; the user's lines, which no kernel has


def text(function: Callable[..., Any], *inputs: Any, mode: str = "fake") -> str:
    return graph_text(trace(function, *inputs, mode=mode).graph)


def made_of(target: Any, *args: Any) -> str:
    """The text of one call on a number; what tracing would change before the graph shows it stays as it is."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    made = graph.call_function(target, (x, *args))
    made.meta["val"] = x.meta["val"]
    graph.output((made,)).meta["val"] = None
    return graph_text(graph)


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2.5, -1).sum(0)


def test_an_equal_graph_has_an_equal_text() -> None:
    assert text(model, torch.randn(4, 6)) == text(model, torch.randn(4, 6))


def test_lines_of_the_model_are_no_part_of_it() -> None:
    first, second = (trace(model, torch.randn(4, 6)) for _ in range(2))
    for node in second.graph.nodes:
        node.meta["stack_trace"] = 'File "/elsewhere/model.py", line 7, in forward'
    assert graph_text(first.graph) == graph_text(second.graph)


@pytest.mark.parametrize(("one", "other"), [
    (0.1, 0.1 + 2**-56), (1, 1.0), (True, 1), (0.0, -0.0), (math.nan, math.inf), (1 + 0j, complex(1, -0.0)), ("1", 1),
    (torch.float16, torch.bfloat16), ([1, 2], [2, 1]), (None, 0), (slice(0, 1), slice(0, 2)),
    (torch.device("cuda:0"), torch.device("cuda:1"))])
def test_a_constant_by_type_and_bits(one: Any, other: Any) -> None:
    assert made_of(aten.mul.Tensor, one) == made_of(aten.mul.Tensor, one)
    assert made_of(aten.mul.Tensor, one) != made_of(aten.mul.Tensor, other)


def test_another_op_and_another_order_of_operands() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    assert len({text(f, x, y) for f in (torch.add, torch.mul, torch.sub, lambda a, b: torch.sub(b, a))}) == 4


def test_dtype_shape_strides_device_and_offset_of_a_value() -> None:
    base = torch.empty(100)
    values = (torch.empty(6, 4), torch.empty(4, 6), torch.empty(4, 6, dtype=torch.float64), torch.empty(6, 4).t(),
              torch.empty(4, 12)[:, ::2], base[:24].view(4, 6), base[1:25].view(4, 6), torch.empty(4, 6, device="meta"))
    texts = []
    for value in values:
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta["val"] = value
        graph.output((x,))
        texts.append(graph_text(graph))
    assert len(set(texts)) == len(values) - 1  # a view of all of its storage is as good as the storage
    assert texts[1] == texts[5]


def test_a_symbolic_size_with_all_that_is_known_of_it() -> None:
    def halves(x: torch.Tensor) -> torch.Tensor:
        return x.view(2, x.shape[0] // 2, x.shape[1]).sum(0)

    def ranged(x: torch.Tensor) -> torch.Tensor:
        torch._check(x.shape[0] < 100)
        return halves(x)

    x = torch.randn(6, 5)
    texts = [text(halves, x), *(text(f, x, mode="symbolic") for f in (halves, ranged)),
             text(halves, torch.randn(8, 5), mode="symbolic")]
    assert len(set(texts)) == 4
    assert text(halves, x, mode="symbolic") == texts[1]


def test_a_fact_that_is_learnt_later() -> None:
    module = trace(lambda x: x.view(-1), torch.randn(6, 5), mode="symbolic")
    before = graph_text(module.graph)
    size = next(iter(module.graph.nodes)).meta["val"].shape[0]
    assert size > 3  # a guard
    assert graph_text(module.graph) != before


def test_what_is_written_over_an_input_last() -> None:
    module = trace(lambda x: x + 1, torch.tensor(1.0))
    before = graph_text(module.graph)
    next(n for n in module.graph.nodes if n.op == "call_function").meta[UPDATE_MARK] = True
    assert graph_text(module.graph) != before


def test_contexts_of_fuse_are_numbered_anew() -> None:
    def marked(first: int, second: int) -> str:
        module = trace(lambda x: (x.sin(), x.cos()), torch.randn(4))
        sin, cos = (n for n in module.graph.nodes if n.op == "call_function")
        sin.meta["custom"], cos.meta["custom"] = {f"{FUSE_MARK}{first}": True}, {f"{FUSE_MARK}{second}": True}
        return graph_text(module.graph)

    assert marked(3, 9) == marked(0, 1) != marked(5, 5)


def test_a_fake_device() -> None:
    def on(device: str) -> str:
        with FakeTensorMode():
            x = torch.empty(4, 6, device=device)
        return graph_text(make_fx(model, tracing_mode="real")(x).graph)

    assert on("cuda:0") == on("cuda:0") != on("cpu")


def test_what_has_no_text() -> None:
    def own(x: torch.Tensor) -> torch.Tensor:
        return x

    for target in (own, torch.ops.higher_order.cond):
        with pytest.raises(Untold):
            made_of(target)
    with pytest.raises(Untold):
        made_of(aten.mul.Tensor, object())
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with pytest.raises(Untold):
        graph_text(graph)


class Watched(dict[str, Any]):
    """A node's meta that remembers what is read of it."""

    read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


def test_segments_and_kernels_read_no_more_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.relu(x @ w).view(2, -1, 16)
        return torch.softmax(h, -1), h.sum(0).sort().values, w[at].cos(), x.cumsum(0)

    module = trace(function, torch.randn(8, 16), torch.randn(16, 16), torch.tensor([1, 0, 3]))
    for node in module.graph.nodes:
        node.meta = Watched(node.meta)
    Watched.read.clear()
    config = Config(executor="interpret", strict=True)
    lower_segments(module, segment(module, gemm=config.products), config)
    assert "val" in Watched.read and Watched.read <= {*READ, *DERIVED}
