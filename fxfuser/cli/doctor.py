"""`fxfuser doctor`: whether fxfuser can work on this machine, and what to do where it cannot.

Enters: nothing.  Leaves: a table of checks and advice; FAILED where a check failed.  Each check is a function that
returns findings and touches nothing but the cache directory.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import traceback
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Callable, Iterator

import networkx
import torch
import triton
from tabulate import tabulate

import fxfuser
from fxfuser import observe
from fxfuser.cli.command import FAILED, Command
from fxfuser.config import Config, variables_set
from fxfuser.errors import FxfuserError
from fxfuser.words import bytes_text, plural

OK, NOTE, FAIL = "ok", "note", "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the table; `advice` is what to do about it."""

    what: str
    state: str  # OK, NOTE or FAIL
    detail: str
    advice: str = ""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="leave out the self-test")


def run(args: Namespace) -> int:
    checks = CHECKS[:-1] if args.quick else CHECKS
    findings = [f for check in checks for f in check()]
    print(tabulate([(f.what, f.state, f.detail) for f in findings], ("check", "", "found"),
                   maxcolwidths=[None, None, 84], disable_numparse=True))
    advice = [f"{f.what}: {f.advice}" for f in findings if f.advice]
    if advice:
        print("\nAdvice\n" + "\n".join(f"  - {line}" for line in advice))
    failed = any(f.state == FAIL for f in findings)
    print(f"\n{'fxfuser does not work here yet' if failed else 'fxfuser works here'}")
    return FAILED if failed else 0


# ---------------------------------------------------------------- checks


def versions() -> Iterator[Finding]:
    yield Finding("python", OK, f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding("fxfuser", OK, f"{fxfuser.__version__}, {Path(fxfuser.__file__).parent}")
    for module, least in ((torch, (2, 11)), (triton, (3, 6))):
        old = _version(module.__version__) < least
        yield Finding(module.__name__, FAIL if old else OK, module.__version__,
                      f"fxfuser needs {'.'.join(map(str, least))} or later" if old else "")
    yield Finding("networkx", OK, networkx.__version__)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdecimal())


def backend() -> Iterator[Finding]:
    found = [e for e in entry_points(group="torch_dynamo_backends") if e.name == "fxfuser"]
    if found:
        yield Finding("backend", OK, f'torch.compile(backend="fxfuser") finds {found[0].value}')
    else:
        yield Finding("backend", FAIL, "not registered with torch.compile",
                      "install the package (pip install --no-deps -e .), or pass backend=fxfuser.fxfuser")


def devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("device", NOTE, f"no CUDA device; {os.cpu_count()} CPU cores",
                      "CPU tensors run as each segment's ATen ops; FXFUSER_EXECUTOR=interpret runs the kernels")
        return
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        new = (p.major, p.minor) >= (8, 0)
        yield Finding(f"cuda:{index}", OK if new else NOTE,
                      f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {bytes_text(p.total_memory)}",
                      "" if new else "kernels are tested on sm_80 and later")
    if not (shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")):
        yield Finding("C compiler", FAIL, "none found", "Triton builds its launchers with one: install gcc")


def triton_tools() -> Iterator[Finding]:
    try:
        yield Finding("ptxas", OK, triton.knobs.nvidia.ptxas.path)
    except RuntimeError as error:
        yield Finding("ptxas", NOTE, str(error), "kernels cannot be assembled without it: install Triton's own wheel")
    if triton.knobs.runtime.interpret:
        yield Finding("TRITON_INTERPRET", NOTE, "set for the whole process",
                      "unset it: kernels cannot be compiled then; FXFUSER_EXECUTOR=interpret does it per kernel")


def configuration() -> Iterator[Finding]:
    present = [f"{name}={text}" for name, text in variables_set().items()]
    try:
        config = Config.resolve()
    except FxfuserError as error:
        yield Finding("environment", FAIL, str(error), "correct or unset the variable")
        return
    yield Finding("environment", OK, ", ".join(present) or "no FXFUSER variable is set")
    yield _directory("cache", config.cache_dir)
    if config.dump_dir is not None:
        yield _directory("dumps", config.dump_dir)


def _directory(what: str, path: Path) -> Finding:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        files = [f.stat().st_size for f in path.rglob("*") if f.is_file()]
    except OSError as error:
        return Finding(what, NOTE, f"{path} cannot be written: {error.strerror}",
                       "set FXFUSER_CACHE_DIR or FXFUSER_DUMP to a directory of yours; without it nothing is kept")
    free = shutil.disk_usage(path).free
    return Finding(what, OK, f"{path}, {len(files)} files, {bytes_text(sum(files))}; {bytes_text(free)} free")


def self_test() -> Iterator[Finding]:
    """Forward and backward of a small function, compiled and compared with eager."""
    yield _try("self-test, interpreter", "interpret", "cpu")
    if torch.cuda.is_available():
        yield _try("self-test, GPU", "triton", "cuda")


def _try(what: str, executor: str, device: str) -> Finding:
    torch.compiler.reset()
    options: dict[str, Any] = {"executor": executor, "strict": True}
    try:
        expected = _gradients(_example, device)
        with observe.recording() as recording:
            actual = _gradients(torch.compile(_example, backend=fxfuser.fxfuser, options=options), device)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)
    except Exception as error:  # whatever is wrong with the machine
        last = traceback.format_exception_only(error)[-1].strip()
        return Finding(what, FAIL, last.splitlines()[0],
                       "run `fxfuser dump` on a function of yours for the whole message, and report this")
    kernels = sum(len(t.kernels) for t in recording.graphs)
    return Finding(what, OK if kernels else FAIL, f"{plural(kernels, 'kernel')}, forward and backward equal eager's")


def _example(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * y.t() + x.sin(), -1).sum(0)


def _gradients(f: Callable[..., torch.Tensor], device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, generator=generator).to(device).requires_grad_() for n in ((5, 7), (7, 5)))
    out = f(x, y)
    return (out, *torch.autograd.grad(out.square().sum(), (x, y)))


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions, backend, devices, triton_tools, configuration, self_test)  # the self-test, which takes long, last

COMMAND = Command(
    "doctor", "check this machine and the installation, and advise",
    "Check versions, devices, Triton, the configuration and the cache directory, then compile a small function,\n"
    "forward and backward, and compare it with eager.",
    add_arguments, run)
