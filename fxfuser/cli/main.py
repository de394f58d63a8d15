"""The `fxfuser` command: a parser over `COMMANDS`.

A new command is one module with a `COMMAND` and one entry below.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Sequence

import fxfuser
from fxfuser.cli import bench, bisect, cache, calibrate, doctor, dump, explain, repro
from fxfuser.cli.command import USAGE, Command
from fxfuser.errors import FxfuserError

COMMANDS: tuple[Command, ...] = (dump.COMMAND, explain.COMMAND, repro.COMMAND, doctor.COMMAND, cache.COMMAND,
                                 calibrate.COMMAND, bisect.COMMAND, bench.COMMAND)

EPILOG = """\
TARGET is a script, or module:function where the function returns (callable, example_inputs); the module
may also be a path, as in model.py:example.  Words after -- belong to the script.

  fxfuser dump train.py --steps 2              everything that the script compiles
  fxfuser dump model.py:example --stage plan   the plan of one function
  fxfuser explain model.py:example             why its segments stay apart
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    own, _, rest = _cut(words)
    top = parser()
    args, unknown = top.parse_known_args(own)
    command: Command = args.command
    if unknown and not command.forwards:
        top.error(f"{command.name} does not know {' '.join(unknown)}; words after -- are the script's")
    args.target_args = [*unknown, *rest]
    try:
        return command.run(args)
    except FxfuserError as error:
        print(f"fxfuser {command.name}: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="fxfuser", description="Show, explain and check what fxfuser makes of a PyTorch program.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"fxfuser {fxfuser.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(
            command.name, help=command.summary, description=command.description, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_arguments(sub)
        sub.set_defaults(command=command)
    return top


def _cut(words: list[str]) -> tuple[list[str], str, list[str]]:
    """What stands before the first --, and after it."""
    if "--" not in words:
        return words, "", []
    at = words.index("--")
    return words[:at], "--", words[at + 1:]


if __name__ == "__main__":
    sys.exit(main())
