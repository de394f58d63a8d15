"""Settings of the whole test run, made before anything of fxfuser is used.

Strict: in a test a segment that cannot be lowered is a failure, not a fall-back.  Caches go to a folder of this run,
so that no test passes on what an earlier one left behind.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

os.environ["FXFUSER_STRICT"] = "1"
os.environ["FXFUSER_CACHE_DIR"] = tempfile.mkdtemp(prefix="fxfuser-tests-")
atexit.register(shutil.rmtree, os.environ["FXFUSER_CACHE_DIR"], ignore_errors=True)
torch.set_num_threads(1)  # the workers share few cores

from fxfuser import backend, capture  # noqa: E402  the variables above are read when they are imported
from fxfuser.runtime.stored_graphs import origin  # noqa: E402
from fxfuser.runtime.stored_segments import Entry  # noqa: E402

if find_spec("hypothesis"):  # a GPU machine may have pytest alone: the tests without properties still run there
    from hypothesis import settings

    # derandomized: a failure on one machine is a failure on all, and a green run stays green
    settings.register_profile("fxfuser", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("fxfuser")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Each test compiles anew and draws the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def _fresh_segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are graphs and segments kept: a test that changes a pass, a rule or a text would be served what was made
    without the change."""
    if request.node.get_closest_marker("keeps_segments") is None:
        monkeypatch.setattr(backend, "entry", lambda graph, config, rates, fuel: Entry(graph, config, rates))
        monkeypatch.setattr(capture, "origin", lambda *args: replace(origin(*args), key=""))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.skip(reason="microseconds of the host, which other workers would lengthen"))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
