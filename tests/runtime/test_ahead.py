"""Kernels built before the first launch: by workers, from the disk cache, and in spite of both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget

from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime import ahead, binary, launcher, workers
from fxfuser.runtime.assemble import Recipe
from fxfuser.runtime.binary import Binary
from fxfuser.runtime.build import Options, Variant, recipe
from fxfuser.runtime.launcher import Cuda
from fxfuser.runtime.store import Store
from fxfuser.runtime.workers import CompilerCrash, Pool

from .graphs import pointwise

HOPPER = GPUTarget("cuda", 90, 32)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "kernels")


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    made = Pool(2)
    monkeypatch.setattr(workers, "_pool", made)
    monkeypatch.setattr(workers, "cores", lambda: 4)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "target_of", lambda device: HOPPER)
    monkeypatch.setattr(launcher, "device_calls", lambda: {"current_device": int, "stream": int})


def recipes(*blocks: int, source: str | None = None) -> list[Recipe]:
    kernels = [pointwise(block=b) if source is None else pointwise(block=b, source=source) for b in blocks]
    return [recipe(k, Variant.usual(k), HOPPER) for k in kernels]


def results(pool: Pool, wanted: list[Recipe]) -> list[Any]:
    return [f.result(120) for f in pool.submit(wanted)]


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Workers run `text` instead of the assembler; it has read sys.path and said that it is ready."""
    path = tmp_path / "worker.py"
    path.write_text("import json, os, signal, sys\nsys.stdin.readline()\n" + text)
    monkeypatch.setattr(workers.assemble, "__file__", str(path))


ANSWER = 'print(json.dumps({"metadata": "{}", "cubin": "eHg="}), flush=True)\n'
READY = 'print(json.dumps({"ready": "yes"}), flush=True)\n'


def test_a_worker_builds_what_this_process_would_without_torch(pool: Pool) -> None:
    source = pointwise().source + "\nimport sys\nassert 'torch' not in sys.modules\n"
    (made,) = results(pool, recipes(64, source=source))
    here = binary.obtain(recipes(64, source=source.replace("assert", "# assert"))[0], None)
    assert made is not None and made.cubin[:4] == b"\x7fELF"
    assert json.loads(made.metadata)["shared"] == json.loads(here.metadata)["shared"]


def test_a_kernel_that_triton_refuses_is_left_to_the_launch(pool: Pool) -> None:
    bad = pointwise().source.replace("scale(a + b)", "scale(a + missing)")
    refused, made = results(pool, [*recipes(64, source=bad), *recipes(64)])
    assert refused is None and made is not None  # the worker lives on


