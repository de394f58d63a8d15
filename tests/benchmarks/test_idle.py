"""Kernels with few programs are found without a device."""

from __future__ import annotations

import pytest
import torch

from benchmarks import idle


def test_a_kernel_of_one_program_is_found() -> None:
    long, x = torch.ones(1 << 21), torch.ones(1 << 10, 1 << 11)
    with idle.counted() as launches:
        running = idle.compiled(lambda x: x.cumsum(0))(long)
        idle.compiled(lambda x: x.exp() + 1)(x)
        idle.compiled(lambda x: x.cumsum(0))(torch.ones(1 << 10))
    assert len(launches) == 3 and not running.any()  # nothing has run
    found = idle.idle(launches, 66, 4 << 20)
    assert [(x.programs, x.bytes, n) for x, n in found] == [(1, 2 * 4 << 21, 1)]


def test_a_step_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    command = ["--models", "qwen3", "--kinds", "training", "--size", "tiny"]
    assert idle.main(command) == 0
    assert "0 of kernels with few programs" in capsys.readouterr().out
    assert idle.main([*command, "--megabytes", "0.001"]) == 1
    assert "qwen3 training" in capsys.readouterr().out.splitlines()[-1]
