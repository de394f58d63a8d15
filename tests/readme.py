"""The README's code blocks: what they are, and what the commands in them print.

    python -m tests.readme      writes into the README what its commands print now

A `python` block that begins with a comment like `# model.py` is that file; other python blocks run one after another
in one namespace.  In a `console` block a line that begins with `$ ` is a command and the others are all that it prints;
in an `sh` block every line is a command.  Commands run in a folder that holds the files.  Invariant: a block of
another kind is an error, so nothing in the README goes unchecked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
KINDS = ("python", "console", "sh")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TIME = re.compile(r"\d+\.\d(?= ms$)", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    kind: str  # one of KINDS
    text: str

    @property
    def file(self) -> str:
        """The name of the file that it is; "" where it is none."""
        found = re.match(r"# (\w+\.py)\n", self.text) if self.kind == "python" else None
        return found[1] if found else ""

    @property
    def commands(self) -> tuple[str, ...]:
        if self.kind == "console":
            return tuple(line[2:] for line in self.text.splitlines() if line.startswith("$ "))
        return tuple(self.text.splitlines()) if self.kind == "sh" else ()


def blocks(text: str) -> tuple[Block, ...]:
    """The blocks of a README in order.  Raises ValueError for one that nothing would check."""
    found = tuple(Block(kind, body) for kind, body in _BLOCK.findall(text))
    for block in found:
        if block.kind not in KINDS:
            raise ValueError(f"a block of kind {block.kind!r}: {block.text[:60]!r}")
    return found


def write_files(text: str, folder: Path) -> None:
    """The README's files, as a reader would save them."""
    for block in blocks(text):
        if block.file:
            (folder / block.file).write_text(block.text)


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`fxfuser ...` in a process of its own, as a newcomer's shell would, without any variable of ours set."""
    name, *words = command.split()
    assert name == "fxfuser", command
    environment = {n: v for n, v in os.environ.items() if not n.startswith("FXFUSER_")}
    environment |= {"PYTHONPATH": str(ROOT), "FXFUSER_CACHE_DIR": str(folder / "cache")}
    return subprocess.run([sys.executable, "-m", "fxfuser.cli.main", *words], cwd=folder, env=environment, text=True,
                          capture_output=True, timeout=280)


def renewed(text: str, folder: Path) -> str:
    """The README with what its console blocks print now; times, which no two runs share, keep what they were."""
    write_files(text, folder)

    def console(match: re.Match[str]) -> str:
        block = Block(match[1], match[2])
        if block.kind != "console":
            return match[0]
        shown = "".join(f"$ {command}\n{run(command, folder).stdout.rstrip()}\n" for command in block.commands)
        times: Iterator[str] = iter(_TIME.findall(block.text))
        return f"```console\n{_TIME.sub(lambda m: next(times, m[0]), shown)}```"

    return _BLOCK.sub(console, text)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        README.write_text(renewed(README.read_text(), Path(folder)))


if __name__ == "__main__":
    main()
