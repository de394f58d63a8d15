"""Bars as a PNG.  Needs matplotlib, which fxfuser does not install: `pip install fxfuser[plot]`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping, Sequence

AVAILABLE = find_spec("matplotlib") is not None
if AVAILABLE:
    from matplotlib.figure import Figure

MOST_BARS = 40


def draw(path: Path, title: str, bars: Sequence[tuple[str, float, float | None]],
         sides: Mapping[str, Mapping[str, float]]) -> None:
    """`bars`: (label, microseconds, floor) of each segment, the longest shown; `sides`: clocks of each backend."""
    shown = sorted(bars, key=lambda b: -b[1])[:MOST_BARS]
    figure = Figure(figsize=(10, 1.5 + 0.3 * len(shown) + (2.5 if sides else 0)), layout="constrained")
    heights = [0.3 * len(shown) + 1, *([2.5] if sides else [])]
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
    _segments(axes[0][0], title, shown)
    if sides:
        _sides(axes[1][0], sides)
    figure.savefig(path, dpi=120)


def _segments(axes: Any, title: str, bars: Sequence[tuple[str, float, float | None]]) -> None:
    labels, times = [b[0] for b in bars], [b[1] for b in bars]
    axes.barh(labels, times, color="tab:blue", label="measured")
    floors = [(label, floor) for label, _, floor in bars if floor is not None]
    if floors:
        axes.barh(*zip(*floors), height=0.35, color="tab:orange", label="floor")
    axes.invert_yaxis()
    axes.set(title=title, xlabel="microseconds")
    axes.legend()


def _sides(axes: Any, sides: Mapping[str, Mapping[str, float]]) -> None:
    clocks = list(dict.fromkeys(c for times in sides.values() for c in times))
    width = 0.8 / max(1, len(clocks))
    for i, clock in enumerate(clocks):
        found = [(n, times[clock]) for n, times in enumerate(sides.values()) if clock in times]
        axes.bar([n + i * width for n, _ in found], [t for _, t in found], width, label=clock)
    axes.set_xticks([n + 0.4 - width / 2 for n in range(len(sides))], list(sides))
    axes.set(ylabel="microseconds")
    axes.legend()
