"""The frame: help, errors of the command line and exit codes."""

from __future__ import annotations

import re

import pytest

from fxfuser.cli.command import USAGE
from fxfuser.cli.main import COMMANDS, parser


def test_help_lists_each_command_with_a_summary(fxfuser) -> None:
    result = fxfuser("--help")
    assert result.code == 0
    for command in COMMANDS:
        assert re.search(rf"^    {command.name}\s", result.out, re.MULTILINE)
    assert "module:function" in result.out


@pytest.mark.parametrize("command", [c.name for c in COMMANDS])
def test_each_command_has_help(command: str, fxfuser) -> None:
    result = fxfuser(command, "--help")
    assert result.code == 0
    assert f"usage: fxfuser {command}" in result.out


@pytest.mark.parametrize("words", [(), ("nonsense",), ("dump",), ("dump", "m:f", "--stage", "nonsense"),
                                   ("doctor", "--nonsense"), ("explain", "m:f", "--nonsense")])
def test_a_wrong_command_line(words: tuple[str, ...], fxfuser) -> None:
    result = fxfuser(*words)
    assert result.code == USAGE
    assert result.out == ""
    assert "fxfuser" in result.err


def test_every_command_runs_something() -> None:
    assert len({c.name for c in COMMANDS}) == len(COMMANDS)
    assert parser().prog == "fxfuser"
