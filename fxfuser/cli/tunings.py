"""What tile searches found, in words.

Enters: the records that the calls of a graph left.  Leaves: lines for the dump's kernels and for explain.
"""

from __future__ import annotations

from fxfuser.observe import GraphTrace, TuningRecord


def summary(trace: GraphTrace) -> str:
    """All kernels of a graph that were searched, with all times; empty without max-autotune."""
    kernels = dict.fromkeys(t.kernel for t in trace.tunings)
    return "\n".join(f"{kernel}: {line}" for kernel in kernels for line in lines(kernel, trace))


def lines(kernel: str, trace: GraphTrace) -> list[str]:
    """What the searches for this kernel found, one line per class of arguments: what runs, then the others."""
    found: dict[str, TuningRecord] = {t.arguments: t for t in trace.tunings if t.kernel == kernel}
    return [f"{t.subject}{f' for {where}' if where else ''}: {_tuning(t)}" for where, t in found.items()]


def _tuning(tuning: TuningRecord) -> str:
    times = dict(tuning.times)
    others = "; ".join(_timed(t, us) for t, us in sorted(times.items(), key=lambda p: (p[1] is None, p[1] or 0.0))
                       if t != tuning.tile)
    chosen = _timed(tuning.tile, times[tuning.tile]) if times else f"{tuning.tile}, nothing could be measured"
    return " ".join(filter(None, (chosen, others and f"(others: {others})",
                                  "from the cache" if tuning.remembered else "")))


def _timed(tile: str, microseconds: float | None) -> str:
    return f"{tile} {'failed' if microseconds is None else f'{microseconds:.1f} us'}"
