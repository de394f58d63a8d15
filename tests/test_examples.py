"""The examples run as a user runs them, at small sizes, and report success only where it is one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fxfuser import observe

EXAMPLES = Path(__file__).parent.parent / "examples"
# aot_eager keeps a fault of the examples apart from one of the compiler
BACKENDS = ("aot_eager", "fxfuser")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch):
    return lambda *args: monkeypatch.setattr(sys, "argv", ["example", *args])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hf", [False, True])
def test_mistral_rope(backend: str, hf: bool, arguments, capsys) -> None:
    if hf:
        pytest.importorskip("transformers")
    arguments("--backend", backend, "--length", "5", *(["--hf"] if hf else []))
    assert _load("mistral_rope").main() == 0
    text = capsys.readouterr().out
    assert text.count(" ok") == 6
    if backend == "fxfuser":
        assert "pointwise" in text


@pytest.mark.parametrize("hf", [False, True])
def test_mistral_rope_is_one_kernel_each_way(hf: bool) -> None:
    if hf:
        pytest.importorskip("transformers")
    example = _load("mistral_rope")
    module = example.huggingface_rope() if hf else example.MistralRope()
    with observe.recording() as recording:
        example.forward_backward(torch.compile(module, backend="fxfuser"), example.example_inputs(6, "cpu"))
    kinds = {name.split(".")[1]: [s.kind.value for s in segmentation.segments]
             for name, segmentation in recording.segmentations}
    assert kinds == {"forward": ["pointwise"], "backward": ["pointwise"]}


def test_the_two_modules_agree() -> None:
    pytest.importorskip("transformers")
    example = _load("mistral_rope")
    inputs = example.example_inputs(7, "cpu")
    for a, b in zip(example.MistralRope()(*inputs), example.huggingface_rope()(*inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_mistral_rope_notices_a_wrong_result(capsys) -> None:
    example = _load("mistral_rope")
    inputs = example.example_inputs(3, "cpu")
    eager = example.forward_backward(example.MistralRope(), inputs)
    wrong = (eager[0] * 1.1, *eager[1:])
    assert not example.compare(eager, wrong, example.reference(inputs))
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("backend", BACKENDS)
def test_nanogpt_learns(backend: str, arguments, capsys) -> None:
    arguments("--backend", backend, "--steps", "30")
    assert _load("nanogpt").main() == 0
    text = capsys.readouterr().out
    if backend == "fxfuser":
        assert "\nforward: " in text
        assert "\nbackward: " in text


def test_nanogpt_fails_where_the_loss_stays(arguments) -> None:
    arguments("--backend", "eager", "--steps", "1")
    assert _load("nanogpt").main() == 1
