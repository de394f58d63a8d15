"""What a command is: one module of `fxfuser.cli` with a `COMMAND`, listed once in `main.COMMANDS`.

Enters: parsed arguments.  Leaves: an exit code, 0 where all went well, FAILED where the target or a check failed and
USAGE where the command line is at fault.  A command prints results on stdout and everything else on stderr.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Callable

FAILED, USAGE = 1, 2


@dataclass(frozen=True)
class Command:
    """`add_arguments` fills the command's parser; `run` does the work and returns the exit code.

    `forwards`: words that the parser does not know belong to the target and arrive as `args.target_args`.
    """

    name: str
    summary: str
    description: str
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int]
    forwards: bool = False
