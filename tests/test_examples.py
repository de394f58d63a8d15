"""The examples run as a user runs them, at small sizes, and report success only where it is one."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
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
        example.forward_backward(torch.compile(module, backend="fxfuser"), example.example_inputs(256, "cpu"))
    kinds = {name.split(".")[1]: [s.kind.value for s in segmentation.segments]
             for name, segmentation in recording.segmentations}
    assert set(kinds) == {"forward", "backward"}
    assert all(len(found) == 1 and found != ["extern"] for found in kinds.values()), kinds


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
    arguments("--backend", backend, "--size", "tiny", "--steps", "30", "--sample", "5", "--compare")
    assert _load("nanogpt").main() == 0
    text = capsys.readouterr().out
    assert "tokens/s" in text
    assert text.count("step    30") == 2  # with eager too
    assert re.search(r"differ by \d\.\d+e-0[3-9]", text) or "differ by 0.00e+00" in text
    for kind in ("inference", "forward", "backward"):
        assert (f"\n{kind}: " in text) == (backend == "fxfuser")


def test_nanogpt_fails_where_the_loss_stays(arguments) -> None:
    arguments("--backend", "eager", "--size", "tiny", "--steps", "1", "--sample", "0")
    assert _load("nanogpt").main() == 1


def _settings(example: ModuleType, steps: int, **rest: object):
    return example.Settings(example.SIZES["tiny"], steps, "eager", **rest)


def test_a_resumed_nanogpt_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    example, file = _load("nanogpt"), tmp_path / "run.pt"
    text = example.read_text(None)
    whole = example.train(_settings(example, 20), text)
    kept: list[bytes] = []
    example.Trainer.save = _keeping(example.Trainer.save, kept, file)
    example.train(_settings(example, 20, checkpoint=file), text)
    assert len(kept) > 5
    file.write_bytes(kept[len(kept) // 2])  # as it was half way
    resumed = example.train(_settings(example, 20, checkpoint=file, resume=True), text)
    assert resumed.history.losses == whole.history.losses
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters()))


def _keeping(save, kept: list[bytes], file: Path):
    def saving(trainer) -> None:
        save(trainer)
        kept.append(file.read_bytes())

    return saving


def test_resuming_nanogpt_needs_a_checkpoint(tmp_path: Path) -> None:
    example = _load("nanogpt")
    for file in (None, tmp_path / "none.pt"):
        with pytest.raises(SystemExit, match="--checkpoint"):
            example.train(_settings(example, 2, checkpoint=file, resume=True), example.read_text(None))


def test_the_seed_decides_a_nanogpt_run() -> None:
    example = _load("nanogpt")
    text = example.read_text(None)
    first, again, other = (example.train(_settings(example, 3, seed=seed), text).history for seed in (0, 0, 1))
    assert first == replace(again, rates=first.rates)
    assert first.losses != other.losses


def test_nanogpt_reads_files_and_folders_but_no_binaries(tmp_path: Path) -> None:
    example = _load("nanogpt")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"x\0y")
    assert bytes(example.read_text(tmp_path).tolist()) == b"one\ntwo"
    assert bytes(example.read_text(tmp_path / "b.txt").tolist()) == b"two"
    with pytest.raises(SystemExit, match="too few"):
        example.split(example.read_text(tmp_path), 64)
    with pytest.raises(SystemExit, match="no such file"):
        example.read_text(tmp_path / "missing")


def test_the_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    rates = [_load("nanogpt").learning_rate(step, 100, 1.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


def test_nanogpt_notices_two_different_curves(capsys) -> None:
    example = _load("nanogpt")
    falling = [5.0 - 0.01 * i for i in range(100)]
    assert example.compare(_settings(example, 100), example.History(falling), example.History(falling))
    assert not example.compare(_settings(example, 100), example.History([x * 1.1 for x in falling]),
                               example.History(falling))
    assert "TOO MUCH" in capsys.readouterr().out


def test_nanogpt_needs_no_progress_bar(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    example = _load("nanogpt")
    monkeypatch.setattr(example, "tqdm", None)
    example.train(_settings(example, 2), example.read_text(None))
    assert "step     2  loss" in capsys.readouterr().out
