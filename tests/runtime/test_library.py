"""Products with what is fused around them: the plan that runs them, and the library's route to the same outputs."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from fxfuser.config import Config
from fxfuser.errors import FallbackWarning
from fxfuser.ops.products import WIDE_PRODUCT as wide_product
from fxfuser.runtime import lower_segments as lowering
from fxfuser.runtime.build_plan import build
from fxfuser.runtime.executor import OnCuda
from fxfuser.runtime.host import Host
from fxfuser.runtime.interpret import interpreted
from fxfuser.runtime.library import Library, Route, library
from fxfuser.runtime.lower_segments import LoweredGemm, lower_segments
from fxfuser.runtime.plan import StepKind
from fxfuser.runtime.strides import fill, strided
from fxfuser.segmenter import anchor_rules
from fxfuser.segmenter.segment import Segment, Segmentation, SegmentKind
from fxfuser.segmenter.segmenter import segment

from .graphs import trace

Fn = Callable[..., Any]
INTERPRET = Config(executor="interpret", strict=True)


def cut(function: Fn, inputs: tuple[torch.Tensor, ...], gemm: str = "fused", symbolic: bool = False,
        ) -> tuple[fx.GraphModule, Segmentation]:
    graph = trace(function, *inputs, symbolic=symbolic)
    return graph, segment(graph, gemm=gemm)


def of(segmentation: Segmentation) -> Segment:
    (found,) = (s for s in segmentation.segments if s.kind is SegmentKind.GEMM)
    return found


def written(function: Fn, inputs: tuple[torch.Tensor, ...], symbolic: bool = False,
            parts: Callable[[str], bool] = lambda name: True) -> tuple[Library, LoweredGemm, Segment, Host]:
    """The library's route of a function's only product; `parts` says which of its kernels were lowered."""
    graph, segmentation = cut(function, inputs, symbolic=symbolic)
    whole = of(segmentation)
    low = lower_segments(graph, segmentation, Config(executor="interpret"))[whole.index]
    assert isinstance(low, LoweredGemm) and low.programs is not None
    low = replace(low, parts={n: k if parts(n) else None for n, k in low.parts.items()})
    host = Host(graph, set(whole.nodes))
    host.namespace.values.update(strided=strided, fill=fill, empty_strided=torch.empty_strided)
    found = library(whole, low.programs, low.parts, host)
    assert found is not None
    return found, low, whole, host


def run(route: Library, low: LoweredGemm, whole: Segment, host: Host, inputs: dict[str, torch.Tensor],
        outputs: list[torch.Tensor], sizes: tuple[int, ...] = ()) -> bool:
    """The route with its kernels in the interpreter."""
    assert low.programs is not None
    scope = dict(host.namespace.values)
    for source in (*route.functions, route.source):
        exec(source, scope)

    def refuse(error: Exception) -> bool:
        raise error

    kernels = tuple(OnCuda((), interpreted(low.parts[p.name].kernel).bind) for p in route.parts)  # type: ignore[union-attr]
    late = Route(kernels)
    launch = late.defined(scope[route.name], lambda: late.on_cuda.bind(refuse))
    given = [inputs[whole.inputs[i].name] for i in low.programs.inputs]
    return launch(*given, *(outputs[i] for i in low.programs.outputs), *sizes)


def epilogue(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w.t())


def both(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x @ w.t()
    return y, torch.relu(y)


def gate(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(x @ w.t()) * (x @ w.sin().t())


def reduced(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = F.gelu(x @ w.t())
    return y, y.sum(0)


def biased(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.addmm(w[:, 0], x, w.t(), beta=0.5, alpha=2.0))


FUNCTIONS = [epilogue, both, gate, reduced, biased]


def example(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(s) for s in shapes)


def results(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("lowered", [True, False], ids=["kernels", "aten"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_library_writes_the_same_outputs(function: Fn, lowered: bool) -> None:
    x, w = example((33, 32), (48, 32))
    route, low, whole, host = written(function, (x, w), parts=lambda name: lowered)
    expected = dict(zip([n.name for n in _outputs(whole)], results(function(x, w))))
    outputs = [torch.full_like(expected[n.name], float("nan")) for n in whole.outputs]
    inputs = {"x_1": x, "w_1": w}
    assert run(route, low, whole, host, _with_values(whole, inputs), outputs)
    for node, actual in zip(whole.outputs, outputs):
        torch.testing.assert_close(actual, expected[node.name])


def _outputs(whole: Segment) -> list[fx.Node]:
    output = next(n for n in whole.nodes[0].graph.nodes if n.op == "output")
    return output.all_input_nodes


def _with_values(whole: Segment, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The segment's inputs: those of the graph and what other segments make of them."""
    found = dict(given)
    for node in whole.inputs:
        if node.name not in found:
            assert node.target is torch.ops.aten.sin.default
            found[node.name] = given["w_1"].sin()
    return found


def test_a_product_that_is_an_output_is_written_in_place() -> None:
    route, _, _, _ = written(both, example((32, 32), (48, 32)))
    assert "aten.mm.out(x_1, t, out=mm)" in route.source and "empty_strided" not in route.source


