"""CUDA launches: the only file that knows how Triton's compiled kernels are called (3.6 to 3.7).

Enters: a Kernel and a device.  Leaves: `launch(in0, ..., out0, ..., n0, ...) -> bool`, specialised Python that
costs a few microseconds: it reads the pointers, looks up the grid and the variant, and calls the compiled kernel.
What a kernel without sizes needs is looked up once, when its launch function is written.  Scratch memory, in which
kernels build tensor descriptors, comes from torch's allocator, whose order is the stream's.
Invariant: the variant that runs assumes nothing that this call's arguments do not meet.  Past `MOST_VARIANTS`
variants of one kernel only the general one is built.
"""

from __future__ import annotations

import threading
from contextvars import copy_context
from dataclasses import replace
from functools import cache
from typing import Any, Callable, Sequence

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher

from fxfuser.lowering.gemm.tiles import SHARED
from fxfuser.lowering.kernel import Kernel, Tile
from fxfuser.runtime.assemble import Recipe
from fxfuser.runtime.binary import Binary, load, obtain
from fxfuser.runtime.build import Options, Variant, constants, is_wide, language_lock, recipe, size_class
from fxfuser.runtime.store import Store

Launch = Callable[..., bool]
Failed = Callable[[Exception], bool]

MOST_VARIANTS = 8
SYSTEM_SHARED = 1024  # bytes of shared memory that the system takes of each program
MOST_SHAPES = 4096

TRITON = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2] if part.isdecimal())
_ONE_TUPLE = TRITON >= (3, 7)  # whether the launcher in C takes the kernel's arguments as one tuple

# what stands in braces is filled in, see `_source`
_TEMPLATE = """
def launch({params}):
    {pointers}
{shape}{device_check}    if ({union}) & 15:
        key = (key, {misaligned})
    try:
        run, head, tail, compiled = variants.get(key) or new_variant(key, ({pointer_tuple}), {sizes})
        queue = stream({device})
        if hooked():
            observed(compiled, grid, queue, {arguments}*tail)
        else:
            run(grid, 1, 1, queue, *head, {packed})
    except Exception as error:
        return failed(error)
    return True
"""

_DYNAMIC = """\
    shape = shapes.get({sizes})
    if shape is None:
        shape = new_shape({sizes})
    grid, key = shape
    if grid == 0:
        return True
"""

_STATIC = """\
    grid, key = {shape}
"""

_DEVICE_CHECK = """\
    if {device} != current_device():
        with on_device({device}):
            return launch({params})
"""


