"""`fxfuser calibrate`: measures this machine's CUDA device, so that merges are priced with its own rates.

Enters: nothing but the current CUDA device.  Leaves: a table of the rates beside those assumed before, which later
compilations for a device of that name use; FAILED where there is no CUDA device or nothing can be kept.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

import torch
from tabulate import tabulate

from fxfuser.cli.command import FAILED, Command
from fxfuser.config import Config
from fxfuser.runtime.calibrate import Bench, CudaBench, measure
from fxfuser.runtime.rates import keep_rates, known_rates
from fxfuser.segmenter.cost import DeviceRates

UNITS = (
    ("bandwidth", "copy, all programs", 1e-6, "TB/s"), ("launch", "launch", 1.0, "us"),
    ("processors", "multiprocessors", 1.0, ""), ("program_bandwidth", "copy, one program", 1e-3, "GB/s"),
    ("operations", "simple operations", 1e-6, "T/s"),
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the rates as one JSON object, per microsecond")


def run(args: Namespace) -> int:
    bench = cuda_bench()
    if bench is None:
        print("fxfuser calibrate needs a CUDA device, and torch sees none here; on the CPU the default rates are used",
              file=sys.stderr)
        return FAILED
    folder = Config.resolve().cache_dir
    before, rates = known_rates(bench.name(), folder) or DeviceRates(), measure(bench)
    kept = keep_rates(bench.name(), rates, folder)
    if args.json:
        print(json.dumps({"device": bench.name(), "kept": kept, **asdict(rates)}))
    else:
        print(f"{bench.name()}\n\n{_table(before, rates)}")
    if not kept:
        print(f"not kept: {folder} cannot be written", file=sys.stderr)
    return 0 if kept else FAILED


def cuda_bench() -> Bench | None:
    """The current CUDA device's; None where there is none."""
    return CudaBench() if torch.cuda.is_available() else None


def _table(before: DeviceRates, rates: DeviceRates) -> str:
    old, new = asdict(before), asdict(rates)
    rows = [(label, f"{new[name] * scale:.4g}", f"{old[name] * scale:.4g}", unit) for name, label, scale, unit in UNITS]
    return str(tabulate(rows, ("rate", "measured", "assumed before", ""), disable_numparse=True,
                        colalign=("left", "right", "right", "left")))


COMMAND = Command(
    "calibrate", "measure the CUDA device, for the segmenter's cost model",
    "Measure how fast the current CUDA device copies, launches and computes, and keep the rates: later compilations\n"
    "for a device of that name price merges with them.  deterministic=True ignores them.",
    add_arguments, run)