def test_a_loaded_binary_is_what_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that Triton reads are gone afterwards, and no folder was made for them: to remove one takes long."""
    (wanted,) = recipes(128)
    made = binary.obtain(wanted, None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "mkdir", None)
    loaded = binary.load(wanted, Binary.decode(made.encode()))
    assert not list(tmp_path.iterdir())
    assert loaded.kernel == made.cubin and loaded.name == "pointwise" and loaded.packed_metadata[0] == 4


# ------------------------------------------------------------------ faults of workers


def test_a_killed_worker(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, READY + "for line in sys.stdin:\n"
           "    if '\"BLOCK\", 64]' in line: os.kill(os.getpid(), signal.SIGKILL)\n    " + ANSWER)
    assert results(pool, recipes(64, 128, 256)) == [None, Binary("{}", b"xx"), Binary("{}", b"xx")]
    assert not pool.broken


def test_a_compiler_that_crashes_on_one_kernel(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, READY + "for line in sys.stdin:\n"
           "    if '\"BLOCK\", 64]' in line: os.kill(os.getpid(), signal.SIGSEGV)\n    " + ANSWER)
    bad, good = pool.submit(recipes(64, 128))
    assert isinstance(bad.exception(60), CompilerCrash) and good.result(60) == Binary("{}", b"xx")


def test_a_worker_that_hangs(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "BUILD_LIMIT", 0.2)
    script(tmp_path, monkeypatch, READY + "import time\ntime.sleep(600)\n")
    assert results(pool, recipes(64)) == [None]


@pytest.mark.parametrize("text", ["sys.exit(3)\n", "os.kill(os.getpid(), signal.SIGSEGV)\n",
                                  "import time\ntime.sleep(600)\n"])
def test_workers_that_never_start(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(workers, "START_LIMIT", 2.0)
    script(tmp_path, monkeypatch, text)
    assert results(pool, recipes(64, 128, 256)) == [None] * 3
    assert pool.broken


def test_no_process_can_be_started(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    assert results(pool, recipes(64, 128)) == [None, None]


def test_workers_end_with_their_starter(pool: Pool) -> None:
    results(pool, recipes(64))
    (worker,) = pool._workers
    pool.close()
    assert worker.process.wait(60) == 0


def test_idle_workers_end_and_others_start_when_there_is_work(
        pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "IDLE_LIMIT", 0.05)
    script(tmp_path, monkeypatch, READY + "for line in sys.stdin:\n    " + ANSWER)
    for _ in range(3):
        assert results(pool, recipes(64, 128, 256)) == [Binary("{}", b"xx")] * 3
        until = time.monotonic() + 30
        while pool._threads and time.monotonic() < until:
            time.sleep(0.01)
        assert (pool._threads, pool._workers) == (0, [])


def test_recipes_that_come_one_by_one_are_built_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pool = Pool(3)
    script(tmp_path, monkeypatch, READY + "import time\nfor line in sys.stdin:\n    time.sleep(1)\n    " + ANSWER)
    futures = [f for block in (64, 128, 256, 512) for f in pool.submit(recipes(block))]
    assert pool._threads == 3
    assert [f.result(60) for f in futures] == [Binary("{}", b"xx")] * 4
    pool.close()


def test_when_a_pool_is_worth_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_pool", None)
    monkeypatch.setattr(workers, "cores", lambda: 8)
    assert [workers.worth_it(n) for n in (1, 2, 3)] == [False, False, True]
    monkeypatch.setattr(workers, "cores", lambda: 1)
    assert not workers.worth_it(50)
    monkeypatch.setattr(workers, "cores", lambda: 2)
    assert workers.worth_it(3)


def test_a_forked_child_makes_a_pool_of_its_own(pool: Pool) -> None:
    builds = ahead._builds
    child = os.fork()
    if child == 0:
        os._exit(0 if workers._pool is None and ahead._builds is not builds else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert workers._pool is pool


# ------------------------------------------------------------------ supply


class Launched:
    """A fake device: what was loaded and launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: list[Binary] = []
        self.obtained = 0
        monkeypatch.setattr(launcher, "load", self.load)
        monkeypatch.setattr(launcher, "obtain", self.obtain)

    def load(self, wanted: Recipe, made: Binary) -> Any:
        self.loaded.append(made)
        return self

    def obtain(self, wanted: Recipe, store: Any) -> Binary:
        self.obtained += 1
        return Binary("{}", b"here")

    function, packed_metadata = 1, ()

    def run(self, *_: Any) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Launched:
    return Launched(monkeypatch)


def kernels(store: Store, *blocks: int) -> list[Cuda]:
    return [Cuda(pointwise(block=b), 0, Options(), store) for b in blocks]


def launch(kernel: Cuda) -> bool:
    def refuse(error: Exception) -> bool:
        raise error

    tensors = [torch.empty(256) for _ in range(3)]
    return kernel.bind(refuse)(*tensors, 256)


