"""What tables and messages say of a graph's parts, in as few words as will do: ops, tensors, places, bytes, counts.

Enters: nodes, locations, numbers.  Leaves: text.  Invariant: paths are as short as they can be and still be found.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any, Iterable, Sequence

import torch
from torch import fx

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
}


def op_name(node: fx.Node) -> str:
    """aten.mul.Tensor as users write it, mul; a custom op keeps its namespace."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(target._schema.name).removeprefix("aten::").replace("::", ".")


def tensor_type(node: fx.Node) -> str:
    """dtype and shape of a node's value, such as bf16[1,32,s0,128]."""
    return _type(node.meta.get("val"))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        return f"{dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_type, value))})"
    return "-" if value is None else type(value).__name__


def short_path(location: str) -> str:
    """`file:line` relative to the working directory or, for an installed package, to where packages are."""
    for part in ("site-packages/", "dist-packages/"):
        if part in location:
            return location.rpartition(part)[2]
    here = os.getcwd() + os.sep
    return location.removeprefix(here)


def shortened(sentence: str) -> str:
    """A sentence with its paths shortened."""
    return re.sub(r"\S+:\d+", lambda m: short_path(m.group()), sentence)


def place(locations: Iterable[str], ranges: int = 3) -> str:
    """Many file:line as few words: model.py:31-33,40; what does not fit is counted."""
    lines: dict[str, set[int]] = {}
    for location in locations:
        file, _, line = short_path(location).rpartition(":")
        lines.setdefault(file, set()).add(int(line))
    texts = [f"{file}:{_ranges(sorted(numbers), ranges)}" for file, numbers in lines.items()]
    return " ".join(texts[:2]) + (f" and {len(texts) - 2} more files" if len(texts) > 2 else "")


def _ranges(numbers: Sequence[int], most: int) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n <= runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ",".join(texts[:most]) + ("..." if len(texts) > most else "")


def without_folders(location: str) -> str:
    """The location without its folders: tables are narrow."""
    return location.rpartition("/")[2]


def bytes_text(count: int) -> str:
    """1536 as 1.5 KB."""
    value = float(count)
    for unit in ("B", "KB", "MB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GB"


def counted(words: Iterable[str], most: int = 8) -> str:
    """Each word once, with how often it occurs where that is more than once: mul x3, add."""
    counts = Counter(words)
    texts = [word if n == 1 else f"{word} x{n}" for word, n in counts.items()]
    return ", ".join(texts[:most]) + (f", {len(texts) - most} more" if len(texts) > most else "")


def plural(count: int, noun: str) -> str:
    """1 kernel, 2 kernels."""
    return f"{count} {noun}{'s' * (count != 1)}"


def broken(name: str, width: int) -> str:
    """A long identifier on several lines, broken at its underscores."""
    lines = [""]
    for part in re.findall(r"[^_]*_*", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
