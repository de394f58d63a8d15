"""Graphs that are kept: no pass runs where nothing has changed, every pass where anything has; results are the same."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._functorch import config as functorch_config
from torch._logging._internal import trace_log
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fxfuser
from fxfuser import backend, capture, fuel, observe
from fxfuser.config import Config
from fxfuser.fuel import Fuel
from fxfuser.passes import loss_plans
from fxfuser.runtime import binary, stored_graphs
from fxfuser.runtime.graph_text import graph_text
from fxfuser.runtime.store import Store

pytestmark = pytest.mark.keeps_segments


class Compiler:
    """Compiles with a cache of its own; counts runs of passes and cuts, and notes what is compiled after them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.ran = folder, 0
        self.graphs: list[object] = []
        for name in ("run", "min_cut_rematerialization_partition"):
            monkeypatch.setattr(capture, name, self._counted(getattr(capture, name)))
        entry = backend.entry

        def noted(graph: fx.Graph, *args: Any) -> Any:
            self.graphs.append(described(graph))
            return entry(graph, *args)

        monkeypatch.setattr(backend, "entry", noted)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.ran += 1
            return function(*args, **kwargs)
        return counted

    def __call__(
        self, function: Callable[..., Any], dynamic: bool | None = None, **options: object
    ) -> Callable[..., Any]:
        torch.compiler.reset()
        self.ran = 0
        self.graphs = []
        chosen = {"executor": "reference", "cache_dir": self.folder, **options}
        return torch.compile(function, backend="fxfuser", options=chosen, dynamic=dynamic)

    @property
    def entries(self) -> list[Path]:
        return sorted((self.folder / stored_graphs.KIND).glob("*.bin"))


def described(graph: fx.Graph) -> object:
    """The text of a graph, what its nodes tell the user and the runtime, and which values share storage."""
    values = [n.meta.get("val") for n in graph.nodes]
    storages = [v.untyped_storage()._cdata if isinstance(v, torch.Tensor) else None for v in values]
    told = [(n.name, n.meta.get("stack_trace"), n.meta.get("owned"), n.meta.get("partitioner_tag"),
             sorted(n.meta.get("nn_module_stack") or ())) for n in graph.nodes]
    return graph_text(graph), told, [storages.index(s) for s in storages]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path / "cache", monkeypatch)


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x @ w.t()), (8,)).softmax(-1).square().sum()


def normalised(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    mean, variance = torch.zeros(8), torch.ones(8)
    return F.batch_norm(x @ w.t(), mean, variance, training=True).sigmoid().sum() + mean.sum()


def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(x, 0.5) @ w.t(), torch.arange(6) + 1)


def constants(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w.t() * torch.tensor([1.5] * 8)).sin().sum()


