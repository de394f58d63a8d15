"""`fxfuser bench`: what each segment takes beside what it must take, and the whole call beside other backends.

Enters: a target.  Leaves: a table of segments (bytes, operations, floor, measured time, percent of floor) with totals
and, with --versus, call, graph and busy time of each backend, which are three clocks and never mixed; as text or JSON,
and as a PNG.  A segment is measured by itself, on inputs made from its metadata, with nothing of them in the L2 cache.
Without CUDA there is call time alone, of the segments' ATen ops, and it is said so.
"""

from __future__ import annotations

import json
import statistics
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from tabulate import tabulate

from fxfuser import report, words
from fxfuser.cli import chart, target
from fxfuser.cli.command import FAILED, Command
from fxfuser.cli.contest import SIDES, Side, contest
from fxfuser.config import Config
from fxfuser.coverage import running
from fxfuser.observe import GraphTrace
from fxfuser.report import SegmentRow
from fxfuser.runtime import timing
from fxfuser.runtime.alone import Alone, alone
from fxfuser.runtime.device_clock import CudaClock
from fxfuser.segmenter.segment import Segment

SAMPLES = 15
COPIED = 1 << 28  # bytes of the copy that gives the bandwidth
SQUARE = 4096  # rows of the matrices whose product gives the peak
SECONDS = 0.05  # for the call clock of one segment
CALL_SECONDS = 0.2  # for each clock of a whole call


@dataclass(frozen=True)
class Row:
    """A measured segment; microseconds are None where it failed, the floor where the device has no known ceilings."""

    graph: str
    segment: str
    kind: str
    kernel: str
    ops: str
    bytes: int
    flops: int
    floor: float | None
    microseconds: float | None
    note: str = ""
    tile: str = ""  # that a search chose

    @property
    def percent(self) -> float | None:
        """Floor over measured: 100 is as fast as the device can."""
        return None if self.floor is None or not self.microseconds else 100 * self.floor / self.microseconds


class Ceilings:
    """What the device does at most: bytes and operations of a matrix product per microsecond, measured when needed."""

    def __init__(self) -> None:
        self.bandwidth: dict[torch.device, float] = {}
        self.products: dict[tuple[torch.device, torch.dtype], float] = {}

    def floor(self, one: Alone, moved: int, dtype: torch.dtype) -> float | None:
        if one.device.type != "cuda":
            return None
        if one.device not in self.bandwidth:
            self.bandwidth[one.device] = COPIED / timing.copy_clock(COPIED, one.device).median
        memory = moved / self.bandwidth[one.device]
        return max(memory, one.flops / self._product(one.device, dtype)) if one.products else memory

    def _product(self, device: torch.device, dtype: torch.dtype) -> float:
        if (device, dtype) not in self.products:
            a, b = (torch.randn(SQUARE, SQUARE, device=device, dtype=dtype) for _ in range(2))
            times = CudaClock(device.index).samples(lambda: torch.mm(a, b), SAMPLES)
            self.products[device, dtype] = 2 * SQUARE**3 / statistics.median(times)
        return self.products[device, dtype]


def add_arguments(parser: ArgumentParser) -> None:
    target.add_target(parser)
    parser.add_argument("--versus", type=_sides, default=(), metavar="BACKENDS",
                        help=f"compare the whole call, such as {','.join(SIDES)}; TARGET must be a function")
    parser.add_argument("--graph", default="", metavar="TEXT", help="only graphs whose name contains TEXT")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a bar chart (needs matplotlib)")


def _sides(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    if unknown := [n for n in names if n not in SIDES]:
        raise ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(SIDES)}")
    return names


def run(args: Namespace) -> int:
    wanted = target.Target.of(args)
    if args.versus and not wanted.function:
        raise target.TargetError("--versus calls a function again and again: name one, as in model.py:example")
    if args.png and not chart.AVAILABLE:
        raise target.TargetError("--png needs matplotlib: pip install matplotlib")
    outcome = target.run(wanted)
    traces = [t for t in outcome.recording.graphs if t.segmentation is not None and args.graph in t.name]
    if outcome.failure or not traces:
        print(outcome.failure or f"{args.target}: nothing was compiled", file=sys.stderr)
        return FAILED
    config = Config.resolve(wanted.mode, wanted.options)
    rows = measured(traces, config)
    sides = contest(wanted, args.versus, CALL_SECONDS) if args.versus else ()
    print(json.dumps(as_json(str(wanted), rows, sides), indent=1) if args.json else text(rows, sides))
    if args.png:
        chart.draw(args.png, str(wanted), [(f"{r.graph} {r.segment}", r.microseconds, r.floor) for r in rows
                                           if r.microseconds is not None], clocks(sides))
        print(args.png, file=sys.stderr)
    return FAILED if any(s.failure for s in sides) else 0


# ---------------------------------------------------------------- segments


def measured(traces: Sequence[GraphTrace], config: Config) -> list[Row]:
    """Every segment; equal ones are measured once."""
    ceilings, known, rows = Ceilings(), dict[str, tuple[float | None, float | None, int, str]](), []
    for trace in traces:
        assert trace.segmentation is not None
        tiles = {t.kernel: t.tile for t in trace.tunings}
        for segment, row in zip(running(trace), report.segment_rows(trace)):
            key = f"{segment.key} {row.inputs}{row.outputs}" if segment.key else f"{trace.name} {segment.name}"
            if key not in known:
                known[key] = _measure(segment, trace, row, config, ceilings)
            floor, microseconds, flops, note = known[key]
            names = words.counted(map(words.op_name, segment.nodes))
            rows.append(Row(trace.name, segment.name, row.kind, row.kernel, names, row.bytes_in + row.bytes_out, flops,
                            floor, microseconds, note, tiles.get(row.kernel, "")))
    return rows


