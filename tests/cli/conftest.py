"""A folder with a small model and scripts, and a way to run commands in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fxfuser.cli.main import main

MODEL = '''\
import torch


def training():
    def f(x, w, b):
        y = torch.relu(x @ w + b)
        return torch.softmax(y * 0.5, -1)
    return f, (torch.randn(8, 16), torch.randn(16, 32, requires_grad=True), torch.randn(32))


def inference():
    return lambda x: (x.sin() + 1).cos(), (torch.randn(4, 6),)


def product():
    return lambda x, w: torch.relu(x @ w).sum(-1), (torch.randn(8, 16), torch.randn(16, 32))


def step_of_decoding():
    def f(q, k, x, w):
        read = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        return x + read.transpose(1, 2).reshape(1, 32) @ w
    return f, tuple(torch.randn(*s).bfloat16() for s in ((1, 2, 1, 16), (1, 2, 150, 16), (1, 32), (32, 32)))


def marks():
    return lambda x: x + torch.arange(64)[:, None].float().cos(), (torch.randn(64, 8),)


def dropped():
    return lambda x: torch.nn.functional.dropout(x, 0.5) + 1, (torch.randn(8, 8),)


def stored():
    return lambda cache, i, x: cache.index_copy_(0, i, x.sin()), (
        torch.zeros(8, 4), torch.tensor([1]), torch.randn(1, 4))


def single():
    return torch.relu, torch.randn(3)


def dynamic():
    return torch.compile(lambda x: x * 2, dynamic=True), (torch.randn(5, 3),)


@torch.compile(backend="eager", dynamic=True)
def doubled(x):
    return x * 2


def decorated():
    return doubled, (torch.randn(5, 3),)


def broken():
    return lambda x: x.view(5), (torch.randn(3),)


def no_pair():
    return 3


def no_inputs():
    return torch.relu, 3
'''
SCRIPT = '''\
import argparse
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, required=True)
parser.add_argument("--backend", default="inductor")
parser.add_argument("--leave", type=int, default=0)
args = parser.parse_args()


@torch.compile(backend=args.backend, options={"max_autotune": True} if args.backend == "inductor" else None)
def f(x):
    return x.exp() * 2


class M(torch.nn.Module):
    def forward(self, x):
        return x - 1


print("from the script", f(torch.ones(args.size)).shape)
m = M()
m.compile(backend="inductor", mode="reduce-overhead")
m(torch.ones(args.size))
sys.exit(args.leave)
'''


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "cli_model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "plain.py").write_text("print('nothing to compile')\n")
    (tmp_path / "raises.py").write_text("def inner():\n    raise ValueError('from the script')\n\n\ninner()\n")
    (tmp_path / "no_import.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("cli_model", None)


@pytest.fixture
def fxfuser(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs one command line in the folder."""
    def run(*words: str) -> Result:
        try:
            code = main(words)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        text = capsys.readouterr()
        return Result(code, text.out, text.err)

    return run
