"""Files that outlive the process: a bounded folder of entries by key, safe to share and safe to lose.

Enters: a key (a hash of all that an entry depends on) and bytes.  Leaves: the same bytes, in this process or another,
or None.  Invariants: what is returned was written whole, under this key, by this user, into a folder that nobody
else can write; no fault of the disk reaches the caller.  An entry is one file: MAGIC, the SHA-256 of the rest, the
key, the bytes; it appears by `os.replace`, so that concurrent writers and readers need no lock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

log = logging.getLogger("fxfuser")

MAGIC = b"fxfuser 1\n"
KINDS = ("kernels", "graphs", "segments", "tiles", "rates")  # one folder each in the cache directory
LIMIT = 1 << 29  # bytes of one folder; a kernel takes about 20 kB
_STALE = 3600  # seconds after which an unfinished file has no writer any more
_PUTS_PER_PRUNE = 64


@dataclass(frozen=True)
class Usage:
    """What a folder holds."""

    entries: int
    bytes: int


class Store:
    """One folder.  `fault` is why it does not serve, "" while it does."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self.fault = ""
        self._puts = 0
        self._checked = False

    def get(self, key: str) -> bytes | None:
        """The entry, which is from now on the last used; a damaged one is removed."""
        if not self._serves():
            return None
        path = self._path(key)
        try:
            payload = _read(path, key)
        except FileNotFoundError:
            return None
        except OSError as error:  # not readable, or a link, which O_NOFOLLOW refuses
            log.info("cache entry %s is not used: %s", path, error)
            return None
        except ValueError as error:
            log.warning("cache entry %s is removed: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)
        return payload

    def put(self, key: str, payload: bytes) -> bool:
        """Keeps the entry if it can; after a full or read-only disk it no longer tries."""
        if not self._serves(create=True):
            return False
        body = key.encode() + b"\n" + payload
        try:
            _write(self._path(key), MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        except OSError as error:
            self._fail(f"{self.folder} cannot be written: {error.strerror or error}")
            return False
        if self._puts % _PUTS_PER_PRUNE == 0:
            self.prune()
        self._puts += 1
        return True

    def prune(self) -> None:
        """Removes what was used longest ago until four fifths of the limit remain, if the limit is exceeded."""
        files = sorted(self._files(), key=lambda f: f[1])
        total = sum(size for _, _, size in files)
        goal = self.limit * 4 // 5 if total > self.limit else total
        now = time.time()
        for path, used, size in files:
            unfinished = path.suffix == ".tmp" and now - used > _STALE
            if total > goal or unfinished:
                with suppress(OSError):  # another process may have been first
                    path.unlink()
                total -= size

    def clear(self) -> Usage:
        """Removes all entries; what was removed."""
        removed, freed = 0, 0
        for path, _, size in self._files():
            with suppress(OSError):
                path.unlink()
                removed, freed = removed + 1, freed + size
        return Usage(removed, freed)

    def usage(self) -> Usage:
        sizes = [size for _, _, size in self._files()]
        return Usage(len(sizes), sum(sizes))

    def check(self) -> str:
        """Why the folder cannot be trusted, or ""; one that does not exist can."""
        try:
            found = os.stat(self.folder, follow_symlinks=True)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return f"{self.folder} cannot be read: {error.strerror}"
        return _distrust(found, str(self.folder))

    def _serves(self, create: bool = False) -> bool:
        if self.fault:
            return False
        if create and not self.folder.is_dir():
            try:
                self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            except OSError as error:
                self._fail(f"{self.folder} cannot be made: {error.strerror or error}")
                return False
        if not self._checked and self.folder.is_dir():
            self._checked = True
            if reason := self.check():
                self._fail(reason)
        return not self.fault

    def _fail(self, reason: str) -> None:
        self.fault = reason
        log.warning("the cache is not used by this process: %s", reason)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.bin"

    def _files(self) -> list[tuple[Path, float, int]]:
        """(path, time of last use, bytes) of each entry and unfinished file."""
        found = []
        with suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith((".bin", ".tmp")):
                    with suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((Path(entry.path), status.st_mtime, status.st_size))
        return found


@cache
def store(cache_dir: Path, kind: str) -> Store:
    """The process's store of one of KINDS."""
    assert kind in KINDS, kind
    return Store(cache_dir / kind)


def _distrust(status: os.stat_result, what: str) -> str:
    if status.st_uid != os.geteuid():
        return f"{what} belongs to user {status.st_uid}, not to {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{what} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _read(path: Path, key: str) -> bytes:
    """The bytes of an entry; raises OSError, or ValueError where it cannot be trusted or is damaged."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)  # of the file that is read, whatever the path names by now
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no file")
        if reason := _distrust(status, "it"):
            raise ValueError(reason)
        data = file.read()
    head, digest, body = data[:len(MAGIC)], data[len(MAGIC):len(MAGIC) + 64], data[len(MAGIC) + 65:]
    if head != MAGIC or hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("its content is damaged")
    name, _, payload = body.partition(b"\n")
    if name != key.encode():
        raise ValueError("it was written under another key")
    return payload


def _write(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
