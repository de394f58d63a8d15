"""The disk cache: what is written comes back, and whatever happens to the disk is survived."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fxfuser.runtime import store as store_file
from fxfuser.runtime.store import MAGIC, Store, Usage


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache" / "kernels")


def entry(store: Store, key: str) -> Path:
    return store.folder / f"{key}.bin"


def test_what_is_put_comes_back_also_later(store: Store) -> None:
    assert store.get("a") is None
    assert store.put("a", b"\0one\nline\n") and store.put("b", b"")
    again = Store(store.folder)
    assert again.get("a") == b"\0one\nline\n" and again.get("b") == b"" and again.get("c") is None
    assert again.usage().entries == 2 and not again.fault


def test_nobody_else_may_read_or_write_it(store: Store) -> None:
    store.put("a", b"x")
    assert store.folder.stat().st_mode & 0o077 == 0 and entry(store, "a").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: b"", lambda data: data[:20], lambda data: data[:-1] + b"?",
    lambda data: b"fxfuser 0\n" + data[len(MAGIC):], lambda data: data + b"more"])
def test_a_damaged_entry_is_removed(store: Store, damage: Any) -> None:
    store.put("a", b"payload")
    entry(store, "a").write_bytes(damage(entry(store, "a").read_bytes()))
    assert store.get("a") is None and not entry(store, "a").exists()
    assert store.put("a", b"payload") and store.get("a") == b"payload"


def test_an_entry_under_another_key_is_refused(store: Store) -> None:
    store.put("a", b"payload")
    os.rename(entry(store, "a"), entry(store, "b"))
    assert store.get("b") is None


def test_a_hash_that_does_not_fit(store: Store) -> None:
    store.put("a", b"payload")
    wrong = hashlib.sha256(b"other").hexdigest().encode()
    entry(store, "a").write_bytes(MAGIC + wrong + b"\na\npayload")
    assert store.get("a") is None


def test_an_entry_of_another_user_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"payload")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.get("a") is None  # the folder was found good before, the entry is not


def test_a_folder_of_another_user_is_not_used(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"payload")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    other = Store(store.folder)
    assert other.get("a") is None and "belongs to user" in other.fault
    assert not other.put("b", b"") and not entry(store, "b").exists()


def test_what_others_can_write_is_not_used(store: Store) -> None:
    store.put("a", b"payload")
    entry(store, "a").chmod(0o666)
    assert store.get("a") is None
    store.put("a", b"payload")
    store.folder.chmod(0o777)
    other = Store(store.folder)
    assert other.get("a") is None and "written by others" in other.fault


def test_a_link_is_not_followed(store: Store, tmp_path: Path) -> None:
    store.put("a", b"payload")
    os.rename(entry(store, "a"), tmp_path / "elsewhere")
    entry(store, "a").symlink_to(tmp_path / "elsewhere")
    assert store.get("a") is None


def test_a_full_disk(store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store.put("a", b"payload")
    opened = os.fdopen

    class Full:
        def __init__(self, descriptor: int, mode: str) -> None:
            self.file = opened(descriptor, mode)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", lambda d, mode: Full(d, mode) if mode == "wb" else opened(d, mode))
    assert not store.put("b", b"payload")
    assert "No space left" in store.fault and len(caplog.records) == 1
    assert not store.put("c", b"payload") and len(caplog.records) == 1  # said once
    assert sorted(p.name for p in store.folder.iterdir()) == ["a.bin"]  # no half-written file stays


def test_a_read_only_disk(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert not store.put("a", b"payload") and "Read-only" in store.fault


def test_a_read_only_folder_still_gives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", b"payload")

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)
    assert store.get("a") == b"payload"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "kernels")
    assert store.get("a") is None and not store.put("a", b"") and "cannot be made" in store.fault
    assert store.usage() == Usage(0, 0) == store.clear()


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "kernels", limit=10_000)
    for i in range(8):
        store.put(f"k{i}", bytes(1000))
        os.utime(entry(store, f"k{i}"), (i, i))
    assert store.get("k0") is not None  # used just now
    store.put("k8", bytes(1000))
    store.put("k9", bytes(1000))
    store.prune()
    left = sorted(p.stem for p in store.folder.iterdir())
    assert "k0" in left and "k9" in left and "k1" not in left and "k2" not in left
    assert store.usage().bytes <= 8_000


def test_the_bound_holds_while_entries_are_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_file, "_PUTS_PER_PRUNE", 4)
    store = Store(tmp_path / "kernels", limit=10_000)
    for i in range(100):
        store.put(f"k{i}", bytes(1000))
        assert store.usage().bytes < 10_000 + 4 * 1100


def test_what_a_dead_writer_left_is_removed(store: Store) -> None:
    store.put("a", b"payload")
    old, young = store.folder / "x.tmp", store.folder / "y.tmp"
    old.write_bytes(b"half"), young.write_bytes(b"half")
    os.utime(old, (time.time() - 10_000,) * 2)
    store.prune()
    assert not old.exists() and young.exists() and store.get("a") == b"payload"
    assert store.clear().entries == 2 and store.usage().entries == 0


WRITER = """
import sys
from pathlib import Path
from fxfuser.runtime.store import Store
store = Store(Path(sys.argv[1]), limit=200_000)
for i in range(300):
    key = str(i % 7)
    store.put(key, key.encode() * 10_000)
    found = store.get(key)
    assert found in (None, key.encode() * 10_000), (key, found)
assert not store.fault, store.fault
"""


def test_processes_write_and_read_at_once(tmp_path: Path) -> None:
    root = Path(store_file.__file__).parents[2]
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "kernels")], cwd=root)
                 for _ in range(3)]
    assert [p.wait(120) for p in processes] == [0, 0, 0]
    assert not list((tmp_path / "kernels").glob("*.tmp"))


def test_threads_write_and_read_at_once(store: Store) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        for i in range(100):
            store.put(f"k{i % 5}", f"k{i % 5}".encode() * 1000)
            if store.get(f"k{i % 5}") != f"k{i % 5}".encode() * 1000:
                wrong.append(f"{number} {i}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
