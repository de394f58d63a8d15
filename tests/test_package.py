"""What the installed package promises: its version, its entry point and a backend that needs no import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points, version

import fxfuser


def test_version() -> None:
    assert version("fxfuser") == fxfuser.__version__


def test_entry_points() -> None:
    (backend,) = entry_points(group="torch_dynamo_backends", name="fxfuser")
    (script,) = entry_points(group="console_scripts", name="fxfuser")
    assert (backend.value, script.value) == ("fxfuser.backend:fxfuser", "fxfuser.cli.main:main")
    assert callable(backend.load())
    assert callable(script.load())


def test_the_backend_needs_no_import() -> None:
    program = ("import torch\n"
               "x = torch.arange(6.0)\n"
               "y = torch.compile(lambda x: x.sin() + 1, backend='fxfuser')(x)\n"
               "torch.testing.assert_close(y, x.sin() + 1)\n"
               "import sys; assert 'fxfuser.backend' in sys.modules")
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/", timeout=120)
