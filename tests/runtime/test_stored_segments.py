"""Segments that are kept: found where nothing has changed, made anew wherever anything has, whatever the disk does."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fxfuser import backend, fuel, observe
from fxfuser.config import Config
from fxfuser.domain.index import Form
from fxfuser.errors import FallbackWarning
from fxfuser.fuel import Fuel
from fxfuser.lowering.kernel import Lowered
from fxfuser.runtime import binary, stored_segments
from fxfuser.runtime.lower_segments import lower_segments
from fxfuser.runtime.store import Store
from fxfuser.segmenter.cost import DeviceRates
from fxfuser.segmenter.segment import Segment, Segmentation
from fxfuser.segmenter.segmenter import segment
from tests.segmenter.graphs import trace

pytestmark = pytest.mark.keeps_segments


class Compiler:
    """Compiles with a cache of its own and counts the graphs that were segmented."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.segmented = folder, 0
        made = backend.segment

        def counted(*args: Any) -> Segmentation:
            self.segmented += 1
            return made(*args)

        monkeypatch.setattr(backend, "segment", counted)

    def __call__(
        self, function: Callable[..., Any], dynamic: bool | None = None, **options: object
    ) -> Callable[..., Any]:
        torch.compiler.reset()
        self.segmented = 0
        chosen = {"executor": "interpret", "cache_dir": self.folder, **options}
        return torch.compile(function, backend="fxfuser", options=chosen, dynamic=dynamic)

    @property
    def entries(self) -> list[Path]:
        return sorted((self.folder / stored_segments.KIND).glob("*.bin"))


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    return Compiler(tmp_path / "cache", monkeypatch)


def training(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1)
    x, w = (torch.randn(n, 16, generator=g, requires_grad=True) for n in (6, 8))
    loss = call(x, w)
    return loss.detach(), *torch.autograd.grad(loss, (x, w))


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(F.gelu(x @ w.t()), (8,)).softmax(-1).square().sum()


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


