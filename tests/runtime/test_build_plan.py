"""Graph, segments and kernels become a plan that computes what the graph does."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from fxfuser.config import Config
from fxfuser.errors import ExecutorError, FallbackWarning, LoweringError, VerificationError
from fxfuser.runtime.build_plan import build, fall_back
from fxfuser.runtime.plan import Plan, StepKind

from .graphs import SOURCE, extern, lowered, node, pointwise, segment, segmentation, trace

EXECUTORS = ("reference", "interpret")


def two_sums(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y) * 2


def plan_of_two_sums(executor: str, x: torch.Tensor, y: torch.Tensor, symbolic: bool = False,
                     **options: Any) -> Plan:
    gm = trace(two_sums, x, y, symbolic=symbolic)
    seg = segment(gm, 0, ["add", "mul"], ["x_1", "y_1"])
    val = node(gm, "mul").meta["val"]
    low = lowered(pointwise(val.dtype, **options), [str(val.numel())])
    return build(gm, segmentation(seg), {0: low}, Config(executor=executor, strict=True), "two_sums")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_kernel(executor: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(7, 33).to(dtype), torch.randn(7, 33).to(dtype)
    plan = plan_of_two_sums(executor, x, y)
    actual = plan.compile()([x, y])
    expected = ((x.float() + y.float()) * 2).to(dtype)
    torch.testing.assert_close(actual, expected, rtol=0 if executor == "interpret" else 1e-2, atol=0.0)


def test_the_plan_reads_as_a_module() -> None:
    x = torch.randn(4, 8)
    text = plan_of_two_sums("interpret", x, x).source
    assert "mul = x_1.new_empty_strided((4, 8), (8, 1))" in text
    assert "segment0(x_1, y_1, mul, 32)  # add.Tensor, mul.Tensor" in text
    assert "return mul" in text


@pytest.mark.parametrize("executor", EXECUTORS)
def test_sizes_change_between_calls(executor: str) -> None:
    x = torch.randn(4, 8)
    call = plan_of_two_sums(executor, x, x, symbolic=True).compile()
    for shape in ((4, 8), (5, 16), (130, 3), (0, 8)):
        a, b = torch.randn(shape), torch.randn(shape)
        torch.testing.assert_close(call([a, b]), two_sums(a, b))


def test_list_is_emptied_and_inputs_die_early() -> None:
    def three(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(torch.mm(x + y, y), y)

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    gm = trace(three, x, y)
    plan = build(gm, segmentation(segment(gm, 0, ["add"], ["x_1", "y_1"]), extern(gm, 1, "mm"), extern(gm, 2, "mm_1")),
                 {0: None}, Config(), "three")
    kinds = [s.kind for s in plan.steps]
    assert kinds[:2] == [StepKind.REFERENCE, StepKind.FREE]
    assert plan.steps[1].text == "del x_1"
    first = weakref.ref(x)
    args = [x, y]
    call = plan.compile()
    scope = call.__globals__  # type: ignore[attr-defined]
    alive = []
    plain = scope["strided"]

    def spy(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        alive.append(first() is not None)
        return plain(tensor, *rest)

    scope["strided"] = spy
    expected = three(x, y)
    del x
    out = call(args)
    gc.collect()
    assert args == [] and first() is None
    assert alive == [True, False]  # as the first segment returns, and as the last product does
    torch.testing.assert_close(out, expected)


def test_outputs_inputs_duplicates_none_and_views() -> None:
    def many(x: torch.Tensor, y: torch.Tensor) -> Any:
        z = x + y
        return [x, z, z, None, z.t(), y.view(-1)]

    x, y = torch.randn(3, 4), torch.randn(3, 4)
    gm = trace(many, x, y)
    plan = build(gm, segmentation(segment(gm, 0, ["add"], ["x_1", "y_1"])), {0: None}, Config(), "many")
    a, b, c, none, t, flat = plan.compile()([x, y])
    assert a is x and b is c and none is None
    assert t.data_ptr() == b.data_ptr() and t.stride() == (1, 4)
    assert flat.data_ptr() == y.data_ptr()
    torch.testing.assert_close(b, x + y)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_strides_are_those_of_the_meta(executor: str) -> None:
    x = torch.randn(8, 4).t()
    plan = plan_of_two_sums(executor, x, x)
    assert plan.compile()([x, x]).stride() == (1, 4)


def test_an_aten_result_with_other_strides_is_copied_for_a_kernel() -> None:
    lib = torch.library.Library("fxfuser_strides", "FRAGMENT")
    lib.define("twice(Tensor x) -> Tensor")
    lib.impl("twice", lambda x: (2 * x).t().contiguous().t(), "CPU")
    lib.impl("twice", lambda x: torch.empty_like(x), "Meta")

    def fn(x: torch.Tensor) -> torch.Tensor:
        t = torch.ops.fxfuser_strides.twice(x)
        return (t + x) * 2

    x = torch.randn(4, 8)
    gm = trace(fn, x)
    segments = segmentation(extern(gm, 0, "twice"), segment(gm, 1, ["add", "mul"], ["twice", "x_1"]))
    plan = build(gm, segments, {1: lowered(pointwise(), ["32"])}, Config(executor="interpret", strict=True), "fn")
    assert "twice = strided(twice, (4, 8), (8, 1), torch.float32)" in plan.source
    torch.testing.assert_close(plan.compile()([x]), 6 * x)


def test_a_kernel_reads_an_aten_result_of_another_dtype_than_its_fake_tensor_has() -> None:
    """Batch norm hands out half statistics as half; its fake tensors say float32, which a kernel's loads believe."""
    def fn(x: torch.Tensor, n: torch.Tensor) -> Any:
        found = torch.ops.aten._batch_norm_with_update_functional(x, n, n, n, n, 0.5, 1e-5)
        return (found[4] + n) * 2, found[5]

    x, n = torch.randn(6, 8).bfloat16(), torch.rand(8).bfloat16()
    gm = trace(fn, x, n)
    mean = next(m for m in gm.graph.nodes if m.args[1:] == (4,))
    assert mean.meta["val"].dtype is torch.float32
    segments = segmentation(extern(gm, 0, "_batch_norm_with_update_functional"),
                            segment(gm, 1, ["add", "mul"], [mean.name, "n_1"]))
    kernel = pointwise(source=SOURCE.replace("a = tl.load", "tl.static_assert(in0.dtype.element_ty == tl.float32)\n"
                                             "    a = tl.load"))
    plan = build(gm, segments, {1: lowered(kernel, ["8"])}, Config(executor="interpret", strict=True), "fn")
    total, variance = plan.compile()([x, n])
    expected = fn(x, n)
    torch.testing.assert_close(total, expected[0].float(), rtol=2 ** -8, atol=0.0)
    assert variance.dtype is torch.bfloat16 and torch.equal(variance, expected[1])  # as eager hands it out


