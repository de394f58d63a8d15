"""Kernel text -> compiled kernel, on a machine with or without a GPU.

Enters: a Kernel and a Variant, what is assumed of its arguments.  Leaves: Triton's compiled kernel, or, for tests,
a `Report` of what the assembler made of it.  Invariant: everything that reads `triton.language` while it may be
patched holds `language_lock` (the interpreter patches that module for all threads).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from fxfuser.lowering.kernel import Dependence, Kernel
from fxfuser.ops import memory_dtype
from fxfuser.runtime.assemble import Recipe, compiled, load_text

__all__ = ["Options", "Report", "Variant", "build", "constants", "load_text", "recipe", "report"]

DESCRIPTOR_ARCH = 90  # the first with tensor descriptors
DEPENDENT_ARCH = 90  # the first on which a kernel can start before the one before it has ended
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes of a program

language_lock = threading.RLock()

_POINTERS = {
    torch.bool: "*i1", torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint16: "*u16", torch.uint32: "*u32", torch.uint64: "*u64", torch.float16: "*fp16",
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64",
}


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel assumes of its arguments, all of which is checked at each call.

    `aligned[i]`: pointer i is a multiple of 16 bytes; `sizes[i]`: "i32" or "i64", with a trailing "d" where the
    size is a multiple of 16; `wide`: offsets need 64 bits.  A size of 1 is not made a constant: the text may
    call methods of a size, and dynamic sizes are rarely 1.
    """

    aligned: tuple[bool, ...]
    sizes: tuple[str, ...]
    wide: bool

    @staticmethod
    def of(pointers: Sequence[int], sizes: Sequence[int], extent: int) -> Variant:
        """The strongest that addresses and sizes meet; `extent` is the largest offset."""
        return Variant(tuple(p % 16 == 0 for p in pointers), tuple(map(size_class, sizes)), is_wide(extent))

    @staticmethod
    def general(kernel: Kernel) -> Variant:
        """The variant that assumes nothing."""
        pointers = len(kernel.inputs) + len(kernel.outputs)
        return Variant((False,) * pointers, ("i64",) * kernel.sizes, True)

    @staticmethod
    def usual(kernel: Kernel) -> Variant:
        """Aligned pointers, sizes that are multiples of 16 and offsets of 32 bits."""
        pointers = len(kernel.inputs) + len(kernel.outputs)
        return Variant((True,) * pointers, ("i32d",) * kernel.sizes, False)


def size_class(size: int) -> str:
    """The entry of `Variant.sizes` for this number."""
    width = "i32" if -2**31 <= size < 2**31 else "i64"
    return width + ("d" if size % 16 == 0 else "")


def is_wide(extent: int) -> bool:
    """Whether offsets up to `extent` need 64 bits."""
    return extent >= 2**31


def index_dtype(wide: bool) -> Any:
    """The value of a kernel's INDEX argument."""
    return tl.int64 if wide else tl.int32


def pointer_types(kernel: Kernel) -> tuple[str, ...]:
    """Triton's types of in0, in1, ..., out0, ...; raises KeyError for a dtype that Triton has no pointer to."""
    return tuple(_POINTERS[memory_dtype(d)] for d in (*kernel.inputs, *kernel.outputs))


def loads_by_descriptor(kernel: Kernel, variant: Variant, arch: int) -> bool:
    """Whether this variant of the kernel loads through tensor descriptors."""
    return (kernel.aligned is not None and arch >= DESCRIPTOR_ARCH and all(variant.aligned[i] for i in kernel.aligned)
            and all(variant.sizes[i].endswith("d") for i in kernel.divisible))


def is_dependent(kernel: Kernel, arch: int) -> bool:
    """Whether the kernel is launched as one of a dependent pair on this device."""
    return kernel.dependence in (Dependence.LEADS, Dependence.FOLLOWS) and arch >= DEPENDENT_ARCH


def constants(kernel: Kernel, variant: Variant, arch: int) -> tuple[tuple[str, Any], ...]:
    """The constexpr arguments in the order of `Kernel`'s parameters."""
    choice = () if kernel.aligned is None else (("DESCRIPTORS", loads_by_descriptor(kernel, variant, arch)),)
    dependent = () if kernel.dependence is None else (("DEPENDENT", is_dependent(kernel, arch)),)
    return (("INDEX", index_dtype(variant.wide)), *choice, *kernel.tile.blocks, *dependent)


@dataclass(frozen=True)
class Options:
    """What a build depends on beside the text: `fp_fusion` lets multiply and add contract to one operation."""

    fp_fusion: bool = True


def recipe(kernel: Kernel, variant: Variant, target: GPUTarget, options: Options = Options()) -> Recipe:
    """All that the build of this variant depends on, as a JSON value: `assemble.compiled` makes a kernel of it."""
    pointers = [*(f"in{i}" for i in range(len(kernel.inputs))), *(f"out{i}" for i in range(len(kernel.outputs)))]
    sizes = [f"n{i}" for i in range(kernel.sizes)]
    fixed = constants(kernel, variant, target.arch)
    types = [*pointer_types(kernel), *(s.removesuffix("d") for s in variant.sizes)]
    divisible = [*variant.aligned, *(s.endswith("d") for s in variant.sizes)]
    return {
        "source": kernel.source, "name": kernel.name, "arch": target.arch,
        "signature": [*map(list, zip([*pointers, *sizes], types)), *([n, "constexpr"] for n, _ in fixed)],
        "constants": [[n, {"dtype": str(v)} if isinstance(v, tl.dtype) else v] for n, v in fixed],
        "divisible": [n for n, d in zip([*pointers, *sizes], divisible) if d],
        "options": {"num_warps": kernel.tile.num_warps, "num_stages": kernel.tile.num_stages,
                    "enable_fp_fusion": options.fp_fusion,
                    "launch_pdl": kernel.dependence is Dependence.FOLLOWS and is_dependent(kernel, target.arch)},
    }


def build(kernel: Kernel, variant: Variant, target: GPUTarget, options: Options = Options()) -> Any:
    """Triton's CompiledKernel, with all its intermediate forms; raises what Triton raises."""
    with language_lock:
        return compiled(recipe(kernel, variant, target, options))


@dataclass(frozen=True)
class Report:
    """What one build needs per program (`shared`, bytes) and per thread (`registers`, bytes of `spills`)."""

    shared: int
    registers: int
    spills: int
    stack: int
    ptx: str


def report(kernel: Kernel, arch: int = 90, variant: Variant | None = None, options: Options = Options()) -> Report:
    """Builds `kernel` for sm_<arch> (usual assumptions unless given) and asks ptxas what it takes; needs no GPU.

    Raises ValueError where a program takes more shared memory than there is, which else only the device says.
    """
    made = build(kernel, variant or Variant.usual(kernel), GPUTarget("cuda", arch, 32), options)
    if made.metadata.shared > SHARED_LIMIT[arch]:
        raise ValueError(f"{kernel.name} with {kernel.tile} takes {made.metadata.shared} bytes of shared memory, "
                         f"sm_{arch} has {SHARED_LIMIT[arch]}")
    ptx = made.asm["ptx"]
    target = re.search(r"\.target (sm_\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        run = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", f"--gpu-name={target[1] if target else f'sm_{arch}'}", str(path),
             "-o", str(path.with_suffix(".cubin"))], capture_output=True, text=True, check=True)

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, run.stderr))

    return Report(made.metadata.shared, number(r"Used (\d+) registers"),
                  number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes stack frame"), ptx)
