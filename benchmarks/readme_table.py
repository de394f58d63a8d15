"""The README's figures, made from the newest results of each case.

    python -m benchmarks.readme_table            rewrites the text between the README's two markers
    python -m benchmarks.readme_table --check    exit status 1 where that text is not what the results give

A case's rows all come from one file, the newest in which ours ran, so that what stands side by side was measured side
by side.  Invariant: nothing outside the markers changes, and the same results give the same text; where there are none
the text says so.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks import epilogue, lineup, memory_bound, nanogpt, split_k, suite, tiles
from benchmarks.record import RESULTS
from fxfuser.runtime.timing import geometric_mean

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
README = Path(__file__).parent.parent / "README.md"
ROPE_SIZE = "S4096"
OURS = "fxfuser"
NO_RESULTS = ("No measurements yet: `python -m benchmarks.rope`, `.memory_bound`, `.epilogue`, `.split_k`, `.tiles` and"
              " `.nanogpt` make them on a GPU.")


class NoFigures(Exception):
    """The README has no place for figures; the text says what it needs."""


def collected(folder: Path, name: str) -> tuple[dict[str, Any], list[str]] | None:
    """The results of that suite on GPUs, each case from the newest file with a row of ours, and where they come from.

    Cases stand as in the file that has most of them, so that a run of a few does not move these to the top.
    """
    files = [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{name}.json"))]
    files = [results for results in files if results["environment"]["device"] == "cuda"]
    files.sort(key=lambda results: str(results["environment"]["date"]), reverse=True)  # stable: later names last
    ours = [list(dict.fromkeys(_case(row) for row in results["rows"] if row["status"] == "ok" and _is_ours(row)))
            for results in files]
    rows: list[Mapping[str, Any]] = []
    sources: list[tuple[str, int]] = []
    taken: set[tuple[str, str]] = set()
    for results, cases in zip(files, ours):
        new = set(cases) - taken
        if new:
            rows += [row for row in results["rows"] if _case(row) in new]
            sources.append((source_line(results), len(new)))
            taken |= new
    if not rows:
        return None
    place = {case: i for i, case in enumerate(dict.fromkeys(case for case, _ in max(ours, key=len)))}
    rows.sort(key=lambda row: place.get(row["case"], len(place)))  # stable: of a case the newest come first
    lines = [line if len(sources) == 1 else f"{line} ({n} of {len(taken)} cases)" for line, n in sources]
    return {**files[0], "rows": rows}, lines


def _case(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["case"], row.get("size", "")


def _is_ours(row: Mapping[str, Any]) -> bool:
    who = row.get("backend") or row.get("variant") or OURS
    return who.startswith(OURS) or who in ("auto", "fused", *split_k.OURS)


def source_line(results: Mapping[str, Any]) -> str:
    """Where figures come from: device, versions, date, commit and command."""
    e = results["environment"]
    return (f"{e.get('gpu', e['device'])}, torch {e['torch']}, triton {e['triton']}, {e['date'].split()[0]}, "
            f"commit {e['commit'][:12]}: `{re.sub(r' --commit [^ ]+', '', results['command'])}`")


def best_inductor(columns: Mapping[str, Mapping[str, Any]]) -> tuple[str, float] | None:
    """The fastest of Inductor's rows by device time."""
    timed = [(name, us) for name, row in columns.items()
             if name.startswith("inductor") and (us := memory_bound.device_us(dict(row)))]
    return min(timed, key=lambda item: item[1]) if timed else None

SLOW_COPY = """

No share of copy is given where the copy of as many bytes was slower than the kernel: the library takes a slow path at
sizes that are no whole number of pages, and that copy is no ceiling."""


