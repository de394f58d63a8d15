"""The results file: measured rows together with all that is needed to judge them.

Leaves: `benchmarks/results/<date>-<name>.json`, rewritten after every row, so that a run that is cut short keeps what
it has.  Invariant: no path and no host name of the machine that measured.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "fxfuser", "numpy")


def environment(device: torch.device, commit: str | None = None) -> dict[str, object]:
    """Versions, date, commit, device.  `commit` is asked of git unless given (a copied tree has no history)."""
    found: dict[str, object] = {name: _version(name) for name in PACKAGES}
    found |= {"python": platform.python_version(), "commit": commit or _commit(),
              "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"), "device": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count,
                  "cuda": torch.version.cuda}
    return found


def command_line(module: str, arguments: list[str]) -> str:
    """How to run this again; values of options that name files are left out, for they hold paths."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and not argument.startswith("--json"):
            kept.append(argument)
        skip = argument == "--json"
    return " ".join(["python -m", module, *kept])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True,
                              cwd=Path(__file__).parent)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@dataclass
class Results:
    """Rows in the order in which they were measured; `add` keeps the file up to date."""

    name: str
    path: Path
    head: dict[str, object]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps({"name": self.name, **self.head, "rows": self.rows}, indent=1) + "\n")
        part.replace(self.path)


def start(name: str, device: torch.device, path: Path | None, commit: str | None = None, module: str = "") -> Results:
    """An empty results file; `path` None puts it into benchmarks/results under today's date.

    `module`, of this folder, is what was run, where it is not called as its results are.
    """
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    command = command_line(f"benchmarks.{module or name}", sys.argv[1:])
    head = {"environment": environment(device, commit), "command": command}
    return Results(name, path or RESULTS / f"{day}-{name}.json", head)