@pytest.mark.parametrize("options", [{}, {"executor": "reference"}, {"gemm": "fused"}, {"gemm": "library"}])
def test_an_equal_graph_is_not_segmented_again(
    options: dict[str, object], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = training(compiler(model, **options))
    assert compiler.segmented == 2 == len(compiler.entries)
    lowered: list[object] = []
    monkeypatch.setattr(backend, "lower_segments", lambda *args: lowered.append(args))
    second = training(compiler(model, **options))
    assert compiler.segmented == 0 and not lowered
    same(second, first)
    for a, b in zip(second, training(model), strict=True):
        torch.testing.assert_close(a, b)


def test_sizes_that_change(compiler: Compiler) -> None:
    def run() -> None:
        call = compiler(lambda x: (x * 2).softmax(-1).sum(0), dynamic=True)
        for rows, columns in ((4, 6), (7, 5), (3, 9)):
            x = torch.randn(rows, columns)
            torch.testing.assert_close(call(x), (x * 2).softmax(-1).sum(0))

    run()
    assert compiler.segmented == 1
    run()
    assert compiler.segmented == 0


def test_numbers_are_never_stale(compiler: Compiler) -> None:
    """A number in the text of the model is part of the graph; one that is passed is an input of each call."""
    x = torch.randn(5, 7)
    for number in (0.5, 0.25, 3, 3.0):
        torch.testing.assert_close(compiler(lambda x, n=number: (x * n + n).exp())(x), (x * number + number).exp())
        assert compiler.segmented == 1
    for _ in range(2):
        call = compiler(lambda x, n: (x * n).exp() + n)
        for number in (0.5, 0.125, 3.0, 0.5):
            torch.testing.assert_close(call(x, number), (x * number).exp() + number)
    assert compiler.segmented == 0


def test_a_backward_that_keeps_its_graph(compiler: Compiler) -> None:
    def twice(call: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        x = torch.linspace(0, 1, 24).view(4, 6).requires_grad_()
        out = call(x)
        return *torch.autograd.grad(out.sum(), x, retain_graph=True), *torch.autograd.grad(out.sum(), x)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.sin(x) * 2)

    twice(compiler(function))
    first, second = twice(compiler(function))
    assert compiler.segmented == 0 and torch.equal(first, second)


@pytest.mark.parametrize("options", [
    {"numerics": "eager"}, {"executor": "reference"}, {"gemm": "fused"}, {"deterministic": True},
    {"linear_cross_entropy": "off"}])
def test_another_option_is_another_entry(options: dict[str, object], compiler: Compiler) -> None:
    training(compiler(model))
    training(compiler(model, **options))
    assert compiler.segmented == 2
    training(compiler(model))
    assert compiler.segmented == 0


@pytest.fixture
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("change", [
    lambda patch: patch.setattr(binary, "installation", lambda: {"fxfuser": "other source"}),
    lambda patch: patch.setattr(backend, "rates_for", lambda graph, config: DeviceRates(launch=99.0)),
    lambda patch: patch.setattr(sys, "version", "9.9"),
    lambda patch: torch.set_float32_matmul_precision("high"),
    lambda patch: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")])
@pytest.mark.usefixtures("_precision")
def test_another_source_rate_or_setting_is_another_entry(
    change: Callable[[pytest.MonkeyPatch], None], compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    training(compiler(model))
    change(monkeypatch)
    training(compiler(model))
    assert compiler.segmented == 2


def test_who_measures_out_fuel_or_records_compiles_anew(compiler: Compiler) -> None:
    training(compiler(model, fuel=1000))
    with fuel.shared(Fuel()):
        training(compiler(model))
    with observe.recording() as records:
        training(compiler(model))
    assert not compiler.entries and compiler.segmented == 2
    assert records.graphs[-1].kernels and records.graphs[-1].segmentation is not None
    training(compiler(model))
    for options in ({"fuel": 1000}, {"dump_dir": compiler.folder / "dump"}):
        training(compiler(model, **options))
        assert compiler.segmented == 2


def test_what_was_not_lowered_is_said_each_time(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Lowered:
        raise ValueError("no kernel today")

    monkeypatch.setitem(lower_segments.__globals__, "lower_kernel", refuse)
    x = torch.randn(4, 6)
    for _ in range(2):
        with pytest.warns(FallbackWarning, match="no kernel today"):
            torch.testing.assert_close(compiler(torch.sin, strict=False)(x), x.sin())
    assert not compiler.entries


# ---------------------------------------------------------------- faults of the disk


class Harm:
    """Unpickles as a call that leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("harm", [
    lambda data: data[:-40], lambda data: b"", lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    lambda data: data + b"more"])
def test_a_damaged_entry_costs_time_alone(harm: Callable[[bytes], bytes], compiler: Compiler) -> None:
    first = training(compiler(model))
    for path in compiler.entries:
        path.write_bytes(harm(path.read_bytes()))
    same(training(compiler(model)), first)
    assert compiler.segmented == 2
    same(training(compiler(model)), first)
    assert compiler.segmented == 0


def _payloads(folder: Path) -> dict[str, bytes]:
    return {"no pickle": b"junk", "another value": pickle.dumps(((), 3)),
            "a call": pickle.dumps(Harm(folder / "trace")),
            "a function of ours": pickle.dumps(((), trace, {})), "a node that is none": b"\x80\x04K\xffQ.",
            "an attribute of a module of ours": b"cfxfuser.runtime.store\nos.getcwd\n)R."}


@pytest.mark.parametrize("kind", list(_payloads(Path())))
def test_a_whole_entry_of_anything_else_is_not_used(kind: str, compiler: Compiler, tmp_path: Path) -> None:
    first = training(compiler(model))
    store = Store(compiler.folder / stored_segments.KIND)
    for path in compiler.entries:
        store.put(path.stem, _payloads(tmp_path)[kind])
    same(training(compiler(model)), first)
    assert compiler.segmented == 2 and not (tmp_path / "trace").exists()


def test_an_entry_of_somebody_else_is_not_used(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    training(compiler(model))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    training(compiler(model))
    assert compiler.segmented == 2


def test_a_disk_that_cannot_be_written(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    for a, b in zip(training(compiler(model, executor="reference")), training(model), strict=True):
        torch.testing.assert_close(a, b)
    assert not compiler.entries


SCRIPT = textwrap.dedent("""
    import torch
    from fxfuser import backend

    made, segment = [], backend.segment
    backend.segment = lambda *args: made.append(args) or segment(*args)

    @torch.compile(backend="fxfuser", options={"executor": "interpret"})
    def f(x, w, at):
        return torch.softmax(torch.relu(x @ w), -1).sum(0) + w[at]

    x, w = torch.ones(4, 8, requires_grad=True), torch.full((8, 8), 0.5)
    f(x, w, torch.tensor(3)).square().sum().backward()
    print(len(made), x.grad.sum().item())
    """)


@pytest.mark.slow
def test_other_processes_take_it_also_at_once(tmp_path: Path) -> None:
    """Under other hash seeds, and several that write the same entries."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def start(seed: int) -> subprocess.Popen[str]:
        environment = {**os.environ, "FXFUSER_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": str(seed),
                       "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)

    together = [start(seed) for seed in (1, 2, 3)]
    printed = [p.communicate(timeout=300)[0].split() for p in together]
    assert len({gradient for _, gradient in printed}) == 1
    assert start(4).communicate(timeout=300)[0].split() == ["0", printed[0][1]]


# ---------------------------------------------------------------- what comes back


def text(value: object) -> str:
    """The value's text; that of a set has its elements in the order of hashes, which a copy need not share."""
    return re.sub(r"frozenset\(\{(.*?)\}\)", lambda m: f"{{{', '.join(sorted(m[1].split(', ')))}}}", repr(value))


def described(segments: tuple[Segment, ...]) -> list[object]:
    """All of segments but the identity of their values."""
    return [(s.index, s.kind, s.nodes, s.inputs, s.outputs, s.reason, s.key, s.fused, s.part, text(s.domain),
             [] if s.domain is None else [(text(p), p.dtype, p.value, p.deps, text(p.args)) for p in s.domain.points()],
             [described(way) for way in s.alternatives]) for s in segments]


def without_notes(low: object) -> str:
    """The text of a kernel or of programs; notes hold the user's lines, and stay in their process."""
    return re.sub(r"notes=\(.*?\), aligned=", "aligned=", repr(low))


def on_cuda(function: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with FakeTensorMode():
        inputs = [torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return make_fx(function, tracing_mode="real")(*inputs)


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def gather(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    padded = torch.nn.functional.pad(x[i.long().clamp(0, 3)].flip(0), (1, 2), value=3.5)
    return padded.view(-1), torch.cat([x, x.cos()]).argmax(-1), x.sort().values


GRAPHS = {
    "rows": lambda: trace(lambda x: (softmax(x), x.sum(0)), torch.randn(6, 5)),
    "lookups and borders": lambda: trace(gather, torch.randn(4, 6), torch.randn(3)),
    "symbols": lambda: trace(lambda x: softmax(x.view(-1, 2)), torch.randn(6, 4), mode="symbolic"),
    "a deep chain": lambda: trace(lambda x: [x := torch.sin(x) for _ in range(500)][-1], torch.randn(8)),
    "products": lambda: on_cuda(lambda x, w: softmax(torch.relu(x @ w)), (512, 256), (256, 1024)),
}


@pytest.mark.parametrize("name", list(GRAPHS))
def test_a_segmentation_comes_back_whole(name: str, tmp_path: Path) -> None:
    module, config = GRAPHS[name](), Config(executor="interpret", strict=True, cache_dir=tmp_path)
    segmentation = segment(module, DeviceRates(), None, config.products)
    lowered = lower_segments(module, segmentation, config)
    place = stored_segments.entry(module.graph, config, DeviceRates(), None)
    assert place.key and place.load() is None
    place.keep(segmentation, lowered)
    found = place.load()
    assert found is not None and any(s.domain is not None for s in segmentation.segments)
    assert described(found[0].segments) == described(segmentation.segments)
    assert {i: without_notes(low) for i, low in found[1].items()} == {i: without_notes(k) for i, k in lowered.items()}
    assert found[0].rates == segmentation.rates and found[0].gemm == segmentation.gemm


def test_no_value_brings_the_hash_of_another_process(tmp_path: Path) -> None:
    module, config = GRAPHS["rows"](), Config(executor="interpret", cache_dir=tmp_path)
    segmentation = segment(module)
    forms = [f for s in segmentation.segments if s.domain for store in s.domain.stores for f in store.index]
    assert forms and all(isinstance(f, Form) and hash(f) and "_hash" in vars(f) for f in forms)
    place = stored_segments.entry(module.graph, config, DeviceRates(), None)
    place.keep(segmentation, lower_segments(module, segmentation, config))
    found = place.load()
    assert found is not None
    for s in found[0].segments:
        assert s.domain is None or not any("_hash" in vars(f) for store in s.domain.stores for f in store.index)


def test_notes_and_lines_stay_here(tmp_path: Path) -> None:
    module, config = GRAPHS["rows"](), Config(executor="interpret", cache_dir=tmp_path)
    for node in module.graph.nodes:
        node.meta["stack_trace"] = 'File "/home/somebody/secret.py", line 7, in forward\n    code'
    segmentation = segment(module)
    stored_segments.entry(module.graph, config, DeviceRates(), None).keep(
        segmentation, lower_segments(module, segmentation, config))
    path, = (tmp_path / stored_segments.KIND).glob("*.bin")
    assert b"secret.py" not in path.read_bytes() and b"somebody" not in path.read_bytes()
