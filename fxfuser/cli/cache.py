"""`fxfuser cache info|clear`: what later processes start from, and how to be rid of it.

Enters: nothing but the configuration.  Leaves: a table of what the cache directory holds; FAILED where it cannot be
used, with the reason.  Repro files lie there too: `clear` leaves them unless asked, since somebody may be reading one.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from tabulate import tabulate

from fxfuser.cli.command import FAILED, Command
from fxfuser.config import Config
from fxfuser.runtime.store import KINDS, LIMIT, Store, Usage
from fxfuser.words import bytes_text, plural

REPROS = "repro"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=("info", "clear"), help="show what is kept, or remove it")
    parser.add_argument("--json", action="store_true", help="info as one JSON object")
    parser.add_argument("--repros", action="store_true", help="clear: the repro files as well")


def run(args: Namespace) -> int:
    folder = Config.resolve().cache_dir
    stores = {kind: Store(folder / kind) for kind in KINDS}
    if args.action == "clear":
        return _clear(folder, stores, args.repros)
    faults = [reason for store in stores.values() if (reason := store.check())]
    usage = {**{kind: store.usage() for kind, store in stores.items()}, REPROS: _repros(folder)}
    if args.json:
        print(json.dumps({"directory": str(folder), "limit": LIMIT, "faults": faults, **{
            kind: {"entries": u.entries, "bytes": u.bytes} for kind, u in usage.items()}}))
    else:
        print(f"{folder}, at most {bytes_text(LIMIT)} of each kind that is not a repro\n")
        print(tabulate([(kind, u.entries, bytes_text(u.bytes)) for kind, u in usage.items()],
                       ("kind", "entries", "size"), colalign=("left", "right", "right")))
        for reason in faults:
            print(f"\nnot used: {reason}")
    return FAILED if faults else 0


def _clear(folder: Path, stores: dict[str, Store], repros: bool) -> int:
    cleared = {kind: store.clear() for kind, store in stores.items()}
    if repros:
        cleared[REPROS] = _repros(folder, remove=True)
    total = Usage(sum(u.entries for u in cleared.values()), sum(u.bytes for u in cleared.values()))
    print(f"removed {plural(total.entries, 'file')}, {bytes_text(total.bytes)}, from {folder}")
    left = sum(store.usage().entries for store in stores.values())
    if left:
        print(f"{plural(left, 'file')} could not be removed")
    return FAILED if left else 0


def _repros(folder: Path, remove: bool = False) -> Usage:
    count, size = 0, 0
    with suppress(OSError):
        for path in (folder / REPROS).glob("*.py"):
            size += path.stat().st_size
            count += 1
            if remove:
                path.unlink()
    return Usage(count, size)


COMMAND = Command(
    "cache", "show or clear what is kept between processes",
    "Compiled kernels, and the segments of graphs, are kept in a directory (FXFUSER_CACHE_DIR), so that a second\n"
    "process starts warm.  The least recently used go when it is full.  Entries of other versions are never used and\n"
    "leave the same way.",
    add_arguments, run)
