"""Imports point one way, stand at the top of their file, and only capture.py touches private PyTorch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "fxfuser"

# A module may import from lower ranks and from its own name; modules of equal rank do not know each other.
RANK = {
    "errors": 0, "words": 1, "config": 1, "observe": 1, "fuel": 1, "garbage": 1, "ops": 2, "attention_masks": 2,
    "margin_loss": 2, "domain": 3, "passes": 4, "segmenter": 4, "lowering": 4, "runtime": 5, "decompositions": 5,
    "capture": 6, "coverage": 6, "report": 7, "rewrites": 8, "backend": 8, "explanation": 9, "cli": 10,
}
# Lowering is handed segments, so it may name their type; it may not call the segmenter.
VALUES = {("lowering", "fxfuser.segmenter.segment")}
# The type of fx.Node.target, which PyTorch has under no public name.
PRIVATE_ALLOWED = ("torch._ops",)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything that is imported, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _upward(module: str, tree: ast.AST) -> list[str]:
    own = module.split(".")[1] if "." in module else ""
    if not own:  # the package itself is the public surface and stands above all
        return []
    faults = []
    for line, name in _imports(tree):
        if name.split(".")[0] != "fxfuser":
            continue
        other = name.partition(".")[2].partition(".")[0]
        if other not in RANK:  # a name of the package itself, which only the commands stand above
            other = "cli"
        allowed = any(own == layer and f"{name}.".startswith(f"{value}.") for layer, value in VALUES)
        if other != own and not allowed and RANK.get(other, 99) >= RANK.get(own, 0):
            faults.append(f"{module}:{line}: {own} imports {name}")
        if other == "capture" and own not in ("capture", "backend"):
            faults.append(f"{module}:{line}: only backend imports capture, not {own}")
    return faults


def _local(module: str, tree: ast.AST) -> list[str]:
    functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))
    return [f"{module}:{line}: function-local import of {name}"
            for function in functions for line, name in _imports(function)]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _is_private(name: str) -> bool:
    """Whether `name` goes through an underscored part of torch; operators (torch.ops.aten._softmax) do not count."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"] or any(f"{name}.".startswith(f"{a}.") for a in PRIVATE_ALLOWED):
        return False
    return any(p.startswith("_") and not p.startswith("__") for p in parts[1:])


def _private(module: str, tree: ast.AST) -> list[str]:
    names = list(_imports(tree))
    names += [(n.lineno, _dotted(n)) for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    faults = [f"{module}:{line}: {name}" for line, name in names if name.startswith("torch._inductor")]
    if module != "fxfuser.capture":
        faults += [f"{module}:{line}: private {name}" for line, name in names if _is_private(name)]
    return faults


def _sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("check", [_upward, _local, _private])
def test_package(check) -> None:
    faults = [f for path in _sources() for f in check(_module(path), ast.parse(path.read_text()))]
    assert not faults, "\n" + "\n".join(faults)


def test_every_module_has_a_rank() -> None:
    tops = {_module(p).split(".")[1] for p in _sources() if _module(p) != "fxfuser"}
    assert tops <= set(RANK), "give the new module its place in RANK"


@pytest.mark.parametrize(("module", "text", "check"), [
    ("fxfuser.segmenter.grow", "from fxfuser.lowering.kernel import Kernel", _upward),
    ("fxfuser.segmenter.grow", "from fxfuser import lowering", _upward),
    ("fxfuser.lowering.emit", "from fxfuser.segmenter.rules import RULES", _upward),
    ("fxfuser.errors", "import fxfuser.config", _upward),
    ("fxfuser.runtime.plan", "import fxfuser", _upward),
    ("fxfuser.runtime.plan", "from fxfuser import Config", _upward),
    ("fxfuser.runtime.plan", "if True:\n    from fxfuser.backend import fxfuser", _upward),
    ("fxfuser.cli.dump", "from fxfuser.capture import trace", _upward),
    ("fxfuser.ops", "def f():\n    import torch", _local),
    ("fxfuser.ops", "import torch._inductor.config", _private),
    ("fxfuser.capture", "import torch._inductor.config", _private),
    ("fxfuser.ops", "from torch import _prims_common", _private),
    ("fxfuser.ops", "import torch\nx = torch._C._nn", _private),
])
def test_the_checks_can_fail(module: str, text: str, check) -> None:
    assert check(module, ast.parse(text))


@pytest.mark.parametrize(("module", "text", "check"), [
    ("fxfuser.lowering.emit", "from fxfuser.segmenter.segment import Segment", _upward),
    ("fxfuser.backend", "from fxfuser.capture import trace", _upward),
    ("fxfuser", "from fxfuser.backend import fxfuser", _upward),
    ("fxfuser.cli.main", "import fxfuser", _upward),
    ("fxfuser.cli.main", "from fxfuser import report", _upward),
    ("fxfuser.ops", "import torch\nx = torch.ops.aten._softmax.default", _private),
    ("fxfuser.capture", "from torch._dynamo.backends.common import aot_autograd", _private),
])
def test_the_checks_can_pass(module: str, text: str, check) -> None:
    assert not check(module, ast.parse(text))


def test_no_kernel_knows_position_embeddings() -> None:
    """They are one launch by general means: the names of what is done there are in examples, benchmarks and tests."""
    named = re.compile(r"(?i)\brope\b|rotary|rotat")
    assert not [f"{path.name}:{number}" for path in ROOT.rglob("*.py")
                for number, line in enumerate(path.read_text().splitlines(), 1) if named.search(line)]