@pytest.mark.parametrize("expand", [False, True])
def test_tangents_may_have_any_strides(expand: bool) -> None:
    x = torch.randn(4, 8)
    gm = trace(two_sums, x, x)
    node(gm, "y_1").name = "tangents_1"
    seg = segment(gm, 0, ["add", "mul"], ["x_1", "tangents_1"])
    plan = build(gm, segmentation(seg), {0: lowered(pointwise(), ["32"])}, Config(executor="interpret"), "backward")
    tangent = torch.randn(1, 1).expand(4, 8) if expand else torch.randn(8, 4).t()
    torch.testing.assert_close(plan.compile()([x, tangent]), two_sums(x, tangent))


def test_sizes_of_a_result_known_at_run_time() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        found = torch.nonzero(x)
        return (found + found) * 2

    from torch._dynamo import config as dynamo_config  # noqa: F401  # loads the fake kernels of nonzero
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    gm = make_fx(fn, tracing_mode="symbolic", _allow_non_fake_inputs=True)(mode.from_tensor(torch.ones(5)))
    segments = segmentation(extern(gm, 0, "nonzero"), segment(gm, 1, ["add", "mul"], ["nonzero", "nonzero"]))
    size = next(iter(node(gm, "nonzero").meta["val"].shape)).node.expr
    kernel = pointwise(torch.int64, source=SOURCE.replace(".to(tl.float32)", "").replace("2.0", "2"))
    plan = build(gm, segments, {1: lowered(kernel, [str(size)])}, Config(executor="interpret", strict=True), "fn")
    assert f"{size} = nonzero.size(0)" in plan.source
    x = torch.tensor([0.0, 1.0, 2.0, 0.0, 3.0])
    torch.testing.assert_close(plan.compile()([x]), fn(x))