def rope_text(results: Mapping[str, Any]) -> str:
    lines: list[tuple[Any, ...]] = []
    slow_copy = False
    for (case, size), columns in memory_bound.by_backend(results["rows"]).items():
        if size != ROPE_SIZE or OURS not in columns:
            continue
        row = columns[OURS]
        eager, best, us = columns.get("eager"), best_inductor(columns), memory_bound.device_us(row)
        kernels = int(row["busy"]["kernels"]) if row.get("busy") else None
        share = row["copy_us"] / us if us else None
        slow_copy |= share is not None and share > 1
        lines.append((case.replace("_", " "), kernels, us, memory_bound.device_us(eager), best[1] if best else None,
                      None if share is None or share > 1 else share, suite.microseconds(row, "call")))
    headers = ("rotary module, 4096 positions", "kernels", "fxfuser, us", "eager, us", "best Inductor, us", "of copy",
               "call, us")
    table = _table(lines, headers, ("", "g", ".1f", ".1f", ".1f", ".2f", ".0f"))
    return table + SLOW_COPY if slow_copy else table


def memory_text(results: Mapping[str, Any]) -> str:
    rows = results["rows"]
    speed, share = memory_bound.ratios(rows, OURS, "inductor"), memory_bound.shares(rows, OURS, memory_bound.LARGE)
    cases = dict.fromkeys(case for case, _ in speed)
    lines: list[tuple[Any, ...]] = []
    for case in cases:
        ours = [v for (name, _), v in speed.items() if name == case]
        copies = [v for (name, _), v in share.items() if name == case]
        lines.append((case.replace("_", " "), geometric_mean(ours), min(ours),
                      geometric_mean(copies) if copies else None))
    lines.append(("geometric mean", geometric_mean(speed.values()), None,
                  geometric_mean(share.values()) if share else None))
    headers = ("memory-bound work", "speed over Inductor's", "at its worst size",
               f"of copy, from {memory_bound.LARGE} MB")
    return _table(lines, headers, ("", ".2f", ".2f", ".2f"))


def training_text(results: Mapping[str, Any]) -> str:
    lines = []
    for backend, row in nanogpt.columns(results["rows"], "nanogpt").items():
        peak = row.get("peak_bytes")
        lines.append((backend, row["step"]["median"] / 1e3, peak / 1e6 if peak else None, row.get("step_kernels"),
                      row["compile_s"], row.get("warm_compile_s")))
    model = results["model"]
    headers = (f"GPT-2 124M, {model['batch']} x {model['context']} tokens", "step, ms", "peak, MB", "kernels a step",
               "compile, s", "warm, s")
    return _table(lines, headers, ("", ".1f", ".0f", ".0f", ".1f", ".1f"))


def models_text(results: Mapping[str, Any]) -> str:
    """A line for each case, of the size that ran last, and one more where both compilers ran in CUDA graphs."""
    lines: list[tuple[Any, ...]] = []
    sizes = dict(reversed([_case(row) for row in results["rows"]]))  # the newest results come first
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        found = nanogpt.columns([row for row in results["rows"] if _case(row) == (case, sizes[case])], case)
        for ours, other, how in ((OURS, "inductor", ""), (f"{OURS}-graphs", "inductor-graphs", ", CUDA graphs")):
            if ours in found:
                row, theirs = found[ours], found.get(other, {}).get("peak_bytes")
                peak = row.get("peak_bytes") if not how else None  # a graph holds its memory between calls
                lines.append((case + how, row["step"]["median"] / 1e3, nanogpt.ratio(found, "eager", row),
                              nanogpt.ratio(found, other, row), peak / 1e6 if peak else None,
                              peak / theirs if peak and theirs else None))
    headers = ("transformers' model", "step, ms", "speed over eager's", "over Inductor's", "peak, MB",
               "part of Inductor's peak")
    return _table(lines, headers, ("", ".2f", ".2f", ".2f", ".0f", ".2f"))


def _table(lines: Sequence[tuple[Any, ...]], headers: Sequence[str], formats: Sequence[str]) -> str:
    """A Markdown table; a column of which nothing was measured is left out."""
    kept = [i for i in range(len(headers)) if any(line[i] is not None for line in lines)]
    return str(tabulate([[line[i] for i in kept] for line in lines], [headers[i] for i in kept], tablefmt="github",
                        floatfmt=[formats[i] for i in kept]))


def tiles_text(results: Mapping[str, Any]) -> str:
    text = tiles.summary(results["rows"])
    return f"{text[0].upper()}{text[1:]}."


