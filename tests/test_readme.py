"""Every code block of the README runs, and its commands print what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from fxfuser.cli.command import FAILED
from fxfuser.cli.main import COMMANDS, main
from fxfuser.config import SETTINGS, Config, Mode
from tests.readme import README, ROOT, blocks, renewed, write_files

TEXT = README.read_text()
PINNED = re.search(r"^TORCH\s*\?= torch==([\d.]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
SHELL = [c.partition("#")[0].strip() for b in blocks(TEXT) if b.kind == "sh" for c in b.commands]


def test_the_two_commands_come_first() -> None:
    first = [line for line in TEXT.splitlines() if line and not line.startswith(("#", "```"))][:2]
    assert [line.split("#")[0].strip() for line in first] == ["make example", "make test"]


def test_python_blocks_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FXFUSER_CACHE_DIR", str(tmp_path))
    scope: dict[str, object] = {}
    found = [b for b in blocks(TEXT) if b.kind == "python" and not b.file]
    assert found
    for i, block in enumerate(found):
        file = tmp_path / f"block{i}.py"  # Dynamo reads the source of what it compiles
        file.write_text(block.text)
        exec(compile(block.text, str(file), "exec"), scope)


@pytest.mark.slow
@pytest.mark.skipif(not PINNED or not torch.__version__.startswith(PINNED[1]), reason="other versions trace otherwise")
def test_commands_print_what_the_readme_says(tmp_path: Path) -> None:
    assert renewed(TEXT, tmp_path) == TEXT, "run python -m tests.readme"


def test_fxfuser_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(TEXT, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXFUSER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command in SHELL:
        if command.startswith("fxfuser "):
            measures = command == "fxfuser calibrate" and not torch.cuda.is_available()
            assert main(command.split()[1:]) == (FAILED if measures else 0), f"{command}\n{capsys.readouterr().err}"
    assert (tmp_path / "segment1.py").is_file() and (tmp_path / "dumped").is_dir()


@pytest.mark.parametrize("command", [c for c in SHELL if not c.startswith("fxfuser")])
def test_other_commands_exist(command: str) -> None:
    tool, *words = command.split()
    if tool == "make":
        environment = {n: v for n, v in os.environ.items() if n != "MAKEFLAGS"}
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    elif tool == "python":
        assert words[0] == "-m"
        assert importlib.util.find_spec(words[1]) is not None
    else:
        assert tool == "pip"
        done = subprocess.run([sys.executable, "-m", "pip", words[0], "--help"], capture_output=True, text=True)
        assert all(word in done.stdout for word in words[1:] if word.startswith("-"))


def test_every_command_is_shown() -> None:
    shown = {c.split()[1] for b in blocks(TEXT) for c in b.commands if c.startswith("fxfuser ")}
    assert shown == {command.name for command in COMMANDS}


def test_options_and_modes_are_the_real_ones() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", TEXT, re.MULTILINE)
    defaults = {f.name: getattr(Config(), f.name) for f in fields(Config)}
    assert dict(rows).keys() == {s.option for s in SETTINGS}
    for name, shown in rows:
        if name != "cache_dir":  # which names the user's own folder
            assert shown == repr(defaults[name])
    assert all(f"`{mode.value}`" in TEXT for mode in Mode)


def test_every_path_exists() -> None:
    paths = [p for p in re.findall(r"`([\w./]+/[\w./]*|\w+\.(?:py|toml|md))`", TEXT) if not p.startswith(("~", "/"))]
    named = {b.file for b in blocks(TEXT)}
    assert paths
    for path in paths:
        assert path in named or (ROOT / path).exists() or (ROOT / "fxfuser" / path).exists(), path
    for link in re.findall(r"\]\(([\w./]+)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_the_map_names_every_part() -> None:
    parts = {p.name + "/" * p.is_dir() for p in (ROOT / "fxfuser").iterdir()
             if not p.name.startswith("_") and p.suffix in ("", ".py")}
    table = TEXT.partition("| in `fxfuser/` |")[2].partition("\n\n")[0]
    assert parts == set(re.findall(r"`([\w]+(?:/|\.py))`", table))
