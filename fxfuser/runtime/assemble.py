"""A recipe -> the binary of one kernel, with Triton alone: no torch, nothing else of fxfuser.

Enters: a recipe, a JSON value that holds all that a build depends on beside the installation.  Leaves: the metadata
that Triton wrote and the cubin.  The file runs as a script too: then it is a worker, which reads one recipe per line
of stdin and answers each with one line.  A worker is a fresh interpreter, never a fork (CUDA and threads do not
survive one) and never `multiprocessing`'s spawn, which would run the user's script again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import os
import sys
import tempfile
from contextlib import ExitStack, suppress
from typing import Any, Mapping, TextIO

if __name__ == "__main__":  # where Triton is found, the starter knows best: its own sys.path is the first line
    sys.path[:] = json.loads(sys.stdin.readline())

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver

Recipe = Mapping[str, Any]


def load_text(source: str, name: str) -> dict[str, Any]:
    """The namespace that results from running a kernel's module.  Triton reads the text back through linecache."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    filename = f"<fxfuser kernel {name} {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    scope: dict[str, Any] = {"__name__": f"fxfuser_kernel_{digest}", "__file__": filename}
    exec(compile(source, filename, "exec"), scope)
    return scope


def constant(value: Any) -> Any:
    """A constexpr argument from its form in a recipe, where {"dtype": "int64"} stands for tl.int64."""
    return tl.dtype(value["dtype"]) if isinstance(value, Mapping) else value


def compiled(recipe: Recipe) -> Any:
    """Triton's CompiledKernel; raises what Triton raises, ValueError where text and recipe do not fit."""
    function = load_text(recipe["source"], recipe["name"])[recipe["name"]]
    names, signature = list(function.arg_names), dict(recipe["signature"])
    if names != list(signature):
        raise ValueError(f"kernel {recipe['name']} takes ({', '.join(names)}), its description {list(signature)}")
    constants = {(names.index(n),): constant(v) for n, v in recipe["constants"]}
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in recipe["divisible"]}
    source = triton.compiler.ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", recipe["arch"], 32), options=dict(recipe["options"]))


def assemble(recipe: Recipe, private: bool = False) -> tuple[str, bytes]:
    """(metadata as JSON text, cubin).  `private`: Triton keeps its files in a folder that is removed afterwards.

    The folder is a setting of the whole process, so only a process of our own takes it at once; elsewhere it is the
    way out where Triton's cache cannot be written.
    """
    with ExitStack() as stack:
        if private:
            stack.enter_context(triton.knobs.cache.scope())
            triton.knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="fxfuser-"))
        try:
            made = compiled(recipe)
        except OSError:
            if private:
                raise
            return assemble(recipe, private=True)
        with open(next(p for n, p in made.metadata_group.items() if n.endswith(".json"))) as file:
            return file.read(), made.asm["cubin"]


def prepare_launcher(recipe: Recipe) -> None:
    """Triton 3.6 compiles a C function per signature at the first launch: leaves it in Triton's cache now."""
    make = vars(driver).get("make_launcher")
    if make is None:  # 3.7 has one launcher for all
        return
    names = [n for n, _ in recipe["signature"]]
    constants = {(names.index(n),): constant(v) for n, v in recipe["constants"]}
    with suppress(Exception):  # the launch will say what is wrong
        driver.compile_module_from_src(
            src=make(constants, dict(recipe["signature"]), None), name="__triton_launcher",
            library_dirs=driver.library_dirs(), include_dirs=driver.include_dirs, libraries=driver.libraries)


def answer(line: str) -> dict[str, str]:
    """What a worker says to one recipe."""
    recipe = json.loads(line)
    try:
        metadata, cubin = assemble(recipe, private=True)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    prepare_launcher(recipe)
    return {"metadata": metadata, "cubin": base64.b64encode(cubin).decode()}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers recipes until the starter closes its end, also by dying."""
    print(json.dumps({"ready": triton.__version__}), file=answers, flush=True)
    for line in requests:
        print(json.dumps(answer(line)), file=answers, flush=True)


if __name__ == "__main__":
    protocol = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a compiler prints is no answer
    serve(sys.stdin, protocol)