def test_a_second_process_builds_nothing(store: Store, pool: Pool, device: Launched,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    first = kernels(store, 64, 128, 256)
    ahead.build_ahead(ahead.FirstCall(k, (256,)) for k in first)
    assert store.usage().entries == 3
    later = kernels(Store(store.folder), 64, 128, 256)
    monkeypatch.setattr(workers, "worth_it", lambda builds: pytest.fail("builds") if builds else False)
    ahead.build_ahead(ahead.FirstCall(k, (256,)) for k in later)
    assert all(launch(k) for k in later)
    assert device.obtained == 0 and [b.cubin[:4] for b in device.loaded] == [b"\x7fELF"] * 3


def test_one_kernel_is_built_here(store: Store, device: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "pool", lambda: pytest.fail("a pool for one kernel"))
    (kernel,) = kernels(store, 64)
    ahead.build_ahead(ahead.FirstCall(kernel, (n,)) for n in (256, 256, 512))
    assert launch(kernel) and device.obtained == 1


def test_what_workers_cannot_build_is_built_here(store: Store, pool: Pool, device: Launched, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, "sys.exit(1)\n")
    made = kernels(store, 64, 128, 256)
    ahead.build_ahead(ahead.FirstCall(k, (256,)) for k in made)
    assert all(launch(k) for k in made) and device.obtained == 3


def test_a_crash_is_an_error_of_the_launch_and_never_tried_here(store: Store, device: Launched) -> None:
    (kernel,) = kernels(store, 64)
    variant = kernel.likely((256,))
    assert variant is not None
    kernel.supply(variant, CompilerCrash("died twice"))
    with pytest.raises(CompilerCrash):
        launch(kernel)
    assert device.obtained == 0


def test_nothing_is_needed_for_what_is_built_or_never_launched(store: Store, device: Launched) -> None:
    (kernel,) = kernels(store, 64)
    builds = ahead.Builds()
    builds.begin(kernel, (0,))
    assert builds.waiting == {}
    for n in (256, 512, 5):
        builds.begin(kernel, (n,))
    assert [v.sizes for _, v in builds.waiting] == [("i32d",), ("i32",)]
    builds.finish({kernel})
    assert builds.waiting == {}
    launch(kernel)
    builds.begin(kernel, (256,))
    assert builds.waiting == {}


def test_builds_begin_before_all_kernels_are_known(store: Store, pool: Pool, device: Launched, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, monkeypatch, READY + "for line in sys.stdin:\n    " + ANSWER)
    monkeypatch.setattr(workers, "_pool", None)
    monkeypatch.setattr(workers, "pool", lambda: pool)
    builds, made = ahead.Builds(), kernels(store, 64, 128, 256, 512)
    counts = []
    for kernel in made:
        builds.begin(kernel, (256,))
        counts.append((len(builds.waiting), len(builds.started)))
    assert counts == [(1, 0), (2, 0), (0, 3), (0, 4)]
    builds.finish(set(made[:2]))
    assert len(builds.started) == 2 and store.usage().entries == 2
    builds.finish(set(made))
    assert builds.started == {} and store.usage().entries == 4
    assert all(launch(k) for k in made) and device.obtained == 0


# ------------------------------------------------------------------ keys


def key(kernel: Kernel, variant: Variant | None = None, target: GPUTarget = HOPPER, options: Options = Options(),
        ) -> str:
    return binary.key_of(recipe(kernel, variant or Variant.usual(kernel), target, options))


def test_all_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pointwise()
    usual = Variant.usual(kernel)
    keys = [
        key(kernel), key(pointwise(block=128)), key(pointwise(torch.bfloat16)), key(pointwise(torch.int32)),
        key(replace(kernel, source=kernel.source.replace("2.0", "2.5"))),
        key(kernel, replace(usual, aligned=(True, True, False))), key(kernel, replace(usual, sizes=("i32",))),
        key(kernel, replace(usual, wide=True)), key(kernel, Variant.general(kernel)),
        key(kernel, target=GPUTarget("cuda", 80, 32)), key(kernel, options=Options(fp_fusion=False)),
        *(key(replace(kernel, tile=Tile((("BLOCK", value),)))) for value in (1, 1.0, True, 0.0, -0.0, 0.1 + 0.2, 0.3)),
        key(replace(kernel, tile=replace(kernel.tile, num_warps=8))),
        key(replace(kernel, tile=replace(kernel.tile, num_stages=2))),
    ]
    assert len(set(keys)) == len(keys)
    assert key(kernel) == key(replace(kernel, candidates=(Tile(()),)))
    known = binary.installation()
    for name in known:
        monkeypatch.setattr(binary, "installation", lambda name=name: {**known, name: "other"})
        assert key(kernel) not in keys


def test_keys_are_equal_in_all_processes() -> None:
    text = ("from tests.runtime.graphs import pointwise; from fxfuser.runtime import binary, build\n"
            "from triton.backends.compiler import GPUTarget; k = pointwise()\n"
            "print(binary.key_of(build.recipe(k, build.Variant.usual(k), GPUTarget('cuda', 90, 32))))")
    found = {subprocess.run([sys.executable, "-c", text], cwd=Path(__file__).parents[2], text=True, check=True,
                            env={**os.environ, "PYTHONHASHSEED": seed}, stdout=subprocess.PIPE).stdout.strip()
             for seed in ("1", "2")}
    assert len(found) == 1


def test_a_change_of_any_source_file_changes_the_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                              ) -> None:
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(binary, "PACKAGE", tmp_path)
    read = binary.installation.__wrapped__
    first = read()["fxfuser"]
    (tmp_path / "a.py").write_text("2")
    second = read()["fxfuser"]
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, read()["fxfuser"]}) == 3


def test_an_entry_that_is_no_kernel_is_built_again(store: Store) -> None:
    (wanted,) = recipes(64)
    for content in (b"", b"{}", b"[]\0xx", b"{\0xx"):
        store.put(binary.key_of(wanted), content)
        assert binary.find(wanted, store) is None
    made = binary.obtain(wanted, store)
    assert binary.find(wanted, store) == made


def test_triton_cannot_write_its_own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (wanted,) = recipes(512)
    assert binary.obtain(wanted, None).cubin[:4] == b"\x7fELF"