def size_function(sizes: int, tile: Tile, processors: int, expressions: Sequence[str],
                  ) -> Callable[..., tuple[int, ...]]:
    """The expressions' values as a function of n0, n1, ... (`sizes` of them); block names are those of the tile."""
    scope: dict[str, Any] = {"cdiv": lambda a, b: -(-a // b), "max": max, "min": min, "PROCESSORS": processors,
                             **dict(tile.blocks)}
    names, body = ", ".join(f"n{i}" for i in range(sizes)), "".join(f"({e}), " for e in expressions)
    made: Callable[..., tuple[int, ...]] = eval(f"lambda {names}: ({body})", scope)
    return made


def grid_function(kernel: Kernel, processors: int) -> Callable[..., tuple[int, ...]]:
    """(programs, largest offset) as a function of n0, n1, ... on a device with so many multiprocessors."""
    return size_function(kernel.sizes, kernel.tile, processors, (kernel.grid, kernel.extent))


class Cuda:
    """A kernel on one device: its variants, shared by all segments that have this kernel."""

    def __init__(self, kernel: Kernel, device: int | None, options: Options, store: Store | None = None) -> None:
        self.kernel, self.device, self.options, self.store = kernel, device, options, store
        self._grid = grid_function(kernel, processors_of(device) if "PROCESSORS" in kernel.grid else 1)
        self._lock = threading.Lock()
        self._shapes: dict[tuple[int, ...], tuple[int, int]] = {}
        self._classes: list[tuple[tuple[str, ...], bool]] = []  # what the sizes of a shape's key allow to assume
        self._variants: dict[Any, Any] = {}
        self._built: dict[Variant, Any] = {}
        self._supplied: dict[Variant, Binary | Exception] = {}
        self._code = compile(self._source(), f"<fxfuser launch {kernel.name}>", "exec")

    def bind(self, failed: Failed) -> Launch:
        """The launch function; a failure to build or launch goes to `failed`, whose answer is returned."""
        scope: dict[str, Any] = {
            "shapes": self._shapes, "variants": self._variants, "new_shape": self.shape, "new_variant": self.variant,
            "on_device": torch.cuda.device, "hooked": _hooked, "observed": _observed, "failed": failed,
            **device_calls()}
        exec(self._code, scope)
        launch: Launch = scope["launch"]
        return launch

    def shape(self, sizes: tuple[int, ...]) -> tuple[int, int]:
        """(grid, key of what the sizes allow to assume), remembered by the sizes."""
        grid, extent = self._grid(*sizes)
        allowed = (tuple(map(size_class, sizes)), is_wide(extent))
        if allowed not in self._classes:
            self._classes.append(allowed)
        found = (max(grid, 0), self._classes.index(allowed))
        if len(self._shapes) >= MOST_SHAPES:
            self._shapes.clear()
        self._shapes[sizes] = found
        return found

    def assumptions(self, pointers: tuple[int, ...], sizes: tuple[int, ...]) -> Variant:
        """The strongest variant that these arguments meet, or the general one if there are too many."""
        classes, wide = self._classes[self.shape(sizes)[1]]
        variant = Variant(tuple(p % 16 == 0 for p in pointers), classes, wide)
        if variant in self._built or len(self._built) < MOST_VARIANTS:
            return variant
        return Variant.general(self.kernel)

    def likely(self, sizes: tuple[int, ...], pointers: tuple[int, ...] | None = None) -> Variant | None:
        """The variant of a first call with these sizes; None if there is no need.  Unless given, pointers are aligned.
        """
        if self.shape(sizes)[0] == 0:
            return None
        variant = self.assumptions(pointers or (0,) * (len(self.kernel.inputs) + len(self.kernel.outputs)), sizes)
        return None if variant in self._built or variant in self._supplied else variant

    def recipe(self, variant: Variant) -> Recipe:
        """What to build for this variant."""
        return recipe(self.kernel, variant, target_of(self.device), self.options)

    def supply(self, variant: Variant, binary: Binary | Exception) -> None:
        """Hands over what was built (or why it cannot be) before the first launch needs it."""
        with self._lock:
            self._supplied.setdefault(variant, binary)

    def variant(self, key: Any, pointers: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """(C launcher, its first arguments, constexpr arguments, kernel) for `key`, built at most once.

        The current device must be the kernel's.  Raises what Triton raises; a failure is remembered.
        """
        with self._lock:
            if key not in self._variants:
                assumed = self.assumptions(pointers, sizes)
                if assumed not in self._built:
                    self._built[assumed] = self._load(assumed)
                found = self._built[assumed]
                if isinstance(found, Exception):
                    raise found
                self._variants[key] = found
            return self._variants[key]

    def _load(self, variant: Variant) -> Any:
        try:
            compiled = self._compiled(variant)
            run, head = _direct(compiled)  # loads the binary onto the current device
            tail = tuple(v for _, v in constants(self.kernel, variant, target_of(self.device).arch))
            return run, head, tail, compiled
        except Exception as error:
            return error

    def _compiled(self, variant: Variant) -> Any:
        made = self._supplied.pop(variant, None)
        if isinstance(made, Exception):
            raise made
        wanted = self.recipe(variant)
        return load(wanted, made or obtain(wanted, self.store))

    def _source(self) -> str:
        kernel, device = self.kernel, "current_device()" if self.device is None else str(self.device)
        pointers = [f"in{i}" for i in range(len(kernel.inputs))] + [f"out{i}" for i in range(len(kernel.outputs))]
        names = [f"n{i}" for i in range(kernel.sizes)]
        addresses = [f"p{i}" for i in range(len(pointers))]
        params = ", ".join([*pointers, *names])
        sizes = f"({', '.join(names)}{',' * (len(names) == 1)})"
        arguments = "".join(f"{a}, " for a in [*addresses, *names])
        shape = _DYNAMIC.format(sizes=sizes)
        if not names:
            found = self.shape(())
            if found[0] == 0:
                return f"def launch({params}):\n    return True\n"
            shape = _STATIC.format(shape=found)
        return _TEMPLATE.format(
            params=params, sizes=sizes, shape=shape, device=device,
            device_check=device_check(self.device, params),
            pointers="; ".join(f"{a} = {p}.data_ptr()" for a, p in zip(addresses, pointers)),
            union=" | ".join(addresses),
            misaligned=", ".join(f"{a} & 15 != 0" for a in addresses),
            pointer_tuple="".join(f"{a}, " for a in addresses),
            arguments=arguments,
            packed=f"({arguments}*tail)" if _ONE_TUPLE else f"{arguments}*tail")


def device_check(device: int | None, params: str) -> str:
    """The start of a launch function that runs only where its device is the current one."""
    return "" if device is None or _only_device() else _DEVICE_CHECK.format(device=device, params=params)


def target_of(device: int | None) -> GPUTarget:
    """What to build for on this device, or on the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    return GPUTarget("cuda", 10 * major + minor, 32)


def processors_of(device: int | None) -> int:
    """Multiprocessors of this device, or of the current one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program can have on this device; on one that has none of CUDA, as on a Hopper."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SHARED
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) - SYSTEM_SHARED


@cache
def _cuda(kernel: Kernel, device: int | None, options: Options, store: Store | None) -> Cuda:
    return Cuda(kernel, device, options, store)


def cuda(kernel: Kernel, device: int | None, options: Options = Options(), store: Store | None = None) -> Cuda:
    """The kernel on this device; kernels that differ in their notes alone are one."""
    with language_lock:
        return _cuda(replace(kernel, notes=(), candidates=()), device, options, store)


def _only_device() -> bool:
    return torch.cuda.device_count() == 1


def device_calls() -> dict[str, Callable[..., int]]:
    """The current device, and the current stream's handle as a function of the device: a call into C each."""
    active = triton.runtime.driver.active
    return {"current_device": active.get_current_device, "stream": active.get_current_stream}


def _direct(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """(launcher, its arguments between the stream and the kernel's own) for launches that no hook observes.

    The launcher is the function in C, with what Triton's Python around it would do beside calling hooks: get scratch
    memory for kernels that ask for it.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if type(run) is CudaLauncher and TRITON in ((3, 6), (3, 7)) and not run.profile_scratch_size:
        flags, none = (function, run.launch_cooperative_grid, run.launch_pdl), (None, None, None)
        before, after = (flags, (None, metadata, *none)) if not _ONE_TUPLE else (
            (*flags, metadata, *none), (None, run.arg_annotations, run.kernel_signature))
        if run.global_scratch_size:
            return _with_scratch(run.launch, before, after, run.global_scratch_size * run.num_ctas), ()
        return run.launch, (*before, None, *after)
    if _ONE_TUPLE:
        return lambda *a: _allocating(run, *a[:-1], *a[-1]), (function, metadata, None, None, None)
    return lambda *a: _allocating(run, *a), (function, metadata, None, None, None)


def _with_scratch(launch: Callable[..., None], before: tuple[Any, ...], after: tuple[Any, ...], size: int,
                  ) -> Callable[..., None]:
    """`launch` with `size` bytes of scratch memory per program between the arguments `before` and `after`."""
    def run(x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        scratch = _scratch(x * size)  # free again when this returns: what takes it next runs later on the stream
        launch(x, y, z, stream, *before, scratch.data_ptr(), *after, *arguments)

    return run


def _scratch(size: int, alignment: int = 0, stream: int | None = None) -> torch.Tensor:
    """Bytes on the current stream of the current device, aligned to 512, as Triton asks its allocator for them."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


def _allocating(run: Callable[..., None], *arguments: Any) -> None:
    """Calls Triton's own launcher where torch's allocator is the one it asks; outside the user's stays."""
    def call() -> None:
        triton.set_allocator(_scratch)
        run(*arguments)

    copy_context().run(call)


def _hooked() -> bool:
    """Whether anybody observes launches: profilers hang hooks there."""
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return bool((enter and enter.calls) or (leave and leave.calls))


def _observed(compiled: Any, grid: int, stream: int, *arguments: Any) -> None:
    """A launch through Triton's own launcher, which calls the hooks."""
    _allocating(compiled.run, grid, 1, 1, stream, compiled.function, compiled.packed_metadata,
                compiled.launch_metadata((grid, 1, 1), stream), triton.knobs.runtime.launch_enter_hook,
                triton.knobs.runtime.launch_exit_hook, *arguments)