def waves(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rotated = torch.view_as_complex(x.view(6, 8, 2)) * torch.polar(torch.ones(8), torch.arange(8.0))
    return (torch.view_as_real(rotated).flatten(1) @ w.t()).square().sum()


def checkpointed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = checkpoint(lambda h: F.gelu(h @ w.t()).exp(), x, use_reentrant=False)
    return (hidden.cos() * hidden).sum()


def hinted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with fxfuser.fuse():
        y = fxfuser.boundary(x.sin() * 2).cos()
    return (y @ w.t()).sum()


def joined(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = torch.cat([x, w]).sin().split([6, 8])
    return (F.pad(a, (1, 2)).cumsum(-1).square().sum() + b.var()).sqrt()


def updated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    kept = x.detach().clone()
    kept.mul_(2).add_(w.sum())
    return (x * kept).sum()


MODELS = (model, normalised, loss, constants, waves, checkpointed, hinted, joined, updated)


def training(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    x, w = (torch.randn(n, 16, generator=g, requires_grad=True) for n in (6, 8))
    result = call(x, w)
    return result.detach(), *torch.autograd.grad(result, (x, w), allow_unused=True, materialize_grads=True)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", MODELS, ids=lambda f: f.__name__)
def test_no_pass_runs_again(function: Callable[..., Any], dynamic: bool, compiler: Compiler) -> None:
    first = training(compiler(function, dynamic))
    graphs = compiler.graphs
    assert compiler.ran and compiler.entries
    second = training(compiler(function, dynamic))
    assert compiler.ran == 0 and compiler.graphs == graphs
    same(second, first)


def test_logits_that_are_kept_in_the_memory_of_a_gradient(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"FIRST": 1, "WHOLE_TILES": 1, "BLOCK": 1}.items():
        monkeypatch.setattr(loss_plans, name, value)
    pieces = loss_plans._pieces
    monkeypatch.setattr(loss_plans, "_pieces", lambda *given: replace(pieces(*given), buffers=(("more", 1 << 30),)))
    options = {"linear_cross_entropy": "low_memory", "executor": "interpret"}
    first = training(compiler(loss, **options))
    graphs = compiler.graphs
    assert any("fxfuser::with_room" in str(graph) for graph in graphs)
    second = training(compiler(loss, **options))
    assert compiler.ran == 0 and compiler.graphs == graphs
    same(second, first)
    torch.testing.assert_close(first, training(compiler(loss, linear_cross_entropy="off")))


def test_tangents_that_get_other_strides(compiler: Compiler) -> None:
    """The backward's passes wait until its tangents have the strides that they are going to have."""
    def run(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        x, w = torch.linspace(0, 1, 96).view(6, 16).requires_grad_(), torch.linspace(1, 2, 128).view(16, 8)
        left, right = call(x, w)
        return torch.autograd.grad((left * 3).square().sum() + right.cos().sum(), x)

    def halves(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x @ w).sin().split(4, -1)

    first = run(compiler(halves))
    torch.testing.assert_close(first, run(halves))
    graphs = compiler.graphs
    same(run(compiler(halves)), first)
    assert compiler.ran == 0 and compiler.graphs == graphs


def test_without_gradients(compiler: Compiler) -> None:
    x, w = torch.randn(6, 16), torch.randn(8, 16)
    first = compiler(model)(x, w)
    graphs = compiler.graphs
    assert torch.equal(compiler(model)(x, w), first) and compiler.ran == 0 and compiler.graphs == graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_call_passes_is_no_part_of_an_entry(dynamic: bool, compiler: Compiler) -> None:
    def function(x: torch.Tensor, n: float) -> torch.Tensor:
        return torch.exp(torch.sin(x) * n)

    for attempt in range(2):
        call = compiler(function, dynamic)
        for rows, number in ((4, 0.5), (7, 0.25), (3, 3.0)):
            x = torch.randn(rows, 6, requires_grad=True)
            found, = torch.autograd.grad(call(x, number).sum(), x)
            torch.testing.assert_close(found, torch.cos(x) * number * function(x, number))
        assert bool(compiler.ran) is not bool(attempt)


def test_a_backward_that_keeps_its_graph(compiler: Compiler) -> None:
    def twice(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_()
        out = call(x)
        return *torch.autograd.grad(out.sum(), x, retain_graph=True), *torch.autograd.grad(out.sum(), x)

    for _ in range(2):
        first, second = twice(compiler(lambda x: torch.exp(torch.sin(x) * 2)))
        assert torch.equal(first, second)
    assert compiler.ran == 0


def test_another_source_is_another_entry(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    training(compiler(model))
    monkeypatch.setattr(binary, "installation", lambda: {"fxfuser": "other source"})
    training(compiler(model))
    assert compiler.ran


@pytest.mark.parametrize("setting", [{"activation_memory_budget": 0.5}, {"ban_recompute_reductions": False}])
def test_another_setting_of_the_cut_is_another_entry(setting: dict[str, object], compiler: Compiler) -> None:
    training(compiler(model))
    with functorch_config.patch(setting):
        training(compiler(model))
    assert compiler.ran


def test_marks_are_told_apart(compiler: Compiler) -> None:
    """The same ops, recomputed at the user's wish and not."""
    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(x @ w.t()).exp()
        return (hidden.cos() * hidden).sum()

    training(compiler(plain))
    training(compiler(checkpointed))
    assert compiler.ran


def test_who_measures_out_fuel_or_records_has_every_pass_run(compiler: Compiler) -> None:
    training(compiler(model, fuel=1000))
    with fuel.shared(Fuel()):
        training(compiler(model))
    assert not compiler.entries
    training(compiler(model))
    with observe.recording() as records:
        training(compiler(model))
    passes = {g.name.partition(".")[2]: [p.name for p in g.passes] for g in records.graphs}
    assert "expand" in passes["joint"] and passes["forward"] == passes["backward"] == [p.__name__ for p in capture.LATE]


def test_a_graph_that_rests_on_a_new_guard_is_not_kept(tmp_path: Path) -> None:
    module = make_fx(torch.sin, tracing_mode="symbolic")(torch.randn(5, 6))
    size = next(iter(module.graph.nodes)).meta["val"].shape[0].node
    config = Config.resolve(None, {"cache_dir": tmp_path})
    for guarded, entries in ((True, 0), (False, 1)):
        kept = stored_graphs.origin(module.graph, config, Fuel(), [])
        if guarded:
            assert size.shape_env.evaluate_expr(size.expr > 3)
        kept.keep((module.graph,))
        assert len(list((tmp_path / stored_graphs.KIND).glob("*.bin"))) == entries


def test_texts_that_nobody_reads_are_not_made(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks for those of the halves whether its structured log is on or not; whoever prints a graph sees it."""
    made: list[str] = []
    render = fx.GraphModule.print_readable

    def rendered(self: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        made.append(render(self, *args, **kwargs))
        return made[-1]

    training(compiler(model))
    monkeypatch.setattr(fx.GraphModule, "print_readable", rendered)
    for handlers, texts in (([], 1), ([logging.NullHandler()], 4)):  # the joint graph's; with Dynamo's and the halves'
        monkeypatch.setattr(trace_log, "handlers", handlers)
        made.clear()
        training(compiler(model))
        assert len(made) == texts and all("def forward" in text for text in made)
    monkeypatch.setattr(trace_log, "handlers", [])
    module = capture.Unread(torch.nn.Module(), make_fx(torch.sin)(torch.ones(3)).graph)
    assert "aten.sin" in module.print_readable(print_output=False)


# ---------------------------------------------------------------- faults of the disk


class Harm:
    """Unpickles as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


def _payloads(folder: Path) -> dict[str, bytes]:
    return {"no pickle": b"junk", "graphs without nodes": pickle.dumps([2, 2]), "no graphs": pickle.dumps([]),
            "a call": pickle.dumps(Harm(folder / "trace")), "an attribute of a module of ours":
            b"cfxfuser.runtime.store\nos.getcwd\n)R."}


@pytest.mark.parametrize("kind", list(_payloads(Path())))
def test_a_whole_entry_of_anything_else_is_not_used(kind: str, compiler: Compiler, tmp_path: Path) -> None:
    first = training(compiler(model))
    store = Store(compiler.folder / stored_graphs.KIND)
    for path in compiler.entries:
        store.put(path.stem, _payloads(tmp_path)[kind])
    same(training(compiler(model)), first)
    assert compiler.ran and not (tmp_path / "trace").exists()
    same(training(compiler(model)), first)
    assert compiler.ran == 0
