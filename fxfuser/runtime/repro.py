"""A runnable file for one segment: its ATen ops as a function, inputs made from metadata, and a check against eager.

Enters: a segment's reference function.  Leaves: the text of a self-contained Python file, which compiles that
function alone with fxfuser under FXFUSER_STRICT, so that the failure shows itself again.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import FunctionType
from typing import Iterator

import torch
from torch import fx

from fxfuser.domain.size import example
from fxfuser.runtime import sizes
from fxfuser.runtime.literals import Namespace
from fxfuser.runtime.reference import Reference

_TEMPLATE = '''"""fxfuser repro of {name}.

{reason}
"""

import math
import operator

import torch
{imports}
aten = torch.ops.aten
{constants}

def strided(tensor, size, stride):
    return tensor


def tensor(size, stride, dtype, device):
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride)) if all(size) else 0
    if dtype.is_floating_point or dtype.is_complex:
        data = torch.randn(extent, device=device).to(dtype)
    else:
        data = torch.randint(0, 2, (extent,), device=device).to(dtype)
    return data.as_strided(size, stride)


{source}


def inputs():
    torch.manual_seed(0)
    return [
{inputs}
    ]


if __name__ == "__main__":
    expected = {function}(*inputs())
    actual = torch.compile({function}, backend="fxfuser", options={{"strict": True}}, dynamic=False)(*inputs())
    torch.testing.assert_close(actual, expected)
    print("{name}: as eager")
'''


def text(name: str, reference: Reference, namespace: Namespace, reason: str) -> str:
    """The repro's source.  Symbols get the size that they had when the graph was traced."""
    hints = {s: _hint(s, reference) for s in reference.symbols}
    rows = [*(_input(leaf) for leaf in reference.leaves), *(f"{n},  # {s}" for s, n in hints.items())]
    read = [n for n, v in namespace.values.items() if isinstance(v, torch.device) and n in reference.source]
    constants = "\n".join(f"{n} = torch.{namespace.values[n]!r}" for n in read)
    return _TEMPLATE.format(
        name=name, reason=reason.replace("\\", "/").replace('"""', "'''"), source=reference.source,
        imports="".join(f"{line}\n" for line in _imports(reference.source, namespace)), constants=constants,
        inputs="\n".join(f"        {r}" for r in rows), function=reference.name)


def _imports(source: str, namespace: Namespace) -> Iterator[str]:
    """What a function calls that is neither PyTorch's nor Python's."""
    if "torch.ops.fxfuser." in source:
        yield "import fxfuser  # noqa: F401  whose ops are called"
    for name, value in namespace.values.items():
        if isinstance(value, FunctionType) and value.__module__.startswith("fxfuser.") and f" {name}(" in source:
            yield f"from {value.__module__} import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")


def write(directory: Path, name: str, source: str) -> str:
    """Writes the repro under `directory`, named by its content; its path, or "" if the directory is not writable."""
    path = directory / "repro" / f"{name}_{hashlib.sha256(source.encode()).hexdigest()[:12]}.py"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    except OSError:
        return ""
    return str(path)


def number(value: int | torch.SymInt) -> int:
    """A size as it was when the graph was traced; 8 where only a run tells."""
    if isinstance(value, int):
        return value
    known = example(value)
    return 8 if known is None else known


def _input(leaf: fx.Node) -> str:
    value = leaf.meta.get("val")
    if isinstance(value, torch.Tensor):
        size, stride = (tuple(map(number, dims)) for dims in (value.shape, value.stride()))
        return f"tensor({size}, {stride}, {value.dtype}, '{value.device}'),  # {leaf.name}"
    if isinstance(value, torch.SymInt):
        return f"{number(value)},  # {leaf.name}"
    return f"{value!r},  # {leaf.name}"


def _hint(symbol: str, reference: Reference) -> int:
    for leaf in reference.leaves:
        value = leaf.meta.get("val")
        dims = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
        for dim in dims:
            if isinstance(dim, torch.SymInt) and sizes.source(dim) == symbol:
                return number(dim)
    return 8