def epilogue_text(results: Mapping[str, Any]) -> str:
    """Products with work behind them, and below a sentence on layers under the default choice."""
    found = lineup.by_variant(results["rows"])
    lines = []
    for (case, size), columns in found.items():
        if case not in epilogue.LAYERS and lineup.PRODUCT in columns:
            ratios = [columns.get(v, {}).get("ratio") for v in ("auto", "fused", "library", "inductor", "eager")]
            lines.append((case.replace("_", " "), size, lineup.microseconds(columns[lineup.PRODUCT]), *ratios))
    headers = ("product with work behind it", "size", "cuBLAS's product alone, us", "fxfuser, x that",
               "our kernel alone", "cuBLAS and our row kernel", "Inductor", "eager")
    text = [_table(lines, headers, ("", "", ".1f", *[".2f"] * 5))] if lines else []
    beside = {key: ratio for key, columns in found.items() if (ratio := epilogue.beside_others(key[0], columns))}
    if beside:
        worst = max(beside, key=beside.__getitem__)
        text.append(f"The default choice takes {geometric_mean(beside.values()):.2f} of the time of the best of cuBLAS "
                    f"and Inductor over {len(beside)} plain and bias + activation layers, {beside[worst]:.2f} at worst "
                    f"({', '.join(worst)}).")
    return "\n\n".join(text)


def split_k_text(results: Mapping[str, Any]) -> str:
    lines = []
    for (case, size), columns in lineup.by_variant(results["rows"]).items():
        if lineup.PRODUCT not in columns:
            continue
        alone = [r for v in split_k.OURS if (r := columns.get(v, {}).get("ratio"))]
        lines.append((case.replace("_", " "), size, lineup.microseconds(columns[lineup.PRODUCT]),
                      columns.get("auto", {}).get("ratio"), min(alone, default=None),
                      columns.get("inductor", {}).get("ratio")))
    headers = ("product with a long sum", "size", "cuBLAS's product alone, us", "fxfuser, x that", "our kernel alone",
               "Inductor")
    table = _table(lines, headers, ("", "", ".1f", ".2f", ".2f", ".2f"))
    said = split_k.wins(results["rows"])
    return f"{table}\n\n{said[0].upper()}{said[1:]}."


def loss_text(results: Mapping[str, Any]) -> str:
    lines = [(row["case"].replace("/both", "").replace("/", ", "), row["variant"].replace("-", " "), row["ms"],
              row["peak_mb"], round(row["kernels"])) for row in results["rows"] if row["status"] == "ok"]
    headers = ("linear + cross entropy, rows x inner x vocabulary", "", "ms", "peak, MB", "kernels")
    return _table(lines, headers, ("", "", ".2f", ".0f", "g"))


SECTIONS = {"rope": rope_text, "memory_bound": memory_text, "epilogue": epilogue_text, "split_k": split_k_text,
            "linear_cross_entropy": loss_text, "tiles": tiles_text, "nanogpt": training_text,
            "transformers": models_text}


def figures(folder: Path) -> str:
    """All sections that have results; NO_RESULTS where none has."""
    parts = []
    for name, render in SECTIONS.items():
        found = collected(folder, name)
        if found is not None:
            results, sources = found
            parts.append("\n\n".join((render(results), "\n\n".join(sources))))
    return "\n\n".join(parts) or NO_RESULTS


def replaced(readme: str, text: str) -> str:
    """The README with `text` between its markers.  Raises NoFigures where it has no such pair."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise NoFigures(f"the README needs the lines {BEGIN} and {END}, in this order")
    return f"{before}{begin}\n{text}\n{end}{after}"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--readme", type=Path, default=README)
    p.add_argument("--results", type=Path, default=RESULTS)
    p.add_argument("--check", action="store_true", help="change nothing; fail where the README is out of date")
    args = p.parse_args()
    try:
        before = args.readme.read_text()
        after = replaced(before, figures(args.results))
    except NoFigures as error:
        print(error, file=sys.stderr)
        return 2
    if args.check:
        return 0 if before == after else 1
    args.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