def test_sizes_are_told_by_tensors() -> None:
    x, w = example((33, 32), (48, 32))
    route, low, whole, host = written(reduced, (x, w), symbolic=True)
    assert low.programs is not None
    for rows in (33, 70):
        x = torch.randn(rows, 32)
        expected = dict(zip([n.name for n in _outputs(whole)], reduced(x, w)))
        outputs = [torch.full_like(expected[n.name], float("nan")) for n in whole.outputs]
        sizes = tuple(_value(s, whole, {"x_1": x, "w_1": w}) for s in low.programs.sizes)
        assert run(route, low, whole, host, {"x_1": x, "w_1": w}, outputs, sizes)
        for node, actual in zip(whole.outputs, outputs):
            torch.testing.assert_close(actual, expected[node.name], rtol=1e-4, atol=1e-4)


def _value(symbol: str, whole: Segment, tensors: dict[str, torch.Tensor]) -> int:
    for node in whole.inputs:
        for dim, size in zip(node.meta["val"].shape, tensors[node.name].shape):
            if str(dim) == symbol:
                return size
    raise KeyError(symbol)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("gemm", ["auto", "fused"])
def test_the_program_runs_in_the_interpreter_and_the_reference_beside_it(function: Fn, gemm: str) -> None:
    x, w = example((33, 32), (48, 32))
    graph, segmentation = cut(function, (x, w), gemm)
    for executor in ("interpret", "reference"):
        config = replace(INTERPRET, executor=executor, gemm=gemm)
        plan = build(graph, segmentation, lower_segments(graph, segmentation, config), config, "product")
        wanted = StepKind.CHOICE if executor == "interpret" else StepKind.REFERENCE
        assert wanted in {s.kind for s in plan.steps}
        for actual, expected in zip(results(plan.compile()([x, w])), results(function(x, w))):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_cost_model_alone_may_spell_out_the_library_s_route() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    inputs = tuple(t.bfloat16() for t in example((12288, 3072), (3072, 768)))
    graph, segmentation = cut(f, inputs, "auto")
    assert not of(segmentation).fused
    config = replace(INTERPRET, deterministic=True, gemm="auto")
    plan = build(graph, segmentation, lower_segments(graph, segmentation, config), config, "product")
    assert [s.kind for s in plan.steps if s.kind in (StepKind.EXTERN, StepKind.LAUNCH, StepKind.CHOICE)] == \
        [StepKind.EXTERN, StepKind.LAUNCH]
    assert "segment0_1(mm, relu)" in plan.source


def test_a_program_that_cannot_be_lowered_is_the_library_s_route(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no tile")

    monkeypatch.setattr(lowering, "lower_gemm", broken)
    x, w = example((33, 32), (48, 32))
    graph, segmentation = cut(epilogue, (x, w), "auto")
    config = replace(INTERPRET, strict=False, gemm="auto")
    with pytest.warns(FallbackWarning, match="no tile"):
        lowered = lower_segments(graph, segmentation, config)
    plan = build(graph, segmentation, lowered, config, "product")
    assert StepKind.EXTERN in {s.kind for s in plan.steps} and "segment0_1(" in plan.source
    torch.testing.assert_close(plan.compile()([x, w]), epilogue(x, w))


def test_the_plan_s_text_defines_the_route_that_it_chooses_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device: routes are bound as on CUDA, with kernels in the interpreter."""
    from_plan: list[OnCuda] = []

    def choose(alternatives: Any, config: Config) -> OnCuda:
        assert alternatives.library is not None and alternatives.prefer_fused
        from_plan.append(alternatives.library)
        return OnCuda(alternatives.library.first_calls, alternatives.library.bind)

    globals_ = build.__globals__
    monkeypatch.setitem(globals_, "choose", choose)
    monkeypatch.setitem(globals_, "executor_of", lambda device, config: "triton")
    monkeypatch.setitem(globals_, "on_cuda", lambda s, low, config, hints: OnCuda((), interpreted(low.kernel).bind))
    x, w = example((33, 32), (48, 32))
    graph, segmentation = cut(epilogue, (x, w), "auto")
    config = Config(strict=True)
    plan = build(graph, segmentation, lower_segments(graph, segmentation, config), config, "product")
    call = plan.compile()
    assert len(from_plan) == 1
    assert "def segment0_library(failed, segment0_1):" in plan.source
    assert "segment0 = choose_segment0(segment0_library)" in plan.source
    torch.testing.assert_close(call([x, w]), epilogue(x, w))
    assert any("segment0_library" in "".join(lines[2]) for lines in linecache.cache.values() if len(lines) > 2)


def test_one_product_behind_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_rules, "TILE", 1)
    monkeypatch.setattr(anchor_rules.Proposal, "requested", True)

    def function(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        h = torch.relu(x @ w.t())
        return wide_product(h, v.t()) * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)

    inputs = example((24, 16), (32, 16), (40, 32))
    route, low, whole, host = written(function, inputs)
    assert [p.kind for p in whole.alternatives[0]].count(SegmentKind.EXTERN) == 2
    named = dict(zip(("x_1", "w_1", "v_1"), inputs))
    (output,) = (torch.full(n.meta["val"].shape, float("nan")) for n in whole.outputs)
    assert run(route, low, whole, host, named, [output])
    torch.testing.assert_close(output, function(*inputs))
