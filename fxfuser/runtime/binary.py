"""Compiled kernels as values that can be stored, sent and loaded.

Enters: a recipe.  Leaves: a `Binary` (from the disk cache or from a build) and, of a Binary, Triton's CompiledKernel.
Triton has a disk cache of its own.  It is not enough: to look into it costs parsing the kernel and hashing all of
Triton (0.3 to 1.5 s a process), it grows without bound and trusts whatever lies there.  What stays in it are Triton's
C modules (the driver's, and before 3.7 a launcher per signature), which only Triton can load.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton._C.libtriton import get_cache_invalidating_env_vars

from fxfuser.config import triton_variables
from fxfuser.runtime.assemble import Recipe, assemble, constant
from fxfuser.runtime.build import language_lock
from fxfuser.runtime.store import Store

PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True)
class Binary:
    """One compiled kernel: the JSON text that Triton wrote about it, and the cubin."""

    metadata: str
    cubin: bytes

    def encode(self) -> bytes:
        return self.metadata.encode() + b"\0" + self.cubin

    @staticmethod
    def decode(data: bytes) -> Binary:
        """Raises ValueError for anything that `encode` did not make."""
        metadata, mark, cubin = data.partition(b"\0")
        if not mark or not cubin or not isinstance(json.loads(metadata), dict):
            raise ValueError("no kernel")
        return Binary(metadata.decode(), cubin)


@dataclass(frozen=True)
class Signature:
    """What Triton's loader reads of a kernel's source: types and constants, but no syntax tree."""

    name: str
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]


def load(recipe: Recipe, binary: Binary) -> Any:
    """Triton's CompiledKernel.  Nothing is parsed or compiled; it goes onto the device when it is first asked to run.

    The constructor reads files, so they are written for it and gone when this returns.
    """
    names = [n for n, _ in recipe["signature"]]
    source = Signature(recipe["name"], dict(recipe["signature"]),
                       {(names.index(n),): constant(v) for n, v in recipe["constants"]})
    # no folder of their own: to remove one takes milliseconds on the layered file systems of containers
    with NamedTemporaryFile(prefix="fxfuser-", suffix=".json") as text, \
            NamedTemporaryFile(prefix="fxfuser-", suffix=".cubin") as code:
        for file, content in ((text, binary.metadata.encode()), (code, binary.cubin)):
            file.write(content)
            file.flush()
        paths = {f"{recipe['name']}.json": text.name, f"{recipe['name']}.cubin": code.name}
        return triton.compiler.CompiledKernel(source, paths, key_of(recipe))


def find(recipe: Recipe, store: Store | None) -> Binary | None:
    """The kernel from an earlier process."""
    data = store.get(key_of(recipe)) if store is not None else None
    if data is None:
        return None
    try:
        return Binary.decode(data)
    except ValueError:  # of another make: then it is built and written again
        return None


def keep(recipe: Recipe, binary: Binary, store: Store | None) -> None:
    """Leaves the kernel to later processes."""
    if store is not None:
        store.put(key_of(recipe), binary.encode())


def obtain(recipe: Recipe, store: Store | None) -> Binary:
    """The kernel from the cache, or built in this process; raises what Triton raises."""
    found = find(recipe, store)
    if found is None:
        with language_lock:
            found = Binary(*assemble(recipe))
        keep(recipe, found, store)
    return found


def key_of(recipe: Recipe) -> str:
    """The cache key.  JSON keeps 1, 1.0 and true apart and writes a float with all its bits."""
    text = json.dumps([installation(), recipe], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def installation() -> dict[str, str]:
    """What a build depends on beside its recipe: every source file of fxfuser, versions, tools and their variables."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    variables = [get_cache_invalidating_env_vars(), dict(triton_variables())]
    return {"fxfuser": digest.hexdigest(), "torch": torch.__version__, "triton": triton.__version__,
            "ptxas": _ptxas(), "environment": json.dumps(variables, sort_keys=True)}


def _ptxas() -> str:
    try:
        return f"{triton.knobs.nvidia.ptxas.version}"
    except RuntimeError:  # none: then nothing can be built, but a kernel of an earlier process may still run
        return "none"
