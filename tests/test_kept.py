"""Compiled regions that AOTAutograd's cache keeps: what is kept, when it is taken, and that it computes the same."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

from fxfuser import observe
from fxfuser.runtime.stored_graph import Unstorable, decode, encode
from tests.segmenter.graphs import trace

Results = tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache's entries."""
    (tmp_path / "inductor").mkdir(mode=0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    return tmp_path / "inductor" / "aotautograd"


def compiled_anew(work: Callable[[Callable[..., Any]], Results], fn: Callable[..., Any],
                  **options: object) -> tuple[Results, dict[str, int]]:
    """What `work` computes with `fn` compiled, and how the cache was used."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    chosen = {"keep_graphs": True, "strict": False, "executor": "interpret", **options}
    results = work(torch.compile(fn, backend="fxfuser", options=chosen, dynamic=False))
    names = {"autograd_cache_hit": "hit", "autograd_cache_saved": "saved", "autograd_cache_miss": "miss",
             "autograd_cache_bypass": "bypass"}
    return results, {short: counters["aot_autograd"][name] for name, short in names.items()
                     if counters["aot_autograd"][name]}


def gradients(fn: Callable[..., Any], *inputs: torch.Tensor) -> Results:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def training(fn: Callable[..., Any]) -> Results:
    return gradients(fn, draw(4, 16), draw(16, 8))


def inference(fn: Callable[..., Any]) -> Results:
    with torch.no_grad():
        return (fn(draw(4, 16), draw(16, 8)),)


def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.relu(x @ w) * 2, -1)


def autocast(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y.float().sin()


def dropout(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ w, 0.5) + 1


def several(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values, positions = torch.topk(x @ w, 3)
    return values * positions.float() + torch.cat([x, x.flip(-1)], -1).view(-1, 8).amax(0)[:3]


def updates(fn: Callable[..., Any]) -> Results:
    x = draw(4, 8)
    return fn(x), x


def write(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.t()[1:]


CASES = {"training": (training, model), "inference": (inference, model), "autocast": (training, autocast),
         "dropout": (training, dropout), "several outputs": (training, several), "mutation": (updates, write)}


@pytest.mark.parametrize("case", CASES)
def test_a_region_is_kept_and_taken(case: str) -> None:
    work, fn = CASES[case]
    first, use = compiled_anew(work, fn)
    assert use == {"miss": 1, "saved": 1}
    second, use = compiled_anew(work, fn)
    assert use == {"hit": 1}
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()
    if case != "dropout":  # whose numbers are fxfuser's own
        for a, b in zip(second, work(fn), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2 if case == "autocast" else 1e-4, atol=1e-3)


def test_a_kept_backward_may_run_again() -> None:
    def twice(fn: Callable[..., Any]) -> Results:
        x = draw(4, 8).requires_grad_()
        out = fn(x)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return *first, *torch.autograd.grad(out.sum(), x)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.sin(x) * 2)

    compiled_anew(twice, fn)
    (first, second), use = compiled_anew(twice, fn)
    assert use == {"hit": 1} and torch.equal(first, second)


def test_nothing_is_kept_unasked(entries: Path) -> None:
    _, used = compiled_anew(training, model, keep_graphs=False)
    assert not used.get("saved") and not used.get("hit") and not entries.exists()


def test_another_option_is_another_region() -> None:
    compiled_anew(training, model)
    assert compiled_anew(training, model, numerics="eager")[1] == {"miss": 1, "saved": 1}
    assert compiled_anew(training, model)[1] == {"hit": 1}


@pytest.mark.parametrize("options", [{"strict": True}, {"fuel": 3}])
def test_who_looks_for_faults_compiles_anew(options: dict[str, object], entries: Path) -> None:
    assert compiled_anew(training, model, **options)[1] == {}
    assert not entries.exists()


def test_who_records_sees_every_graph(entries: Path) -> None:
    compiled_anew(training, model)
    with observe.recording() as recording:
        assert compiled_anew(training, model)[1] == {}
    assert [t.graph.kind for t in recording.graphs] == ["joint", "forward", "backward"]


def test_sizes_that_change_are_not_kept(entries: Path) -> None:
    torch.compiler.reset()
    fn = torch.compile(model, backend="fxfuser", options={"keep_graphs": True, "strict": False}, dynamic=True)
    training(fn)
    assert not entries.exists()


def test_what_cannot_be_written_runs_all_the_same(entries: Path) -> None:
    constant = torch.arange(8.0)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) * constant

    results, use = compiled_anew(training, fn)
    assert "saved" not in use and "hit" not in compiled_anew(training, fn)[1]
    torch.testing.assert_close(results, training(fn))


@pytest.mark.parametrize("harm", [b"", b"\x80\x04nonsense", None])
def test_a_damaged_entry_costs_time_alone(harm: bytes | None, entries: Path) -> None:
    first, _ = compiled_anew(training, model)
    (path,) = entries.glob("*/*")
    path.write_bytes(path.read_bytes()[:-40] if harm is None else harm)
    second, use = compiled_anew(training, model)
    assert "hit" not in use
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_not_trusted(mode: int, entries: Path) -> None:
    compiled_anew(training, model)
    entries.chmod(mode)
    assert compiled_anew(training, model)[1] == {}
    entries.chmod(0o700)
    entries.parent.chmod(mode)
    assert compiled_anew(training, model)[1] == {}
    entries.parent.chmod(0o700)
    assert compiled_anew(training, model)[1] == {"hit": 1}


def test_a_folder_that_cannot_be_written(entries: Path) -> None:
    entries.write_text("")  # no folder
    first, use = compiled_anew(training, model)
    assert "saved" not in use
    for a, b in zip(first, training(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_another_process_takes_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent("""
        import torch
        from torch._dynamo.utils import counters

        @torch.compile(backend="fxfuser", options={"keep_graphs": True})
        def f(x, w):
            return torch.softmax(torch.relu(x @ w), -1)

        x, w = torch.ones(4, 8, requires_grad=True), torch.full((8, 8), 0.5)
        f(x, w).square().sum().backward()
        print(counters["aot_autograd"]["autograd_cache_hit"], x.grad.sum().item())
        """))
    environment = {**os.environ, "FXFUSER_STRICT": "0", "FXFUSER_CACHE_DIR": str(tmp_path / "cache"),
                   "PYTHONPATH": str(Path(__file__).parent.parent)}
    first, second = (subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True,
                                    timeout=300, check=True).stdout.split() for _ in range(2))
    assert first[0] == "0" and second[0] == "1" and first[1] == second[1]


def test_a_graph_comes_back_as_it_was() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, positions = torch.topk(x.t()[1:, ::2], 2)
        return values + y.to(torch.bfloat16).mean(), positions, torch.full((3,), float("inf"), device="cpu")

    module = trace(fn, torch.randn(6, 5), torch.randn(4))
    made = decode(encode(module, torch._subclasses.FakeTensor), torch._subclasses.FakeTensorMode)
    assert str(made.graph) == str(module.graph)
    for a, b in zip(made.graph.nodes, module.graph.nodes, strict=True):
        assert a.target == b.target and a.args.__repr__() == b.args.__repr__()
        assert a.meta.get("stack_trace") == b.meta.get("stack_trace")
        if isinstance(b.meta.get("val"), torch.Tensor):
            old, new = b.meta["val"], a.meta["val"]
            assert (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device)


def test_a_graph_of_symbolic_sizes_is_refused() -> None:
    with pytest.raises(Unstorable, match="changes from call to call"):
        encode(trace(torch.sin, torch.randn(6, 5), mode="symbolic"), torch._subclasses.FakeTensor)