def _measure(segment: Segment, trace: GraphTrace, row: SegmentRow, config: Config, ceilings: Ceilings,
             ) -> tuple[float | None, float | None, int, str]:
    """(floor, microseconds, flops, note)."""
    assert trace.segmentation is not None
    try:
        one = alone(segment, trace.segmentation, config)
        microseconds = _microseconds(one)
    except Exception as error:  # an op that wants other values than made-up ones
        return None, None, 0, _said(error)
    note = "" if one.kernel or not row.kernel else "as ATen ops"
    try:
        return ceilings.floor(one, row.bytes_in + row.bytes_out, _dtype(segment)), microseconds, one.flops, note
    except RuntimeError as error:  # no room for what the ceilings are measured on: the segment's time stands
        return None, microseconds, one.flops, f"no floor: {_said(error)}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _microseconds(one: Alone) -> float:
    if one.device.type != "cuda":
        return timing.call_clock([one.run], one.device, SECONDS).median
    clock = CudaClock(one.device.index)
    clock.samples(one.run, 3)
    return statistics.median(clock.samples(one.run, SAMPLES))


def _dtype(segment: Segment) -> torch.dtype:
    found = (n.meta.get("val") for n in (*segment.inputs, *segment.outputs))
    return next((v.dtype for v in found if isinstance(v, torch.Tensor) and v.is_floating_point()), torch.float32)


# ---------------------------------------------------------------- output


def text(rows: Sequence[Row], sides: Sequence[Side]) -> str:
    """Segments with totals, then the backends."""
    shown = [(r.graph, r.segment.removeprefix("segment"), words.broken(r.kernel, 26) or r.kind, r.ops,
              words.bytes_text(r.bytes), _operations(r.flops), _us(r.floor), _us(r.microseconds), _percent(r.percent),
              r.note or r.tile)
             for r in rows]
    total = totals(rows)
    shown.append(("total", str(len(rows)), "", "", words.bytes_text(total["bytes"]), _operations(total["flops"]),
                  _us(total["floor"]), _us(total["microseconds"]), _percent(total["percent"]), ""))
    headers = ("graph", "#", "kernel", "ATen ops", "bytes", "ops", "floor us", "us", "% of floor", "note")
    parts = [str(tabulate(shown, headers, disable_numparse=True, maxcolwidths=[None, None, None, 28, *[None] * 5, 30],
                          colalign=("left", "right", "left", "left", *["right"] * 5, "left")))]
    return "\n\n".join([*parts, *notes(), *([_versus(sides)] if sides else [])])


def _versus(sides: Sequence[Side]) -> str:
    shown = []
    for side in sides:
        m = side.measurement
        if m is None:
            shown.append((side.name, "-", "-", "-", "-", "-", side.failure))
            continue
        shown.append((side.name, _us(m.call.median), _us(m.device_us), _us(m.busy.microseconds if m.busy else None),
                      f"{m.busy.count:.0f}" if m.busy else "-", words.bytes_text(m.peak_bytes) if m.peak_bytes else "-",
                      "; ".join(m.notes)))
    headers = ("backend", "call us", "graph us", "busy us", "kernels", "peak", "note")
    table = tabulate(shown, headers, disable_numparse=True, colalign=("left", *["right"] * 5, "left"))
    return f"the whole call, forward and backward (call: wall time; graph: one replay; busy: its kernels)\n\n{table}"


def notes() -> list[str]:
    """What the figures are not."""
    if torch.cuda.is_available():
        return []
    return ["No CUDA device: the times are call times of ATen ops on the CPU, and there is no floor to compare with."]


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Sums over the segments that could be measured; the percentage where all of those have a floor."""
    done = [r for r in rows if r.microseconds is not None]
    time = sum(r.microseconds or 0.0 for r in done)
    floor = sum(r.floor or 0.0 for r in done) if done and all(r.floor is not None for r in done) else None
    return {"bytes": sum(r.bytes for r in rows), "flops": sum(r.flops for r in rows), "floor": floor,
            "microseconds": time if done else None,
            "percent": 100 * floor / time if floor is not None and time else None}


def clocks(sides: Sequence[Side]) -> Mapping[str, Mapping[str, float]]:
    """Microseconds by backend and clock, without those that do not exist."""
    found: dict[str, dict[str, float]] = {}
    for side in sides:
        m = side.measurement
        if m is not None:
            known = {"call": m.call.median, "graph": m.device_us, "busy": m.busy.microseconds if m.busy else None}
            found[side.name] = {clock: us for clock, us in known.items() if us is not None}
    return found


def as_json(name: str, rows: Sequence[Row], sides: Sequence[Side]) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"target": name, "device": device, "notes": notes(),
            "segments": [{**asdict(r), "percent": r.percent} for r in rows], "totals": totals(rows),
            "versus": {s.name: s.measurement.to_json() if s.measurement else {"failure": s.failure} for s in sides}}


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _operations(count: int) -> str:
    """1500000 as 1.5 M."""
    value = float(count)
    for unit in ("", " k", " M", " G"):
        if value < 1000:
            return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f} T"


COMMAND = Command(
    "bench", "measure each segment beside its floor, and the whole call beside other backends",
    "Run TARGET, then measure each segment by itself: bytes, operations, the time that the device needs at least for\n"
    "either (the floor), the time that it takes and the first as a percentage of the second.  --versus measures the\n"
    "whole call as well: wall time, one replay of a CUDA graph, and the sum of its kernels.",
    add_arguments, run, forwards=True)