def test_opaque_arguments_and_submodules() -> None:
    def fn(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        y = torch.cond(flag, lambda v: v.sin(), lambda v: v.cos(), (x,))
        return torch.ops.aten.index.Tensor(y, [None, torch.arange(2)]).to(torch.float64)

    x = torch.randn(3, 4)
    gm = trace(fn, x, torch.tensor(True))
    calls = [n.name for n in gm.graph.nodes if n.op == "call_function" and "getitem" not in n.name]
    plan = build(gm, segmentation(*(extern(gm, i, n) for i, n in enumerate(calls))), {}, Config(), "fn")
    for flag in (True, False):
        torch.testing.assert_close(plan.compile()([x, torch.tensor(flag)]), fn(x, torch.tensor(flag)))


def test_a_kernel_that_fails_raises_under_strict_and_else_runs_as_aten(tmp_path: Any) -> None:
    x = torch.randn(4, 8)
    gm = trace(two_sums, x, x)
    seg = segment(gm, 0, ["add", "mul"], ["x_1", "y_1"])
    low = {0: lowered(pointwise(source=SOURCE.replace("a + b", "a + nowhere")), ["32"])}
    strict = build(gm, segmentation(seg), low, Config(executor="interpret", strict=True, cache_dir=tmp_path), "fn")
    with pytest.raises(LoweringError, match="nowhere"):
        strict.compile()([x, x])
    call = build(gm, segmentation(seg), low, Config(executor="interpret", cache_dir=tmp_path), "fn").compile()
    with pytest.warns(FallbackWarning, match="segment0") as caught:
        torch.testing.assert_close(call([x, x]), two_sums(x, x))
        torch.testing.assert_close(call([x, x]), two_sums(x, x))
    assert len(caught) == 1
    repro = next((tmp_path / "repro").glob("segment0_*.py")).read_text()
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(repro, scope)
    torch.testing.assert_close(scope["segment0_aten"](x, x)[0], two_sums(x, x))


def test_segments_that_compute_the_same_have_one_function(tmp_path: Any) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = (x + y) * 2
        b = (y + a) * 2
        return a, b, (b + y) * 3

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    gm = trace(fn, x, y)
    parts = segmentation(
        segment(gm, 0, ["add", "mul"], ["x_1", "y_1"]), segment(gm, 1, ["add_1", "mul_1"], ["y_1", "mul"]),
        segment(gm, 2, ["add_2", "mul_2"], ["mul_1", "y_1"]))
    plan = build(gm, parts, {}, Config(), "fn")
    assert plan.source.count("def segment") == 2  # the last one's factor is another
    assert "mul_1, = segment0_aten(y_1, mul)" in plan.source and "mul_2, = segment2_aten(mul_1, y_1)" in plan.source
    torch.testing.assert_close(plan.compile()([x, y]), fn(x, y))
    broken = lowered(pointwise(source=SOURCE.replace("a + b", "a + nowhere")), ["32"])
    config = Config(executor="interpret", cache_dir=tmp_path)
    call = build(gm, parts, {1: broken}, config, "fn").compile()
    with pytest.warns(FallbackWarning, match="segment1"):
        torch.testing.assert_close(call([x, y]), fn(x, y))
    scope: dict[str, Any] = {"__name__": "repro"}
    exec(next((tmp_path / "repro").glob("segment1_*.py")).read_text(), scope)
    torch.testing.assert_close(scope["segment0_aten"](x, y)[0], two_sums(x, y))


def test_segments_of_other_shapes_have_functions_of_their_own() -> None:
    """Strides are part of a function: it returns what the segment's meta says."""
    x, y = torch.randn(4, 8), torch.randn(2, 8)
    gm = trace(lambda x, y: ((x + x) * 2, (y + y) * 2), x, y)
    parts = segmentation(segment(gm, 0, ["add", "mul"], ["x_1"]), segment(gm, 1, ["add_1", "mul_1"], ["y_1"]))
    plan = build(gm, parts, {}, Config(), "fn")
    assert plan.source.count("def segment") == 2
    torch.testing.assert_close(plan.compile()([x, y]), (x * 4, y * 4))


def test_a_segment_that_cannot_be_lowered(tmp_path: Any) -> None:
    gm = trace(two_sums, torch.randn(4, 8), torch.randn(4, 8), symbolic=True)
    seg = segment(gm, 0, ["add", "mul"], ["x_1", "y_1"])
    with pytest.raises(LoweringError, match=r"no rule(.|\n)*repro/segment0_"):
        fall_back(gm, seg, Config(strict=True, cache_dir=tmp_path), RuntimeError("no rule"))
    with pytest.warns(FallbackWarning, match="no rule"):
        fall_back(gm, seg, Config(cache_dir=tmp_path), RuntimeError("no rule"))


def test_threads_share_a_plan() -> None:
    x = torch.randn(16, 16)
    call = plan_of_two_sums("interpret", x, x).compile()
    inputs = [torch.randn(16, 16) for _ in range(8)]
    results: dict[int, torch.Tensor] = {}
    threads = [threading.Thread(target=lambda i=i: results.__setitem__(i, call([inputs[i], x]))) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, given in enumerate(inputs):
        torch.testing.assert_close(results[i], two_sums(given, x))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(4, 8)
    gm = trace(two_sums, x, x)
    with pytest.raises(ExecutorError, match="CUDA"):
        seg = segment(gm, 0, ["add", "mul"], ["x_1", "y_1"])
        build(gm, segmentation(seg), {0: lowered(pointwise(), ["32"])}, Config(executor="triton", strict=True), "fn")
    with pytest.warns(UserWarning, match="run as ATen ops"):
        build(gm, segmentation(seg), {0: lowered(pointwise(), ["32"])}, Config(executor="triton"), "fn")
    with pytest.raises(VerificationError, match="outputs"):
        seg = segment(gm, 0, ["add", "mul"], ["x_1", "y_1"], ["add", "mul"])
        build(gm, segmentation(seg), {0: lowered(pointwise(), ["32"])}, Config(executor="interpret"), "fn")


def test_writes_that_no_segment_owns_come_last() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y
        x.copy_(z)
        return z * 1

    x, y = torch.randn(3), torch.randn(3)
    gm = trace(fn, x, y)
    segs = segmentation(segment(gm, 0, ["add"], ["x_1", "y_1"]), segment(gm, 1, ["mul"], ["add"]))
    plan = build(gm, segs, {}, Config(), "fn")
    a = x.clone()
    out = plan.compile()([a, y])
    torch.testing.assert_close(a, x + y)
    torch.testing.assert_close(out, x + y)
